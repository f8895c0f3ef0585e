"""Folding: the same points in fewer strided families.

A *family* is a start (slot, element) and axes ``(extent, slot stride, element stride)``, kept in
descending order of stride. Everything here is exact and local; nothing walks elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from ..maps._space import IntArray
from ..maps._table import HEAD, Columns, PieceTable, build, concatenate, empty_table

Point: TypeAlias = tuple[int, int]  # (slot, element)
Axis: TypeAlias = tuple[int, int, int]  # (extent, slot stride, element stride)
Axes: TypeAlias = tuple[Axis, ...]
Family: TypeAlias = tuple[Point, Axes]


def simplified(table: PieceTable, *, listed: int = 0) -> PieceTable:
    """The table with neighbouring pieces folded; the very same object where nothing folds.

    Pieces fold within a group: the same two boxes at the same scale. A group is folded again where
    normal form merges axes of what folding gave, until that gives no fewer. A group of at most
    ``listed`` points is also tried point by point, which no way of cutting can hide from.
    """
    done: list[PieceTable] = []
    waiting = table
    while (found := _folded(waiting, listed)) is not None:
        waiting, *settled = found
        done += settled
    return concatenate([*done, waiting]) if done else table


def _folded(table: PieceTable, listed: int) -> list[PieceTable] | None:
    """What folding each group gave where it may fold again, what it gave elsewhere, and the pieces
    of the groups that do not fold; None where none does."""
    groups = grouped(table)
    families = families_of(table) if groups else []
    touched = np.zeros(len(table), bool)
    parts: tuple[tuple[list[Family], list[int]], ...] = (([], []), ([], []))  # families, a piece of theirs
    for picked in groups:
        its = [families[k] for k in picked.tolist()]
        fewer = fold(its)
        if len(fewer) >= len(its) and _count(its) <= listed:
            fewer = fold(fold_points(sorted(points_of(its))))
        if len(fewer) < len(its):
            touched[picked] = True
            folded, origin = parts[not listed and not any(_merges(axes) for _, axes in fewer)]
            folded += fewer
            origin += [int(picked[0])] * len(fewer)
    if not touched.any():
        return None
    made = [table_of(folded, table.rows[:HEAD, origin]) for folded, origin in parts]
    return [*made, table.take(~touched)]


def _merges(axes: Axes) -> bool:
    """Whether normal form makes one axis of two."""
    return any(n * s == outer[1] and n * e == outer[2] for outer, (n, s, e) in pairwise(axes))


def _count(families: list[Family]) -> int:
    return sum(prod(axis[0] for axis in axes) for _, axes in families)


def points_of(families: Iterable[Family]) -> Iterator[Point]:
    """All points, family by family."""
    for (slot, element), axes in families:
        slots, elements = np.array([slot], np.int64), np.array([element], np.int64)
        for n, s, e in axes:
            steps: IntArray = np.arange(n, dtype=np.int64)
            slots = (slots[:, None] + s * steps).reshape(-1)
            elements = (elements[:, None] + e * steps).reshape(-1)
        yield from zip(slots.tolist(), elements.tolist())


def grouped(table: PieceTable, *, alone: bool = False) -> list[IntArray]:
    """Positions of the pieces that share both boxes and the scale, group by group: those of
    several pieces, or with ``alone`` all of them."""
    least = 1 if alone else 2
    if len(table) < least:
        return []
    c = table.columns
    keys = [c.dom_box, c.cod_box] + ([c.numerator, c.denominator] if table.scaled else [])
    if all((k == k[0]).all() for k in keys):
        return [np.arange(len(table))]
    order = np.lexsort(keys[::-1])
    fresh = np.ones(len(table), bool)
    fresh[1:] = np.logical_or.reduce([k[order[1:]] != k[order[:-1]] for k in keys])
    if not alone:
        single = fresh & np.append(fresh[1:], True)
        order, fresh = order[~single], fresh[~single]
    return np.split(order, np.flatnonzero(fresh)[1:]) if len(order) else []


def families_of(table: PieceTable) -> list[Family]:
    """The pieces as families, in order."""
    c = table.columns
    heads = zip(c.dom_offset.tolist(), c.cod_offset.tolist())
    if not table.axes:
        return [(head, ()) for head in heads]
    axes = zip(*(zip(*(x.tolist() for x in axis)) for axis in zip(c.shape, c.dom_strides, c.cod_strides)))
    return [(head, tuple(axis for axis in part if axis[0] > 1)) for head, part in zip(heads, axes)]


def table_of(families: list[Family], head: IntArray | Sequence[int]) -> PieceTable:
    """Families as a table, in the boxes and at the scales of pieces whose rows start with ``head``:
    one column for all families, or one for each."""
    if not families:
        return empty_table()
    axes, count = max(len(f[1]) for f in families), len(families)
    unit = (1, 0, 0)
    filled = [parts + (unit,) * (axes - len(parts)) for _, parts in families]
    blocks = np.array(filled, np.int64).reshape(count, axes, 3).T
    offsets = np.array([f[0] for f in families], np.int64).T
    heads = np.broadcast_to(np.asarray(head, np.int64).reshape(HEAD, -1), (HEAD, count))
    box, _, far, _, top, bottom = heads
    return build(Columns(box, offsets[0], far, offsets[1], top, bottom, *blocks))


# --- one group ----------------------------------------------------------------------------


def fold(families: list[Family]) -> list[Family]:
    """Families with the same points, no more of them, and usually fewer."""
    if len({axes for _, axes in families}) == 1:  # most groups are translates of one block
        whole = fold_points(sorted(head for head, _ in families))
        if len(whole) == 1:
            return [(whole[0][0], _ordered(whole[0][1] + families[0][1]))]
    refused = 0  # families of the last cut that finer tiles did not help
    while len(families) > 1:
        fewer = _stacked(_joined(families))
        if len(fewer) == refused:
            break
        finer = _recut(fewer)
        refused = len(fewer) if finer is fewer else 0
        fewer = finer
        if len(fewer) >= len(families):
            break
        families = fewer
    return families


def _ordered(axes: Iterable[Axis]) -> Axes:
    return tuple(sorted(axes, key=_stride, reverse=True))


def _stride(axis: Axis) -> Point:
    return axis[1:]


def _joined(families: list[Family]) -> list[Family]:
    """Families that continue each other along one axis become one."""
    touching = _touching(families)
    if not touching:
        return families
    live = dict.fromkeys(families)
    members: dict[Point, list[Family]] = {stride: [] for stride in sorted(touching)}
    _enlist(live, members)
    for stride, its in members.items():
        _enlist(_join_along(live, its, stride), members)
    return list(live)


def _touching(families: list[Family]) -> set[Point]:
    """The strides along which some family starts where another would go on, before or after it.
    Joining families adds none."""
    starts = {head for head, _ in families}
    return {
        (s, e)
        for (x, y), axes in families
        for n, s, e in axes
        if (x + n * s, y + n * e) in starts or (x - s, y - e) in starts
    }


def _enlist(families: Iterable[Family], members: dict[Point, list[Family]]) -> None:
    """Enter families under the strides of their axes."""
    for family in families:
        for _, s, e in family[1]:
            if (s, e) in members:
                members[s, e].append(family)


def _join_along(live: dict[Family, None], members: list[Family], stride: Point) -> list[Family]:
    """Join the members, and families without an axis of this stride that touch them, in ``live``;
    returns the new families. A family is found by its start, a member also by its end."""
    starts: dict[Family, tuple[Family, int]] = {}  # (start, other axes) -> the family, its extent
    ends: dict[Family, Point] = {}  # (where it would go on, other axes) -> its start
    for family in members:
        if family in live:
            head, axes = family
            extent, rest = _apart(axes, stride)
            starts[head, rest] = family, extent
            ends[_step_on(head, extent, stride), rest] = head
    made = []
    for start in list(starts):
        if start not in starts:
            continue
        (first, rest), parts, extent = start, [], 0
        while (before := _before(live, ends, first, rest, stride)) is not None:
            first = before
        at = first
        while (part := starts.pop((at, rest), None) or _single(live, at, rest)) is not None:
            parts.append(part[0])
            extent += part[1]
            at = _step_on(first, extent, stride)
        if len(parts) > 1:
            for family in parts:
                del live[family]
            made.append((first, _ordered((*rest, (extent, *stride)))))
            live[made[-1]] = None
    return made


def _apart(axes: Axes, stride: Point) -> tuple[int, Axes]:
    """The extent along a stride, and the other axes."""
    k = next(k for k, axis in enumerate(axes) if axis[1:] == stride)
    return axes[k][0], axes[:k] + axes[k + 1 :]


def _step_on(p: Point, count: int, stride: Point) -> Point:
    return p[0] + count * stride[0], p[1] + count * stride[1]


def _before(
    live: dict[Family, None], ends: dict[Family, Point], first: Point, rest: Axes, stride: Point
) -> Point | None:
    """Where the family starts that ends at ``first``, or the single one a step before it."""
    found = ends.get((first, rest))
    if found is None:
        single = _single(live, _step_on(first, -1, stride), rest)
        found = single and single[0][0]
    return found


def _single(live: dict[Family, None], at: Point, rest: Axes) -> tuple[Family, int] | None:
    """The live family without an axis of the stride that starts there."""
    return ((at, rest), 1) if (at, rest) in live else None


def _stacked(families: list[Family]) -> list[Family]:
    """Families of one form whose starts are nested progressions become one with more axes."""
    forms: defaultdict[Axes, list[Point]] = defaultdict(list)
    for head, axes in families:
        forms[axes].append(head)
    if len(forms) == len(families):
        return families
    stacked: list[Family] = []
    for form, heads in forms.items():
        stacked += [(head, _ordered(axes + form)) for head, axes in fold_points(sorted(heads))]
    return stacked


def _recut(families: list[Family]) -> list[Family]:
    """Families re-cut to the common granule along every axis and folded from there, where that
    gives fewer.

    The granule of an axis is the gcd of its extents. This undoes a join across a digit
    boundary, which hides that all runs are translates of one (fused QKV orders need it).
    """
    if len({axes for _, axes in families}) == 1:  # one granule already
        return families
    most = 8 * len(families) + 56
    extents = [{_stride(axis): axis[0] for axis in axes} for _, axes in families]
    granule = _granules(extents)
    tiles = sum(prod(n // granule[s] for s, n in e.items()) for e in extents)
    if not len(families) < tiles <= most:
        return families
    heads: list[Point] = []
    for (head, _), e in zip(families, extents):
        points = [head]
        for s, n in e.items():
            if n > granule[s]:
                points = [_step_on(p, i, s) for p in points for i in range(0, n, granule[s])]
        heads += points
    heads.sort()
    form = tuple((g, *s) for s, g in granule.items() if g > 1)
    if len(families) == 2:  # only a single progression is fewer
        whole = _nested(heads)
        return families if whole is None else [(heads[0], _ordered(whole + form))]
    fewer = fold_points(heads)
    return [(head, _ordered(axes + form)) for head, axes in fewer] if len(fewer) < len(families) else families


def _granules(extents: list[dict[Point, int]]) -> dict[Point, int]:
    """The gcd of the extents along each stride; 1 where a family has no axis of that stride."""
    found: defaultdict[Point, list[int]] = defaultdict(list)
    for e in extents:
        for stride, extent in e.items():
            found[stride].append(extent)
    return {s: gcd(*its) if len(its) == len(extents) else 1 for s, its in found.items()}


def fold_points(points: list[Point]) -> list[Family]:
    """Sorted distinct points as few nested progressions.

    Two points always are a progression, which says little and leaves odd strides behind. So two
    alone fold only where elements do not go backwards, and among more points a pair counts only
    where its step comes three times.

    >>> fold_points([(0, 0), (1, 3), (2, 10), (3, 13)])
    [((0, 0), ((2, 2, 10), (2, 1, 3)))]
    >>> [len(fold_points(points)) for points in ([(0, 0), (1, 3), (2, 10)], [(0, 3), (1, 0)])]
    [3, 2]
    """
    if len(points) < 2:
        return [(p, ()) for p in points]
    whole = _nested(points)
    if whole is not None:
        return [(points[0], whole)]
    families: list[Family] = []
    for (extent, step), heads in _runs(points).items():
        inner = ((extent, *step),) if extent > 1 else ()
        families += [(head, axes + inner) for head, axes in _folded_heads(extent, heads)]
    return families


def _folded_heads(extent: int, heads: list[Point]) -> list[Family]:
    """The starts of runs folded in turn; those of pairs only where that is no accident."""
    alone: list[Family] = [(head, ()) for head in heads]
    if extent == 1:
        return alone
    outer = fold_points(heads)
    return outer if extent > 2 or 3 * len(outer) <= len(heads) else alone


def _runs(points: list[Point]) -> dict[tuple[int, Point], list[Point]]:
    """The starts of runs by extent and step, cut off greedily from the left."""
    steps = [(q[0] - p[0], q[1] - p[1]) for p, q in pairwise(points)]
    runs: defaultdict[tuple[int, Point], list[Point]] = defaultdict(list)
    k = 0
    while k < len(points):
        n = _run(steps, k)
        if n == 2 and _run(steps, k + 1) > 2:
            n = 1
        runs[n, steps[k] if n > 1 else (0, 0)].append(points[k])
        k += n
    rare = [key for key, heads in runs.items() if key[0] == 2 and len(heads) < 3]
    for key in rare:
        runs[1, (0, 0)] += [q for p in runs.pop(key) for q in (p, _step_on(p, 1, key[1]))]
    return runs


def _run(steps: list[Point], k: int) -> int:
    """How many points from ``k`` on form one progression."""
    n = 1
    while k + n <= len(steps) and steps[k + n - 1] == steps[k]:
        n += 1
    return n


def _nested(points: list[Point]) -> tuple[Axis, ...] | None:
    """The points as one nested progression, if they are one, outermost axis first.

    The innermost axis is all of the first run: if it ended earlier, the next axis would continue it.
    """
    count = len(points)
    if count == 1:
        return ()
    first, second = points[:2]
    step = second[0] - first[0], second[1] - first[1]
    if count == 2 and step[1] < 0:
        return None
    n = next((n for n in range(2, count) if points[n] != _step_on(first, n, step)), count)
    heads = points[::n]
    if count % n or not (n == count or _repeats(points, heads, n, step)):
        return None
    outer = _nested(heads)
    return None if outer is None else (*outer, (n, *step))


def _repeats(points: list[Point], heads: list[Point], n: int, step: Point) -> bool:
    """Whether each head starts the same run of ``n`` points."""
    return all(
        points[k * n + i] == (x + i * step[0], y + i * step[1])
        for k, (x, y) in enumerate(heads)
        for i in range(1, n)
    )
