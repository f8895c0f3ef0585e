"""Programs: a plan as rounds of messages under a memory bound."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from .._errors import InvalidMapError
from .._struct import struct
from ..maps._space import BoolArray, IntArray, read_only
from ._dtypes import dtype_name, itemsize
from ._plan import Entry, TreePlan

PARCEL_HEAD = 7  # round, source rank, target rank, entry, source box, offset, hop
ASSUMED_ITEMSIZE = 8  # bytes per element where dtypes are not known yet
WORD_BYTES = 64  # what a rank tells each other one when a run opens

Dtypes: TypeAlias = tuple[tuple[str, str], ...]  # per entry: (source dtype, target dtype)


class Parcels:
    """Blocks that travel, as int64 columns: ``[7 + 2 * axes, n]`` with the extents and source
    strides of each block after the head. Ordered by round, source, target, then wire order.

    A block names elements by the slots of the source they come from. Hop 0 sends from there;
    hop 1 forwards what the sender has received before, from its own target.
    """

    __slots__ = ("_hash", "axes", "rows")

    def __init__(self, rows: IntArray) -> None:
        rows = np.ascontiguousarray(rows, np.int64)
        rows.setflags(write=False)
        self.rows = rows
        self.axes = (len(rows) - PARCEL_HEAD) // 2
        self._hash: int | None = None

    def __len__(self) -> int:
        return int(self.rows.shape[1])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Parcels) and np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.rows.shape, self.rows.tobytes()))
        return self._hash

    def __reduce__(self) -> tuple[type[Parcels], tuple[IntArray]]:
        return (Parcels, (np.array(self.rows),))

    @property
    def shape(self) -> IntArray:
        return self.rows[PARCEL_HEAD : PARCEL_HEAD + self.axes]

    @property
    def strides(self) -> IntArray:
        return self.rows[PARCEL_HEAD + self.axes :]

    @property
    def elements(self) -> IntArray:
        sizes: IntArray = np.prod(self.shape, axis=0, dtype=np.int64)
        return sizes


@struct
class Message:
    """What one rank sends another in one round; ``size`` in bytes."""

    source: int
    target: int
    size: int
    parcels: int


@struct
class Round:
    """Messages exchanged at once."""

    messages: tuple[Message, ...]

    def __str__(self) -> str:
        return ", ".join(f"{m.source}->{m.target} {m.size} B" for m in self.messages) or "nothing"

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends."""
        return _added((m.source, m.size) for m in self.messages)

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each rank receives."""
        return _added((m.target, m.size) for m in self.messages)

    @property
    def staging(self) -> dict[int, int]:
        """Bytes of send and receive buffers per rank."""
        return _added([*self.sent.items(), *self.received.items()])


def _added(pairs: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Sums by rank of (rank, bytes)."""
    sums: dict[int, int] = {}
    for rank, size in pairs:
        sums[rank] = sums.get(rank, 0) + size
    return sums


@struct
class Program:
    """A tree plan as rounds: made from global metadata alone, hence the same on every rank.

    ``dtypes`` are pairs (source, target) per entry of the plan, None until the first run
    tells; counts then assume 8 bytes per element. In no round do the send and receive buffers
    of a rank exceed ``max_bytes`` together. With ``relay`` receivers forward.
    """

    plan: TreePlan
    dtypes: Dtypes | None
    max_bytes: int | None
    parcels: Parcels
    single: bool = False
    relay: bool = False

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        relay = ", relay" if self.relay else ""
        rounds = f"{len(self.rounds)} round{'s' * (len(self.rounds) != 1)}"
        assumed = "" if self.dtypes is not None else f" at {ASSUMED_ITEMSIZE} bytes an element"
        return f"<Program of {rounds}, {self.wire_bytes} bytes on the wire{assumed}{bound}{relay}>"

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"round {k}: {r}" for k, r in enumerate(self.rounds))])

    @cached_property
    def wire_sizes(self) -> IntArray:
        """Bytes per element on the wire: ``[hop, entry]``."""
        return read_only(wire_sizes(self.plan, self.dtypes))

    @cached_property
    def parcel_bytes(self) -> IntArray:
        """Bytes of each parcel."""
        return read_only(bytes_of(self.parcels, self.wire_sizes))

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross ranks in all rounds."""
        return int(self.parcel_bytes.sum())

    @property
    def sent(self) -> dict[int, int]:
        """Bytes that each rank sends in all rounds."""
        return self._per_rank(1)

    @property
    def received(self) -> dict[int, int]:
        """Bytes that each rank receives in all rounds."""
        return self._per_rank(2)

    def _per_rank(self, side: int) -> dict[int, int]:
        return _added(zip(self.parcels.rows[side].tolist(), self.parcel_bytes.tolist()))

    @cached_property
    def lower_bound(self) -> int | None:
        """The fewest bytes that any plan for the same layouts could put on the wire."""
        total = 0
        for entry, size in zip(self.plan.entries, self.wire_sizes[0].tolist()):
            bound = entry.plan.stats.lower_bound
            if bound is None:
                return None
            total += bound * size
        return total

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds with their messages; what a recording backend would see."""
        rows, sizes = self.parcels.rows, self.parcel_bytes
        if not len(sizes):
            return ()
        first = np.flatnonzero(starts_of(rows[:3]))
        sums = np.add.reduceat(sizes, first)
        counts = np.diff([*first, len(sizes)])
        found: list[list[Message]] = [[] for _ in range(int(rows[0, -1]) + 1)]
        for r, s, t, size, n in zip(*rows[:3, first].tolist(), sums.tolist(), counts.tolist()):
            found[r].append(Message(s, t, size, n))
        return tuple(Round(tuple(its)) for its in found)

    @cached_property
    def peak_staging(self) -> int:
        """The most bytes of buffers that any rank needs in any round, with the words that open a
        run where the schedule counts them."""
        most = max((max(r.staging.values(), default=0) for r in self.rounds), default=0)
        return most + counted_words(self.max_bytes, self.plan) if most else 0

    @property
    def digest(self) -> str:
        """The plan's digest with the bound: equal on ranks that run the same program."""
        return f"{self.plan.digest}:{self.max_bytes}:{self.dtypes}:{self.relay}"


