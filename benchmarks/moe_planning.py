"""M1: planning a microbatch, S=4096 K=8 E=256 R=8 with duplicate tables, against list loops.

The list loop is the specification word for word over plain Python lists: it walks the group's routes and
makes one rank's tables. Ours makes the same tables as that rank does in a group: from the gathered
counts, its own routes, and the slot lists it receives; the messages are replayed from memory. "own part"
is a loop given exactly what ours is given; "all ranks by ours" makes the tables of all eight in one
process, against the loop's one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from _measure import arguments, ratio, report

from shardalg.moe import Buffer, Counters, plan_dispatch, simulate
from shardalg.moe._notice import as_words

SHAPE = {"E": 256, "S": 4096, "K": 8, "H": 1, "pad": 1}
RANKS, GOAL = 8, 100
DROPPED = -(2**31)


class Replay:
    """One rank of a group whose messages were recorded."""

    size, many, closed, device = RANKS, False, False, torch.device("cpu")

    def __init__(self, rank: int) -> None:
        self.ranks, self.counters, self.rows, self.lists = (rank,), Counters(), [], torch.empty(0)

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        return self.rows or [list(mine[0])] * RANKS

    def exchange(self, sends: Any, receives: Any) -> Any:
        receives[0].data.copy_(self.lists)
        return lambda: None


def list_loop(rank: int, topk: list[list[list[int]]], rows: int) -> Any:
    """dst and the duplicate tables of one rank from the routing of all: one route at a time."""
    experts = SHAPE["E"]
    epn = experts // RANKS
    total = [0] * experts
    for its in topk:
        for row in its:
            for e in row:
                if e >= 0:
                    total[e] += 1
    alloc = list_alloc(total, epn)
    base = [list_bases(alloc, d, epn) for d in range(RANKS)]
    seen, dst, groups, entries = [0] * experts, [], [], []
    for source, its in enumerate(topk):
        for row in its:
            used, mine = set(), []
            for e in row:
                if e < 0:
                    if source == rank:
                        dst.append(DROPPED)
                    continue
                g, d = seen[e], 0
                seen[e] += 1
                while sum(alloc[e][: d + 1]) <= g:
                    d += 1
                slot = base[d][e] + g - sum(alloc[e][:d])
                if source == rank:
                    value = d * rows + slot
                    dst.append(-value - 1 if d in used else value)
                    used.add(d)
                if d == rank:
                    mine.append(slot)
            if len(mine) > 1:
                groups.append([mine[0], len(entries), len(mine) - 1])
                entries += mine[1:]
    return dst, groups, entries


def own_part(
    rank: int, counts: list[list[int]], topk: list[list[int]], received: list[list[int]], rows: int
) -> Any:
    """The same tables from what a rank of a group has: counts, its routes, and the lists it receives."""
    experts, epn = len(counts[0]), len(counts[0]) // RANKS
    alloc = list_alloc([sum(c[e] for c in counts) for e in range(experts)], epn)
    base = [list_bases(alloc, d, epn) for d in range(RANKS)]
    seen = [sum(c[e] for c in counts[:rank]) for e in range(experts)]
    dst: list[int] = []
    sends: list[list[int]] = [[] for _ in range(RANKS)]
    for row in topk:
        used = set()
        for e in row:
            if e < 0:
                dst.append(DROPPED)
                continue
            g, d = seen[e], 0
            seen[e] += 1
            while sum(alloc[e][: d + 1]) <= g:
                d += 1
            slot = base[d][e] + g - sum(alloc[e][:d])
            value = d * rows + slot
            dst.append(-value - 1 if d in used else value)
            sends[d].append(-slot - 1 if d in used else slot)
            used.add(d)
    groups: list[list[int]] = []
    entries: list[int] = []
    primary = -1
    for codes in received:
        for code in codes:
            if code >= 0:
                primary = code
                continue
            if not groups or groups[-1][0] != primary:
                groups.append([primary, len(entries), 0])
            groups[-1][2] += 1
            entries.append(-code - 1)
    return dst, groups, entries


def list_alloc(total: list[int], epn: int) -> list[list[int]]:
    """The exact policy."""
    tokens = sum(total)
    alloc = [[n if d == e // epn else 0 for d in range(RANKS)] for e, n in enumerate(total)]
    balance = [
        sum(total[h * epn : (h + 1) * epn]) - tokens // RANKS - (h < tokens % RANKS) for h in range(RANKS)
    ]
    moves: dict[int, dict[int, int]] = {}
    while max(balance) > 0:
        h, u = balance.index(max(balance)), balance.index(min(balance))
        moves.setdefault(h, {})[u] = -balance[u]
        balance[h] += balance[u]
        balance[u] = 0
    for h, wanted in moves.items():
        rest = total[h * epn : (h + 1) * epn]
        while max(wanted.values()) > 0:
            d = min(r for r in wanted if wanted[r] == max(wanted.values()))
            i = rest.index(max(rest))
            t = min(rest[i], wanted[d])
            rest[i] -= t
            wanted[d] -= t
            alloc[h * epn + i][d] += t
            alloc[h * epn + i][h] -= t
    return alloc


def list_bases(alloc: list[list[int]], d: int, epn: int) -> dict[int, int]:
    """First row of each expert's segment on rank d, layout "compact"."""
    own = list(range(d * epn, (d + 1) * epn))
    remote = [e for e in range(len(alloc)) if e not in own and alloc[e][d]]
    base, at = {}, 0
    for e in own + remote:
        base[e] = at
        at += alloc[e][d]
    return base


