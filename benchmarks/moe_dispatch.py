"""M2: dispatch + combine against permute + ``all_to_all_single`` without deduplication.

S=1024 K=8 H=1024 E=64, uniform routing, identity experts. Both have their tables beforehand. "permute"
sends every route's row, sorted by expert, and groups arrivals by expert as an expert's matrix product
wants them; "bare" leaves arrivals in the order of their sources. Each is compared with ours under the
same allocator: "fresh" allocates everything at every call, "pooled" allocates nothing from the second
call on. The last method plans every microbatch instead of keeping the plan.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from _measure import arguments, report
from _ranks import Methods, Times, timed

from shardalg.moe import Buffer, combine, dispatch, plan_dispatch
from shardalg.moe._pool import Pool

S, K, H, E = 1024, 8, 1024, 64
GOALS = {2: 1.8, 4: 1.4}


class Permute:
    """Every route's row travels."""

    def __init__(self, ids: torch.Tensor, *, grouped: bool, pooled: bool) -> None:
        ranks, here = dist.get_world_size(), dist.get_rank()
        epn = E // ranks
        order = ids.flatten().argsort(stable=True)
        self.token, self.inverse = order // K, order.argsort()
        counts = ids.flatten().bincount(minlength=E)
        every = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(every, counts)
        mine = torch.stack(every)[:, here * epn : (here + 1) * epn]
        self.sends, self.receives = counts.view(ranks, epn).sum(1).tolist(), mine.sum(1).tolist()
        experts = torch.arange(epn).repeat(ranks).repeat_interleave(mine.flatten())
        self.group = experts.argsort(stable=True) if grouped else None
        self.ungroup = experts.argsort(stable=True).argsort()
        self.pooled: dict[str, torch.Tensor] | None = {} if pooled else None

    def room(self, name: str, rows: int) -> torch.Tensor:
        """Staging memory: kept where ``pooled``."""
        if self.pooled is None:
            return torch.empty(rows, H)
        if name not in self.pooled:
            self.pooled[name] = torch.empty(rows, H)
        return self.pooled[name]

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = self.dispatch(hidden)
        return self.combine(rows)

    def dispatch(self, hidden: torch.Tensor) -> torch.Tensor:
        sent = torch.index_select(hidden, 0, self.token, out=self.room("sent", S * K))
        total = sum(self.receives)
        arrived = self.room("arrived", total)
        dist.all_to_all_single(arrived, sent, self.receives, self.sends)
        if self.group is None:
            return arrived
        return torch.index_select(arrived, 0, self.group, out=self.room("rows", total))

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            rows = torch.index_select(rows, 0, self.ungroup, out=self.room("arrived", len(rows)))
        back = self.room("back", S * K)
        dist.all_to_all_single(back, rows, self.sends, self.receives)
        routes = torch.index_select(back, 0, self.inverse, out=self.room("sent", S * K))
        return torch.sum(routes.view(S, K, H), 1, out=self.room("out", S))


class Fresh(Buffer):
    """Our buffer without its pool: every call allocates all it needs."""

    @property
    def pool(self) -> Pool:
        return Pool(self.device)

    @pool.setter
    def pool(self, pool: Pool) -> None:
        """Kept by nobody."""


def setup(rank: int) -> Methods:
    """The methods of one rank."""
    made = torch.Generator().manual_seed(rank)
    ids = torch.rand(S, E, generator=made).topk(K).indices
    hidden = torch.randn(S, H, generator=made)
    buffers = {
        kind: make(dist.group.WORLD, E=E, S=S, K=K, H=H)
        for kind, make in (("fresh", Fresh), ("pooled", Buffer))
    }
    plans = {kind: plan_dispatch(buffer, ids) for kind, buffer in buffers.items()}

    def ours(kind: str, plan: Any = None) -> torch.Tensor:
        plan = plans[kind] if plan is None else plan
        rows, _ = dispatch(buffers[kind], plan, hidden)
        return combine(buffers[kind], plan, rows)[0]

    calls: dict[str, Any] = {}
    for kind in buffers:
        for name, grouped in (("permute", True), ("bare", False)):
            other = Permute(ids, grouped=grouped, pooled=kind == "pooled")
            calls[f"{name} {kind}"] = lambda other=other: other(hidden)
        calls[f"ours {kind}"] = lambda kind=kind: ours(kind)
    calls["ours planning"] = lambda: ours("pooled", plan_dispatch(buffers["pooled"], ids))
    right = lambda out: torch.allclose(out, hidden * K, rtol=1e-5, atol=1e-5)
    plan = plans["pooled"]
    facts = {
        "rows": int(plan.send_rows.sum() - plan.send_rows[rank]),
        "routes": S * K - int((ids // (E // dist.get_world_size()) == rank).sum()),
    }
    return Methods(calls, dict.fromkeys(calls, right), facts)


def rows(times: Times, ranks: int) -> list[dict[str, Any]]:
    """One row per method with its ratio to ours under the same allocator."""
    found: list[dict[str, Any]] = []
    for name in times.seconds:
        what, kind = name.split()
        ours = "ours pooled" if kind == "planning" else f"ours {kind}"
        wire = sum(f["rows" if what == "ours" else "routes"] for f in times.facts)
        ratio = times.ratio(name, ours)
        row = {"ranks": ranks, "method": name, "ms": times.median(name) * 1e3, "rows on the wire": wire}
        row |= {"ours faster by": ratio, "by processor time": times.work_ratio(name, ours)}
        if what == "permute":
            row |= {"goal": GOALS[ranks], "ok": ratio >= GOALS[ranks]}
        found.append(row)
    return found


def main() -> int:
    options = arguments(__doc__ or "")
    table = [
        row for ranks in GOALS for row in rows(timed(setup, ranks, rounds=5 if options.quick else 11), ranks)
    ]
    return 0 if report("M2 dispatch + combine", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
