"""Programs: a plan as rounds of messages under a memory bound."""

from __future__ import annotations

from functools import cached_property
from typing import Any, TypeAlias

import numpy as np

from .._struct import struct
from ..maps._space import IntArray
from ._dtypes import dtype_name, itemsize
from ._plan import Entry, TreePlan

PARCEL_HEAD = 6  # round, source rank, target rank, entry, source box, offset
ASSUMED_ITEMSIZE = 8  # bytes per element where dtypes are not known yet

Dtypes: TypeAlias = tuple[tuple[str, str], ...]  # per entry: (source dtype, target dtype)


class Parcels:
    """Blocks that travel, as int64 columns: ``[6 + 2 * axes, n]`` with the extents and source
    strides of each block after the head. Ordered by round, source, target, then wire order."""

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

    @cached_property
    def staging(self) -> dict[int, int]:
        """Bytes of send and receive buffers per rank."""
        held: dict[int, int] = {}
        for m in self.messages:
            for rank in (m.source, m.target):
                held[rank] = held.get(rank, 0) + m.size
        return held


@struct
class Program:
    """A tree plan as rounds: made from global metadata alone, hence the same on every rank.

    ``dtypes`` are pairs (source, target) per entry of the plan, None until the first run
    tells; counts then assume 8 bytes per element. In no round do the send and receive buffers
    of a rank exceed ``max_bytes`` together.
    """

    plan: TreePlan
    dtypes: Dtypes | None
    max_bytes: int | None
    parcels: Parcels
    single: bool = False

    def __repr__(self) -> str:
        bound = "" if self.max_bytes is None else f", max_bytes={self.max_bytes}"
        return f"<Program of {len(self.rounds)} rounds, {self.wire_bytes} bytes on the wire{bound}>"

    @cached_property
    def wire_sizes(self) -> IntArray:
        """Bytes per element on the wire, per entry."""
        return np.array(wire_sizes(self.plan, self.dtypes), np.int64)

    @cached_property
    def parcel_bytes(self) -> IntArray:
        """Bytes of each parcel."""
        sizes: IntArray = self.parcels.elements * self.wire_sizes[self.parcels.rows[3]]
        return sizes

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross ranks in all rounds."""
        return int(self.parcel_bytes.sum())

    @cached_property
    def lower_bound(self) -> int | None:
        """The fewest bytes that any plan for the same layouts could put on the wire."""
        total = 0
        for entry, size in zip(self.plan.entries, self.wire_sizes.tolist()):
            bound = entry.plan.stats.lower_bound
            if bound is None:
                return None
            total += bound * size
        return total

    @cached_property
    def rounds(self) -> tuple[Round, ...]:
        """The rounds with their messages; what a recording backend would send."""
        rows, sizes = self.parcels.rows, self.parcel_bytes.tolist()
        found: list[dict[tuple[int, int], list[int]]] = []
        for r, s, t, size in zip(rows[0].tolist(), rows[1].tolist(), rows[2].tolist(), sizes):
            while len(found) <= r:
                found.append({})
            its = found[r].setdefault((s, t), [0, 0])
            its[0] += size
            its[1] += 1
        return tuple(
            Round(tuple(Message(s, t, size, n) for (s, t), (size, n) in sorted(its.items()))) for its in found
        )

    @cached_property
    def peak_staging(self) -> int:
        """The most bytes of buffers that any rank needs in any round."""
        return max((max(r.staging.values(), default=0) for r in self.rounds), default=0)

    @property
    def digest(self) -> str:
        """The plan's digest with the bound: equal on ranks that run the same program."""
        return f"{self.plan.digest}:{self.max_bytes}:{self.dtypes}"


def wire_sizes(plan: TreePlan, dtypes: Dtypes | None) -> list[int]:
    """Bytes per element on the wire, per entry."""
    if dtypes is None:
        return [ASSUMED_ITEMSIZE] * len(plan.entries)
    return [itemsize(wire_dtype(e, pair)) for e, pair in zip(plan.entries, dtypes)]


def wire_dtype(entry: Entry, dtypes: tuple[str, str]) -> str:
    """The dtype that travels: the target's where that is smaller, so that the sender casts; the
    source's otherwise, and where copies are scaled, since scaling comes before the cast."""
    source, target = dtypes
    shrinks = itemsize(target) < itemsize(source) and not entry.plan.map.table.scaled
    return target if shrinks else source


def as_dtypes(plan: TreePlan, dtypes: Any) -> Dtypes | None:
    """Pairs per entry from one dtype, a (source, target) pair, or a mapping by target name."""
    if dtypes is None:
        return None

    def pair(given: Any) -> tuple[str, str]:
        a, b = given if isinstance(given, tuple) else (given, given)
        return dtype_name(a), dtype_name(b)

    if isinstance(dtypes, dict):
        return tuple(pair(dtypes[e.target]) for e in plan.entries)
    return tuple(pair(dtypes) for _ in plan.entries)
