"""A live transfer against a distributed checkpoint saved and loaded in memory-backed files.

E3: >= 4x DCP (2 ranks), 6x (4).
"""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from _measure import arguments, report
from _ranks import Methods, timed
from torch.distributed.tensor import DTensor, Shard, init_device_mesh

import shardalg as sa

GOALS = {2: 4.0, 4: 6.0}
MEMORY = Path("/dev/shm")


def setup(rank: int, mebibytes: int, folder: str) -> Methods:
    """Methods that bring a float32 matrix of that size from rows to columns."""
    ranks = dist.get_world_size()
    shape = (1024, mebibytes * 256)
    mesh = init_device_mesh("cpu", (ranks,))
    source, target = (sa.layout(shape, sa.Split(axis), ranks=ranks) for axis in (0, 1))
    whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape)
    mine, wanted = sa.extract(source, whole, rank), sa.extract(target, whole, rank)
    del whole
    out, loaded = torch.empty_like(wanted), torch.empty_like(wanted)
    before = DTensor.from_local(mine, mesh, [Shard(0)])
    after = DTensor.from_local(loaded, mesh, [Shard(1)])

    def theirs() -> torch.Tensor:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save({"w": before}, checkpoint_id=f"{folder}/one")
            dcp.load({"w": after}, checkpoint_id=f"{folder}/one")
        return loaded

    ctx = sa.backends.cpu()
    bound = sa.bind(ctx, sa.schedule(sa.plan(source, target), dtypes="float32"))
    gloo = sa.backends.cpu(strategy="fused")
    again = sa.bind(gloo, sa.schedule(sa.plan(source, target), dtypes="float32"))
    calls = {
        "DCP": theirs,
        "ours": lambda: sa.run(ctx, bound, {rank: mine}, {rank: out})[rank],
        "ours over gloo": lambda: sa.run(gloo, again, {rank: mine}, {rank: out})[rank],
    }
    checks = dict.fromkeys(calls, lambda x: torch.equal(x, wanted))
    return Methods(calls, checks, close=lambda: [c.close() for c in (ctx, gloo)])


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    table: list[dict[str, Any]] = []
    for ranks in (2,) if options.quick else (2, 4):
        folder = tempfile.mkdtemp(prefix="shardalg-bench-", dir=MEMORY)
        try:
            times = timed(setup, ranks, 64, folder, rounds=5 if options.quick else 9)
        finally:
            shutil.rmtree(folder)
        for name in ("ours", "ours over gloo"):
            its: dict[str, Any] = {"ranks": ranks, "MiB": 64, "method": name, "ms": times.median(name) * 1e3}
            its["x DCP"] = times.ratio("DCP", name)
            if name == "ours":
                its |= {"goal": f">= {GOALS[ranks]}x", "ok": its["x DCP"] >= GOALS[ranks]}
            table.append(its)
    return 0 if report("against a checkpoint in memory", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
