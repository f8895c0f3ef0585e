"""One big tensor, rows to columns: ours against DTensor.redistribute and against raw gloo.

E1: against DTensor.redistribute, with buffers given >= 4.5x (2 ranks), 8x (4), 15x (8); fresh >= 2x, 4x, 7x.
E2: over gloo at most 1.4 times a raw all_to_all_single of the same bytes, already packed ("p2p", which is
what a context takes where ranks cannot share memory); held at 2 ranks, one for each processor here.
E4: through shared memory at most 0.75 times raw gloo at 256 MiB.

"raw gloo" moves the whole shard, the part that stays included: ours copies that part too. "off-rank"
moves only what crosses ranks.
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

GOALS = {2: (4.5, 2.0), 4: (8.0, 4.0), 8: (15.0, 7.0)}
GLOO, SHARED = 1.4, 0.75


def setup(rank: int, mebibytes: int) -> Methods:
    """Methods that bring a float32 matrix of that size from rows to columns."""
    ranks, side = dist.get_world_size(), 1024
    shape = (side, mebibytes * 256)
    source, target = (sa.layout(shape, sa.Split(axis), ranks=ranks) for axis in (0, 1))
    mesh = init_device_mesh("cpu", (ranks,))
    rows = torch.arange(rank * side // ranks, (rank + 1) * side // ranks, dtype=torch.float32)
    mine = rows[:, None] * 0.5 + torch.arange(shape[1], dtype=torch.float32)[None]
    columns = torch.arange(rank * shape[1] // ranks, (rank + 1) * shape[1] // ranks, dtype=torch.float32)
    want = torch.arange(side, dtype=torch.float32)[:, None] * 0.5 + columns[None]
    theirs = DTensor.from_local(mine, mesh, [Shard(0)])
    program = sa.schedule(sa.plan(source, target), dtypes="float32")
    calls: dict[str, Any] = {"DTensor": lambda: theirs.redistribute(mesh, [Shard(1)]).to_local()}
    contexts, out = [], torch.empty_like(want)
    for strategy in ("fused", "p2p", "shared"):
        ctx = sa.backends.cpu(strategy=strategy)
        contexts.append(ctx)
        bound = sa.bind(ctx, program)
        calls[f"{strategy} given"] = lambda c=ctx, b=bound: sa.run(c, b, {rank: mine}, {rank: out})[rank]
        calls[f"{strategy} fresh"] = lambda c=ctx, b=bound: sa.run(c, b, {rank: mine})[rank]
    checks = {name: lambda x: torch.equal(x, want) for name in calls}
    away = mine.numel() * 4 // ranks
    sizes = [0 if p == rank else away for p in range(ranks)]
    packed, into = (torch.zeros(mine.nbytes, dtype=torch.uint8) for _ in range(2))
    less, into_less = packed[: sum(sizes)], into[: sum(sizes)]
    calls["raw gloo"] = lambda: dist.all_to_all_single(into, packed)
    calls["off-rank"] = lambda: dist.all_to_all_single(into_less, less, sizes, sizes)
    copied = torch.empty_like(mine)
    calls["memcpy"] = lambda: copied.copy_(mine)
    return Methods(calls, checks, close=lambda: [c.close() for c in contexts])


def rows(times: Times, ranks: int, mebibytes: int) -> list[dict[str, Any]]:
    given, fresh = GOALS[ranks]
    head = {"ranks": ranks, "MiB": mebibytes}
    found: list[dict[str, Any]] = []
    for strategy in ("fused", "p2p", "shared"):
        for kind, goal in (("given", given), ("fresh", fresh)):
            name = f"{strategy} {kind}"
            its = {**head, "ours": name, "ms": round(times.median(name) * 1e3, 2)}
            its["x DTensor"] = round(times.ratio("DTensor", name), 2)
            its["/ raw gloo"] = round(times.ratio(name, "raw gloo"), 2)
            its["/ off-rank"] = round(times.ratio(name, "off-rank"), 2)
            its["/ raw work"] = round(times.work_ratio(name, "raw gloo"), 2)
            its["/ memcpy"] = round(times.ratio(name, "memcpy"), 1)
            if strategy == "shared":
                its |= {"goal": f">= {goal}x DTensor", "ok": its["x DTensor"] >= goal}
            if kind == "given" and ranks == 2 and strategy == "p2p":
                its |= {"goal": f"<= {GLOO} raw", "ok": its["/ raw gloo"] <= GLOO}
            if kind == "given" and ranks < 8 and strategy == "shared" and mebibytes >= 256:
                its["goal"] += f", <= {SHARED} raw"
                its["ok"] = its["ok"] and its["/ raw gloo"] <= SHARED
            found.append(its)
    return found


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    sizes = [(2, 64)] if options.quick else [(2, 64), (2, 256), (4, 64), (4, 256), (8, 64)]
    table: list[dict[str, Any]] = []
    for ranks, mebibytes in sizes:
        table += rows(timed(setup, ranks, mebibytes, rounds=5 if options.quick else 9), ranks, mebibytes)
    return 0 if report("rows to columns", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
