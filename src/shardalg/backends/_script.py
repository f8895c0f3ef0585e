"""A program as one process will run it: moves between shards and buffers, all numbers ready."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ..maps import Box
from ..maps._meet import Blocks, meet
from ..maps._space import IntArray, Shape, row_major
from ..ops._tensors import strips
from ..plans import Program, TransferPlan
from ..plans._stats import box_ranks


class Move(NamedTuple):
    """A strided block between a shard and a message (or, locally, another shard).

    ``entry`` and ``box`` name the shard; ``at`` is the first byte in the buffer and
    ``buffer_strides`` run in elements.
    """

    entry: int
    box: Box
    shape: Shape
    strides: Shape
    offset: int
    at: int
    buffer_strides: Shape
    scale: tuple[int, int]


class Local(NamedTuple):
    """A copy within one rank."""

    entry: int
    shape: Shape
    source: Box
    source_offset: int
    source_strides: Shape
    target: Box
    target_offset: int
    target_strides: Shape
    scale: tuple[int, int]


class Turn(NamedTuple):
    """One rank's part of one round: bytes per peer, and the moves that fill and drain buffers."""

    send_bytes: dict[int, int]
    receive_bytes: dict[int, int]
    pack: tuple[tuple[int, Move], ...]
    unpack: tuple[tuple[int, Move], ...]


class Script(NamedTuple):
    """Everything the ranks of one process do, per rank and round."""

    turns: tuple[dict[int, Turn], ...]
    local: tuple[Local, ...]


def script(program: Program, ranks: tuple[int, ...]) -> Script:
    """The moves of ``program`` that concern ``ranks``."""
    rows, sizes = program.parcels.rows, program.parcel_bytes
    count = int(rows[0].max(initial=-1)) + 1
    offsets = _offsets(rows, sizes)
    turns: list[dict[int, Turn]] = []
    packs = {r: _packs(program, np.flatnonzero(rows[1] == r), offsets) for r in ranks}
    unpacks = {r: _unpacks(program, np.flatnonzero(rows[2] == r), offsets) for r in ranks}
    for k in range(count):
        here = np.flatnonzero(rows[0] == k)
        turns.append(
            {
                r: Turn(
                    _per_peer(rows, sizes, here, 1, 2, r), _per_peer(rows, sizes, here, 2, 1, r),
                    tuple(packs[r].get(k, ())), tuple(unpacks[r].get(k, ())),
                )
                for r in ranks
            }
        )  # fmt: skip
    return Script(tuple(turns), tuple(_locals(program, set(ranks))))


def _offsets(rows: IntArray, sizes: IntArray) -> IntArray:
    """The first byte of each parcel within its message."""
    starts = np.zeros(len(sizes), np.int64)
    before = 0
    last: tuple[int, ...] = ()
    for k, (key, size) in enumerate(zip(map(tuple, rows[:3].T.tolist()), sizes.tolist())):
        before = before if key == last else 0
        starts[k] = before
        before, last = before + size, key
    return starts


def _per_peer(
    rows: IntArray, sizes: IntArray, here: IntArray, mine: int, other: int, rank: int
) -> dict[int, int]:
    found: dict[int, int] = {}
    for k in here[rows[mine][here] == rank].tolist():
        peer = int(rows[other][k])
        found[peer] = found.get(peer, 0) + int(sizes[k])
    return found


def _packs(program: Program, picked: IntArray, offsets: IntArray) -> dict[int, list[tuple[int, Move]]]:
    """Moves into messages by round, each with its peer."""
    p = program.parcels
    found: dict[int, list[tuple[int, Move]]] = {}
    for k in picked.tolist():
        entry, box = int(p.rows[3][k]), int(p.rows[4][k])
        source = program.plan.entries[entry].plan.source.domain.boxes[box]
        live = p.shape[:, k] > 1
        shape, strides = tuple(p.shape[live, k].tolist()), tuple(p.strides[live, k].tolist())
        at = int(offsets[k])
        move = Move(entry, source, shape, strides, int(p.rows[5][k]), at, row_major(shape), (1, 1))
        found.setdefault(int(p.rows[0][k]), []).append((int(p.rows[2][k]), move))
    return found


def _unpacks(program: Program, picked: IntArray, offsets: IntArray) -> dict[int, list[tuple[int, Move]]]:
    """Moves out of messages by round: where each wire element is written, once or several times."""
    p, sizes = program.parcels, program.wire_sizes
    found: dict[int, list[tuple[int, Move]]] = {}
    for entry in np.unique(p.rows[3][picked]).tolist():
        its = picked[p.rows[3][picked] == entry]
        plan = program.plan.entries[entry].plan
        wire = _wire_blocks(program, its)
        rank = int(p.rows[2][its[0]])
        boxes = np.flatnonzero(box_ranks(plan, "target") == rank)
        wanted = _wanted_blocks(plan, boxes)
        limits = Limits()
        met = meet(wire, wanted, limits, Budget(limits))
        c = plan.map.table.columns
        pieces = np.flatnonzero(np.isin(c.dom_box, boxes))
        for k in range(len(met.left)):
            parcel, piece = int(its[met.left[k]]), int(pieces[met.right[k]])
            live = met.shape[:, k] > 1
            at = int(offsets[parcel]) + int(met.left_offset[0, k]) * int(sizes[entry])
            move = Move(
                entry, plan.target.domain.boxes[int(c.dom_box[piece])], tuple(met.shape[live, k].tolist()),
                tuple(met.right_strides[0, live, k].tolist()), int(met.right_offset[0, k]), at,
                tuple(met.left_strides[0, live, k].tolist()),
                (int(c.numerator[piece]), int(c.denominator[piece])),
            )  # fmt: skip
            found.setdefault(int(p.rows[0][parcel]), []).append((int(p.rows[1][parcel]), move))
    return found


def _wire_blocks(program: Program, its: IntArray) -> Blocks:
    """Parcels as blocks of source slots that carry their position in the message."""
    p = program.parcels
    shape = p.shape[:, its]
    inner = np.ones_like(shape)
    for k in range(len(shape) - 2, -1, -1):
        inner[k] = inner[k + 1] * shape[k + 1]
    return Blocks(
        p.rows[4][its],
        p.rows[5][its],
        shape,
        p.strides[:, its],
        np.zeros((1, len(its)), np.int64),
        inner[None],
    )


def _wanted_blocks(plan: TransferPlan, boxes: IntArray) -> Blocks:
    """The copies into some target boxes as blocks of source slots that carry target slots."""
    c = plan.map.table.columns
    pieces = np.flatnonzero(np.isin(c.dom_box, boxes))
    return Blocks(
        c.cod_box[pieces], c.cod_offset[pieces], c.shape[:, pieces], c.cod_strides[:, pieces],
        c.dom_offset[None, pieces], c.dom_strides[None][:, :, pieces],
    )  # fmt: skip


def _locals(program: Program, ranks: set[int]) -> Iterator[Local]:
    for entry, e in enumerate(program.plan.entries):
        plan = e.plan
        source, target = box_ranks(plan, "source"), box_ranks(plan, "target")
        for box in np.flatnonzero(np.isin(target, list(ranks))).tolist():
            for s in strips(plan.map, dom_box=box):
                if source[plan.source.domain.index(*s.element.key)] == target[box]:
                    yield Local(
                        entry, s.shape, s.element, s.element_offset, s.element_strides,
                        s.slot, s.slot_offset, s.slot_strides, s.scale,
                    )  # fmt: skip
