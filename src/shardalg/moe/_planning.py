"""``plan_dispatch``: from routing to plan, with one gather of counts and one exchange of slot lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..backends._eager import eager
from ._buffer import Buffer, check_open, per_rank, returned
from ._geometry import Geometry
from ._notice import WORDS, as_words, raise_first
from ._plan import CommPlan, make_plan
from ._policy import Array
from ._tables import (
    Routes,
    Shared,
    count_by_run,
    duplicates,
    received,
    remote_stats,
    route,
    segments,
    share,
)
from ._transport import Bundle

INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


@eager
def plan_dispatch(buffer: Buffer, topk: Any) -> Any:
    """The ``CommPlan`` of one microbatch from this rank's routing ``topk`` [S_r, K], integers.

    Collective. A negative id routes nowhere; an id of E or more, a shape or dtype that is no
    routing and more than S tokens are the same ``InvalidMapError`` on every rank, raised after the
    gather of counts and before anything else moves. One host synchronisation, so plans are not
    captured in CUDA graphs. A simulated buffer takes and gives one value per rank.

    >>> from shardalg.moe import simulate
    >>> topk = [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])]
    >>> a, b = plan_dispatch(simulate(2, E=4, S=2, K=1, H=1, pad=2), topk)
    >>> a.dst.tolist(), b.dst.tolist(), a.experts_to_copy.tolist()
    ([2, 6], [7, 0], [[3, -1], [-1, -1]])
    """
    check_open(buffer)
    g = buffer.geometry
    said = [_examine(g, ids) for ids in per_rank(buffer, topk, "routing")]
    rows = buffer.transport.all_gather([message for message, _ in said])
    raise_first([row[:WORDS] for row in rows])
    shared = share(g, np.array([row[WORDS:] for row in rows], np.int64))
    routes = [route(g, shared, rank, ids) for rank, (_, ids) in zip(buffer.ranks, said)]
    wanted = [received(shared, rank) for rank in buffer.ranks]
    slots = _exchange_slots(buffer, routes, wanted)
    each = zip(buffer.ranks, routes, wanted, slots)
    return returned(buffer, [_plan(buffer, shared, *its) for its in each])


def _examine(g: Geometry, topk: Any) -> tuple[list[int], Array]:
    """One rank's message (its problem if any, then counts per expert) and its flat ids."""
    problem, ids = _problem(g, topk), np.zeros(0, np.int64)
    if not problem:
        ids = topk.detach().cpu().numpy().reshape(-1)
        if ids.max(initial=-1) >= g.E:
            at = int((ids >= g.E).argmax())
            problem = (
                f"topk[{at // g.K}, {at % g.K}] is expert {ids[at]}, there are E={g.E} experts (0..{g.E - 1})"
            )
    if problem:
        return as_words(problem) + [0] * g.E, ids
    real = ids if ids.min(initial=0) >= 0 else ids[ids >= 0]
    return [0] * WORDS + np.bincount(real, minlength=g.E).tolist(), ids


def _problem(g: Geometry, topk: Any) -> str:
    """What is wrong with a routing before its ids are looked at, or nothing."""
    if not isinstance(topk, torch.Tensor):
        return f"topk must be an integer tensor, got {type(topk).__name__}"
    if topk.dtype not in INTEGERS:
        return f"topk must be an integer tensor, got {topk.dtype}"
    if topk.dim() != 2 or topk.shape[1] != g.K:
        return f"topk must be [S_r, K={g.K}], got {tuple(topk.shape)}"
    if len(topk) > g.S:
        return f"{len(topk)} tokens exceed the capacity S={g.S}; make the Buffer with S={len(topk)}"
    return ""


def _exchange_slots(buffer: Buffer, routes: Sequence[Routes], counts: Sequence[Array]) -> list[Array]:
    """Each held rank's slot lists, in source order, its own part included."""
    sends, receives, into = [], [], []
    for rank, mine, wanted in zip(buffer.ranks, routes, counts):
        away = np.arange(len(wanted)) != rank
        before = int(mine.sent[:rank].sum())
        after = before + int(mine.sent[rank])
        code = np.concatenate([mine.code[:before], mine.code[after:]])
        landing = np.empty(int(wanted[away].sum()), np.int32)
        sends.append(_bundle(code, mine.sent * away, buffer.device))
        receives.append(_bundle(landing, wanted * away, buffer.device))
        into.append((landing, int(wanted[:rank].sum()), mine.code[before:after]))
    if buffer.geometry.R > 1:
        buffer.transport.exchange(sends, receives)()
    found = [bundle.data.cpu().numpy().view(np.int32) for bundle in receives]
    return [np.concatenate([f[:at], own, f[at:]]) for f, (_, at, own) in zip(found, into)]


def _bundle(codes: Array, count: Array, device: torch.device) -> Bundle:
    data = torch.from_numpy(np.ascontiguousarray(codes).view(np.uint8)).to(device)
    return Bundle(data, tuple((count * 4).tolist()))


def _plan(buffer: Buffer, shared: Shared, rank: int, mine: Routes, counts: Array, slots: Array) -> CommPlan:
    g = buffer.geometry
    experts, ends, fill = segments(g, shared, rank)
    groups, entries, used = duplicates(slots, g.NvS)
    values = {
        "N": g.N, "R": g.R, "E": g.E, "B": g.B, "NvS": g.NvS, "K": g.K, "pad": g.pad,
        "S_r": len(mine.dst) // g.K, "H": buffer.H, "layout": g.layout, "rank": rank, "dtype": buffer.dtype,
    }  # fmt: skip
    arrays = {
        "dst": mine.dst, "experts_to_copy": shared.copies, "cu_seqlens": ends, "group_experts": experts,
        "zero_fill_ranges": fill, "remote_stats": remote_stats(g, shared, rank), "dup_groups": groups,
        "dup_loffs": entries, "dup_counts": used, "recv_slots": slots, "send_routes": mine.sent,
        "recv_routes": counts,
        "send_rows": mine.rows, "recv_rows": count_by_run(slots >= 0, counts), "counts": shared.counts,
        "alloc": shared.alloc,
    }  # fmt: skip
    return make_plan(g, buffer._owner, values, arrays, mine.order, buffer.device)
