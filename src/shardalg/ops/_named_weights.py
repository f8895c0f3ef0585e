"""Other weights and activations as real systems cut them.

``shape`` is that of the unpartitioned tensor in elements; ``ranks`` a count or ids, as for ``layout``. Raises
``InvalidMapError`` with the arithmetic where an axis does not divide. Cost: a few blocks per rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

from .._errors import InvalidMapError
from ..maps import AffineMap, Piece, Side, Space
from ..maps._reading import as_int, listed, one_of
from ..maps._space import as_shape, row_major
from ..placements import Attention, BlockGather, Cyclic, Experts, Replicate, Split
from ._compose import compose
from ._layout import layout, rank_ids
from ._lower import Run, along_axis
from ._named_qkv import each_split, equal_part, extent_of, head_sizes
from ._simplify import simplify

ORDERS = ("gate_up_first", "hidden_first")
PARTS = ("gate", "up", "down")


def gate_up(
    shape: int | Sequence[int],
    ranks: int | Sequence[int],
    *,
    cut: str = "before",
    axis: int = 0,
    grain: int = 1,
) -> AffineMap:
    """A gate half and an up half fused along ``axis``.

    ``cut="before"``: each half is cut and a rank holds its gate rows, then its up rows;
    ``cut="after"``: the fused tensor is cut like any other. Widths are whole grains, the rest on the
    last rank.

    >>> [p.codomain.offset for p in gate_up((8,), 2).pieces_of(1)]
    [2]
    >>> gate_up((8,), 2).pieces_of(1)[0].codomain.strides, gate_up((8,), 2, cut="after").pieces_of(1)[0].shape
    ((4, 1), (4,))
    """
    shape, labels, widths = as_shape(shape), rank_ids(ranks), Attention(grain=grain)
    extent = extent_of(shape, axis)
    one_of(cut, ("before", "after"), "gate_up: cut")
    if cut == "after":
        return layout(shape, Split(axis, sizes=head_sizes(extent, widths, len(labels))), labels)
    half = equal_part(extent, 2, "halves, gate and up")
    return layout(shape, each_split(axis, (half, half), widths, len(labels)), labels)


def expert_part(shape: int | Sequence[int], part: str, order: str = "gate_up_first") -> AffineMap:
    """One of the packed expert weights as a map from its own logical tensor into the fused source.

    ``part`` "gate" (w1) and "up" (w3) are ``[experts, ffn, hidden]`` inside a source of ``[experts, 2 * ffn,
    hidden]``, or ``[experts, hidden, 2 * ffn]`` with ``order="hidden_first"``; "down" (w2) is ``[experts,
    hidden, ffn]`` inside the same, or its transpose.

    >>> expert_part((2, 6, 5), "up").logical_shape, expert_part((2, 6, 5), "up").domain
    ((2, 6, 5), Space.logical((2, 3, 5)))
    """
    shape = as_shape(shape)
    if len(shape) != 3:
        raise InvalidMapError(f"packed expert weights come from [experts, rows, columns], got shape {shape}")
    one_of(part, PARTS, "part")
    one_of(order, ORDERS, "order")
    strides = list(row_major(shape))
    fused = 1 if order == "gate_up_first" else 2
    packed, offset = list(shape), 0
    if part != "down":
        packed[fused] = equal_part(shape[fused], 2, "halves, gate and up")
        offset = packed[fused] * strides[fused] * (part == "up")
    if order == "hidden_first":
        packed[1:], strides[1:] = packed[:0:-1], strides[:0:-1]
    own = Side(0, row_major(packed))
    piece = Piece(tuple(packed), own, Side(offset, tuple(strides)))
    return AffineMap.from_pieces(Space.logical(tuple(packed)), Space.logical(shape), [piece])


def packed_experts(
    shape: int | Sequence[int],
    experts: Experts,
    part: str,
    ranks: int | Sequence[int] | None = None,
    *,
    order: str = "gate_up_first",
) -> AffineMap:
    """The packed weights that each expert-parallel rank holds, as a layout of the fused source.

    ``expert_part`` after ``experts``: rank r holds ``[local experts, ...]`` of w1, w2 or w3.

    >>> m = packed_experts((4, 6, 5), Experts.uniform(4, 2), "up")
    >>> m.shard_shape(0), m.pieces_of(1)[0].codomain.offset
    ((2, 3, 5), 75)
    """
    inside = expert_part(shape, part, order)
    packed = inside.domain.boxes[0].shape
    return simplify(compose(inside, layout(packed, experts, ranks)))


def padded_vocabulary(
    shape: int | Sequence[int], ranks: int | Sequence[int], *, height: int, axis: int = 0
) -> AffineMap:
    """A vocabulary padded to ``height`` rows and cut evenly; the padding is nobody's element.

    >>> m = padded_vocabulary((13, 2), 4, height=16)
    >>> [(m.shard_shape(r), sum(p.size for p in m.pieces_of(r))) for r in m.ranks][2:]
    [((4, 2), 8), ((4, 2), 2)]
    """
    shape, labels, height = as_shape(shape), rank_ids(ranks), as_int(height, "height")
    rows = extent_of(shape, axis)
    if height < rows:
        raise InvalidMapError(f"a vocabulary of {rows} rows cannot be padded to {height}")
    each = equal_part(height, len(labels), "shards of the padded vocabulary")
    starts = [min(k * each, rows) for k in range(len(labels) + 1)]
    runs = [[Run(0, a, b - a)] for a, b in zip(starts, starts[1:])]
    return simplify(along_axis(shape, axis % len(shape), labels, [each] * len(labels), runs))


def predivided_bias(shape: int | Sequence[int], ranks: int | Sequence[int]) -> AffineMap:
    """A bias that every rank holds divided by their number, so that the sum of outputs adds it once.

    >>> predivided_bias((4,), 3).pieces_of(2)[0].scale
    Fraction(1, 3)
    """
    labels = rank_ids(ranks)
    return layout(shape, Replicate(Fraction(1, len(labels))), labels)


def context_parallel(shape: int | Sequence[int], ranks: int | Sequence[int], *, axis: int = 0) -> AffineMap:
    """Load-balanced causal context: the axis in 2P chunks, rank r holds chunks r and 2P-1-r.

    >>> context_parallel((8,), 2).pieces_of(0)
    (Piece((2, 2), Side(0, (2, 1), rank=0), Side(0, (6, 1))),)
    """
    shape, labels = as_shape(shape), rank_ids(ranks)
    chunks = 2 * len(labels)
    size = equal_part(extent_of(shape, axis), chunks, f"chunks, two for each of {len(labels)} ranks")
    ids = {rank: (r, chunks - 1 - r) if size else () for r, rank in enumerate(labels)}
    return layout(shape, BlockGather(axis, max(size, 1), ids))


def block_cyclic(
    shape: int | Sequence[int],
    grid: Sequence[int],
    blocks: Sequence[int],
    *,
    first: Sequence[int] = (0, 0),
    ranks: int | Sequence[int] | None = None,
) -> AffineMap:
    """ScaLAPACK's matrices: blocks of ``blocks[k]`` dealt out along axis k over ``grid[k]`` ranks,
    starting with position ``first[k]``; ranks are row-major in the grid.

    >>> block_cyclic((9, 4), (2, 2), (2, 1)).shard_shape(0)
    (5, 2)
    """
    shape, grid = as_shape(shape), listed(grid, "grid")
    blocks, first = listed(blocks, "blocks"), listed(first, "first")
    if not len(shape) == len(grid) == len(blocks) == len(first):
        raise InvalidMapError(
            f"block_cyclic needs a grid extent, a block and a first position per axis of {shape}, got"
            f" grid={tuple(grid)}, blocks={tuple(blocks)}, first={tuple(first)}"
        )
    return layout(shape, [Cyclic(k, b, f) for k, (b, f) in enumerate(zip(blocks, first))], ranks, mesh=grid)
