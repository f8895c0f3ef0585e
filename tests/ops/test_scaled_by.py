"""A rank holds exactly the scales of the tiles its slots fall in, in the order of its shard."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardalg import (
    Attention,
    BlockGather,
    Cyclic,
    Flat,
    InvalidMapError,
    Replicate,
    Segments,
    Space,
    Split,
    UnsupportedError,
    equivalent,
    extract,
    gate_up,
    layout,
    nest,
    padded_vocabulary,
    predivided_bias,
    qkv_codegen,
    scaled_by,
)

WEIGHTS = {
    "rows": layout((256, 8), Split(0), ranks=4),
    "columns": layout((6, 12), Split(1), ranks=3),
    "uneven": layout((10, 4), Split(0, sizes=(3, 0, 7)), ranks=3),
    "both": layout((8, 8), [Split(0), Split(1)], mesh={"a": 2, "b": 2}),
    "cyclic": layout((12, 3), Cyclic(0, 2), ranks=2),
    "reordered": layout((12, 3), BlockGather(0, 4, [[2, 0], [1]])),
    "segments": layout((12, 4), Segments(0, ((8, Split(0)), (4, Replicate()))), ranks=2),
    "whole": layout((5, 7), Replicate(), ranks=2),
    "codegen": qkv_codegen((48, 4), Attention(kv_heads=8), 2),
    "gate and up": gate_up((16, 4), 2),
    "three axes": layout((4, 6, 5), Split(1), ranks=2),
    "nested": nest(
        layout((12, 4), Split(0), ranks=2), {r: layout((6, 4), Split(1), ranks=2) for r in (0, 1)}
    ),
}


def tiles_of(made, rank, tile):
    """The tile of each slot, by extracting the tile numbers from a full tensor of them."""
    index = np.indices(made.logical_shape)
    counts = [-(-n // t) for n, t in zip(made.logical_shape, tile)]
    return extract(made, np.ravel_multi_index([i // t for i, t in zip(index, tile)], counts) + 1, rank)


def runs(tiles):
    """The tiles along each axis, neighbours that are alike taken once."""
    for axis in range(tiles.ndim):
        first = [0] + [
            k for k in range(1, tiles.shape[axis]) if (tiles.take(k, axis) != tiles.take(k - 1, axis)).any()
        ]
        tiles = tiles.take(first[: tiles.shape[axis]], axis)
    return tiles


@pytest.mark.parametrize("name", WEIGHTS)
@given(data=st.data())
def test_each_rank_holds_the_scales_of_its_tiles(name, data):
    weight = WEIGHTS[name]
    tile = tuple(data.draw(st.integers(1, n + 1)) for n in weight.logical_shape)
    found = scaled_by(weight, tile)
    shape = tuple(-(-n // t) for n, t in zip(weight.logical_shape, tile))
    assert found.codomain == Space.logical(shape)
    scales = np.arange(1, 1 + np.prod(shape)).reshape(shape)
    for rank in weight.ranks:
        held, tiles = extract(found, scales, rank), tiles_of(weight, rank, tile)
        assert np.array_equal(held, runs(tiles)) if tiles.size else held.size == 0


def test_ranks_that_share_a_tile_replicate_its_scale():
    """Tiles of 128 rows, 64 rows per rank: ranks 2i and 2i+1 share tile i."""
    found = scaled_by(WEIGHTS["rows"], (128, 8))
    assert equivalent(found, layout((2, 1), BlockGather(0, 1, [[0], [0], [1], [1]])))


def test_scales_of_a_padded_vocabulary():
    """Padding counts on from the row before it; a tile that is all padding has no scale."""
    weight = padded_vocabulary((13, 4), 4, height=16)
    assert equivalent(scaled_by(weight, (2, 4)), padded_vocabulary((7, 1), 4, height=8))
    assert scaled_by(padded_vocabulary((3, 4), 4, height=16), (2, 4)).shard_shape(3) == (2, 1)


def test_what_is_no_grid_of_tiles_is_refused():
    with pytest.raises(UnsupportedError, match="2 axes"):
        scaled_by(layout((6, 4), Flat(), ranks=2), (2, 2))
    opposite = Segments(0, ((2, BlockGather(1, 2, [[0], [1]])), (2, BlockGather(1, 2, [[1], [0]]))))
    with pytest.raises(UnsupportedError, match="no grids"):
        scaled_by(layout((4, 4), opposite, ranks=2), (2, 2))
    with pytest.raises(UnsupportedError, match="scales of its own"):
        scaled_by(predivided_bias((8,), 2), (4,))


@pytest.mark.parametrize("tile", [(2,), (2, 0), (2, 2, 2)])
def test_a_tile_has_an_extent_per_axis(tile):
    with pytest.raises(InvalidMapError, match="one extent of at least 1 per axis"):
        scaled_by(WEIGHTS["whole"], tile)
