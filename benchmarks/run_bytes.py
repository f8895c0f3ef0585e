"""Bytes on the wire and memory: exact counters and the peak of every process.

E6: a run needs its output and staging of ``max_bytes``, never a full tensor on any rank. Through shared
memory staging lies in segments that the context made before, of 8 MiB a rank; their pages count in every
process that has looked at them, so what "extra" shows there is bounded by those of all ranks it reads.
E7: bytes on the wire are the plan's off-rank bytes; equal layouts and replicated -> split send 0, and the
latter costs at most 1.3 times a plain copy.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from _measure import arguments, report
from _ranks import Methods, timed

import shardalg as sa

MEBIBYTE = 1 << 20
COPY = 1.3
SLACK = 2 * MEBIBYTE  # the interpreter's own: a first run that moves nothing takes 1


def peak() -> int:
    """The most bytes this process has held."""
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


def layouts(kind: str, shape: tuple[int, int], ranks: int) -> tuple[sa.AffineMap, sa.AffineMap]:
    rows, columns = (sa.layout(shape, sa.Split(axis), ranks=ranks) for axis in (0, 1))
    whole = sa.layout(shape, sa.Replicate(), ranks=ranks)
    return {"rows -> columns": (rows, columns), "equal": (rows, rows), "replica -> rows": (whole, rows)}[kind]


def setup(rank: int, kind: str, mebibytes: int, max_bytes: int | None, strategy: str) -> Methods:
    ranks = dist.get_world_size()
    source, target = layouts(kind, (1024, mebibytes * 256), ranks)
    mine = torch.ones(source.shard_shape(rank))
    program = sa.schedule(sa.plan(source, target), dtypes="float32", max_bytes=max_bytes)
    ctx = sa.backends.cpu(strategy=strategy)
    bound = sa.bind(ctx, program)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    out = sa.run(ctx, bound, {rank: mine})[rank]
    grown = peak() - before
    facts = {
        "grown": grown - out.nbytes, "sent": ctx.counters.payload_bytes, "planned": program.sent.get(rank, 0),
        "crossing": program.plan.stats.bytes_crossing(4), "staging": program.peak_staging,
    }  # fmt: skip
    copied = torch.empty_like(out)
    calls = {"copy": lambda: copied.copy_(out), "run": lambda: sa.run(ctx, bound, {rank: mine}, {rank: out})}
    return Methods(calls, facts=facts, close=ctx.close)


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    table: list[dict[str, Any]] = []
    strategies = ("fused", "shared") if options.quick else sa.backends.STRATEGIES[:3]
    for strategy in strategies:
        for kind, max_bytes in (
            ("rows -> columns", 4 * MEBIBYTE),
            ("equal", None),
            ("replica -> rows", None),
        ):
            times = timed(setup, 4, kind, 64, max_bytes, strategy, rounds=5 if options.quick else 9)
            grown = max(f["grown"] for f in times.facts)
            sent = sum(f["sent"] for f in times.facts)
            its: dict[str, Any] = {"strategy": strategy, "case": kind, "MiB": 64, "sent": sent}
            its |= {"planned": times.facts[0]["crossing"], "extra MiB": grown / MEBIBYTE}
            its["max MiB"] = (max_bytes or 0) / MEBIBYTE
            its["/ copy"] = times.ratio("run", "copy")
            exact = sent == its["planned"] and all(f["sent"] == f["planned"] for f in times.facts)
            most = (max_bytes or 0) * (2 if strategy == "shared" else 1)
            its["goal"] = f"<= {most // MEBIBYTE} + {SLACK // MEBIBYTE} MiB"
            its["ok"] = exact and grown <= most + SLACK
            if kind == "replica -> rows":
                its |= {
                    "goal": f"0 bytes, <= {COPY} copies, {its['goal']}",
                    "ok": its["ok"] and its["/ copy"] <= COPY,
                }
            table.append(its)
    return 0 if report("bytes and memory, 4 ranks", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
