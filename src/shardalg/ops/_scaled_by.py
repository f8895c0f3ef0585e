"""Block scales that go with a weight."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Limits
from ..maps import AffineMap, Piece, Side, Space
from ..maps._map import remember, require_shards
from ..maps._space import IntArray, Shape, as_shape, index_of, row_major
from ._equivalent import equivalent
from ._regions import restrict
from ._simplify import simplify


def scaled_by(layout: AffineMap, tile: Sequence[int], *, limits: Limits = Limits()) -> AffineMap:
    """The layout of the per-tile scales of a weight, from the layout of the weight.

    The logical tensor has one element per tile of ``tile`` elements (the last may be short). Each rank
    holds the scales of the tiles its slots fall in, in shard order, so ranks that share a tile replicate its
    scale. Padding has no scale.

    Raises ``UnsupportedError`` where a shard is no grid of rows and columns of the weight (a flat buffer),
    because then no grid of tiles describes it.

    Cost: the rows of each shard along each axis, and its pieces.

    >>> from shardalg import Split, layout
    >>> weight = layout((256, 8), Split(0), ranks=4)
    >>> [p.codomain.offset for p in scaled_by(weight, (128, 8)).pieces]
    [0, 0, 1, 1]
    """
    require_shards(layout, "the layout of scaled_by")
    shape, tile = layout.logical_shape, as_shape(tile, "tile")
    if len(tile) != len(shape) or 0 in tile:
        raise InvalidMapError(f"tile {tile} must have one extent of at least 1 per axis of {shape}")
    if layout.table.scaled:
        raise UnsupportedError(
            "scaled_by: the weight's layout has scales of its own; give the unscaled layout"
        )
    lines = _lines(layout, limits)
    grid = _grid(layout.domain, shape, {rank: [_runs(x) for x in its] for rank, its in lines.items()})
    if not equivalent(grid, layout, limits=limits):
        raise UnsupportedError(
            f"scaled_by: the shards are no grids of rows and columns of {shape}, so no grid of tiles"
            " describes them; derive the scales from the layout before it was flattened"
        )
    tiles = {rank: [_tiles(x, t) for x, t in zip(its, tile)] for rank, its in lines.items()}
    storage = Space.shards({rank: tuple(len(x) for x in its) for rank, its in tiles.items()})
    scales = tuple(-(-n // t) for n, t in zip(shape, tile))
    runs = {rank: [_runs(x) for x in its] for rank, its in tiles.items()}
    return simplify(_grid(storage, scales, runs))


# --- one axis at a time -------------------------------------------------------------------


def _lines(layout: AffineMap, limits: Limits) -> dict[int, list[IntArray]]:
    """Per rank and axis: the index along that axis of the element in each row of the shard, -1 for
    padding, read off lines through a slot that holds something."""
    shape = layout.logical_shape
    for b in layout.domain.boxes:
        if len(b.shape) != len(shape):
            raise UnsupportedError(
                f"scaled_by: the shard of rank {b.rank} has shape {b.shape}, but its weight has"
                f" {len(shape)} axes; derive the scales from the layout before it was flattened"
            )
    lines = {rank: [np.full(n, -1) for n in layout.shard_shape(rank)] for rank in layout.ranks}
    corners = _corners(layout)
    for axis in range(len(shape)):
        where = {rank: [*corner[:axis], slice(None), *corner[axis + 1 :]] for rank, corner in corners.items()}
        for p in restrict(layout, where, limits=limits).pieces:
            assert p.domain.rank is not None
            slots, elements = (_addresses(p.shape, side) for side in (p.domain, p.codomain))
            at = _along(slots, layout.shard_shape(p.domain.rank), axis)
            lines[p.domain.rank][axis][at] = _along(elements, shape, axis)
    return lines


def _corners(layout: AffineMap) -> dict[int, tuple[int, ...]]:
    """For each rank that holds something, the index of one slot that does."""
    c = layout.table.columns
    boxes, first = np.unique(c.dom_box, return_index=True)
    found = {}
    for box, k in zip(boxes.tolist(), first.tolist()):
        b = layout.domain.boxes[box]
        assert b.rank is not None
        found[b.rank] = index_of(int(c.dom_offset[k]), b.shape)
    return found


def _addresses(shape: Shape, side: Side) -> IntArray:
    at = np.array([side.offset])
    for n, stride in zip(shape, side.strides):
        at = (at[:, None] + np.arange(n) * stride).reshape(-1)
    return at


def _along(addresses: IntArray, shape: Shape, axis: int) -> IntArray:
    return addresses // row_major(shape)[axis] % shape[axis]


def _tiles(line: IntArray, tile: int) -> IntArray:
    """The tile of each scale along one axis of a shard: a new one wherever the tile changes, -1 where
    it is all padding. Padding goes on counting from the row before it."""
    held = np.flatnonzero(line >= 0)
    if not len(line):
        return line
    before = np.maximum.accumulate(np.where(line >= 0, np.arange(len(line)), held[0] if len(held) else 0))
    start = line[before] if len(held) else np.zeros(len(line), np.int64)
    index = (start + np.arange(len(line)) - before) // tile
    fresh = np.flatnonzero(np.diff(index, prepend=index[0] - 1))
    real = np.maximum.reduceat(line, fresh) >= 0
    return np.where(real, index[fresh], -1)


# --- grids --------------------------------------------------------------------------------


class Span(NamedTuple):
    """``size`` neighbours: from position ``at`` of the shard and index ``start`` of the tensor."""

    at: int
    start: int
    size: int


def _runs(line: IntArray) -> list[Span]:
    """The runs of neighbours in a line, padding left out."""
    cuts = np.flatnonzero(np.diff(line) != 1) + 1
    parts = zip([0, *cuts.tolist()], [*cuts.tolist(), len(line)])
    return [Span(a, int(line[a]), b - a) for a, b in parts if b > a and line[a] >= 0]


def _grid(storage: Space, shape: Shape, runs: dict[int, list[list[Span]]]) -> AffineMap:
    """The layout in which each rank holds the product of its runs along every axis."""
    pieces = []
    to = row_major(shape)
    for rank, axes in runs.items():
        own = row_major(storage.shape(rank))
        for spans in itertools.product(*axes):
            here = sum(s.at * stride for s, stride in zip(spans, own))
            there = sum(s.start * stride for s, stride in zip(spans, to))
            block = tuple(s.size for s in spans)
            pieces.append(Piece(block, Side(here, own, rank), Side(there, to)))
    return remember(AffineMap.from_pieces(storage, Space.logical(shape), pieces), single_valued=True)
