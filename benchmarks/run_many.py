"""Many tensors in one program against DTensor.redistribute one by one.

E5: 100 tensors of 256 KiB >= 5x (2 ranks), 20x (4). Also the state dict of a transformer whose fused
qkv weights (query, key and value rows cut apart) go from TP 2 to TP 4.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from _measure import arguments, report
from _ranks import Methods, Times, timed
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import shardalg as sa

GOALS = {2: 5.0, 4: 20.0}


def hundred(rank: int, count: int) -> Methods:
    """Methods that bring ``count`` matrices of 256 KiB from rows to columns."""
    ranks, shape = dist.get_world_size(), (256, 256)
    mesh = init_device_mesh("cpu", (ranks,))
    names = [f"w{k}" for k in range(count)]
    source, target = ({n: sa.layout(shape, sa.Split(axis), ranks=ranks) for n in names} for axis in (0, 1))
    whole = {n: torch.arange(256 * 256, dtype=torch.float32).view(shape) + k for k, n in enumerate(names)}
    shards = {n: {rank: sa.extract(source[n], whole[n], rank)} for n in names}
    wanted = {n: sa.extract(target[n], whole[n], rank) for n in names}
    theirs = {n: DTensor.from_local(shards[n][rank], mesh, [Shard(0)]) for n in names}
    program = sa.schedule(sa.plan_tree(source, target), dtypes="float32")
    calls: dict[str, Any] = {
        "DTensor": lambda: {n: {rank: t.redistribute(mesh, [Shard(1)]).to_local()} for n, t in theirs.items()}
    }
    contexts = []
    for strategy in ("fused", "shared"):
        ctx = sa.backends.cpu(strategy=strategy)
        contexts.append(ctx)
        bound = sa.bind(ctx, program)
        out = {n: {rank: torch.empty_like(x)} for n, x in wanted.items()}
        calls[f"{strategy} given"] = lambda c=ctx, b=bound, o=out: sa.run(c, b, shards, o)
        calls[f"{strategy} fresh"] = lambda c=ctx, b=bound: sa.run(c, b, shards)

    def right(found: Any) -> bool:
        return all(torch.equal(found[n][rank], x) for n, x in wanted.items())

    return Methods(calls, dict.fromkeys(calls, right), close=lambda: [c.close() for c in contexts])


HIDDEN, HEADS, KV_HEADS, LAYERS, VOCABULARY = 512, 8, 4, 8, 8192


def transformer(ranks: int) -> dict[str, sa.AffineMap]:
    """The layouts of a small transformer under tensor parallelism."""
    width = HIDDEN // HEADS
    groups = ((HEADS * width, sa.Split(0)), (KV_HEADS * width, sa.Split(0)), (KV_HEADS * width, sa.Split(0)))
    rows = (HEADS + 2 * KV_HEADS) * width
    found = {"embed": sa.layout((VOCABULARY, HIDDEN), sa.Split(0), ranks=ranks)}
    for k in range(LAYERS):
        found[f"{k}.qkv"] = sa.layout((rows, HIDDEN), sa.Segments(0, groups), ranks=ranks)
        found[f"{k}.out"] = sa.layout((HIDDEN, HEADS * width), sa.Split(1), ranks=ranks)
        found[f"{k}.up"] = sa.layout((4 * HIDDEN, HIDDEN), sa.Split(0), ranks=ranks)
        found[f"{k}.down"] = sa.layout((HIDDEN, 4 * HIDDEN), sa.Split(1), ranks=ranks)
        found[f"{k}.norm"] = sa.layout((HIDDEN,), sa.Replicate(), ranks=ranks)
    return found


def state_dict(rank: int) -> Methods:
    """A state dict from TP 2 to TP 4, against raw gloo with the same bytes already packed."""
    ranks = dist.get_world_size()
    source, target = transformer(2), transformer(4)
    whole = {n: torch.randn(m.logical_shape, generator=torch.Generator().manual_seed(k))
             for k, (n, m) in enumerate(source.items())}  # fmt: skip
    shards = {n: {rank: sa.extract(m, whole[n], rank)} if rank in m.ranks else {} for n, m in source.items()}
    wanted = {n: sa.extract(m, whole[n], rank) for n, m in target.items()}
    program = sa.schedule(sa.plan_tree(source, target), dtypes="float32")
    sizes = [[0] * ranks for _ in range(2)]
    for its in program.rounds:
        for m in its.messages:
            if m.source == rank:
                sizes[0][m.target] += m.size
            if m.target == rank:
                sizes[1][m.source] += m.size
    packed, into = (torch.zeros(sum(s), dtype=torch.uint8) for s in sizes)
    calls: dict[str, Any] = {"raw gloo": lambda: dist.all_to_all_single(into, packed, sizes[1], sizes[0])}
    contexts = []
    for strategy in ("fused", "p2p", "shared"):
        ctx = sa.backends.cpu(strategy=strategy)
        contexts.append(ctx)
        bound = sa.bind(ctx, program)
        out = {n: {rank: torch.empty_like(x)} for n, x in wanted.items()}
        calls[f"{strategy} given"] = lambda c=ctx, b=bound, o=out: sa.run(c, b, shards, o)

    def right(found: Any) -> bool:
        return found is None or all(torch.equal(found[n][rank], x) for n, x in wanted.items())

    facts = {"copies": len(program.plan), "bytes": program.wire_bytes}
    return Methods(calls, dict.fromkeys(calls, right), facts, close=lambda: [c.close() for c in contexts])


def many_rows(times: Times, ranks: int) -> list[dict[str, Any]]:
    found = []
    for name in times.seconds:
        if name != "DTensor":
            its: dict[str, Any] = {"case": "100 x 256 KiB", "ranks": ranks, "ours": name}
            its |= {"ms": times.median(name) * 1e3, "x DTensor": times.ratio("DTensor", name)}
            if name == "shared given":
                its |= {"goal": f">= {GOALS[ranks]}x DTensor", "ok": its["x DTensor"] >= GOALS[ranks]}
            found.append(its)
    return found


def state_rows(times: Times) -> list[dict[str, Any]]:
    return [
        {
            "case": f"state dict TP 2 -> 4, {times.facts[0]['copies']} copies", "ranks": 4, "ours": name,
            "ms": times.median(name) * 1e3, "/ raw gloo": times.ratio(name, "raw gloo"),
        }
        for name in times.seconds
        if name != "raw gloo"
    ]  # fmt: skip


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    rounds = 5 if options.quick else 9
    table: list[dict[str, Any]] = []
    for ranks in (2,) if options.quick else (2, 4):
        table += many_rows(timed(hundred, ranks, 100, rounds=rounds), ranks)
    table += state_rows(timed(state_dict, 4, rounds=rounds))
    return 0 if report("many tensors", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
