"""Fused query, key and value weights as real models cut them.

Each function derives the layout from what the model says about itself; the tests prove each equal to
a probe of the partition function in DeepSpeed 0.19.8. ``NAMED`` says which block types use which.

``shape`` is that of the unpartitioned weight (rows first) or bias, in elements; ``ranks`` a count or ids, as
for ``layout``. Raises ``InvalidMapError`` naming the fact of ``Attention`` that is missing, or with the
arithmetic where rows do not divide. Cost: a few blocks per rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

from .._errors import InvalidMapError, UnsupportedError
from ..maps import AffineMap
from ..maps._reading import as_int, as_text, by_key
from ..maps._space import Shape, as_shape
from ..placements import Attention, BlockGather, Replicate, Segments, Split
from ._layout import layout, rank_ids
from ._lower import even_shares

Named: TypeAlias = Callable[[Any, Attention, Any], AffineMap]


def head_sizes(total: int, attention: Attention, ranks: int) -> tuple[int, ...]:
    """How many of ``total`` rows each rank gets under automatic tensor parallelism.

    Whole key/value heads where their number is known and divides the rows; otherwise whole grains, the
    rest on the last rank; otherwise single rows. Larger shares come first.

    >>> head_sizes(40, Attention(kv_heads=5), 2), head_sizes(40, Attention(grain=16), 2)
    ((24, 16), (16, 24))
    """
    require_attention(attention, "head_sizes")
    total, ranks = as_int(total, "the number of rows"), len(rank_ids(ranks))
    if attention.kv_heads is not None and total % attention.kv_heads == 0:
        unit = total // attention.kv_heads
        return tuple(n * unit for n in even_shares(attention.kv_heads, ranks))
    if total < attention.grain:
        return even_shares(total, ranks)
    grains, rest = divmod(total, attention.grain)
    sizes = [n * attention.grain for n in even_shares(grains, ranks)]
    return (*sizes[:-1], sizes[-1] + rest)


# --- the layouts --------------------------------------------------------------------------


def qkv_per_head(shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int]) -> AffineMap:
    """Rows ordered head by head (q1 k1 v1 q2 k2 v2 ...): consecutive whole heads. Bloom, Falcon.

    >>> qkv_per_head((24, 2), Attention(kv_heads=4), 2) == layout((24, 2), Split(0), ranks=2)
    True
    """
    shape, labels = _rows(shape, attention, "qkv_per_head"), rank_ids(ranks)
    return layout(shape, Split(0, sizes=head_sizes(shape[0], attention, len(labels))), labels)


def qkv_by_block(shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int]) -> AffineMap:
    """All of q, then all of k, then all of v, each cut on its own. GLM, ChatGLM, MPT, Baichuan.

    With two key/value heads q has ``attention.hidden`` rows and k and v share the rest; otherwise
    the three are equal.

    >>> m = qkv_by_block((12,), Attention(kv_heads=2, hidden=8), 2)
    >>> [p.codomain.offset for p in m.pieces_of(1)]
    [4, 9]
    """
    shape, labels = _rows(shape, attention, "qkv_by_block"), rank_ids(ranks)
    return layout(shape, _blocks(shape, attention, len(labels)), labels)


def _blocks(shape: Shape, attention: Attention, ranks: int) -> Segments:
    if attention.kv_heads == 2:
        query = _need(attention.hidden, "hidden", "a fused qkv with 2 key/value heads")
        key = (shape[0] - query) // 2
        if key < 0:
            raise InvalidMapError(f"cannot find k and v below {query} query rows in {shape[0]} rows")
        sizes = (query, key, shape[0] - query - key)
    else:
        sizes = (equal_part(shape[0], 3, "blocks q, k and v"),) * 3
    return each_split(0, sizes, attention, ranks)


def each_split(axis: int, sizes: Sequence[int], attention: Attention, ranks: int) -> Segments:
    """Segments of an axis, each cut on its own."""
    return Segments(axis, tuple((n, Split(axis, sizes=head_sizes(n, attention, ranks))) for n in sizes))


def qkv_qwen(shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int]) -> AffineMap:
    """As ``qkv_by_block``, but every rank must hold some query rows: QWen cannot unpack an empty one.

    >>> m = qkv_qwen((12, 2), Attention(kv_heads=4), 2)
    >>> m == qkv_by_block((12, 2), Attention(kv_heads=4), 2)
    True
    """
    shape, labels = _rows(shape, attention, "qkv_qwen"), rank_ids(ranks)
    placement = _blocks(shape, attention, len(labels))
    query = head_sizes(placement.parts[0][0], attention, len(labels))
    if 0 in query:
        raise InvalidMapError(
            f"QWen unpacks q, k and v by the width of q, and rank {labels[query.index(0)]} of {len(labels)}"
            f" would hold none of {sum(query)} query rows; use at most {sum(n > 0 for n in query)} ranks"
        )
    return layout(shape, placement, labels)


def qkv_codegen(
    shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int], *, mp_blocks: int = 4
) -> AffineMap:
    """``mp_blocks`` blocks of q, k and v rows, each third cut over the ranks, dealt out in order.

    Rank r holds ``mp_blocks`` consecutive (block, part) pairs, of each pair q, k and v. At one rank
    the partition is never applied: the tensor is whole. One piece per rank whatever the rows.

    >>> m = qkv_codegen((24, 8), Attention(kv_heads=8), 2)
    >>> len(m), [p.shape for p in m.pieces_of(0)]
    (2, [(2, 2, 3, 8)])
    """
    shape, labels = _rows(shape, attention, "qkv_codegen"), rank_ids(ranks)
    if as_int(mp_blocks, "mp_blocks") < 1:
        raise InvalidMapError(f"mp_blocks must be at least 1, got {mp_blocks}")
    if len(labels) == 1:
        return layout(shape, Replicate(), labels)
    _check_codegen(shape, attention, len(labels), mp_blocks)
    block = shape[0] // (3 * mp_blocks * len(labels))
    return layout(shape, BlockGather(0, block, dict(zip(labels, _codegen_blocks(len(labels), mp_blocks)))))


def _codegen_blocks(ranks: int, mp_blocks: int) -> list[list[int]]:
    """Ids of the blocks of each rank, in shard order: all its (block, part) pairs, for each q, k, v."""
    return [
        [
            pair // ranks * 3 * ranks + third * ranks + pair % ranks
            for pair in range(rank * mp_blocks, (rank + 1) * mp_blocks)
            for third in range(3)
        ]
        for rank in range(ranks)
    ]


def _check_codegen(shape: Shape, attention: Attention, ranks: int, mp_blocks: int) -> None:
    heads = _need(attention.kv_heads, "kv_heads", "CodeGen's fused qkv")
    if len(shape) != 2:
        raise InvalidMapError(f"CodeGen's fused qkv is a matrix (its partition needs columns), got {shape}")
    if heads % (ranks * mp_blocks):
        raise InvalidMapError(
            f"CodeGen needs kv_heads to be a multiple of ranks * mp_blocks = {ranks} * {mp_blocks}"
            f" = {ranks * mp_blocks}, got {heads} = {ranks * mp_blocks}*{heads // (ranks * mp_blocks)}"
            f" + {heads % (ranks * mp_blocks)}"
        )
    equal_part(shape[0], 3 * mp_blocks * ranks, f"blocks (q, k, v in {mp_blocks} blocks over {ranks} ranks)")
    sizes = head_sizes(shape[0], attention, ranks)
    if len(set(sizes)) > 1:
        raise InvalidMapError(
            f"CodeGen takes equal shares, but {shape[0]} rows in grains of {attention.grain} give {sizes};"
            f" use rows that are a multiple of kv_heads={heads}"
        )


def qkv_bigcode(shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int]) -> AffineMap:
    """``attention.hidden`` query rows cut, the key/value rows below them on every rank. GPTBigCode.

    >>> m = qkv_bigcode((12, 4), Attention(hidden=8), 2)
    >>> [m.shard_shape(r) for r in m.ranks]
    [(8, 4), (8, 4)]
    """
    shape, labels = _rows(shape, attention, "qkv_bigcode"), rank_ids(ranks)
    query = _need(attention.hidden, "hidden", "GPTBigCode's fused qkv")
    if query > shape[0]:
        raise InvalidMapError(f"GPTBigCode's fused qkv of shape {shape} has fewer rows than hidden={query}")
    cut = Split(0, sizes=head_sizes(query, attention, len(labels)))
    return layout(shape, Segments(0, ((query, cut), (shape[0] - query, Replicate()))), labels)


def qkv_phi3(shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int]) -> AffineMap:
    """q, then k, then v, where k and v have ``kv_heads`` heads of ``columns / heads`` rows. Phi-3.

    >>> m = qkv_phi3((16, 8), Attention(heads=4, kv_heads=2), 2)
    >>> [(p.shape, p.codomain.offset) for p in m.pieces_of(1)]
    [((32,), 32), ((2, 16), 80)]
    """
    shape, labels = _rows(shape, attention, "qkv_phi3"), rank_ids(ranks)
    heads = _need(attention.heads, "heads", "Phi-3's fused qkv")
    kv_heads = _need(attention.kv_heads, "kv_heads", "Phi-3's fused qkv")
    if len(shape) != 2:
        raise InvalidMapError(f"Phi-3's fused qkv is a matrix (its columns give the head size), got {shape}")
    key = kv_heads * (shape[1] // heads)
    query = shape[0] - 2 * key
    if query < 0:
        raise InvalidMapError(
            f"Phi-3's fused qkv of shape {shape} cannot hold k and v of {kv_heads} heads"
            f" of {shape[1] // heads} rows: 2 * {key} > {shape[0]}"
        )
    return layout(shape, each_split(0, (query, key, key), attention, len(labels)), labels)


# --- choosing by block type ---------------------------------------------------------------

NAMED: Mapping[str, Named] = MappingProxyType(
    {
        "BaichuanLayer": qkv_by_block,
        "BloomBlock": qkv_per_head,
        "CodeGenBlock": qkv_codegen,
        "DecoderLayer": qkv_by_block,
        "FalconDecoderLayer": qkv_per_head,
        "GLMBlock": qkv_by_block,
        "GPTBigCodeBlock": qkv_bigcode,
        "MPTBlock": qkv_by_block,
        "MptBlock": qkv_by_block,
        "Phi3DecoderLayer": qkv_phi3,
        "QWenBlock": qkv_qwen,
    }
)


def named_qkv(block: str, table: Mapping[str, Named] = NAMED) -> Named:
    """The fused qkv layout of a block type: the longest name in ``table`` that occurs in ``block``,
    and ``qkv_per_head`` where none does.

    >>> named_qkv("FalconDecoderLayer").__name__, named_qkv("NewBlock").__name__
    ('qkv_per_head', 'qkv_per_head')
    """
    if not isinstance(block, str):
        raise InvalidMapError(f"named_qkv takes the name of a block type, got {block!r}")
    table = by_key(table, "named_qkv: table")
    found = [name for name in table if as_text(name, "a name of named_qkv: table") in block]
    return table[max(found, key=len)] if found else qkv_per_head


# --- key/value heads and value heads ------------------------------------------------------


def grouped_query(
    shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int], *, axis: int = 0
) -> AffineMap:
    """Key or value rows in whole heads, also when there are more ranks than heads.

    With ``ranks`` a multiple of ``kv_heads`` rank r holds head ``r // (ranks / kv_heads)`` whole;
    with fewer ranks than heads each holds consecutive heads, larger shares first.

    >>> m = grouped_query((512,), Attention(kv_heads=4), 8)
    >>> [p.codomain.offset for p in m.pieces]
    [0, 0, 128, 128, 256, 256, 384, 384]
    """
    shape, labels = as_shape(shape), rank_ids(ranks)
    require_attention(attention, "grouped-query attention")
    heads = _need(attention.kv_heads, "kv_heads", "grouped-query attention")
    size = equal_part(extent_of(shape, axis), heads, "key/value heads")
    if len(labels) <= heads:
        return layout(shape, Split(axis, rule="balanced", unit=max(size, 1)), labels)
    copies = equal_part(len(labels), heads, "groups of ranks, one per key/value head")
    ids = {rank: [place // copies] for place, rank in enumerate(labels)}
    return layout(shape, BlockGather(axis, max(size, 1), ids if size else dict.fromkeys(labels, ())))


def shared_qk_value(
    shape: int | Sequence[int], attention: Attention, ranks: int | Sequence[int], *, axis: int = 0
) -> AffineMap:
    """Yuan's value heads: for every second query head of a rank the head of half its number, then the
    same heads of the second half. ``axis=0`` is v_proj (weight or bias), ``axis=1`` o_proj's weight.

    A rank with an odd number of query heads shares a value head with its neighbour. o_proj's bias
    is refused by name: its real partition yields an empty tensor.

    >>> m = shared_qk_value((16,), Attention(kv_heads=8), 2)
    >>> [(p.shape, p.codomain.offset, p.codomain.strides) for p in m.pieces_of(1)]
    [((2, 4), 4, (8, 1))]
    """
    shape, labels = as_shape(shape), rank_ids(ranks)
    if axis == 1 and len(shape) == 1:
        raise UnsupportedError(
            f"Yuan's o_proj bias of shape {shape} has no layout: its real partition keeps no value of it;"
            " hold it replicated, divided by the number of ranks (predivided_bias)"
        )
    require_attention(attention, "Yuan's shared-QK values")
    heads = _need(attention.kv_heads, "kv_heads", "Yuan's shared-QK values")
    each = equal_part(heads, len(labels), "ranks with whole heads each")
    if len(labels) > heads // 2:
        raise InvalidMapError(
            f"Yuan's shared-QK values need at least two heads per rank: {len(labels)} ranks are more than"
            f" half of {heads} heads"
        )
    size = equal_part(extent_of(shape, axis), heads, "heads")
    ids = {rank: _shared_heads(place * each, each, heads) for place, rank in enumerate(labels)}
    return layout(shape, BlockGather(axis, max(size, 1), ids if size else dict.fromkeys(labels, ())))


def _shared_heads(first: int, count: int, heads: int) -> list[int]:
    """Value heads paired with ``count`` query heads from ``first`` on."""
    half = [first // 2 + k for k in range(-(-count // 2))]
    return half + [head + heads // 2 for head in half]


# --- arithmetic with reasons --------------------------------------------------------------


def _rows(shape: Any, attention: Attention, what: str) -> Shape:
    found = as_shape(shape)
    require_attention(attention, what)
    if not found:
        raise InvalidMapError(f"{what} needs a tensor with rows, got a 0-d tensor")
    return found


def require_attention(attention: object, what: str) -> None:
    """Raise for what is no ``Attention``, with the way to one."""
    if not isinstance(attention, Attention):
        raise InvalidMapError(f"{what} takes Attention(kv_heads=, ...), got {attention!r}")


def extent_of(shape: Shape, axis: int) -> int:
    if not -len(shape) <= as_int(axis, "axis") < len(shape):
        raise InvalidMapError(f"axis {axis} does not exist in a tensor of shape {shape}")
    return shape[axis]


def _need(value: int | None, name: str, what: str) -> int:
    if value is None:
        raise InvalidMapError(f"{what} needs the model's {name}: Attention({name}=...)")
    return as_int(value, name)


def equal_part(total: int, parts: int, what: str) -> int:
    """``total / parts``, or an error with the arithmetic."""
    if total % parts:
        near = " or ".join(str(n) for n in (total // parts * parts, -(-total // parts) * parts) if n)
        raise InvalidMapError(
            f"{total} does not divide into {parts} equal {what}:"
            f" {total} = {parts}*{total // parts} + {total % parts}; {near} would"
        )
    return total // parts
