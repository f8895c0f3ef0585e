"""The same cuts said as layouts: what lets the weights be planned, compared and moved."""

from __future__ import annotations

from loader import HEAD, HEADS, KEY, KV_HEADS, QUERY

import shardalg as sa

MODEL = sa.Attention(heads=HEADS, kv_heads=KV_HEADS)


def qkv(columns: int, ranks: int) -> sa.AffineMap:
    """The fused projection on ``ranks`` ranks, a multiple of the key/value heads."""
    heads = sa.BlockGather(0, HEAD, {r: [r * KV_HEADS // ranks] for r in range(ranks)})
    parts = ((QUERY, sa.Split(0, unit=HEAD)), (KEY, heads), (KEY, heads))
    return sa.layout((QUERY + 2 * KEY, columns), sa.Segments(0, parts), ranks=ranks)


def vocabulary(rows: int, columns: int, ranks: int) -> sa.AffineMap:
    """The embedding on ``ranks`` ranks of equal height."""
    return sa.layout((rows, columns), sa.Split(0, rule="pad"), ranks=ranks)
