"""``verify``: a plan proved against the routing it was made for, by means the planner does not use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from .._errors import InvalidMapError
from ..ops import Answer
from ._geometry import INT32_MIN
from ._plan import LEAVES, CommPlan, check_shapes
from ._policy import Array

SHARED = ("experts_to_copy", "counts", "alloc")
Check = tuple[bool, str, Any]


def verify(plan: CommPlan | Sequence[CommPlan], topk: Any) -> Answer:
    """Whether ``plan`` is that of ``topk`` [S_r, K]: every route in a slot of its expert, every slot once.

    Takes one rank's plan and routing, or sequences with those of all ranks, which are then also
    compared with each other. A false answer says what is wrong and where. Needs no buffer and
    sends nothing; the cost is about E passes over the routes.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> topk = [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])]
    >>> plans = plan_dispatch(simulate(2, E=4, S=2, K=1, H=1), topk)
    >>> bool(verify(plans, topk)), verify(plans[0], topk[1]).reason
    (True, 'counts of this rank[0] is 0, should be 1')
    """
    if isinstance(plan, CommPlan):
        return _first_failure(_one(plan, topk))
    for rank, (p, ids) in enumerate(zip(plan, topk, strict=True)):
        answer = _first_failure(_one(p, ids))
        if not answer:
            return Answer(False, f"rank {rank}: {answer.reason}", answer.witness)
    return _first_failure(_together(plan))


def _first_failure(checks: Iterator[Check]) -> Answer:
    for holds, reason, witness in checks:
        if not holds:
            return Answer(False, reason, witness)
    return Answer(True)


def _one(p: CommPlan, topk: torch.Tensor) -> Iterator[Check]:
    """One rank's own proof: its routes, its segments, what it receives."""
    yield _well_formed(p)
    yield (
        tuple(topk.shape) == (p.S_r, p.K),
        f"topk is {tuple(topk.shape)}, the plan is for {(p.S_r, p.K)}",
        None,
    )
    t = {name: getattr(p, name).cpu().numpy().astype(np.int64) for name in LEAVES}
    ids = topk.cpu().numpy().reshape(-1)
    yield _equal("counts of this rank", t["counts"][p.rank], np.bincount(ids[ids >= 0], minlength=p.E))
    yield bool((t["alloc"] >= 0).all()), "alloc has a negative count", None
    yield _equal("tokens allocated per expert", t["alloc"].sum(1), t["counts"].sum(0))
    segments = [_segments(p, t["alloc"], d) for d in range(p.R)]
    for d, (copies, *_) in enumerate(segments):
        yield _equal(f"experts copied to rank {d}", t["experts_to_copy"][d], np.array(copies))
    _, groups, ends, fill, _ = segments[p.rank]
    for name, value in (("group_experts", groups), ("cu_seqlens", ends), ("zero_fill_ranges", fill)):
        yield _equal(name, t[name], np.array(value))
    yield _equal("dst", t["dst"], _expected_dst(p, t, ids, [s[-1] for s in segments]))
    yield from _sent(p, t)
    yield from _received(p, t)


def _well_formed(p: CommPlan) -> Check:
    groups = (p.E if p.layout == "slots" else p.epn) + p.B
    try:
        check_shapes(p, groups)
    except (InvalidMapError, AttributeError) as error:
        return False, str(error), None
    return p.N % p.K == 0 and p.S_r * p.K <= p.N, f"S_r*K = {p.S_r * p.K} routes do not fit N = {p.N}", None


def _segments(
    p: CommPlan, alloc: Array, d: int
) -> tuple[list[int], list[int], list[int], list[tuple[int, int]], dict[int, int]]:
    """Rank d's copies, group experts, ends, pad rows and first row per expert, by walking its groups."""
    own = range(d * p.epn, (d + 1) * p.epn)
    remote = [e for e in range(p.E) if e not in own and alloc[e, d] > 0]
    if p.layout == "slots":
        remote.sort(key=lambda e: (-alloc[e, d], -e))
    copies = remote + [-1] * (p.B - len(remote))
    groups = [*(range(p.E) if p.layout == "slots" else own), *copies]
    first: dict[int, int] = {}
    ends, fill, at = [], [], 0
    for position, e in enumerate(groups):
        here = e >= 0 and (e in own or position >= len(groups) - p.B)
        c = int(alloc[e, d]) if here else 0
        padded = (c + p.pad - 1) // p.pad * p.pad
        if c:
            first[e] = at
        fill.append((at + c, padded - c) if padded > c else (0, 0))
        at += padded
        ends.append(at)
    return copies, groups, ends, fill, first