def starts_of(keys: IntArray) -> BoolArray:
    """Where a column differs from the one before it: the first of each run of equal columns."""
    fresh = np.ones(keys.shape[1], bool)
    fresh[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    return fresh


def bytes_of(p: Parcels, sizes: IntArray) -> IntArray:
    """Bytes of each parcel, from bytes per element by hop and entry."""
    found: IntArray = p.elements * sizes[p.rows[6], p.rows[3]]
    return found


def counted_words(max_bytes: int | None, plan: TreePlan) -> int:
    """Bytes of the words that a rank sends and receives when a run opens, one per peer. They count
    while they are at most half of the bound."""
    size = 2 * WORD_BYTES * max(0, len(ranks_of_plan(plan)) - 1)
    return size if max_bytes is not None and 2 * size <= max_bytes else 0


def ranks_of_plan(plan: TreePlan) -> set[int]:
    """Global ranks that send, receive or keep something."""
    distinct = {id(e.plan): e.plan for e in plan.entries}
    return {r for p in distinct.values() for s, t, _ in p.traffic for r in (s, t)}


def wire_sizes(plan: TreePlan, dtypes: Dtypes | None) -> IntArray:
    """Bytes per element on the wire: ``[hop, entry]``."""
    if dtypes is None:
        return np.full((2, len(plan.entries)), ASSUMED_ITEMSIZE, np.int64)
    hops = [
        [itemsize(wire_dtype(e, p)) for e, p in zip(plan.entries, dtypes)],
        [itemsize(p[1]) for p in dtypes],
    ]
    return np.array(hops, np.int64).reshape(2, len(plan.entries))


def wire_dtype(entry: Entry, dtypes: tuple[str, str], hop: int = 0) -> str:
    """The dtype that travels: the target's where that is smaller, so that the sender casts; the
    source's otherwise, and where copies are scaled, since scaling comes before the cast. What is
    forwarded is the target's already."""
    source, target = dtypes
    shrinks = itemsize(target) < itemsize(source) and not entry.plan.map.table.scaled
    return target if shrinks or hop else source


def as_dtypes(plan: TreePlan, dtypes: Any) -> Dtypes | None:
    """Pairs per entry from one dtype, a (source, target) pair, or a mapping by target name."""
    if dtypes is None:
        return None
    if not isinstance(dtypes, Mapping):
        return (_pair(dtypes),) * len(plan.entries)
    names = [e.target for e in plan.entries]
    without = [n for n in names if n not in dtypes]
    unknown = [n for n in dtypes if n not in {*names, *dict(plan.tied)}]
    if without or unknown:
        raise InvalidMapError(
            f"dtypes= must name the tensors of the plan, {names[:8]}: {without[:8]} are missing,"
            f" {unknown[:8]} unknown"
        )
    return tuple(_pair(dtypes[name]) for name in names)


def _pair(given: Any) -> tuple[str, str]:
    if isinstance(given, tuple):
        if len(given) != 2:
            raise InvalidMapError(f"a pair of dtypes is (source, target), got {given!r}")
        return dtype_name(given[0]), dtype_name(given[1])
    return dtype_name(given), dtype_name(given)
