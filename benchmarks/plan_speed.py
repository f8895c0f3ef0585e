"""Planning against DeepSpeed 0.19.8 and Awex 0.9.0: goals P1 to P7.

Ours includes everything ``plan`` does: matching, choosing, the proof that every target slot
has a source, normal form. The peers get maps of their own, made by their own constructors
where they have one.
"""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from _measure import Ratio, arguments, exponent, ratio, report, seconds
from _peers import awex, awex_parameter
from deepspeed.checkpoint.affine import (
    AffinePiece,
    ParamAffineMap,
    block_gather_map,
    contiguous_split_map,
    sub_param_map,
)
from deepspeed.checkpoint.affine_transfer import PlanBudget, plan_transfer

import shardalg as sa
from shardalg import AffineMap, BlockGather, Experts, Segments, Split, layout
from shardalg.ops._blocks import block, write

SIDE = 1024
ROOM = PlanBudget(
    max_pieces_per_map=1 << 30, max_pair_checks=1 << 40, max_segments=1 << 30, max_plan_bytes=1 << 40,
    max_merge_checks=1 << 40,
)  # fmt: skip

Pair = tuple[AffineMap, AffineMap, Any, Any]  # ours and theirs: source, target


def split(axis: int, ranks: int, shape: tuple[int, int] = (SIDE, SIDE)) -> tuple[AffineMap, Any]:
    sizes = [shape[axis] // ranks + (r < shape[axis] % ranks) for r in range(ranks)]
    return layout(shape, Split(axis, sizes=tuple(sizes)), ranks=ranks), contiguous_split_map(
        shape, sizes, axis
    )


def pair(source: tuple[AffineMap, Any], target: tuple[AffineMap, Any]) -> Pair:
    return source[0], target[0], source[1], target[1]


def fused(ranks: int) -> tuple[AffineMap, Any]:
    """q, k and v, each split over the ranks."""
    rows = 3 * 192
    widths = [[192 // ranks] * ranks] * 3
    ours = Segments(0, tuple((192, Split(0, rule="exact")) for _ in range(3)))
    return layout((rows, 64), ours, ranks=ranks), sub_param_map((rows, 64), [192] * 3, widths, 0)


def gathered(ranks: int, order: Callable[[int], int]) -> tuple[AffineMap, Any]:
    """256 blocks of 4 rows dealt out in a shuffled order."""
    ids = sorted(range(256), key=order)
    by_rank = {r: ids[r::ranks] for r in range(ranks)}
    return layout((1024, 64), BlockGather(0, 4, by_rank)), block_gather_map((1024, 64), by_rank, 4, 0)


def experts(ranks: int) -> tuple[AffineMap, Any]:
    """256 experts dealt round-robin over the ranks."""
    by_rank = {r: list(range(r, 256, ranks)) for r in range(ranks)}
    return layout((256, 8, 16), Experts(by_rank)), block_gather_map((256, 8, 16), by_rank, 1, 0)


def grid(rows: int, columns: int) -> tuple[AffineMap, Any]:
    h, w = SIDE // rows, SIDE // columns
    ours = layout((SIDE, SIDE), [Split(0), Split(1)], mesh=(rows, columns))
    pieces = {
        r * columns + c: [AffinePiece((h, w), r * h * SIDE + c * w, (SIDE, 1), 0, (w, 1), [r * columns + c])]
        for r in range(rows)
        for c in range(columns)
    }
    return ours, ParamAffineMap((SIDE, SIDE), dict.fromkeys(pieces, (h, w)), pieces)


def cases() -> dict[str, tuple[Pair, float]]:
    """Name -> (maps, goal against DeepSpeed): P1."""
    return {
        "32 rows -> 64 columns": (pair(split(0, 32), split(1, 64)), 60),
        "128 rows -> 256 columns": (pair(split(0, 128), split(1, 256)), 200),
        "128 rows -> 256 rows": (pair(split(0, 128), split(0, 256)), 400),
        "fused QKV 64 -> 96": (pair(fused(64), fused(96)), 400),
        "256-block gather 16 -> 32": (
            pair(gathered(16, lambda b: b * 97 % 256), gathered(32, lambda b: b * 41 % 256)),
            400,
        ),
        "256 experts 64 -> 96": (pair(experts(64), experts(96)), 400),
        "grid 16x16 -> 8x32": (pair(grid(16, 16), grid(8, 32)), 400),
    }


def timed(goal: str, case: str, peer: str, r: Ratio, wanted: float | None, **counts: Any) -> dict[str, Any]:
    """A row of the tables of ratios."""
    row = {
        "goal": goal, "case": case, "peer": peer, "ours ms": r.ours * 1e3, "theirs ms": r.theirs * 1e3,
        "ratio": r.median, "low": r.low, "high": r.high, "wanted": wanted,
    }  # fmt: skip
    return row | counts | ({} if wanted is None else {"ok": r.median >= wanted})


def counted(goal: str, case: str, value: float, wanted: Any, ok: bool) -> dict[str, Any]:
    """A row of the tables of exact counts."""
    return {"goal": goal, "case": case, "value": value, "wanted": wanted, "ok": ok}


def written(source: AffineMap, target: AffineMap) -> Any:
    """Our plan with its copies written down: plans in product form write them only when asked."""
    return sa.plan(source, target).map.table.rows


def deepspeed(source: Any, target: Any) -> Any:
    return plan_transfer(target, source, ROOM)


def against_deepspeed(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, ((a, b, x, y), goal) in cases().items():
        if quick and name == "128 rows -> 256 columns":
            continue
        theirs = deepspeed(x, y)
        ours = sa.plan(a, b)
        same = executed_alike(a, ours, theirs)
        slow = seconds(lambda x=x, y=y: deepspeed(x, y), 1) > 2
        r = ratio(
            lambda a=a, b=b: written(a, b), lambda x=x, y=y: deepspeed(x, y), rounds=3 if slow or quick else 9
        )
        row = timed(
            "P1", name, "DeepSpeed", r, goal, copies=len(ours), theirs=len(theirs.segments), equal=same
        )
        rows.append(row | {"ok": row["ok"] and same and len(ours) <= len(theirs.segments)})
    return rows


def executed_alike(source: AffineMap, ours: sa.TransferPlan, theirs: Any) -> bool:
    """P7: both plans, run on the same shards, fill the target alike."""
    full = torch.arange(torch.Size(source.logical_shape).numel()).reshape(source.logical_shape)
    shards = {r: x.reshape(-1) for r, x in sa.extract(source, full).items()}
    want = sa.extract(ours.target, full)
    got = {r: torch.full((x.numel(),), -1, dtype=x.dtype) for r, x in want.items()}
    for s in theirs.segments:
        values = shards[s.source_rank].as_strided(s.shape, s.source_strides, s.source_offset)
        got[s.target_rank].as_strided(s.shape, s.target_strides, s.target_offset).copy_(values)
    mine = {r: torch.full((x.numel(),), -1, dtype=x.dtype) for r, x in want.items()}
    for c in ours.copies:
        values = block(shards[c.source.rank], c.shape, c.source.strides, c.source.offset)
        write(mine[c.target.rank], c.shape, c.target.strides, c.target.offset, values)
    return all(got[r].equal(mine[r]) and mine[r].equal(want[r].reshape(-1)) for r in want)


# --- small plans, trees, one rank -----------------------------------------------------------


def awex_boxes(axis: int, ranks: int, side: int = SIDE) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    n = side // ranks
    return [
        ((r * n, 0), (n, side)) if axis == 0 else ((0, r * n), (side, n)) for r in range(ranks)
    ]  # fmt: skip


def awex_plan(source: tuple[int, int], target: tuple[int, int], names: list[str]) -> Callable[[], Any]:
    """Awex's whole plan for parameters cut as (axis, ranks)."""
    builder = awex().TransferPlanBuilder(target[1], source[1])
    sides = [[awex_parameter(n, (SIDE, SIDE), awex_boxes(*cut)) for n in names] for cut in (target, source)]
    return lambda: builder.build_weights_mapping_operations(*sides)


def small_plans(quick: bool) -> list[dict[str, Any]]:
    rows = []
    for name, source, target, of_deepspeed, of_awex in (
        ("2 rows -> 4 columns", (0, 2), (1, 4), None, 1.0),
        ("8 -> 16 rows", (0, 8), (0, 16), 20.0, 1.5),
        ("8 rows -> 16 columns", (0, 8), (1, 16), 20.0, 1.5),
    ):
        a, b, x, y = pair(split(*source), split(*target))
        rounds = 5 if quick else 15
        for peer, call, goal in (
            ("DeepSpeed", lambda x=x, y=y: deepspeed(x, y), of_deepspeed),
            ("Awex", awex_plan(source, target, ["w"]), of_awex),
        ):
            r = ratio(lambda a=a, b=b: written(a, b), call, rounds=rounds)
            rows.append(timed("P2", name, peer, r, goal))
    return rows


def model(quick: bool) -> list[dict[str, Any]]:
    """P3: 400 parameters with 4 distinct layout pairs, TP 8 -> 16."""
    kinds = [((0, 8), (0, 16)), ((1, 8), (1, 16)), ((0, 8), (1, 16)), ((1, 8), (0, 16))]
    names = [f"layer{i}.{k}" for i in range(100) for k in range(4)]
    ours = [(split(*s)[0], split(*t)[0]) for s, t in kinds]
    theirs = [(split(*s)[1], split(*t)[1]) for s, t in kinds]
    sources = {n: ours[k % 4][0] for k, n in enumerate(names)}
    targets = {n: ours[k % 4][1] for k, n in enumerate(names)}
    builder = awex().TransferPlanBuilder(16, 8)
    sides = [
        [awex_parameter(n, (SIDE, SIDE), awex_boxes(*kinds[k % 4][side])) for k, n in enumerate(names)]
        for side in (1, 0)
    ]
    rows = []
    for peer, call, goal in (
        ("DeepSpeed", lambda: [deepspeed(*theirs[k % 4]) for k in range(len(names))], 100.0),
        ("Awex", lambda: builder.build_weights_mapping_operations(*sides), 10.0),
    ):
        r = ratio(lambda: sa.plan_tree(sources, targets), call, rounds=3 if quick else 5)
        rows.append(timed("P3", "400 parameters, TP 8 -> 16", peer, r, goal))
    return rows


def one_rank(quick: bool) -> list[dict[str, Any]]:
    """P4: one rank's own plan at 512 -> 512."""
    a, b = split(0, 512)[0], split(1, 512)[0]
    builder = awex().TransferPlanBuilder(512, 512)
    sides = [[awex_parameter("w", (SIDE, SIDE), awex_boxes(axis, 512))] for axis in (1, 0)]
    r = ratio(
        lambda: sa.plan(a, b, rank=5),
        lambda: builder.build_local_transfer_plan(*sides, 5),
        rounds=1 if quick else 3,
    )
    return [timed("P4", "one rank of 512 -> 512", "Awex", r, 500.0)]


# --- growth and memory ----------------------------------------------------------------------


def growth(quick: bool) -> list[dict[str, Any]]:
    """P5: row -> row over 128..1024 pieces; nothing refused at 512 x 512 or 2,048 blocks."""
    sizes = (128, 256, 512, 1024)
    pairs = [(split(0, n, (4096, 64))[0], split(0, 2 * n, (4096, 64))[0]) for n in sizes]
    times = [min(seconds(lambda a=a, b=b: sa.plan(a, b), 5) for _ in range(5)) for a, b in pairs]
    slope = exponent(sizes, times)
    wide = sa.plan(split(0, 512)[0], split(1, 512)[0])
    blocks = layout((4096, 16), BlockGather(0, 2, {r: range(r, 2048, 16) for r in range(16)}))
    many = sa.plan(blocks, layout((4096, 16), Split(0), ranks=16))
    return [
        counted("P5", "growth exponent, rows -> rows", slope, "<= 1.1", slope <= 1.1),
        counted("P5", "512 x 512 copies", len(wide), 512**2, len(wide) == 512**2),
        counted("P5", "2,048 blocks, elements", many.map.size, 65536, many.map.size == 65536),
    ]


def memory(quick: bool) -> list[dict[str, Any]]:
    """P6: bytes per copy of a 2-D plan, kept and at the peak."""
    a, b = split(0, 128)[0], split(1, 256)[0]
    sa.plan(a, b)
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    p = sa.plan(a, b)
    assert p.map.table.rows.size
    kept, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    unwritten = min(seconds(lambda: sa.plan(a, b), 20) for _ in range(5))
    each = [(kept - before) / len(p), (peak - before) / len(p)]
    return [
        counted("P6", "bytes per copy kept", each[0], "<= 112", each[0] <= 112),
        counted("P6", "bytes per copy, peak", each[1], "<= 250", each[1] <= 250),
        counted("-", "ms to plan them in product form", unwritten * 1e3, "<= 0.2", unwritten <= 2e-4),
    ]


def main() -> int:
    options = arguments(__doc__ or "")
    good = True
    for title, part in (
        ("P1, P7: plans against DeepSpeed 0.19.8", against_deepspeed),
        ("P2: small plans", small_plans),
        ("P3: a model", model),
        ("P4: one rank alone", one_rank),
        ("P5: growth", growth),
        ("P6: memory", memory),
    ):
        good &= report(title, part(options.quick), options.json)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
