"""A program as one process will run it: all numbers ready, columns rather than objects."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ..maps._meet import Blocks, meet
from ..maps._space import IntArray
from ..maps._table import Columns
from ..plans import Program, TransferPlan
from ..plans._program import Parcels, bytes_of, starts_of
from ..plans._stats import box_ranks


class Moves(NamedTuple):
    """Strided blocks between shards and messages, one column per block.

    The shard is a box (position in the source's domain, or in the target's where ``own`` is
    "target") of an entry, ``offset`` and ``strides`` in its elements. ``at`` is the first byte in
    the message, ``buffer_strides`` run in elements. ``peer`` is the position of the other rank, and
    ``start`` the first byte of the message where all messages of a turn lie in one buffer.
    """

    entry: IntArray
    box: IntArray
    hop: IntArray
    peer: IntArray
    offset: IntArray
    at: IntArray
    start: IntArray
    numerator: IntArray
    denominator: IntArray
    shape: IntArray
    strides: IntArray
    buffer_strides: IntArray

    def take(self, picked: IntArray) -> Moves:
        return Moves(*(x[..., picked] for x in self))


class Part(NamedTuple):
    """One rank's part of one turn: bytes per peer in the order of the context's peers, moves from
    sources (``pack``) and from targets (``forward``) into messages, and from messages (``unpack``)."""

    send_bytes: list[int]
    receive_bytes: list[int]
    pack: Moves
    forward: Moves
    unpack: Moves


class Turn(NamedTuple):
    """What the ranks of one process do at once; ``round`` of the program, maybe one of several."""

    round: int
    parts: dict[int, Part]


class Locals(NamedTuple):
    """Copies between shards that this process holds both of, one column per copy."""

    entry: IntArray
    source: IntArray
    target: IntArray
    source_offset: IntArray
    target_offset: IntArray
    numerator: IntArray
    denominator: IntArray
    shape: IntArray
    source_strides: IntArray
    target_strides: IntArray


class Script(NamedTuple):
    """Everything the ranks of one process do; ``parcels`` are the program's, by turn."""

    program: Program
    parcels: Parcels
    turns: tuple[Turn, ...]
    local: Locals


def script(
    program: Program, ranks: tuple[int, ...], peers: tuple[int, ...], turns: Parcels | None = None
) -> Script:
    """The moves of ``program`` that concern ``ranks``, one turn per round.

    ``turns`` replaces the rounds where a transport wants smaller ones.
    """
    fine = program.parcels if turns is None else turns
    sizes = bytes_of(fine, program.wire_sizes)
    count = int(fine.rows[0].max(initial=-1)) + 1
    wire = _Wire(program, fine, sizes, _offsets(fine.rows, sizes), peers, count)
    parts = {r: _parts(wire, r) for r in ranks}
    made = [Turn(k, {r: parts[r][k] for r in ranks}) for k in range(count)]
    rounds = _round_of_turn(program, fine, count)
    made = [t._replace(round=r) for t, r in zip(made, rounds)]
    return Script(program, fine, tuple(made), local_copies(program, ranks))


def within(program: Program, ranks: tuple[int, ...]) -> Script:
    """A script for a process that holds every rank: all copies are local, nothing is sent."""
    return Script(program, program.parcels, (), local_copies(program, ranks, across=True))


def _round_of_turn(program: Program, fine: Parcels, count: int) -> list[int]:
    """The program's round that each turn is part of: bytes sent until then tell."""
    if fine is program.parcels:
        return list(range(count))
    bound = np.cumsum([sum(m.size for m in r.messages) for r in program.rounds])
    per_turn = np.bincount(fine.rows[0], bytes_of(fine, program.wire_sizes), count).astype(np.int64)
    return [int(r) for r in np.searchsorted(bound, np.cumsum(per_turn))]


class _Wire(NamedTuple):
    program: Program
    fine: Parcels
    sizes: IntArray
    offsets: IntArray
    peers: tuple[int, ...]
    turns: int


def _offsets(rows: IntArray, sizes: IntArray) -> IntArray:
    """The first byte of each parcel within its message."""
    if not len(sizes):
        return sizes
    before = np.cumsum(sizes) - sizes
    first = starts_of(rows[:3])
    found: IntArray = before - before[np.flatnonzero(first)][np.cumsum(first) - 1]
    return found


