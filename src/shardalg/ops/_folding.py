"""Folding: the same points in fewer strided families.

A *family* is a start (slot, element) and axes ``(extent, slot stride, element stride)``, kept in
descending order of stride. Everything here is exact and local; nothing walks elements.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from ..maps._space import IntArray
from ..maps._table import HEAD, Columns, PieceTable, build, concatenate

Point: TypeAlias = tuple[int, int]  # (slot, element)
Axis: TypeAlias = tuple[int, int, int]  # (extent, slot stride, element stride)
Axes: TypeAlias = tuple[Axis, ...]
Family: TypeAlias = tuple[Point, Axes]


def simplified(table: PieceTable, *, listed: int = 0) -> PieceTable:
    """The table with neighbouring pieces folded; the very same object where nothing folds.

    Pieces fold within a group: the same two boxes at the same scale. Each group is folded until
    folding it again, read back in normal form, gives no fewer. A group of at most ``listed``
    points is also tried point by point, which no way of cutting can hide from.
    """
    done: list[PieceTable] = []
    waiting = table
    stable: set[tuple[Family, ...]] = set()
    while (found := _folded(waiting, listed, stable)) is not None:
        waiting, settled = found
        done.append(settled)
    return concatenate([*done, waiting]) if done else table


def _folded(
    table: PieceTable, listed: int, stable: set[tuple[Family, ...]]
) -> tuple[PieceTable, PieceTable] | None:
    """The groups that fold, folded once and in one table, and the pieces of those that do not.

    ``stable`` collects what folding gave: a group that normal form leaves as it was folded is not
    folded again.
    """
    groups = grouped(table)
    families = families_of(table) if groups else []
    touched = np.zeros(len(table), bool)
    folded: list[Family] = []
    origin: list[int] = []
    for picked in groups:
        its = [families[k] for k in picked.tolist()]
        if not listed and tuple(its) in stable:
            continue
        fewer = fold(its)
        if len(fewer) >= len(its) and _count(its) <= listed:
            fewer = fold(fold_points(sorted(points_of(its))))
        if len(fewer) < len(its):
            touched[picked] = True
            stable.add(tuple(sorted((head, _ordered(axes)) for head, axes in fewer)))
            folded += fewer
            origin += [int(picked[0])] * len(fewer)
    if not folded:
        return None
    return families_table(folded, table.rows[:HEAD, origin]), table.take(~touched)


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


def families_table(families: list[Family], head: IntArray | Sequence[int]) -> PieceTable:
    """Families as a table, in the boxes and at the scales of pieces whose rows start with ``head``:
    one column for all families, or one for each."""
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
            return [(whole[0][0], whole[0][1] + families[0][1])]
    while len(families) > 1:
        fewer = _stacked(_joined(families))
        if len(fewer) > 1:
            fewer = min(fewer, _recut(fewer), key=len)
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
    if not _touch(families):
        return families
    live = dict.fromkeys((head, _ordered(axes)) for head, axes in families)
    members: defaultdict[Point, list[Family]] = defaultdict(list)
    for family in live:
        for axis in family[1]:
            members[_stride(axis)].append(family)
    for stride in sorted(members):
        for family in _join_along(live, members[stride], stride):
            for axis in family[1]:
                if _stride(axis) > stride:
                    members[_stride(axis)].append(family)
    return list(live)


def _touch(families: list[Family]) -> bool:
    """Whether any family starts where another would go on, before or after it, along its axes."""
    starts = {head for head, _ in families}
    return any(
        (x + n * s, y + n * e) in starts or (x - s, y - e) in starts
        for (x, y), axes in families
        for n, s, e in axes
    )


def _join_along(live: dict[Family, None], members: list[Family], stride: Point) -> list[Family]:
    """Join the members, and families without an axis of this stride that touch them, in ``live``;
    returns the new families. A family is found by its start, a member also by its end."""
    starts: dict[Family, Family] = {}
    ends: dict[Family, Family] = {}
    for family in members:
        if family in live:
            rest = tuple(axis for axis in family[1] if _stride(axis) != stride)
            starts[family[0], rest] = family
            ends[_after(family, stride), rest] = family
    made = []
    for start in list(starts):
        if start not in starts:
            continue
        (first, rest), parts, extent = start, [], 0
        while (before := ends.get((first, rest)) or _single(live, first, rest, stride, -1)) is not None:
            first = before[0]
        at = first
        while (part := starts.pop((at, rest), None) or _single(live, at, rest, stride, 0)) is not None:
            parts.append(part)
            extent += _extent(part, stride)
            at = (first[0] + extent * stride[0], first[1] + extent * stride[1])
        if len(parts) > 1:
            for part in parts:
                del live[part]
            made.append((first, _ordered((*rest, (extent, *stride)))))
            live[made[-1]] = None
    return made


def _extent(family: Family, stride: Point) -> int:
    return next((axis[0] for axis in family[1] if _stride(axis) == stride), 1)


def _after(family: Family, stride: Point) -> Point:
    """Where the next family along a stride would start."""
    (slot, element), extent = family[0], _extent(family, stride)
    return slot + extent * stride[0], element + extent * stride[1]


def _single(live: dict[Family, None], at: Point, rest: Axes, stride: Point, steps: int) -> Family | None:
    """The live family without an axis of the stride that starts ``steps`` strides from ``at``."""
    family = ((at[0] + steps * stride[0], at[1] + steps * stride[1]), rest)
    return family if family in live else None


def _stacked(families: list[Family]) -> list[Family]:
    """Families of one form whose starts are nested progressions become one with more axes."""
    forms: defaultdict[Axes, list[Point]] = defaultdict(list)
    for head, axes in families:
        forms[_ordered(axes)].append(head)
    stacked: list[Family] = []
    for form, heads in forms.items():
        stacked += [(head, axes + form) for head, axes in fold_points(sorted(heads))]
    return stacked


def _recut(families: list[Family]) -> list[Family]:
    """Families re-cut to the common granule along every axis and folded from there.

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
            points = [(p[0] + s[0] * i, p[1] + s[1] * i) for p in points for i in range(0, n, granule[s])]
        heads += points
    form = _ordered((g, *s) for s, g in granule.items() if g > 1)
    return [(head, axes + form) for head, axes in fold_points(sorted(heads))]


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
    runs: defaultdict[tuple[int, Point], list[Point]] = defaultdict(list)
    k = 0
    while k < len(points):
        n = _run(points, k)
        after = _run(points, k + 1) if n == 2 and k + 1 < len(points) else 0
        n = 1 if after > n else n
        runs[n, _step(points, k) if n > 1 else (0, 0)].append(points[k])
        k += n
    rare = [key for key, heads in runs.items() if key[0] == 2 and len(heads) < 3]
    for key in rare:
        _, (slot, element) = key
        runs[1, (0, 0)] += [q for p in runs.pop(key) for q in (p, (p[0] + slot, p[1] + element))]
    return runs


