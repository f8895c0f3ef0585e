"""Finite sets of points (slot, element), cut into the chains of one step.

A *chain* of a set along a step is a maximal run p, p + step, p + 2 step, ... inside it, so the
chains, their starts and their lengths depend on the set alone. ``Listed`` holds a set point by
point, ``Strided`` as disjoint pieces of a table; both answer the same questions alike, and
``relation`` takes whichever is cheaper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TypeAlias

import numpy as np

from .._errors import LimitError
from .._limits import Budget, Limits
from ..maps._relation import common, count_common, exact_sizes, families_table, minus
from ..maps._space import BoolArray, IntArray
from ..maps._table import HEAD, Columns, PieceTable, build, concatenate
from ._folding import Family, Point, families_of, points_of, simplified

FEW = 512  # points that are always listed
DENSE = 16  # points per piece up to which a set is listed


class Listed:
    """A set as its points in ascending order."""

    def __init__(self, points: list[Point], budget: Budget) -> None:
        self.points, self.budget, self.size = points, budget, len(points)
        self.members = set(points)

    def first(self, count: int) -> list[Point]:
        return self.points[:count]

    def last(self, count: int) -> list[Point]:
        """The greatest points, in descending order."""
        return self.points[: -count - 1 : -1]

    def repeats(self, step: Point) -> int:
        """How many points have the next one along the step in the set too."""
        self.budget.spend(self.size)
        return sum((p[0] + step[0], p[1] + step[1]) in self.members for p in self.points)

    def chains(self, step: Point) -> dict[int, Relation]:
        """The starts of the chains by their length."""
        self.budget.spend(self.size)
        starts: defaultdict[int, list[Point]] = defaultdict(list)
        for p in self.points:
            if (p[0] - step[0], p[1] - step[1]) not in self.members:
                starts[self._length(p, step)].append(p)
        return {n: Listed(points, self.budget) for n, points in starts.items()}

    def _length(self, start: Point, step: Point) -> int:
        (slot, element), n = start, 1
        while (slot + n * step[0], element + n * step[1]) in self.members:
            n += 1
        return n

    def listed(self) -> list[Point]:
        return self.points


class Strided:
    """A set as disjoint pieces in one pair of boxes, at one scale."""

    def __init__(self, table: PieceTable, limits: Limits, budget: Budget) -> None:
        self.table, self.limits, self.budget = table, limits, budget
        self.size = sum(exact_sizes(table.shape))
        budget.spend(len(table))

    def first(self, count: int) -> list[Point]:
        return list(islice(_ascending(families_of(self.table)), count))

    def last(self, count: int) -> list[Point]:
        mirrored = [(_negative(_end(f)), f[1]) for f in families_of(self.table)]
        return [_negative(p) for p in islice(_ascending(mirrored), count)]

    def repeats(self, step: Point) -> int:
        self.budget.spend(len(self.table))
        return count_common(self.table, _moved(self.table, step, 1), self.limits, self.budget)

    def chains(self, step: Point) -> dict[int, Relation]:
        starts = self._axis_chains(step) or self._any_chains(step)
        return {n: relation(table, self.limits, self.budget) for n, table in starts.items()}

    def _axis_chains(self, step: Point) -> dict[int, PieceTable] | None:
        """The chains where they are axes of the pieces: no chain may continue in another piece."""
        c = self.table.columns
        along = (c.shape > 1) & (c.dom_strides == step[0]) & (c.cod_strides == step[1])
        length = np.where(along, c.shape, 1).prod(axis=0)
        heads = c._replace(shape=np.where(along, 1, c.shape))
        ends = heads._replace(
            dom_offset=c.dom_offset + length * step[0], cod_offset=c.cod_offset + length * step[1]
        )
        if len(common(build(ends), self.table, self.limits, self.budget).left):
            return None
        return {n: build(_picked(heads, length == n)) for n in np.unique(length).tolist()}

    def _any_chains(self, step: Point) -> dict[int, PieceTable]:
        """The chains of a set however it is cut: from their starts and their ends."""
        starts = self._less(self.table, _moved(self.table, step, 1))
        ends = self._less(self.table, _moved(self.table, step, -1))
        if _is_few(starts, self.budget) and _is_few(ends, self.budget):
            return _paired(starts, ends, step)
        found: dict[int, PieceTable] = {}
        while len(starts):
            length, its = self._class(starts, ends, step)
            found[length] = its
            starts = self._less(starts, its)
            ends = self._less(ends, _moved(its, step, length - 1))
        return found

    def _class(self, starts: PieceTable, ends: PieceTable, step: Point) -> tuple[int, PieceTable]:
        """A length and the starts of all chains that long.

        Of the starts with an end at that distance some may have a nearer end; the chain that ends
        there is shorter, so its length is tried next, and in the end nothing lies between.
        """
        length = 1 + self._distance(_first_point(starts), step, ends)
        while True:
            its = self._both(starts, _moved(ends, step, 1 - length))
            if length == 1:
                return length, its
            nearer = common(ends, _repeated(its, length - 1, step), self.limits, self.budget)
            if not len(nearer.left):
                return length, its
            end = int(nearer.offset[0, 0]), int(nearer.offset[1, 0])
            length = 1 + self._distance(end, _negative(step), starts)

    def _distance(self, start: Point, step: Point, table: PieceTable) -> int:
        """How many steps from a point to the nearest point of the table in that direction."""
        reach = min(span // abs(s) for s, span in zip(step, self._spans()) if s)
        line = _repeated(_listed_table([start], table), reach + 1, step)
        met = common(table, line, self.limits, self.budget)
        side = 0 if step[0] else 1
        low = np.minimum(met.strides[side] * np.sign(step[side]) * (met.shape - 1), 0).sum(axis=0)
        ahead = (met.offset[side] - start[side]) * np.sign(step[side]) + low
        return int(ahead.min()) // abs(step[side])

    def _spans(self) -> tuple[int, int]:
        c = self.table.columns
        low, high = zip(*(_range(c.shape, *c.side(k)[1:]) for k in (0, 1)))
        return high[0] - low[0], high[1] - low[1]

    def _both(self, a: PieceTable, b: PieceTable) -> PieceTable:
        self.budget.spend(len(a) + len(b))
        return simplified(families_table(common(a, b, self.limits, self.budget), a))

    def _less(self, a: PieceTable, b: PieceTable) -> PieceTable:
        self.budget.spend(len(a) + len(b))
        return simplified(minus(a, b, self.limits, self.budget))

    def listed(self) -> list[Point]:
        if self.size > self.budget.left:
            raise LimitError(
                f"{self.size} elements without a common step have no canonical form within"
                f" Limits(steps={self.budget.bound}); raise the bound, or use equivalent or fingerprint"
            )
        self.budget.spend(self.size)
        return sorted(points_of(families_of(self.table)))


Relation: TypeAlias = Listed | Strided


def relation(table: PieceTable, limits: Limits, budget: Budget) -> Relation:
    """The points of a table, all in one pair of boxes and at one scale."""
    if _is_few(table, budget):
        return Listed(sorted(points_of(families_of(table))), budget)
    return Strided(simplified(table), limits, budget)


def _is_few(table: PieceTable, budget: Budget) -> bool:
    """Whether the points are better listed."""
    return sum(exact_sizes(table.shape)) <= max(FEW, min(DENSE * len(table), budget.left))


def _paired(starts: PieceTable, ends: PieceTable, step: Point) -> dict[int, PieceTable]:
    """Chains from their starts and ends: on each line they alternate, so sorting pairs them."""
    found: defaultdict[int, list[Point]] = defaultdict(list)
    side = 0 if step[0] else 1
    either = [points_of(families_of(table)) for table in (starts, ends)]
    pairs = zip(*(sorted(points, key=lambda p: _place(p, step, side)) for points in either))
    for start, end in pairs:
        found[1 + (end[side] - start[side]) // step[side]].append(start)
    return {n: _listed_table(points, starts) for n, points in found.items()}


def _place(p: Point, step: Point, side: int) -> tuple[int, int, int]:
    """The line of a point along a step, and its place there."""
    place, residue = divmod(p[side], step[side])
    return p[0] * step[1] - p[1] * step[0], residue, place


def refined(chains: dict[int, Relation], granule: int, step: Point) -> Relation:
    """The starts of all chains cut into runs of ``granule`` points, which divides their lengths."""
    long = granule * step[0], granule * step[1]
    some = list(chains.items())
    if all(isinstance(heads, Listed) for _, heads in some):
        points = [
            (p[0] + i * long[0], p[1] + i * long[1])
            for n, heads in some for p in heads.listed() for i in range(n // granule)
        ]  # fmt: skip
        return Listed(sorted(points), some[0][1].budget)
    one = next(heads for _, heads in some if isinstance(heads, Strided))
    starts = [h.table if isinstance(h, Strided) else _listed_table(h.points, one.table) for _, h in some]
    tables = [_repeated(table, n // granule, long) for table, (n, _) in zip(starts, some)]
    return relation(concatenate(tables), one.limits, one.budget)


def _listed_table(points: list[Point], like: PieceTable) -> PieceTable:
    """Points as pieces, in the boxes and at the scale of another table."""
    count = len(points)
    offsets, none = np.array(points, np.int64).reshape(count, 2).T, np.zeros((0, count), np.int64)
    box, _, far, _, top, bottom = (np.full(count, v) for v in like.rows[:HEAD, 0].tolist())
    return build(Columns(box, offsets[0], far, offsets[1], top, bottom, none, none, none))


def _repeated(table: PieceTable, count: int, step: Point) -> PieceTable:
    c = table.columns
    axes = [(c.shape, count), (c.dom_strides, step[0]), (c.cod_strides, step[1])]
    return build(Columns(*c[:6], *(np.concatenate([x, np.full((1, len(table)), v)]) for x, v in axes)))


def _picked(c: Columns, where: BoolArray) -> Columns:
    return Columns(*(x[..., where] for x in c))


def _moved(table: PieceTable, step: Point, times: int) -> PieceTable:
    """The table with ``times * step`` added to every point; its order stays."""
    rows = table.rows.copy()
    rows[1] += times * step[0]
    rows[3] += times * step[1]
    return PieceTable(rows)


def _first_point(table: PieceTable) -> Point:
    c = table.columns
    return int(c.dom_offset[0]), int(c.cod_offset[0])


def _range(shape: IntArray, offset: IntArray, strides: IntArray) -> tuple[int, int]:
    """The least and greatest address on one side."""
    steps = strides * (shape - 1)
    low, high = np.minimum(steps, 0).sum(axis=0), np.maximum(steps, 0).sum(axis=0)
    return int((offset + low).min()), int((offset + high).max())


def _end(family: Family) -> Point:
    """The greatest point: steps of a piece in normal form ascend."""
    (slot, element), axes = family
    return slot + sum(s * (n - 1) for n, s, _ in axes), element + sum(e * (n - 1) for n, _, e in axes)


def _negative(p: Point) -> Point:
    return -p[0], -p[1]


def _ascending(families: list[Family]) -> Iterator[Point]:
    """The points of families whose steps ascend, in ascending order, without listing them all.

    Next to each point taken come its neighbours along the axis last stepped along and the later
    ones, so that each point enters once.
    """
    heap = [(head, k, 0, (0,) * len(axes)) for k, (head, axes) in enumerate(families)]
    heapify(heap)
    while heap:
        (slot, element), k, last, index = heappop(heap)
        yield slot, element
        axes = families[k][1]
        for i in range(last, len(axes)):
            n, s, e = axes[i]
            if index[i] + 1 < n:
                stepped = (*index[:i], index[i] + 1, *index[i + 1 :])
                heappush(heap, ((slot + s, element + e), k, i, stepped))
