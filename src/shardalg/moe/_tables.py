"""From counts and routing to the tables of one rank's plan: pure functions on NumPy arrays.

Each function is one step of the planner and is equal to a plain loop over routes; none of them
walks routes in Python. Names: e expert, d destination rank, s source rank, c count.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from .._errors import LimitError
from ._geometry import INT32_MIN, Geometry, capacities, round_up
from ._policy import checked_alloc, remote_experts

Array: TypeAlias = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Shared:
    """What all ranks know after the counts gather, and therefore agree on.

    ``counts`` [R, E] per source rank, ``alloc`` [E, R] per destination, ``base`` [E, R] first row
    of the expert's segment there, ``copies`` [R, B] the expert in each copy slot or -1, and the
    remote segments as ``slot_base`` and ``slot_count`` [R, B].
    """

    counts: Array
    alloc: Array
    base: Array
    copies: Array
    slot_base: Array
    slot_count: Array
    own_rows: Array

    @property
    def starts(self) -> Array:
        """[R, E]: position of a source's first route in the sequence of an expert."""
        return np.cumsum(self.counts, 0) - self.counts

    @property
    def ends(self) -> Array:
        """[E, R]: where a destination's part of an expert's sequence ends."""
        return np.cumsum(self.alloc, 1)


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
    return Shared(counts, alloc, base, copies, slot_base, slot_count, own_rows)


def _copy_slots(g: Geometry, alloc: Array) -> tuple[Array, Array, Array]:
    """Remote experts as (expert, rank, slot): by id, or by tokens and id descending in "slots"."""
    ranks, experts = np.nonzero(remote_experts(alloc).T)
    if g.layout == "slots":
        order = np.lexsort((-experts, -alloc[experts, ranks], ranks))
        ranks, experts = ranks[order], experts[order]
    slots = positions_in_runs(ranks)
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


def overlaps(shared: Shared, start: Array, count: Array, end: Array, size: Array) -> tuple[Array, Array]:
    """Where [start, start+count) and [end-size, end) of a sequence meet: (first position, length)."""
    low = np.maximum(start, end - size)
    return low, np.maximum(np.minimum(start + count, end) - low, 0)


@dataclass(frozen=True)
class Routes:
    """One source rank's routes: ``dst`` [S_r*K] as the plan stores it, and what it sends.

    Real routes by (destination, token, k): ``token``, ``route`` (flat index), ``primary`` and
    ``code``, the slot at the destination (``-slot-1`` for all but the first of a token there).
    ``sent`` [R] counts them by destination.
    """

    dst: Array
    route: Array
    code: Array
    sent: Array
    K: int


def route(g: Geometry, shared: Shared, rank: int, ids: Array) -> Routes:
    """Each route's slot: position g of an expert's sequence lies in the first segment that has it.

    Sorting a rank's routes by expert (stably) makes its part of every segment contiguous, so
    positions are a ramp per (expert, destination) and nothing is searched.
    """
    real = np.flatnonzero(ids >= 0) if ids.min(initial=0) < 0 else None
    wanted = ids if real is None else ids[real]
    ends = shared.ends
    low, length = overlaps(
        shared, shared.starts[rank][:, None], shared.counts[rank][:, None], ends, shared.alloc
    )
    value = np.arange(g.R) * g.NvS + shared.base + low - (ends - shared.alloc)
    order = stable_order(wanted, g.E)
    slot = np.empty(len(wanted), np.int32)
    slot[order] = ramps(value.ravel(), length.ravel()).astype(np.int32)
    rank_of = np.empty(len(wanted), _small(g.R))
    rank_of[order] = np.repeat(np.tile(np.arange(g.R, dtype=rank_of.dtype), g.E), length.ravel())
    flat = np.arange(len(ids), dtype=np.int32) if real is None else real.astype(np.int32)
    code = np.where(_first_of_token(flat // g.K, rank_of, g.R, len(ids) // g.K), slot, ~slot)
    dst = code if real is None else np.full(len(ids), INT32_MIN, np.int32)
    if real is not None:
        dst[real] = code
    by_rank = stable_order(rank_of, g.R)
    offset = slot - rank_of.astype(np.int32) * np.int32(g.NvS)
    local = np.where(code >= 0, offset, ~offset)
    return Routes(dst, flat[by_rank], local[by_rank], length.sum(0), g.K)


def received(shared: Shared, rank: int) -> Array:
    """[R]: routes that reach ``rank`` from every source, known before any list is exchanged."""
    end, size = shared.ends[:, rank], shared.alloc[:, rank]
    return overlaps(shared, shared.starts, shared.counts, end, size)[1].sum(1)


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
    before = np.cumsum(length) - length
    return np.repeat(first - before, length) + np.arange(int(length.sum()))


def positions_in_runs(keys: Array) -> Array:
    """How many equal keys stand directly before each entry of a sorted array.

    >>> positions_in_runs(np.array([2, 2, 5, 5, 5])).tolist()
    [0, 1, 0, 1, 2]
    """
    starts = np.flatnonzero(np.diff(keys, prepend=keys[:1] - 1))
    return np.arange(len(keys)) - np.repeat(starts, np.diff(starts, append=len(keys)))


def stable_order(keys: Array, below: int) -> Array:
    """Stable sorting order of integers in [0, below); a radix sort where 16 bits suffice."""
    return np.argsort(keys.astype(_small(below), copy=False), kind="stable")


def _small(below: int) -> Any:
    """The smallest unsigned type for numbers below a bound."""
    return np.min_scalar_type(max(below - 1, 0))


def _first_of_token(token: Array, rank_of: Array, ranks: int, tokens: int) -> Array:
    """Whether a route is its token's first (lowest k) to that rank.

    Writing route numbers backwards leaves the first one in each (token, rank) cell.
    """
    cell = token * np.intp(ranks) + rank_of
    first = np.empty(tokens * ranks, np.int32)
    index = np.arange(len(cell), dtype=np.int32)
    first[cell[::-1]] = index[::-1]
    return first[cell] == index  # type: ignore[no-any-return]
