"""Layouts whose pieces are plain boxes of the logical tensor: the short way to a plan.

Most real layouts give each rank a few boxes, with one step along every axis. Two sets of
boxes meet axis by axis, so their plan needs no solver. Between two grids it is the product of the
meetings along each axis: in plain Python where copies are few, left in product form where pairs are many.
Otherwise boxes are sorted along one axis. The general way (``meet``) gives the same copies and is
what the tests compare with.
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from .._limits import Limits
from ..maps import AffineMap
from ..maps._digits import chain_digits
from ..maps._meet import overlap_pairs, overlapping
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import IntArray, row_major
from ..maps._table import HEAD, PieceTable, from_ordered
from ._grid import Grid, counts, grid_of, meetings, written

FEW = 20  # copies up to which plain Python is the faster way
LISTED = 32  # pieces that are kept as lists for it
SOME = 1 << 12  # pairs up to which all are tested, and copies written at once


Listed = tuple[list[int], list[int], int, int]  # low, strides, offset, shard


class Boxes(NamedTuple):
    """Pieces as boxes: axes outermost first, ``low``/``high`` ``[axes, n]`` in coordinates of the
    logical tensor, ``offset`` of the first slot and ``strides`` ``[axes, n]`` in the shard.

    ``lone`` says that no two pieces share a shard, ``orderly`` that strides fall along the axes,
    as in any row-major shard. ``grid`` is set where the boxes are a product; ``lists`` holds the same
    as plain tuples where pieces are few.
    """

    low: IntArray
    high: IntArray
    offset: IntArray
    strides: IntArray
    shard: IntArray
    lone: bool
    orderly: bool
    grid: Grid | None
    lists: list[Listed]


def boxes_of(layout: AffineMap) -> Boxes | None:
    """The pieces as boxes, None where some piece is none; remembered with the layout."""
    known: dict[str, Boxes | None] = layout.__dict__
    if "_boxes" not in known:
        known["_boxes"] = _boxes(layout)
    return known["_boxes"]


def _boxes(layout: AffineMap) -> Boxes | None:
    table = layout.table
    if len(layout.codomain) != 1 or table.scaled or not len(table):
        return None
    chain = sorted({s for s, n in zip(row_major(layout.logical_shape), layout.logical_shape) if n > 1} | {1})
    digits = chain_digits(side_blocks(table, CODOMAIN, DOMAIN), chain)
    plain = digits.product & ((digits.step == 1) | (digits.extent == 1)).all(axis=0)
    if not plain.all() or len(digits.free_shape):
        return None
    low, extent = digits.start[::-1], digits.extent[::-1]
    strides = np.where(extent > 1, digits.payload[0][::-1], 0)
    c = table.columns
    lone = len(np.unique(c.dom_box)) == len(table)
    columns = (low.T, strides.T, c.dom_offset, c.dom_box)
    orderly = bool(((strides[:-1] > strides[1:]) | (extent[:-1] == 1) | (extent[1:] == 1)).all())
    grid = grid_of(low, low + extent) if lone else None
    lists = list(zip(*(x.tolist() for x in columns))) if len(table) <= LISTED else []
    return Boxes(low, low + extent, c.dom_offset, strides, c.dom_box, lone, orderly, grid, lists)


def box_copies(source: AffineMap, target: AffineMap, limits: Limits) -> PieceTable | None:
    """Target slots -> source slots for two layouts of plain boxes without replicas in the source;
    None where another way must be taken."""
    pairs = len(source) * len(target)
    a, b = boxes_of(source), boxes_of(target)
    if a is None or b is None or not (a.lone and b.lone and b.orderly):
        return None
    if a.grid is None or b.grid is None:
        return _together(a, b, limits)
    if pairs > SOME:
        return _product(a, b, a.grid, b.grid, limits)
    few = _listed(a, b, a.grid, b.grid) if a.lists and b.lists and limits.copies >= FEW else None
    return few if few is not None else _together(a, b, limits)


def _product(a: Boxes, b: Boxes, of_a: Grid, of_b: Grid, limits: Limits) -> PieceTable:
    """The copies between two grids, counted now and written when asked for."""
    met = meetings(of_a, of_b)
    count, size = counts(met)
    limits.hold("copies", count)
    pairs = (b.offset, a.offset), (b.strides, a.strides), (b.shard, a.shard)
    return PieceTable.unwritten(count, size, len(met), lambda: written(met, of_a, of_b, *pairs))


def _listed(a: Boxes, b: Boxes, of_a: Grid, of_b: Grid) -> PieceTable | None:
    """The copies between two small grids in plain Python, None where they are more than a few."""
    along = [_along(*ends) for ends in zip(of_a.ends, of_b.ends)]
    if prod(map(len, along)) > FEW:
        return None
    rows = []
    for met in product(*along):
        j = i = 0
        for (mine, theirs, *_), step_b, step_a in zip(met, of_b.steps, of_a.steps):
            j += mine * step_b
            i += theirs * step_a
        rows.append(_row(met, b.lists[of_b.cells[j]], a.lists[of_a.cells[i]]))
    rows.sort()
    axes = len(along)
    used = max((k for row in rows for k in range(axes) if row[HEAD + k] > 1), default=-1) + 1
    if used < axes:
        keep = [*range(HEAD), *(HEAD + block * axes + k for block in range(3) for k in range(used))]
        rows = [tuple(row[c] for c in keep) for row in rows]
    return PieceTable(np.array(rows, np.int64).reshape(len(rows), HEAD + 3 * used).T)


_Along = tuple[int, int, int, int]  # interval of b, interval of a, where they meet, for how long


def _along(of_a: list[tuple[int, int]], of_b: list[tuple[int, int]]) -> list[_Along]:
    """The meetings of two sorted lists of disjoint intervals."""
    found, i = [], 0
    for j, (low_b, high_b) in enumerate(of_b):
        while i < len(of_a) and of_a[i][1] <= low_b:
            i += 1
        k = i
        while k < len(of_a) and of_a[k][0] < high_b:
            low, high = max(low_b, of_a[k][0]), min(high_b, of_a[k][1])
            if low < high:
                found.append((j, k, low, high - low))
            k += 1
    return found


def _row(met: tuple[_Along, ...], b: Listed, a: Listed) -> tuple[int, ...]:
    """One copy as a row of the table, its axes in normal form."""
    low_b, strides_b, offset_b, shard_b = b
    low_a, strides_a, offset_a, shard_a = a
    shape: list[int] = []
    mine: list[int] = []
    theirs: list[int] = []
    for (_, _, low, n), lb, sb, la, sa in zip(met, low_b, strides_b, low_a, strides_a):
        offset_b += (low - lb) * sb
        offset_a += (low - la) * sa
        if n == 1:
            continue
        if shape and mine[-1] == sb * n and theirs[-1] == sa * n:
            shape[-1] *= n
            mine[-1], theirs[-1] = sb, sa
        else:
            shape.append(n)
            mine.append(sb)
            theirs.append(sa)
    pad = len(met) - len(shape)
    if pad:
        none = [0] * pad
        shape, mine, theirs = shape + [1] * pad, mine + none, theirs + none
    return (shard_b, offset_b, shard_a, offset_a, 1, 1, *shape, *mine, *theirs)


def _together(a: Boxes, b: Boxes, limits: Limits) -> PieceTable:
    """All pairs at once: those that meet, and where."""
    j, i = _all_pairs(a, b) if a.low.shape[1] * b.low.shape[1] <= SOME else _candidates(a, b, limits)
    low = np.maximum(b.low[:, j], a.low[:, i])
    extent = np.minimum(b.high[:, j], a.high[:, i])
    extent -= low
    meets = (extent > 0).all(axis=0)
    if not meets.all():
        j, i, low, extent = j[meets], i[meets], low[:, meets], extent[:, meets]
    limits.hold("copies", len(i))
    axes = len(low)
    rows = np.empty((HEAD + 3 * axes, len(i)), np.int64)
    rows[0], rows[2] = b.shard[j], a.shard[i]
    rows[1], rows[3] = b.offset[j], a.offset[i]
    rows[4:6] = 1
    rows[HEAD : HEAD + axes] = extent
    for k in range(axes):
        for x, at, side in ((b, j, 1), (a, i, 3)):
            strides = x.strides[k][at]
            rows[side] += (low[k] - x.low[k][at]) * strides
            strides[extent[k] == 1] = 0
            rows[HEAD + (axes if side == 1 else 2 * axes) + k] = strides
    return from_ordered(rows)


def _all_pairs(a: Boxes, b: Boxes) -> tuple[IntArray, IntArray]:
    """Pairs (target piece, source piece) that meet, of few."""
    meets = np.minimum(b.high[:, :, None], a.high[:, None]) > np.maximum(b.low[:, :, None], a.low[:, None])
    j, i = np.nonzero(meets.all(axis=0))
    return j, i


def _candidates(a: Boxes, b: Boxes, limits: Limits) -> tuple[IntArray, IntArray]:
    """Pairs (target piece, source piece) that overlap along the axis where the fewest do."""
    axis = min(range(len(a.low)), key=lambda k: overlapping(b.low[k], b.high[k] - 1, a.low[k], a.high[k] - 1))
    return overlap_pairs(b.low[axis], b.high[axis] - 1, a.low[axis], a.high[axis] - 1, limits)
