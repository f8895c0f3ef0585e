"""M2: dispatch + combine against permute + ``all_to_all_single`` without deduplication, S=1024 K=8 H=1024 E=64.

Both get their tables beforehand, keep their staging buffers and allocate only what they return. "permute"
sends every route's row, sorted by expert, and groups arrivals by expert; "bare" leaves arrivals in the order of their
sources. The last rows show what planning every microbatch costs, against keeping the plan.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from _measure import arguments, report
from _ranks import Methods, Times, timed

from shardalg.moe import Buffer, combine, dispatch, plan_dispatch

S, K, H, E = 1024, 8, 1024, 64
GOALS = {2: 1.8, 4: 1.4}


class Permute:
    """Every route's row travels; ``grouped`` sorts arrivals by expert, as an expert's matrix product wants them."""

    def __init__(self, ids: torch.Tensor, grouped: bool) -> None:
        ranks, here = dist.get_world_size(), dist.get_rank()
        epn = E // ranks
        self.order = ids.flatten().argsort(stable=True)
        self.token, self.inverse = self.order // K, self.order.argsort()
        counts = ids.flatten().bincount(minlength=E)
        every = [torch.empty_like(counts) for _ in range(ranks)]
        dist.all_gather(every, counts)
        mine = torch.stack(every)[:, here * epn : (here + 1) * epn]
        self.sends, self.receives = counts.view(ranks, epn).sum(1).tolist(), mine.sum(1).tolist()
        experts = torch.arange(epn).repeat(ranks).repeat_interleave(mine.flatten())
        self.group = experts.argsort(stable=True) if grouped else None
        self.ungroup = self.group.argsort() if self.group is not None else None
        self.sent, self.back = torch.empty(S * K, H), torch.empty(S * K, H)
        self.arrived = torch.empty(sum(self.receives), H)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        torch.index_select(hidden, 0, self.token, out=self.sent)
        rows = self.arrived if self.group is not None else torch.empty_like(self.arrived)
        dist.all_to_all_single(rows, self.sent, self.receives, self.sends)
        if self.group is not None:
            rows = rows.index_select(0, self.group)
            torch.index_select(rows, 0, self.ungroup, out=self.arrived)
        dist.all_to_all_single(self.back, self.arrived if self.group is not None else rows, self.sends, self.receives)
        torch.index_select(self.back, 0, self.inverse, out=self.sent)
        return self.sent.view(S, K, H).sum(1)


def setup(rank: int) -> Methods:
    """The methods of one rank on uniform routing, identity experts."""
    made = torch.Generator().manual_seed(rank)
    ids = torch.rand(S, E, generator=made).topk(K).indices
    hidden = torch.randn(S, H, generator=made)
    buffer = Buffer(dist.group.WORLD, E=E, S=S, K=K, H=H)
    plan = plan_dispatch(buffer, ids)

    def ours(plan: Any = plan) -> torch.Tensor:
        rows, _ = dispatch(buffer, plan, hidden)
        return combine(buffer, plan, rows)[0]

    grouped, bare = Permute(ids, True), Permute(ids, False)
    calls = {
        "permute": lambda: grouped(hidden),
        "bare": lambda: bare(hidden),
        "ours": ours,
        "planning too": lambda: ours(plan_dispatch(buffer, ids)),
    }
    right = lambda out: torch.allclose(out, hidden * K, rtol=1e-5, atol=1e-5)
    facts = {"rows": int(plan.send_rows.sum() - plan.send_rows[rank]), "routes": sum(grouped.sends) - grouped.sends[rank]}
    return Methods(calls, dict.fromkeys(calls, right), facts, buffer.close)


def rows(times: Times, ranks: int) -> list[dict[str, Any]]:
    """One row per method with its ratio to ours."""
    sent = {"permute": "routes", "bare": "routes", "ours": "rows", "planning too": "rows"}
    found: list[dict[str, Any]] = []
    for name in sent:
        wire = sum(f[sent[name]] for f in times.facts)
        row = {"ranks": ranks, "method": name, "ms": times.median(name) * 1e3, "rows on the wire": wire}
        row |= {"ours faster by": times.ratio(name, "ours"), "by processor time": times.work_ratio(name, "ours")}
        if name == "permute":
            row |= {"goal": GOALS[ranks], "ok": times.ratio(name, "ours") >= GOALS[ranks]}
        found.append(row)
    return found


def main() -> int:
    options = arguments(__doc__ or "")
    table = [row for ranks in GOALS for row in rows(timed(setup, ranks, rounds=5 if options.quick else 11), ranks)]
    return 0 if report("M2 dispatch + combine", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
