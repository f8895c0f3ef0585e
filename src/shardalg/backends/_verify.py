"""A checksum per copy, so that a byte that changes on its way is noticed and named."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch

from ..maps._space import IntArray
from ..plans import Program
from ..plans._program import Parcels, bytes_of

SUM = np.dtype(np.uint32)


class Part(NamedTuple):
    """One copy's bytes in a message: its number among the program's blocks, first byte, size."""

    number: int
    at: int
    size: int


class Checks(NamedTuple):
    """The parts of every message by (turn, rank, peer), as sent and as received."""

    program: Program
    parcels: Parcels
    sent: dict[tuple[int, int, int], list[Part]]
    received: dict[tuple[int, int, int], list[Part]]

    def say(self, number: int) -> str:
        """A copy in words."""
        p = self.parcels
        turn, source, target, entry, box, offset = p.rows[:6, number].tolist()
        e = self.program.plan.entries[entry]
        its = e.plan.source.domain.boxes[box]
        live = p.shape[:, number] > 1
        return (
            f"the copy of {e.target!r} from rank {source} to rank {target} in turn {turn}: the block of"
            f" shape {tuple(p.shape[live, number].tolist())} at offset {offset} of {its!r}"
        )


def checks(program: Program, parcels: Parcels, ranks: tuple[int, ...]) -> Checks:
    """Where each copy lies in the messages of some ranks."""
    sent: dict[tuple[int, int, int], list[Part]] = {}
    received: dict[tuple[int, int, int], list[Part]] = {}
    rows, sizes = parcels.rows, bytes_of(parcels, program.wire_sizes)
    at = _first_bytes(rows[:3], sizes)
    mine = np.flatnonzero(np.isin(rows[1], ranks) | np.isin(rows[2], ranks))
    for k in mine.tolist():
        number, source, target = rows[:3, k].tolist()
        part = Part(k, int(at[k]), int(sizes[k]))
        sent.setdefault((number, source, target), []).append(part)
        received.setdefault((number, target, source), []).append(part)
    return Checks(program, parcels, sent, received)


def _first_bytes(keys: IntArray, sizes: IntArray) -> IntArray:
    """The first byte of each block in its message: blocks lie there in order, without gaps."""
    ends = np.cumsum(sizes)
    fresh = np.ones(keys.shape[1], bool)
    fresh[1:] = (keys[:, 1:] != keys[:, :-1]).any(axis=0)
    before: Any = np.maximum.accumulate(np.where(fresh, ends - sizes, 0)) if len(ends) else ends
    return ends - sizes - before  # type: ignore[no-any-return]


def sums_of(parts: list[Part], message: torch.Tensor) -> bytes:
    """The checksums of the parts of one message."""
    data: Any = message.cpu().numpy().data
    return np.array([zlib.crc32(data[p.at : p.at + p.size]) for p in parts], SUM).tobytes()


def first_difference(parts: list[Part], message: torch.Tensor, said: bytes) -> int | None:
    """The number of the first copy whose checksum is not what its sender said."""
    differs = np.flatnonzero(np.frombuffer(sums_of(parts, message), SUM) != np.frombuffer(said, SUM))
    return parts[int(differs[0])].number if len(differs) else None