def _step(points: list[Point], k: int) -> Point:
    return points[k + 1][0] - points[k][0], points[k + 1][1] - points[k][1]


def _run(points: list[Point], k: int) -> int:
    """How many points from ``k`` on form one progression."""
    if k + 1 >= len(points):
        return 1
    (x, y), (dx, dy) = points[k], _step(points, k)
    n = 2
    while k + n < len(points) and points[k + n] == (x + n * dx, y + n * dy):
        n += 1
    return n


def _nested(points: list[Point]) -> tuple[Axis, ...] | None:
    """The points as one nested progression, if they are one, outermost axis first."""
    count = len(points)
    if count == 1:
        return ()
    step = _step(points, 0)
    if count == 2 and step[1] < 0:
        return None
    for n in range(_run(points, 0), 1, -1):
        if count % n:
            continue
        heads = points[::n]
        if n < count and not _repeats(points, heads, n, step):
            continue
        outer = _nested(heads)
        if outer is not None:
            return (*outer, (n, *step))
    return None


def _repeats(points: list[Point], heads: list[Point], n: int, step: Point) -> bool:
    """Whether each head starts the same run of ``n`` points."""
    return all(
        points[k * n + i] == (x + i * step[0], y + i * step[1])
        for k, (x, y) in enumerate(heads)
        for i in range(1, n)
    )
