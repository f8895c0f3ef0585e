"""Schedules: a plan as rounds of messages."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from .._errors import InvalidMapError, LimitError, UnsupportedError
from ..maps._reading import as_int, flag
from ..maps._space import BoolArray, IntArray
from ..plans import Entry, Program, TransferPlan, TreePlan
from ..plans._plan import as_tree
from ..plans._program import Dtypes, Parcels, as_dtypes, bytes_of, counted_words, starts_of, wire_sizes
from ._wire import cut, tree_wire

MESSAGE_BYTES = (1 << 31) - (1 << 20)  # stays below the int32 counts of every transport
SHARE = 8  # a block takes at most this part of the bound, so that a round fits several


def schedule(
    plan: TransferPlan | TreePlan, *, max_bytes: int | None = None, dtypes: Any = None, relay: bool = False
) -> Program:
    """The plan as rounds of messages, from global metadata alone.

    In every round the send and receive buffers of a rank together stay within ``max_bytes`` (with
    the words that open a run, where those take at most half of it): big blocks are cut across
    rounds, small ones share a message; without a bound everything that fits a message goes in one
    round.
    ``dtypes`` is one dtype name, a (source, target) pair, or a mapping by target name; where they
    differ the smaller travels. Without dtypes the counts assume 8 bytes per element and the first
    run schedules again with the real ones. Local copies are never on the wire.

    ``relay=True`` lets receivers forward: a holder sends each element once, to one of the ranks
    that want it, which sends it on to the others in a later round. Scaled copies go directly.

    Raises ``LimitError`` if one element does not fit ``max_bytes``.

    Cost: n log n in the blocks that cross ranks.

    >>> from shardalg import layout, plan, Replicate, Split
    >>> p = plan(layout((8, 8), Split(0), ranks=2), layout((8, 8), Split(1), ranks=2))
    >>> program = schedule(p, max_bytes=64, dtypes="float32")
    >>> len(program.rounds), program.wire_bytes, program.peak_staging
    (2, 128, 64)
    >>> p = plan(layout((8,), Replicate(), ranks=1), layout((8,), Replicate(), ranks=[1, 2]))
    >>> print(schedule(p, dtypes="uint8", relay=True))
    <Program of 2 rounds, 16 bytes on the wire, relay>
    round 0: 0->1 8 B
    round 1: 1->2 8 B
    """
    tree = as_tree(plan)
    if not all(e.plan.same_ranks for e in tree.entries):
        raise UnsupportedError(
            "the plan does not say which processes its ranks are: plan with source_ranks= and target_ranks="
        )
    flag(relay, "relay")
    if max_bytes is not None and as_int(max_bytes, "max_bytes") < 1:
        raise InvalidMapError(f"max_bytes must be at least 1, got {max_bytes}")
    if (max_bytes is not None or relay) and any(e.plan.rank is not None for e in tree.entries):
        raise UnsupportedError(
            "rounds need the whole plan: plan without rank=, or schedule without max_bytes and relay"
        )
    for e in tree.entries:
        _require_whole(e)
    pairs = as_dtypes(tree, dtypes)
    found = parcels(tree, pairs, max_bytes, relay)
    return Program(tree, pairs, max_bytes, found, isinstance(plan, TransferPlan), relay)


def _require_whole(e: Entry) -> None:
    """Refuse a plan that claims to fill its target and has fewer copies than that takes."""
    p = e.plan
    if p.rank is None and p.missing == "error" and p.map.single_valued and p.map.size < p.target.size:
        raise InvalidMapError(
            f"the plan{f' of {e.target!r}' if e.target else ''} writes {p.map.size} of {p.target.size} target"
            ' slots: plan again, or with missing="leave" if the rest is to stay as it is'
        )


def with_dtypes(program: Program, dtypes: Any) -> Program:
    """The same program once the dtypes are known."""
    pairs = as_dtypes(program.plan, dtypes)
    found = parcels(program.plan, pairs, program.max_bytes, program.relay)
    return Program(program.plan, pairs, program.max_bytes, found, program.single, program.relay)


def parcels(tree: TreePlan, dtypes: Dtypes | None, max_bytes: int | None, relay: bool = False) -> Parcels:
    """The blocks that cross ranks, cut to fit, with the round each travels in."""
    sizes = wire_sizes(tree, dtypes)
    widest = int(sizes.max(initial=1))
    if max_bytes is not None and widest > max_bytes:
        raise LimitError(f"one element of {widest} bytes does not fit max_bytes={max_bytes}")
    room = MESSAGE_BYTES
    if max_bytes is not None:
        room = min(max_bytes - counted_words(max_bytes, tree), MESSAGE_BYTES)
    chunk = max(room // SHARE, widest)
    rows, feed = tree_wire(tree, chunk // sizes.max(axis=0, initial=1), relay)
    order = np.lexsort((rows[5], rows[4], rows[3], -sizes[rows[6], rows[3]], rows[2], rows[1], rows[6]))
    rows, feed = rows[:, order], feed[order]
    blocks = Stream(rows[1], rows[2], bytes_of(Parcels(rows), sizes))
    used = Rounds(None if max_bytes is None else room)
    first = feed < 0
    rounds = np.zeros(len(order), np.int64)
    rounds[first] = used.place(blocks.take(first), chunk)
    if not first.all():
        brought = np.empty(len(order), np.int64)
        brought[order] = rounds
        rounds[~first] = used.place(blocks.take(~first), chunk, brought[feed[~first]] + 1)
    return _ordered(np.concatenate([rounds[None], rows[1:]]), sizes)


def slabs(program: Program, bound: int) -> Parcels:
    """The parcels with rounds of more than ``bound`` bytes of staging cut into turns that stay
    below it; rounds are now turns, in the order of the rounds they come from."""
    rows, sizes = program.parcels.rows, program.wire_sizes
    if max((max(r.staging.values(), default=0) for r in program.rounds), default=0) <= bound:
        return program.parcels
    widest = int(sizes.max(initial=1))
    chunk = max(bound // SHARE, widest)
    done, count = [rows[:, :0]], 0
    for k, its in enumerate(program.rounds):
        mine = rows[:, slice(*np.searchsorted(rows[0], [k, k + 1]))]
        if max(its.staging.values()) > bound:
            mine = cut(mine, chunk // widest)
            turns = Rounds(bound).place(Stream(mine[1], mine[2], bytes_of(Parcels(mine), sizes)), chunk)
        else:
            turns = np.zeros(mine.shape[1], np.int64)
        done.append(np.concatenate([turns[None] + count, mine[1:]]))
        count += int(turns.max()) + 1
    return _ordered(np.concatenate(done, axis=1), sizes)


def _ordered(rows: IntArray, sizes: IntArray) -> Parcels:
    """By round, source and target; big elements before small ones, so that every block in a
    message is aligned."""
    return Parcels(rows[:, np.lexsort((-sizes[rows[6], rows[3]], rows[2], rows[1], rows[0]))])


class Stream(NamedTuple):
    """Blocks in wire order, those of one source and target side by side."""

    source: IntArray
    target: IntArray
    size: IntArray

    def take(self, picked: IntArray | BoolArray) -> Stream:
        return Stream(*(x[picked] for x in self))


class Rounds:
    """Rounds being filled. ``bound`` is for the bytes a rank sends and receives in one; without
    it rounds only keep messages below their limit."""

    def __init__(self, bound: int | None) -> None:
        self.bound = bound
        self.used: dict[int, list[int]] = {}
        self.count = 0

    def place(self, blocks: Stream, chunk: int, after: IntArray | None = None) -> IntArray:
        """The round of each block, none before ``after``: the earliest with room at both ends.

        Blocks of one pair of ranks are fused up to ``chunk`` bytes. Pairs are taken by shift, target
        minus source, so that early rounds pair all ranks.
        """
        if not len(blocks.size):
            return np.zeros(0, np.int64)
        fresh, turn = _fused(blocks, MESSAGE_BYTES - chunk if self.bound is None else chunk, self.bound)
        first = np.flatnonzero(fresh)
        if self.bound is None:
            rounds = turn[first] + self.count
        else:
            source, target, size = (
                blocks.source[first],
                blocks.target[first],
                np.add.reduceat(blocks.size, first),
            )
            least = np.zeros(len(first), np.int64) if after is None else np.maximum.reduceat(after, first)
            shift = (target - source) % (int(max(source.max(), target.max())) + 1)
            order = np.lexsort((source, shift, turn[first], least))
            rounds = np.empty(len(first), np.int64)
            rounds[order] = self._earliest(*(x[order].tolist() for x in (source, target, size, least)))
        self.count = max(self.count, int(rounds.max()) + 1)
        found: IntArray = rounds[np.cumsum(fresh) - 1]
        return found

    def _earliest(
        self, sources: list[int], targets: list[int], sizes: list[int], least: list[int]
    ) -> list[int]:
        assert self.bound is not None
        bound, used, small = self.bound, self.used, min(sizes)
        for rank in {*sources, *targets}:
            used.setdefault(rank, [0])
        start = dict.fromkeys(used, 0)  # rounds before this one are full
        rounds = []
        for s, t, size, r in zip(sources, targets, sizes, least):
            a, b = used[s], used[t]
            r = max(r, start[s], start[t])
            while (r < len(a) and a[r] + size > bound) or (r < len(b) and b[r] + size > bound):
                r += 1
            for rank, its in ((s, a), (t, b)):
                if r >= len(its):
                    its.extend([0] * (r + 1 - len(its)))
                its[r] += size
                if its[r] + small > bound and start[rank] == r:
                    start[rank] = r + 1
            rounds.append(r)
        return rounds


def _fused(blocks: Stream, chunk: int, bound: int | None) -> tuple[BoolArray, IntArray]:
    """Which blocks begin a new unit of about ``chunk`` bytes, and each block's turn: how many
    units its pair of ranks has before."""
    pair = starts_of(np.stack([blocks.source, blocks.target]))
    fresh = pair.copy()
    if bound is not None and 2 * chunk > bound:  # two blocks might not fit: every block alone
        fresh[:] = True
    else:
        before = np.cumsum(blocks.size) - blocks.size
        unit = (before - before[np.flatnonzero(pair)][np.cumsum(pair) - 1]) // chunk
        fresh[1:] |= unit[1:] != unit[:-1]
    number = np.cumsum(fresh) - 1
    return fresh, number - number[np.flatnonzero(pair)][np.cumsum(pair) - 1]
