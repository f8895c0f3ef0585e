"""M3, M4: exact counters. The busiest rank computes its capacity; the wire carries distinct pairs.

Rows per rank before and after balancing, for four routings, and the rows that cross ranks: one per route,
one per distinct (token, rank) pair (the lower bound), and what the transport really counted.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from _measure import arguments, report

from shardalg.moe import dispatch, plan_dispatch, simulate
from shardalg.moe import report as plan_report

R, E, S, K, H = 8, 64, 512, 8, 4


def routings() -> dict[str, list[torch.Tensor]]:
    """Distinct experts per token: uniform, biased (random expert popularity), zipf, one hot home."""
    made = torch.Generator().manual_seed(0)
    biases = {
        "uniform": torch.zeros(E),
        "biased": torch.randn(E, generator=made),
        "zipf": -1.2 * torch.log(torch.arange(1.0, E + 1)),
        "hot home": (torch.arange(E) < E // R) * 4.0,
    }

    def draw(bias: torch.Tensor) -> torch.Tensor:
        noise = -torch.log(-torch.log(torch.rand(S, E, generator=made)))
        return (noise + bias).topk(K).indices

    return {name: [draw(bias) for _ in range(R)] for name, bias in biases.items()}


def distinct_pairs(plans: Any) -> int:
    """Counted one route at a time."""
    pairs = set()
    for p in plans:
        for i, v in enumerate(p.dst.tolist()):
            d = (v if v >= 0 else -v - 1) // p.NvS
            if d != p.rank:
                pairs.add((p.rank, i // K, d))
    return len(pairs)


def row(name: str, topk: list[torch.Tensor]) -> dict[str, Any]:
    """One routing's counters."""
    buffer = simulate(R, E=E, S=S, K=K, H=H)
    plans = plan_dispatch(buffer, topk)
    found = plan_report(plans)
    before = buffer.transport.counters.bytes_sent
    dispatch(buffer, plans, [torch.zeros(S, H) for _ in range(R)])
    wire = (buffer.transport.counters.bytes_sent - before) // (4 * H)
    routes = sum(n for s, its in enumerate(found.routes) for d, n in enumerate(its) if s != d)
    pairs = distinct_pairs(plans)
    busiest = max(found.loads_after)
    return {
        "routing": name, "busiest before": max(found.loads_before), "after": busiest, "capacity": S * K,
        "copies": found.copies, "moved": found.moved, "at least": found.moved_at_least,
        "routes crossing": routes, "pairs crossing": pairs, "rows sent": wire,
        "ok": busiest == S * K and wire == pairs,
    }  # fmt: skip


def main() -> int:
    options = arguments(__doc__ or "")
    table = [row(name, topk) for name, topk in routings().items()]
    return 0 if report(f"M3, M4 balance and traffic, R={R} E={E} S={S} K={K}", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