def _parts(wire: _Wire, rank: int) -> list[Part]:
    """One rank's part of every turn."""
    rows = wire.fine.rows
    out, into = np.flatnonzero(rows[1] == rank), np.flatnonzero(rows[2] == rank)
    send, receive = _message_bytes(wire, out, 2, rank), _message_bytes(wire, into, 1, rank)
    starts = [np.cumsum(x, axis=1) - x for x in (send, receive)]
    first_hop, later = out[rows[6, out] == 0], out[rows[6, out] == 1]
    pack = _started(_packs(wire, first_hop), rows[0, first_hop], starts[0])
    forward, of_later = _unpacks(wire, later, rank, 2)
    forward = _started(forward, rows[0, of_later], starts[0])
    unpack, of_into = _unpacks(wire, into, rank, 1)
    unpack = _started(unpack, rows[0, of_into], starts[1])
    groups = [
        _by_turn(m, rows[0, its], wire.turns)
        for m, its in ((pack, first_hop), (forward, of_later), (unpack, of_into))
    ]
    return [Part(s, r, *its) for s, r, *its in zip(send.tolist(), receive.tolist(), *groups)]


def _message_bytes(wire: _Wire, picked: IntArray, other: int, rank: int) -> IntArray:
    """Payload bytes ``[turn, peer]``."""
    count = len(wire.peers)
    where = wire.fine.rows[0, picked] * count + _position(wire.peers, wire.fine.rows[other, picked])
    sums = np.zeros(wire.turns * count, np.int64)
    np.add.at(sums, where, wire.sizes[picked])
    return sums.reshape(wire.turns, count)


def _position(peers: tuple[int, ...], ranks: IntArray) -> IntArray:
    order = np.argsort(peers)
    found: IntArray = order[np.searchsorted(np.array(peers)[order], ranks)]
    return found


def _started(m: Moves, turn: IntArray, starts: IntArray) -> Moves:
    return m._replace(start=starts[turn, m.peer]) if len(turn) else m


def _by_turn(m: Moves, turn: IntArray, count: int) -> list[Moves]:
    order = np.argsort(turn, kind="stable")
    bounds = np.searchsorted(turn[order], np.arange(count + 1))
    return [m.take(order[a:b]) for a, b in zip(bounds, bounds[1:])]


def _row_major(shape: IntArray) -> IntArray:
    inner = np.ones_like(shape)
    for k in range(len(shape) - 2, -1, -1):
        inner[k] = inner[k + 1] * shape[k + 1]
    return inner


def _packs(wire: _Wire, picked: IntArray) -> Moves:
    """Moves from source shards into messages: one per parcel."""
    p = wire.fine
    head = p.rows[:, picked]
    one = np.ones(len(picked), np.int64)
    shape = p.shape[:, picked]
    return Moves(
        head[3], head[4], head[6], _position(wire.peers, head[2]), head[5], wire.offsets[picked],
        np.zeros_like(one), one, one, shape, p.strides[:, picked], _row_major(shape),
    )  # fmt: skip


def _unpacks(wire: _Wire, picked: IntArray, rank: int, other: int) -> tuple[Moves, IntArray]:
    """Moves between messages and the target shards of ``rank``: where each wire element belongs,
    in one slot or several. Also the parcel behind each move. Entries that share a plan share the work.
    """
    p, sizes = wire.fine, wire.program.wire_sizes
    made: dict[tuple[int, bytes], tuple[Moves, IntArray]] = {}
    parts, parcels = [], []
    entries = p.rows[3, picked]
    order = np.argsort(entries, kind="stable")
    bounds = np.flatnonzero(starts_of(entries[order][None])) if len(order) else order
    for its in np.split(picked[order], bounds[1:]) if len(order) else []:
        entry = int(p.rows[3, its[0]])
        plan = wire.program.plan.entries[entry].plan
        key = (id(plan), p.rows[4:, its].tobytes())
        if key not in made:
            made[key] = _wanted_moves(plan, p, its, rank)
        m, of = made[key]
        parcel = its[of]
        parts.append(
            m._replace(
                entry=np.full(len(of), entry),
                peer=_position(wire.peers, p.rows[other, parcel]),
                at=wire.offsets[parcel] + m.at * sizes[m.hop, entry],
            )
        )
        parcels.append(parcel)
    return _together(parts), np.concatenate([np.zeros(0, np.int64), *parcels])


