"""Finite sets of points (slot, element), cut into the chains of one step.

A *chain* of a set along a step is a maximal run p, p + step, p + 2 step, ... inside it, so the
chains, their starts and their lengths depend on the set alone. ``Listed`` holds a set point by
point, ``Strided`` as disjoint pieces of a table; both answer the same questions alike, and
``relation`` takes whichever is cheaper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import TypeAlias

import numpy as np

from .._errors import LimitError
from .._limits import Budget, Limits
from ..maps._relation import common, count_common, exact_sizes, families_table, minus
from ..maps._space import IntArray
from ..maps._table import Columns, PieceTable, build, concatenate
from ._folding import Family, Point, families_of, simplified

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

    def chains(self, step: Point) -> dict[int, Listed]:
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
        """The chains of a set however it is cut: ``powers[j]`` holds the points from which
        2**j points follow each other, and lengths are found by binary digits."""
        powers = [self.table]
        while self._fits(step, len(powers)):
            j = len(powers) - 1
            more = self._both(powers[j], _moved(powers[j], step, -(1 << j)))
            if not len(more):
                break
            powers.append(more)
        found = {0: self._less(self.table, _moved(self.table, step, 1))}
        for j in reversed(range(len(powers))):
            digits: dict[int, PieceTable] = {}
            for length, heads in found.items():
                longer = self._both(heads, _moved(powers[j], step, -length))
                digits[length] = self._less(heads, longer)
                digits[length + (1 << j)] = longer
            found = {n: t for n, t in digits.items() if len(t)}
        return found

    def _fits(self, step: Point, j: int) -> bool:
        """Whether a chain of more than 2**(j - 1) points could lie in the set."""
        return all(abs(s) << (j - 1) <= span for s, span in zip(step, self._spans()))

    def _spans(self) -> tuple[int, int]:
        c = self.table.columns
        spans = []
        for offset, strides in ((c.dom_offset, c.dom_strides), (c.cod_offset, c.cod_strides)):
            steps = strides * (c.shape - 1)
            low = offset + np.minimum(steps, 0).sum(axis=0)
            high = offset + np.maximum(steps, 0).sum(axis=0)
            spans.append(int(high.max()) - int(low.min()))
        return spans[0], spans[1]

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
                f" Limits(steps={self.budget.bound}); raise the bound, or compare with equivalent or fingerprint"
            )
        self.budget.spend(self.size)
        return sorted(_points(self.table))


Relation: TypeAlias = Listed | Strided


def relation(table: PieceTable, limits: Limits, budget: Budget) -> Relation:
    """The points of a table, all in one pair of boxes and at one scale."""
    size = sum(exact_sizes(table.shape))
    if size <= max(FEW, min(DENSE * len(table), budget.left)):
        return Listed(sorted(_points(table)), budget)
    return Strided(simplified(table), limits, budget)


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
    tables = [_repeated(_as_table(heads, one.table), n // granule, long) for n, heads in some]
    return relation(concatenate(tables), one.limits, one.budget)


def _as_table(some: Relation, like: PieceTable) -> PieceTable:
    """The points as pieces, in the boxes and at the scale of another table."""
    if isinstance(some, Strided):
        return some.table
    points = np.array(some.points, np.int64).T
    none = np.zeros((0, some.size), np.int64)
    box, _, far, _, top, bottom = (np.full(some.size, v) for v in like.rows[:6, 0].tolist())
    return simplified(build(Columns(box, points[0], far, points[1], top, bottom, none, none, none)))


def _repeated(table: PieceTable, count: int, step: Point) -> PieceTable:
    c = table.columns
    axes = [(c.shape, count), (c.dom_strides, step[0]), (c.cod_strides, step[1])]
    return build(Columns(*c[:6], *(np.concatenate([x, np.full((1, len(table)), v)]) for x, v in axes)))


def _picked(c: Columns, where: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Columns:
    return Columns(*(x[..., where] for x in c))


def _moved(table: PieceTable, step: Point, times: int) -> PieceTable:
    """The table with ``times * step`` added to every point; its order stays."""
    rows = table.rows.copy()
    rows[1] += times * step[0]
    rows[3] += times * step[1]
    return PieceTable(rows)


def _points(table: PieceTable) -> Iterable[Point]:
    """All points, piece by piece."""
    for (slot, element), axes in families_of(table):
        slots, elements = np.array([slot], np.int64), np.array([element], np.int64)
        for n, s, e in axes:
            steps: IntArray = np.arange(n, dtype=np.int64)
            slots = (slots[:, None] + s * steps).reshape(-1)
            elements = (elements[:, None] + e * steps).reshape(-1)
        yield from zip(slots.tolist(), elements.tolist())


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
