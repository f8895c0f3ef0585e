"""From counts and routing to the tables of one rank's plan: pure functions on NumPy arrays.

Each function is one step of the planner and is equal to a plain loop over routes; none of them
walks routes in Python. Names: e expert, d destination rank, s source rank, c count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._errors import LimitError
from ._geometry import INT32_MIN, Geometry, capacities, round_up
from ._policy import Array, checked_alloc, remote_experts


@dataclass(frozen=True)
class Shared:
    """What all ranks know after the counts gather, and therefore agree on.

    ``counts`` [R, E] per source rank, ``alloc`` [E, R] per destination, ``base`` [E, R] first row
    of the expert's segment there, ``copies`` [R, B] the expert in each copy slot or -1, and its
    tokens there ``slot_count`` [R, B]. An expert's sequence is cut by source at ``starts`` [R, E] and by
    destination at ``ends`` [E, R].
    """

    counts: Array
    alloc: Array
    base: Array
    copies: Array
    slot_count: Array
    starts: Array
    ends: Array


def share(g: Geometry, counts: Array) -> Shared:
    """The tables every rank derives alike from ``counts`` [R, E]."""
    total = counts.sum(0)
    alloc = checked_alloc(g.policy, total, capacities(int(total.sum()), g.R), g.L, g.M)
    own_rows = round_up(alloc[np.arange(g.E), np.arange(g.E) // g.epn], g.pad)
    experts, ranks, slots = _copy_slots(g, alloc)
    copies = np.full((g.R, g.B), -1, np.int64)
    slot_count = np.zeros((g.R, g.B), np.int64)
    copies[ranks, slots] = experts
    slot_count[ranks, slots] = alloc[experts, ranks]
    padded = round_up(slot_count, g.pad)
    by_home = own_rows.reshape(g.R, g.epn)
    slot_base = by_home.sum(1)[:, None] + np.cumsum(padded, 1) - padded
    base = np.zeros((g.E, g.R), np.int64)
    base[np.arange(g.E), np.arange(g.E) // g.epn] = (np.cumsum(by_home, 1) - by_home).ravel()
    base[experts, ranks] = slot_base[ranks, slots]
    return Shared(counts, alloc, base, copies, slot_count, np.cumsum(counts, 0) - counts, np.cumsum(alloc, 1))


def _copy_slots(g: Geometry, alloc: Array) -> tuple[Array, Array, Array]:
    """Remote experts as (expert, rank, slot): by id, or by tokens and id descending in "slots"."""
    ranks, experts = np.nonzero(remote_experts(alloc).T)
    if g.layout == "slots":
        order = np.lexsort((-experts, -alloc[experts, ranks], ranks))
        ranks, experts = ranks[order], experts[order]
    slots = positions_in_runs(changes(ranks))
    if slots.max(initial=-1) >= g.B:
        rank = int(ranks[slots.argmax()])
        raise LimitError(
            f"rank {rank} needs {int((ranks == rank).sum())} copied experts, the buffer has B={g.B} slots:"
            f' use B={g.epn} (B=epn), or policy="max_copies"'
        )
    return experts, ranks, slots


def segments(g: Geometry, shared: Shared, rank: int) -> tuple[Array, Array, Array]:
    """``group_experts``, ``cu_seqlens`` and ``zero_fill_ranges`` of one destination, by group."""
    own = np.arange(rank * g.epn, (rank + 1) * g.epn)
    first, held = (0, np.arange(g.E)) if g.layout == "slots" else (rank * g.epn, own)
    count = np.zeros(g.groups, np.int64)
    count[own - first] = shared.alloc[own, rank]
    count[len(held) :] = shared.slot_count[rank]
    padded = round_up(count, g.pad)
    ends = np.cumsum(padded)
    fill = np.stack([ends - padded + count, padded - count], 1)
    fill[fill[:, 1] == 0] = 0
    return np.concatenate([held, shared.copies[rank]]), ends, fill


def overlaps(start: Array, count: Array, end: Array, size: Array) -> tuple[Array, Array]:
    """Where [start, start+count) and [end-size, end) of a sequence meet: (first position, length)."""
    low = np.maximum(start, end - size)
    return low, np.maximum(np.minimum(start + count, end) - low, 0)


@dataclass(frozen=True)
class Routes:
    """One source rank's routes: ``dst`` [S_r*K] as the plan stores it, and what it sends.

    ``order`` lists the real routes (flat indices) by (destination, token, k), ``code`` their slots there
    (``-slot-1`` for all but the first of a token); ``sent`` [R] counts them, ``rows`` [R] the tokens
    among them.
    """

    dst: Array
    order: Array
    code: Array
    sent: Array
    rows: Array


def route(g: Geometry, shared: Shared, rank: int, ids: Array) -> Routes:
    """Each route's slot: position g of an expert's sequence lies in the first segment that has it.

    Sorting a rank's routes by expert (stably) makes its part of every segment contiguous, so
    positions are a ramp per (expert, destination) and nothing is searched. Sorting them by
    destination puts the routes that one token has there side by side.
    """
    by_expert = _order_real(ids, g.E)
    ends = shared.ends
    low, length = overlaps(shared.starts[rank][:, None], shared.counts[rank][:, None], ends, shared.alloc)
    value = np.arange(g.R) * g.NvS + shared.base + low - (ends - shared.alloc)
    slot = np.empty(len(ids), np.int32)
    slot[by_expert] = ramps(value.ravel().astype(np.int32), length.ravel())
    rank_of = np.full(len(ids), g.R, _small(g.R + 1))
    rank_of[by_expert] = np.repeat(np.tile(np.arange(g.R, dtype=rank_of.dtype), g.E), length.ravel())
    order, sent = stable_order(rank_of, g.R + 1)[: len(by_expert)], length.sum(0)
    token = np.repeat(np.arange(len(ids) // g.K, dtype=np.int32), g.K)[order]
    repeat = _repeats(token, sent)
    flip, there = -repeat.astype(np.int32), slot[order]
    dst = np.full(len(ids), INT32_MIN, np.int32)
    dst[order] = there ^ flip
    code = (there - np.repeat(np.arange(g.R, dtype=np.int32) * np.int32(g.NvS), sent)) ^ flip
    return Routes(dst, order, code, sent, sent - count_by_run(repeat, sent))


def _order_real(ids: Array, experts: int) -> Array:
    """Indices of the ids that are not negative, stably by expert."""
    if ids.min(initial=0) >= 0:
        return stable_order(ids, experts)
    real = np.flatnonzero(ids >= 0)
    return real[stable_order(ids[real], experts)]


def _repeats(token: Array, run: Array) -> Array:
    """Whether an entry has the token of the entry before it in its run."""
    repeat = ~changes(token)
    starts = np.cumsum(run) - run
    repeat[starts[run > 0]] = False
    return repeat


def count_by_run(marked: Array, run: Array) -> Array:
    """How many entries are marked in each of the consecutive runs of the given lengths."""
    before = np.zeros(len(marked) + 1, np.int32)
    np.cumsum(marked, out=before[1:])
    ends = np.cumsum(run)
    return np.asarray(before[ends] - before[ends - run])


def received(shared: Shared, rank: int) -> Array:
    """[R]: routes that reach ``rank`` from every source, known before any list is exchanged."""
    end, size = shared.ends[:, rank], shared.alloc[:, rank]
    return np.asarray(overlaps(shared.starts, shared.counts, end, size)[1].sum(1))


def duplicates(codes: Array, rows: int) -> tuple[Array, Array, Array]:
    """``dup_groups`` [rows, 3], ``dup_loffs`` [rows], ``dup_counts`` [2] from slot lists in source order.

    A group is a slot that other slots repeat: (primary slot, start in ``dup_loffs``, count).
    """
    groups, entries = np.zeros((rows, 3), np.int32), np.zeros(rows, np.int32)
    repeat = codes < 0
    found = np.flatnonzero(repeat)
    if len(found) == 0:
        return groups, entries, np.zeros(2, np.int32)
    entries[: len(found)] = ~codes[found]
    first = np.flatnonzero(~repeat[found - 1])
    groups[: len(first), 0] = codes[found[first] - 1]
    groups[: len(first), 1] = first
    groups[: len(first), 2] = np.diff(first, append=len(found))
    return groups, entries, np.array([len(first), len(found)], np.int32)


def remote_stats(g: Geometry, shared: Shared, rank: int) -> Array:
    """Remote experts computed here; copy slots anywhere that hold one of my experts."""
    mine = shared.copies // g.epn == rank
    return np.array([(shared.copies[rank] >= 0).sum(), (mine & (shared.copies >= 0)).sum()], np.int32)


def ramps(first: Array, length: Array) -> Array:
    """``first[i], first[i]+1, ...`` for ``length[i]`` numbers, one after another.

    >>> ramps(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(length, dtype=first.dtype) - length.astype(first.dtype)
    made = np.repeat(first - before, length)
    made += np.arange(len(made), dtype=first.dtype)
    return made


def changes(keys: Array) -> Array:
    """Where an entry of a sorted array differs from the one before it.

    >>> changes(np.array([2, 2, 5])).tolist()
    [True, False, True]
    """
    first = np.ones(len(keys), bool)
    np.not_equal(keys[1:], keys[:-1], out=first[1:])
    return first


def run_lengths(first: Array) -> Array:
    """Lengths of the runs that begin where ``first`` says.

    >>> run_lengths(np.array([True, False, True])).tolist()
    [2, 1]
    """
    return np.diff(np.flatnonzero(first), append=len(first))


def positions_in_runs(first: Array) -> Array:
    """How many entries of its run stand before each entry.

    >>> positions_in_runs(np.array([True, False, True, False, False])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.flatnonzero(first).astype(np.int32)
    return np.arange(len(first), dtype=np.int32) - np.repeat(starts, np.diff(starts, append=len(first)))


def stable_order(keys: Array, below: int) -> Array:
    """Stable sorting order of integers in [0, below); a radix sort where 16 bits suffice."""
    return np.argsort(keys.astype(_small(below), copy=False), kind="stable")


def _small(below: int) -> Any:
    """The smallest unsigned type for numbers below a bound."""
    return np.min_scalar_type(max(below - 1, 0))
