"""Pieces of named layouts and copies of their transfers, beside DeepSpeed 0.19.8.

Both sides describe the same real partition and move it between the same numbers of ranks. A row is
ok when ours are no more than theirs and no more than the goal, where there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from _measure import arguments, report
from deepspeed.checkpoint.affine import block_gather_map, replicated_map, segmented_map, sub_param_map
from deepspeed.checkpoint.affine_transfer import plan_transfer
from deepspeed.module_inject.fusedqkv_utils import codegen_block_layout, shared_qk_value_head_ids
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

import shardalg as sa


class Model(NamedTuple):
    """One weight, as each side describes it at a number of ranks."""

    ours: Callable[[int], sa.AffineMap]
    theirs: Callable[[int], Any]
    moves: Sequence[tuple[int, int, int | None]]  # source ranks, target ranks, most copies


def codegen(rows: int, columns: int, heads: int, moves: Sequence[tuple[int, int, int | None]]) -> Model:
    attention = sa.Attention(kv_heads=heads)

    def theirs(ranks: int) -> Any:
        size, ids = codegen_block_layout(rows, ranks, heads)
        return block_gather_map((rows, columns), ids, size, 0)

    return Model(lambda ranks: sa.qkv_codegen((rows, columns), attention, ranks), theirs, moves)


def bigcode(query: int, both: int, columns: int, moves: Sequence[tuple[int, int, int | None]]) -> Model:
    attention = sa.Attention(hidden=query)

    def theirs(ranks: int) -> Any:
        widths = get_shard_size_list(query, ranks, AutoTPMeta(n_embd=query))
        segments = [(query, False), (both, True)]
        return segmented_map((query + both, columns), segments, 0, ranks, [widths, None])

    return Model(lambda ranks: sa.qkv_bigcode((query + both, columns), attention, ranks), theirs, moves)


def yuan(heads: int, size: int, other: int, axis: int, moves: Sequence[tuple[int, int, int | None]]) -> Model:
    shape = (heads * size, other) if axis == 0 else (other, heads * size)

    def theirs(ranks: int) -> Any:
        ids = {rank: shared_qk_value_head_ids(heads, ranks, rank) for rank in range(ranks)}
        return block_gather_map(shape, ids, size, axis)

    attention = sa.Attention(kv_heads=heads)
    return Model(lambda ranks: sa.shared_qk_value(shape, attention, ranks, axis=axis), theirs, moves)


def by_block(
    sizes: tuple[int, int, int], columns: int, moves: Sequence[tuple[int, int, int | None]]
) -> Model:
    attention = sa.Attention(kv_heads=2, hidden=sizes[0])

    def theirs(ranks: int) -> Any:
        widths = [list(sa.head_sizes(n, attention, ranks)) for n in sizes]
        return sub_param_map((sum(sizes), columns), sizes, widths, 0)

    return Model(lambda ranks: sa.qkv_by_block((sum(sizes), columns), attention, ranks), theirs, moves)


def whole(shape: tuple[int, ...], moves: Sequence[tuple[int, int, int | None]]) -> Model:
    return Model(
        lambda ranks: sa.layout(shape, sa.Replicate(), ranks=ranks),
        lambda ranks: replicated_map(shape, ranks),
        moves,
    )


MODELS = {
    "CodeGen 192x8": codegen(192, 8, 32, [(2, 4, 4), (4, 2, 4), (2, 8, 8), (8, 2, 8), (4, 8, 8), (8, 4, 8)]),
    "CodeGen 12288x4096": codegen(12288, 4096, 32, [(2, 4, 4), (4, 8, 8), (8, 4, 8)]),
    "BigCode 48x8": bigcode(32, 16, 8, [(2, 4, 7), (4, 2, None), (2, 8, None)]),
    "Yuan v_proj 16x8": yuan(8, 2, 8, 0, [(4, 2, 4), (2, 4, 4)]),
    "Yuan v_proj 4096x2048": yuan(32, 128, 2048, 0, [(4, 2, 4), (2, 8, 8)]),
    "Yuan o_proj 8x16": yuan(8, 2, 8, 1, [(4, 2, 4), (2, 4, 4)]),
    "ChatGLM 4608x4096": by_block((4096, 256, 256), 4096, [(2, 4, None), (1, 2, None)]),
    "replicated 64x64": whole((64, 64), [(2, 4, 4)]),
}  # fmt: skip


def same(ours: sa.AffineMap, theirs: Any) -> bool:
    """Whether both describe the same layout."""
    pieces = [
        sa.Piece(
            p.shape, sa.Side(p.dest_offset, p.dest_strides, rank), sa.Side(p.source_offset, p.source_strides)
        )
        for rank, its in theirs.pieces_by_rank.items()
        for p in its
    ]
    read = sa.AffineMap.from_pieces(
        sa.Space.shards(theirs.shard_shapes), sa.Space.logical(theirs.logical_shape), pieces
    )
    return bool(sa.equivalent(ours, read))


def row(name: str, model: Model, source: int, target: int, goal: int | None) -> dict[str, Any]:
    """Counts of one transfer, both sides with their default choice of holders."""
    a, b = model.ours(source), model.ours(target)
    x, y = model.theirs(source), model.theirs(target)
    assert same(a, x) and same(b, y), f"{name}: the two sides describe different layouts"
    counts = {
        "pieces, DeepSpeed": sum(len(p) for m in (x, y) for p in m.pieces_by_rank.values()),
        "pieces, ours": len(a) + len(b),
        "copies, DeepSpeed": len(plan_transfer(y, x).segments),
        "copies, ours": len(sa.plan(a, b)),
    }
    most = min(n for n in (counts["copies, DeepSpeed"], goal) if n is not None)
    ok = counts["copies, ours"] <= most and counts["pieces, ours"] <= counts["pieces, DeepSpeed"]
    return {"weight": name, "ranks": f"{source} -> {target}", **counts, "goal": goal, "ok": ok}


def main() -> int:
    options = arguments(__doc__ or "")
    rows = [row(name, model, *move) for name, model in MODELS.items() for move in model.moves]
    good = report("Pieces of two layouts, copies between them", rows, options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
