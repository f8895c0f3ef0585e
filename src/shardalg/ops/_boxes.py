"""Layouts whose pieces are plain boxes of the logical tensor: the short way to a plan.

Most real layouts give each rank a few boxes, with one step along every axis. Two sets of
boxes meet axis by axis, so their plan needs no solver: a double loop where there are few pairs, the
product of per-axis meetings where both sides are grids and pairs are many, else a sort along one axis.
The general way (``meet``) gives the same copies and is
what the tests compare with.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._limits import Limits
from ..maps import AffineMap
from ..maps._meet import chain_digits, overlap_pairs, overlapping
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import IntArray, row_major
from ..maps._table import HEAD, PieceTable, from_ordered
from ._grid import Grid, counts, grid_of, meetings, written

FEW, SOME = 12, 1 << 12  # pairs up to which the loop, and testing all pairs, are the faster way


class Boxes(NamedTuple):
    """Pieces as boxes: axes outermost first, ``low``/``high`` ``[axes, n]`` in coordinates of the
    logical tensor, ``offset`` of the first slot and ``strides`` ``[axes, n]`` in the shard.

    ``lone`` says that no two pieces share a shard, ``orderly`` that strides fall along the axes,
    as in any row-major shard. ``grid`` is set where the boxes are a product. ``lists`` holds the same
    as plain tuples ``(low, high, strides, offset, shard)`` where pieces are few.
    """

    low: IntArray
    high: IntArray
    offset: IntArray
    strides: IntArray
    shard: IntArray
    lone: bool
    orderly: bool
    grid: Grid | None
    lists: list[tuple[list[int], list[int], list[int], int, int]]


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
    plain = digits.product & ((digits.step == 1) | (digits.count == 1)).all(axis=0)
    if not plain.all() or len(digits.free_shape):
        return None
    low, count = digits.start[::-1], digits.count[::-1]
    strides = np.where(count > 1, digits.payload[0][::-1], 0)
    c = table.columns
    lone = len(np.unique(c.dom_box)) == len(table)
    columns = (low.T, (low + count).T, strides.T, c.dom_offset, c.dom_box)
    orderly = bool(((strides[:-1] > strides[1:]) | (count[:-1] == 1) | (count[1:] == 1)).all())
    grid = grid_of(low, low + count) if lone and len(table) > FEW else None
    lists = list(zip(*(x.tolist() for x in columns))) if len(table) <= FEW else []
    return Boxes(low, low + count, c.dom_offset, strides, c.dom_box, lone, orderly, grid, lists)


def box_copies(source: AffineMap, target: AffineMap, limits: Limits) -> PieceTable | None:
    """Target slots -> source slots for two layouts of plain boxes without replicas in the source;
    None where another way must be taken."""
    pairs = len(source) * len(target)
    a, b = boxes_of(source), boxes_of(target)
    if a is None or b is None or not (a.lone and b.lone and b.orderly):
        return None
    if pairs <= FEW and len(a.low) < 3:
        return _looped(a, b)
    if pairs > SOME and a.grid is not None and b.grid is not None:
        return _product(a, b, a.grid, b.grid, limits)
    return _together(a, b, limits)


def _product(a: Boxes, b: Boxes, of_a: Grid, of_b: Grid, limits: Limits) -> PieceTable:
    """The copies between two grids, counted now and written when asked for."""
    met = meetings(of_a, of_b)
    count, size = counts(met)
    limits.hold("copies", count)
    pairs = (b.offset, a.offset), (b.strides, a.strides), (b.shard, a.shard)
    return PieceTable.unwritten(count, size, len(met), lambda: written(met, of_a, of_b, *pairs))


def _looped(a: Boxes, b: Boxes) -> PieceTable:
    rows = []
    for low_b, high_b, strides_b, offset_b, shard_b in b.lists:
        for low_a, high_a, strides_a, offset_a, shard_a in a.lists:
            row = _meeting(low_a, high_a, strides_a, offset_a, low_b, high_b, strides_b, offset_b)
            if row is not None:
                rows.append((shard_b, row[0], shard_a, row[1], 1, 1, *row[2]))
    return from_ordered(np.array(rows, np.int64).reshape(len(rows), HEAD + 3 * len(a.low)).T)


def _meeting(
    low_a: list[int],
    high_a: list[int],
    strides_a: list[int],
    offset_a: int,
    low_b: list[int],
    high_b: list[int],
    strides_b: list[int],
    offset_b: int,
) -> tuple[int, int, list[int]] | None:
    """Both offsets and ``(extents, target strides, source strides)`` of two boxes' meeting."""
    shape: list[int] = []
    mine: list[int] = []
    theirs: list[int] = []
    for la, ha, sa, lb, hb, sb in zip(low_a, high_a, strides_a, low_b, high_b, strides_b):
        low = la if la > lb else lb
        n = (ha if ha < hb else hb) - low
        if n <= 0:
            return None
        offset_a += (low - la) * sa
        offset_b += (low - lb) * sb
        if n == 1:
            sa = sb = 0
        elif shape and shape[-1] > 1 and mine[-1] == sb * n and theirs[-1] == sa * n:
            n *= shape.pop()
            mine.pop()
            theirs.pop()
        shape.append(n)
        mine.append(sb)
        theirs.append(sa)
    if len(shape) > 1 and shape[0] == 1:  # unit axes come last
        shape, mine, theirs = [shape[1], 1], [mine[1], 0], [theirs[1], 0]
    pad = len(low_a) - len(shape)
    if pad:
        shape, mine, theirs = shape + [1] * pad, mine + [0] * pad, theirs + [0] * pad
    return offset_b, offset_a, shape + mine + theirs


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