def _expected_dst(p: CommPlan, t: dict[str, Array], ids: Array, first: list[dict[int, int]]) -> Array:
    """Each route's slot by its position in the sequence of its expert, one expert at a time."""
    value = np.full(len(ids), INT32_MIN, np.int64)
    for e in range(p.E):
        mine = np.flatnonzero(ids == e)
        position = t["counts"][: p.rank, e].sum() + np.arange(len(mine))
        bounds = np.cumsum(t["alloc"][e])
        to = np.searchsorted(bounds, position, side="right")
        base = np.array([d * p.NvS + first[d].get(e, 0) for d in range(p.R)])
        value[mine] = base[to] + position - (bounds - t["alloc"][e])[to]
    seen: set[tuple[int, int]] = set()
    for i in np.flatnonzero(value != INT32_MIN).tolist():
        pair = (i // p.K, int(value[i]) // p.NvS)
        value[i] = ~value[i] if pair in seen else value[i]
        seen.add(pair)
    return value


def _sent(p: CommPlan, t: dict[str, Array]) -> Iterator[Check]:
    dst = t["dst"][t["dst"] != INT32_MIN]
    to = np.where(dst >= 0, dst, ~dst) // p.NvS
    yield _equal("send_routes", t["send_routes"], np.bincount(to, minlength=p.R))
    yield _equal("send_rows", t["send_rows"], np.bincount(to[dst >= 0], minlength=p.R))


def _received(p: CommPlan, t: dict[str, Array]) -> Iterator[Check]:
    """Used slots and pad rows are [0, cu_seqlens[-1]), each once; duplicates are what the lists say."""
    codes = t["recv_slots"]
    slots = np.where(codes >= 0, codes, ~codes)
    pads = [np.arange(start, start + n) for start, n in t["zero_fill_ranges"]]
    yield _equal(
        "used slots and pad rows", np.sort(np.concatenate([slots, *pads])), np.arange(t["cu_seqlens"][-1])
    )
    source = np.repeat(np.arange(p.R), t["recv_routes"])
    yield _equal("recv_routes", np.array([len(source)]), np.array([len(codes)]))
    yield _equal("recv_rows", t["recv_rows"], np.bincount(source[codes >= 0], minlength=p.R))
    groups: list[tuple[int, int, int]] = []
    entries: list[int] = []
    primary = -1
    for code in codes.tolist():
        if code >= 0:
            primary = code
            continue
        if not groups or groups[-1][0] != primary:
            groups.append((primary, len(entries), 0))
        groups[-1] = (*groups[-1][:2], groups[-1][2] + 1)
        entries.append(~code)
    yield _equal("dup_counts", t["dup_counts"], np.array([len(groups), len(entries)]))
    yield _equal(
        "dup_groups", t["dup_groups"][: len(groups)].reshape(-1), np.array(groups, np.int64).reshape(-1)
    )
    yield _equal("dup_loffs", t["dup_loffs"][: len(entries)], np.array(entries, np.int64))
    copies = t["experts_to_copy"]
    stats = [(copies[p.rank] >= 0).sum(), ((copies >= 0) & (copies // p.epn == p.rank)).sum()]
    yield _equal("remote_stats", t["remote_stats"], np.array(stats))


def _together(plans: Sequence[CommPlan]) -> Iterator[Check]:
    """All ranks share one allocation, and each receives the very slots the others send to."""
    yield (
        [p.rank for p in plans] == list(range(plans[0].R)),
        "plans are not those of ranks 0..R-1 in order",
        None,
    )
    for p in plans[1:]:
        for name in SHARED:
            yield (
                torch.equal(getattr(p, name), getattr(plans[0], name)),
                f"{name} differs on rank {p.rank}",
                None,
            )
    for d, p in enumerate(plans):
        sent = [_codes_to(q, d) for q in plans]
        yield _equal(f"slots received by rank {d}", p.recv_slots.cpu().numpy(), np.concatenate(sent))


def _codes_to(p: CommPlan, d: int) -> Array:
    """The slots at rank d, in order of routes, repeats as ``-slot-1``."""
    dst = p.dst.cpu().numpy().astype(np.int64)
    dst = dst[dst != INT32_MIN]
    value = np.where(dst >= 0, dst, ~dst)
    here = value // p.NvS == d
    return np.asarray(np.where(dst >= 0, value % p.NvS, ~(value % p.NvS))[here])


def _equal(what: str, found: Array, wanted: Array) -> Check:
    """The two arrays are equal; otherwise the first difference."""
    if found.shape != wanted.shape:
        return False, f"{what}: {found.shape} entries, should be {wanted.shape}", None
    differ = np.argwhere(found != wanted)
    if len(differ) == 0:
        return True, "", None
    at = tuple(int(i) for i in differ[0])
    return False, f"{what}{list(at)} is {found[at]}, should be {wanted[at]}", at