def uniform(rank: int) -> torch.Tensor:
    """Eight distinct experts per token."""
    made = torch.Generator().manual_seed(rank)
    return torch.rand(SHAPE["S"], SHAPE["E"], generator=made).topk(SHAPE["K"]).indices


def check(plan: Any, made: Any) -> None:
    """The loop's tables are the plan's."""
    dst, groups, entries = made
    assert dst == plan.dst.tolist() and [len(groups), len(entries)] == plan.dup_counts.tolist()
    assert groups == plan.dup_groups[: len(groups)].tolist()
    assert entries == plan.dup_loffs[: len(entries)].tolist()


def row(case: str, ours: Any, loop: Any, rounds: int, goal: float | None = None) -> dict[str, Any]:
    """One comparison."""
    found = ratio(ours, loop, rounds=rounds)
    its = {"case": case, "loop ms": found.theirs * 1e3, "ours ms": found.ours * 1e3, "ratio": found.median}
    return its if goal is None else {**its, "goal": goal, "ok": found.median >= goal}


def main() -> int:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    topk, rank, rounds = [uniform(r) for r in range(RANKS)], 3, 3 if options.quick else 9
    group = simulate(RANKS, **SHAPE)
    plans = plan_dispatch(group, topk)
    plan, replay = plans[rank], Replay(rank)
    buffer = Buffer(replay, **SHAPE)
    replay.rows = [as_words("") + p.counts[r].tolist() for r, p in enumerate(plans)]
    lists = list(plan.recv_slots.split(plan.recv_routes.tolist()))
    replay.lists = torch.cat([x for s, x in enumerate(lists) if s != rank]).view(torch.uint8)
    assert plan_dispatch(buffer, topk[rank]) == plan
    every = [t.tolist() for t in topk]
    own = (rank, plan.counts.tolist(), every[rank], [x.tolist() for x in lists], plan.NvS)
    check(plan, list_loop(rank, every, plan.NvS))
    check(plan, own_part(*own))
    ours = lambda: plan_dispatch(buffer, topk[rank])
    table = [
        row("one rank", ours, lambda: list_loop(rank, every, plan.NvS), rounds, GOAL),
        row("one rank, own part", ours, lambda: own_part(*own), rounds),
        row(
            "all ranks by ours",
            lambda: plan_dispatch(group, topk),
            lambda: list_loop(rank, every, plan.NvS),
            rounds,
        ),
    ]
    return 0 if report("M1 planning with duplicate tables", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