def _wanted_moves(plan: TransferPlan, p: Parcels, its: IntArray, rank: int) -> tuple[Moves, IntArray]:
    """Parcels met with what a rank wants; ``at`` counts elements within the parcel."""
    c = _wanted(plan, np.flatnonzero(box_ranks(plan, "target") == rank))
    limits = Limits()
    shape = p.shape[:, its]
    zero = np.zeros((1, len(its)), np.int64)
    wire = Blocks(p.rows[4, its], p.rows[5, its], shape, p.strides[:, its], zero, _row_major(shape)[None])
    wanted = Blocks(c.cod_box, c.cod_offset, c.shape, c.cod_strides, c.dom_offset[None], c.dom_strides[None])
    met = meet(wire, wanted, limits, Budget(limits))
    none = np.zeros(len(met.left), np.int64)
    moves = Moves(
        none, c.dom_box[met.right], p.rows[6, its[met.left]], none,
        met.right_offset[0], met.left_offset[0], none, c.numerator[met.right], c.denominator[met.right],
        met.shape, met.right_strides[0], met.left_strides[0],
    )  # fmt: skip
    return moves, met.left


def _wanted(plan: TransferPlan, boxes: IntArray) -> Columns:
    """The copies into some target boxes."""
    c = plan.map.table.columns
    picked = np.flatnonzero(np.isin(c.dom_box, boxes))
    return Columns(*(x[..., picked] for x in c))


def _together(parts: list[Moves]) -> Moves:
    axes = max((len(m.shape) for m in parts), default=0)
    none = np.zeros(0, np.int64)
    flat = np.zeros((axes, 0), np.int64)
    wide = [Moves(*(none,) * 9, flat, flat, flat)]
    for m in parts:
        extra = ((0, axes - len(m.shape)), (0, 0))
        wide.append(
            m._replace(
                shape=np.pad(m.shape, extra, constant_values=1),
                strides=np.pad(m.strides, extra),
                buffer_strides=np.pad(m.buffer_strides, extra),
            )
        )
    return Moves(*(np.concatenate(xs, axis=-1) for xs in zip(*wide)))


def local_copies(program: Program, ranks: tuple[int, ...], *, across: bool = False) -> Locals:
    """Copies within each of ``ranks``, or also ``across`` them."""
    made: dict[int, Columns] = {}
    parts: list[Columns] = []
    held = np.array(ranks, np.int64)
    for e in program.plan.entries:
        if id(e.plan) not in made:
            c = e.plan.map.table.columns
            source, target = box_ranks(e.plan, "source")[c.cod_box], box_ranks(e.plan, "target")[c.dom_box]
            here = np.isin(target, held) & (np.isin(source, held) if across else source == target)
            made[id(e.plan)] = Columns(*(x[..., np.flatnonzero(here)] for x in c))
        parts.append(made[id(e.plan)])
    entry = np.repeat(np.arange(len(parts)), [len(c.dom_box) for c in parts])
    axes = max((len(c.shape) for c in parts), default=0)
    wide = [_widened(c, axes) for c in parts] or [Columns(*(entry,) * 6, *(np.zeros((0, 0), np.int64),) * 3)]
    c = Columns(*(np.concatenate(xs, axis=-1) for xs in zip(*wide)))
    return Locals(
        entry, c.cod_box, c.dom_box, c.cod_offset, c.dom_offset, c.numerator, c.denominator, c.shape,
        c.cod_strides, c.dom_strides,
    )  # fmt: skip


def _widened(c: Columns, axes: int) -> Columns:
    extra = ((0, axes - len(c.shape)), (0, 0))
    return c._replace(
        shape=np.pad(c.shape, extra, constant_values=1),
        dom_strides=np.pad(c.dom_strides, extra),
        cod_strides=np.pad(c.cod_strides, extra),
    )
