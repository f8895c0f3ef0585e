"""Fold neighbouring pieces into fewer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from math import gcd, prod
from typing import TypeAlias

import numpy as np

from ..maps import AffineMap
from ..maps._map import known, remember
from ..maps._table import HEAD, Columns, PieceTable, build, concatenate

Point: TypeAlias = tuple[int, int]  # (slot, element)
Axis: TypeAlias = tuple[int, int, int]  # (extent, slot stride, element stride)
Family: TypeAlias = tuple[Point, tuple[Axis, ...]]


def simplify(m: AffineMap) -> AffineMap:
    """The same map with neighbouring pieces folded.

    ``equivalent(simplify(m), m)`` and ``simplify(simplify(m)) == simplify(m)``. Local and
    cheap: pieces in the same two boxes at the same scale are joined end to end along an axis,
    stacked where their offsets are nested progressions, and re-cut to their common granule
    where an accidental join hides such a progression. No promise of the fewest pieces.

    >>> from shardalg import BlockGather, layout
    >>> len(simplify(layout((8,), BlockGather(0, 2, {0: (0, 1), 1: (2, 3)}))))
    2
    """
    table = simplified(m.table)
    if table is m.table:
        return m
    return remember(
        AffineMap(m.domain, m.codomain, table),
        single_valued=known(m, "single_valued"),
        injective=known(m, "injective"),
    )


def simplified(table: PieceTable) -> PieceTable:
    """The folded table; the very same object where nothing folds."""
    groups = _groups(table)
    if not groups:
        return table
    folded: list[PieceTable] = []
    touched = np.zeros(len(table), bool)
    for picked in groups:
        families = _families(table, picked)
        fewer = fold(families)
        if len(fewer) < len(families):
            touched[picked] = True
            folded.append(_as_table(fewer, table.rows[:HEAD, picked[0]].tolist()))
    if not folded:
        return table
    return concatenate([table.take(~touched), *folded])


def _groups(table: PieceTable) -> list[np.ndarray[tuple[int], np.dtype[np.int64]]]:
    """Positions of pieces that share both boxes and the scale, where there are several."""
    if len(table) < 2:
        return []
    c = table.columns
    keys = [c.dom_box, c.cod_box] + ([c.numerator, c.denominator] if table.scaled else [])
    if all((k == k[0]).all() for k in keys):
        return [np.arange(len(table))]
    order = np.lexsort(keys[::-1])
    changes = np.zeros(len(table) - 1, bool)
    for k in keys:
        changes |= k[order[1:]] != k[order[:-1]]
    cuts = np.flatnonzero(changes) + 1
    if len(cuts) == len(table) - 1:
        return []
    return [np.sort(g) for g in np.split(order, cuts) if len(g) > 1]


def _families(table: PieceTable, picked: np.ndarray[tuple[int], np.dtype[np.int64]]) -> list[Family]:
    c = table.columns
    heads = zip(c.dom_offset[picked].tolist(), c.cod_offset[picked].tolist())
    axes = zip(*(x[:, picked].T.tolist() for x in (c.shape, c.dom_strides, c.cod_strides)))
    return [(head, tuple((n, d, e) for n, d, e in zip(*part) if n > 1)) for head, part in zip(heads, axes)]


def _as_table(families: list[Family], head: list[int]) -> PieceTable:
    """Families in the boxes and at the scale of ``head``, as a table."""
    axes, count = max(len(f[1]) for f in families), len(families)
    blocks = np.zeros((3, axes, count), np.int64)
    blocks[0] = 1
    for j, (_, parts) in enumerate(families):
        for i, axis in enumerate(parts):
            blocks[:, i, j] = axis
    offsets = np.array([f[0] for f in families], np.int64).T
    same: Callable[[int], np.ndarray[tuple[int], np.dtype[np.int64]]] = lambda v: np.full(count, v)
    return build(
        Columns(same(head[0]), offsets[0], same(head[2]), offsets[1], same(head[4]), same(head[5]), *blocks)
    )


# --- folding families of points -----------------------------------------------------------


def fold(families: list[Family]) -> list[Family]:
    """Families with the same points, no more of them, and usually fewer."""
    while len(families) > 1:
        fewer = _stacked(_joined(families))
        if len(fewer) > 1:
            fewer = min(fewer, _recut(fewer), key=len)
        if len(fewer) >= len(families):
            break
        families = fewer
    return families


def _joined(families: list[Family]) -> list[Family]:
    """Families that continue each other along one axis become one."""
    strides = sorted({axis[1:] for _, axes in families for axis in axes})
    for stride in strides:
        families = _joined_along(families, stride)
    return families


def _joined_along(families: list[Family], stride: Point) -> list[Family]:
    by_start: dict[tuple[Point, tuple[Axis, ...]], int] = {}
    split: list[tuple[Point, int, tuple[Axis, ...]]] = []
    for head, axes in families:
        extent = next((n for n, *s in axes if tuple(s) == stride), 1)
        rest = tuple(axis for axis in axes if axis[1:] != stride)
        if len(rest) + (extent > 1) != len(axes):
            return families  # one family has two axes of this stride
        by_start[head, rest] = len(split)
        split.append((head, extent, rest))
    if len(by_start) < len(split):
        return families
    follower: dict[int, int] = {}
    for k, (head, extent, rest) in enumerate(split):
        end = (head[0] + extent * stride[0], head[1] + extent * stride[1])
        after = by_start.get((end, rest))
        if after is not None and after != k:
            follower[k] = after
    if not follower:
        return families
    inner = set(follower.values())
    joined: list[Family] = []
    for k, (head, extent, rest) in enumerate(split):
        if k in inner:
            continue
        while k in follower:
            k = follower[k]
            extent += split[k][1]
        joined.append((head, (*rest, (extent, *stride)) if extent > 1 else rest))
    return joined


def _stacked(families: list[Family]) -> list[Family]:
    """Families of one form whose heads are nested progressions become one with more axes."""
    forms: defaultdict[tuple[Axis, ...], list[Point]] = defaultdict(list)
    for head, axes in families:
        forms[tuple(sorted(axes, reverse=True))].append(head)
    stacked: list[Family] = []
    for form, heads in forms.items():
        stacked += [(head, axes + form) for head, axes in fold_points(sorted(heads))]
    return stacked


def _recut(families: list[Family]) -> list[Family]:
    """Families re-cut to the common granule along every axis and folded from there.

    The granule of an axis is the gcd of its extents. This undoes a join across a digit
    boundary, which hides that all runs are translates of one (fused QKV orders need it).
    """
    strides = sorted({axis[1:] for _, axes in families for axis in axes})
    extents = [{axis[1:]: axis[0] for axis in axes} for _, axes in families]
    granule = [gcd(*(e.get(s, 1) for e in extents)) for s in strides]
    tiles = sum(prod(e.get(s, 1) // g for s, g in zip(strides, granule)) for e in extents)
    repeated = any(len(e) < len(axes) for e, (_, axes) in zip(extents, families))
    if repeated or not len(families) < tiles <= 8 * len(families) + 56:
        return families
    heads: list[Point] = []
    for (head, _), e in zip(families, extents):
        points = [head]
        for s, g in zip(strides, granule):
            steps = range(0, e.get(s, 1), g)
            points = [(p[0] + s[0] * i, p[1] + s[1] * i) for p in points for i in steps]
        heads += points
    form = tuple((g, *s) for s, g in zip(strides, granule) if g > 1)
    return [(head, axes + form) for head, axes in fold_points(sorted(heads))]


def fold_points(points: list[Point]) -> list[Family]:
    """Sorted distinct points as few nested progressions.

    >>> fold_points([(0, 0), (1, 3), (2, 10), (3, 13)])
    [((0, 0), ((2, 2, 10), (2, 1, 3)))]
    """
    if len(points) < 2:
        return [(p, ()) for p in points]
    whole = _nested(points)
    if whole is not None:
        return [(points[0], whole)]
    runs: defaultdict[tuple[int, Point], list[Point]] = defaultdict(list)
    k = 0
    while k < len(points):
        n = _run(points, k)
        after = _run(points, k + 1) if n == 2 and k + 1 < len(points) else 0
        n = 1 if after > n else n
        runs[n, _step(points, k) if n > 1 else (0, 0)].append(points[k])
        k += n
    if len(runs) == 1 and len(next(iter(runs.values()))) == len(points):
        return [(p, ()) for p in points]
    families: list[Family] = []
    for (n, step), heads in runs.items():
        inner = ((n, *step),) if n > 1 else ()
        outer = fold_points(heads) if n > 1 else [(p, ()) for p in heads]
        families += [(head, axes + inner) for head, axes in outer]
    return families


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
