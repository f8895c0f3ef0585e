"""Plans in product form: two grids of boxes meet axis by axis.

A layout that cuts every axis into intervals and gives each cell to one shard is a *grid*: a product of
per-axis tables. The copies between two grids are the product of the meetings along each axis, so
their number and the elements they move are known from those short lists alone. The copies are
written down when somebody asks for them: planning 32,768 takes the time of planning a few hundred.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import numpy as np

from ..maps._space import IntArray, row_major
from ..maps._table import HEAD, PieceTable, from_ordered


class Grid(NamedTuple):
    """Per axis the sorted intervals ``[low, high)``, and ``cell[i0, i1, ...]``, the position of the
    box of each combination; ``ends``, ``cells`` and ``steps`` are the same as plain lists."""

    low: tuple[IntArray, ...]
    high: tuple[IntArray, ...]
    cell: IntArray
    ends: list[list[tuple[int, int]]]
    cells: list[int]
    steps: tuple[int, ...]


def grid_of(low: IntArray, high: IntArray) -> Grid | None:
    """Boxes ``[axes, n]`` as a grid; None where they are no product of disjoint intervals."""
    lows, highs, places = [], [], []
    for a, b in zip(low, high):
        starts, first, place = np.unique(a, return_index=True, return_inverse=True)
        ends = b[first]
        if (ends[:-1] > starts[1:]).any() or (ends[place.reshape(-1)] != b).any():
            return None
        lows.append(starts)
        highs.append(ends)
        places.append(place.reshape(-1))
    shape = tuple(len(x) for x in lows)
    if prod(shape) != low.shape[1]:
        return None
    cell = np.full(shape, -1, np.int64)
    cell[tuple(places)] = np.arange(low.shape[1])
    if (cell < 0).any():
        return None
    ends = [list(zip(a.tolist(), b.tolist())) for a, b in zip(lows, highs)]
    return Grid(tuple(lows), tuple(highs), cell, ends, cell.reshape(-1).tolist(), row_major(shape))


class Meetings(NamedTuple):
    """Along one axis: which interval of each grid, where they meet, and for how long."""

    mine: IntArray
    theirs: IntArray
    low: IntArray
    extent: IntArray


def meetings(a: Grid, b: Grid) -> list[Meetings]:
    """The meetings of ``b``'s intervals with ``a``'s along each axis, ``b`` first in order."""
    found = []
    for low_a, high_a, low_b, high_b in zip(a.low, a.high, b.low, b.high):
        begin = np.searchsorted(high_a, low_b, "right")
        counts = np.maximum(np.searchsorted(low_a, high_b, "left") - begin, 0)
        mine = np.repeat(np.arange(len(low_b)), counts)
        theirs = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts - begin, counts)
        low = np.maximum(low_b[mine], low_a[theirs])
        found.append(Meetings(mine, theirs, low, np.minimum(high_b[mine], high_a[theirs]) - low))
    return found


def counts(met: list[Meetings]) -> tuple[int, int]:
    """How many copies the product holds, and how many elements they move."""
    return prod(len(m.mine) for m in met), prod(int(m.extent.sum()) for m in met)


def written(met: list[Meetings], a: Grid, b: Grid, offsets: tuple[IntArray, IntArray],
            strides: tuple[IntArray, IntArray], shards: tuple[IntArray, IntArray]) -> PieceTable:  # fmt: skip
    """The copies of the product, from ``b``'s slots to ``a``'s. Pairs are (``b``'s, ``a``'s);
    strides are ``[axes, boxes]``."""
    axes = len(met)
    j, i = (g.cell[np.ix_(*(m[k] for m in met))].reshape(-1) for k, g in ((0, b), (1, a)))
    shape = tuple(len(m.mine) for m in met)
    rows = np.empty((HEAD + 3 * axes, len(j)), np.int64)
    rows[0], rows[2] = shards[0][j], shards[1][i]
    rows[1], rows[3] = offsets[0][j], offsets[1][i]
    rows[4:6] = 1
    for k, m in enumerate(met):
        extent = _spread(m.extent, k, shape)
        rows[HEAD + k] = extent
        for side, at, grid, place in ((0, j, b, m.mine), (1, i, a, m.theirs)):
            step = strides[side][k][at]
            rows[1 + 2 * side] += _spread(m.low - grid.low[k][place], k, shape) * step
            step[extent == 1] = 0
            rows[HEAD + (1 + side) * axes + k] = step
    return from_ordered(rows)


def _spread(x: IntArray, axis: int, shape: tuple[int, ...]) -> IntArray:
    """Values along one axis, repeated over all the others, flat."""
    along = tuple(-1 if k == axis else 1 for k in range(len(shape)))
    flat: IntArray = np.broadcast_to(x.reshape(along), shape).reshape(-1)
    return flat
