"""Schedules: a plan as rounds of messages."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from .._errors import InvalidMapError, LimitError, UnsupportedError
from ..maps._space import IntArray, as_int
from ..plans import Program, TransferPlan, TreePlan
from ..plans._plan import as_tree
from ..plans._program import PARCEL_HEAD, Dtypes, Parcels, as_dtypes, wire_sizes
from ..plans._stats import box_ranks, wire_table

MESSAGE_BYTES = (1 << 31) - (1 << 20)  # stays below the int32 counts of every transport


def schedule(
    plan: TransferPlan | TreePlan, *, max_bytes: int | None = None, dtypes: Any = None, relay: bool = False
) -> Program:
    """The plan as rounds of messages, from global metadata alone.

    In every round the send and receive buffers of a rank together stay within ``max_bytes``:
    big blocks are cut across rounds, small ones share a message; without a bound everything
    that fits a message goes in one round. ``dtypes`` is one dtype name, a (source, target) pair, or a
    mapping by target name; where they differ the smaller travels. Without dtypes the counts assume
    8 bytes per element and the first run schedules again with the real ones. Local copies
    are never on the wire.

    Raises ``LimitError`` if one element does not fit ``max_bytes``.

    >>> from shardalg import layout, plan, Split
    >>> p = plan(layout((8, 8), Split(0), ranks=2), layout((8, 8), Split(1), ranks=2))
    >>> program = schedule(p, max_bytes=64, dtypes="float32")
    >>> len(program.rounds), program.wire_bytes, program.peak_staging
    (2, 128, 64)
    """
    if relay:
        raise UnsupportedError("schedule(relay=True): forwarding by receivers is not built yet")
    tree = as_tree(plan)
    if not all(e.plan.same_ranks for e in tree.entries):
        raise UnsupportedError(
            "the plan does not say which processes its ranks are: plan with source_ranks= and target_ranks="
        )
    if max_bytes is not None and as_int(max_bytes, "max_bytes") < 1:
        raise InvalidMapError(f"max_bytes must be at least 1, got {max_bytes}")
    if max_bytes is not None and any(e.plan.rank is not None for e in tree.entries):
        raise UnsupportedError(
            "rounds need the whole plan: plan without rank=, or schedule without max_bytes"
        )
    pairs = as_dtypes(tree, dtypes)
    return Program(tree, pairs, max_bytes, parcels(tree, pairs, max_bytes), isinstance(plan, TransferPlan))


def parcels(tree: TreePlan, dtypes: Dtypes | None, max_bytes: int | None) -> Parcels:
    """The blocks that cross ranks, cut to fit, with the round each travels in."""
    sizes = wire_sizes(tree, dtypes)
    widest = max(sizes, default=1)
    if max_bytes is not None and widest > max_bytes:
        raise LimitError(f"one element of {widest} bytes does not fit max_bytes={max_bytes}")
    most = MESSAGE_BYTES // 2 if max_bytes is None else min(max(max_bytes // 4, widest), MESSAGE_BYTES // 2)
    blocks = [_entry_blocks(tree, k, most // size) for k, size in enumerate(sizes)]
    axes = max((b.axes for b in blocks), default=0)
    rows = (
        np.concatenate([_widened(b, axes) for b in blocks], axis=1)
        if blocks
        else np.zeros((PARCEL_HEAD, 0), int)
    )
    wire = np.array(sizes, np.int64)
    rows = rows[:, _wire_order(rows, wire)]
    found = Parcels(rows)
    rounds = _rounds(found, found.elements * wire[rows[3]], max_bytes)
    placed = np.concatenate([rounds[None], rows[1:]])
    return Parcels(placed[:, np.lexsort((np.arange(len(rounds)), rows[2], rows[1], rounds))])


def _wire_order(rows: IntArray, wire: IntArray) -> IntArray:
    """Big elements before small ones, so that every block in a message is aligned."""
    return np.lexsort((rows[5], rows[4], rows[3], -wire[rows[3]], rows[2], rows[1]))


def _widened(p: Parcels, axes: int) -> IntArray:
    extra = axes - p.axes
    shape = np.pad(p.shape, ((0, extra), (0, 0)), constant_values=1)
    return np.concatenate([p.rows[:PARCEL_HEAD], shape, np.pad(p.strides, ((0, extra), (0, 0)))])


def _entry_blocks(tree: TreePlan, k: int, most: int) -> Parcels:
    """The off-rank blocks of one entry, none with more than ``most`` elements."""
    plan = tree.entries[k].plan
    table = wire_table(plan)
    c = table.columns
    source, target = box_ranks(plan, "source")[c.cod_box], box_ranks(plan, "target")[c.dom_box]
    away = np.flatnonzero(source != target)
    head = np.stack([np.zeros(len(away), np.int64), source[away], target[away], np.full(len(away), k),
                     c.cod_box[away], c.cod_offset[away]])  # fmt: skip
    shape, strides = c.shape[:, away], c.cod_strides[:, away]
    return _cut(Parcels(np.concatenate([head, shape, strides])), most)


def _cut(p: Parcels, most: int) -> Parcels:
    """Blocks of more than ``most`` elements in slabs along their outer axes."""
    if not (p.elements > most).any():
        return p
    cut: list[list[int]] = []
    for column in p.rows.T.tolist():
        head, shape = column[:PARCEL_HEAD], column[PARCEL_HEAD : PARCEL_HEAD + p.axes]
        cut += _slabs(head, shape, column[PARCEL_HEAD + p.axes :], most)
    return Parcels(np.array(cut, np.int64).reshape(len(cut), len(p.rows)).T)


def _slabs(head: list[int], shape: list[int], strides: list[int], most: int) -> list[list[int]]:
    inner = int(np.prod(np.array(shape, dtype=object)))
    if inner <= most:
        return [[*head, *shape, *strides]]
    axis = next(k for k, n in enumerate(shape) if n > 1)
    inner //= shape[axis]
    step = max(1, most // inner)
    slabs: list[list[int]] = []
    for start in range(0, shape[axis], step):
        extent = min(step, shape[axis] - start)
        moved = [*head[:-1], head[-1] + start * strides[axis]]
        slabs += _slabs(moved, [*shape[:axis], extent, *shape[axis + 1 :]], strides, most)
    return slabs


def _rounds(p: Parcels, sizes: IntArray, max_bytes: int | None) -> IntArray:
    """The round of each parcel: the earliest with room at both ends and in the message.

    Parcels are taken by shift, target minus source, so that early rounds pair all ranks.
    """
    source, target = p.rows[1], p.rows[2]
    rounds = np.zeros(len(p), np.int64)
    if max_bytes is None and int(sizes.sum()) <= MESSAGE_BYTES:
        return rounds
    count = int(max(source.max(initial=0), target.max(initial=0))) + 1
    order = np.lexsort((np.arange(len(p)), source, (target - source) % count))
    turn = _turns(source[order], target[order])
    order = order[np.lexsort((np.arange(len(order)), turn))]
    room = _Room(max_bytes)
    for k in order.tolist():
        rounds[k] = room.place(int(source[k]), int(target[k]), int(sizes[k]))
    return rounds


def _turns(source: IntArray, target: IntArray) -> IntArray:
    """How many earlier parcels have the same source and target."""
    seen: defaultdict[tuple[int, int], int] = defaultdict(int)
    turns = []
    for pair in zip(source.tolist(), target.tolist()):
        turns.append(seen[pair])
        seen[pair] += 1
    return np.array(turns, np.int64)


class _Room:
    """Bytes left per rank and per message in each round."""

    def __init__(self, max_bytes: int | None) -> None:
        self.max_bytes = max_bytes
        self.ranks: list[defaultdict[int, int]] = []
        self.messages: list[defaultdict[tuple[int, int], int]] = []
        self.first: defaultdict[int, int] = defaultdict(int)  # no room before this round

    def place(self, source: int, target: int, size: int) -> int:
        r = max(self.first[source], self.first[target])
        while not self._fits(r, source, target, size):
            r += 1
        for rank in (source, target):
            self.ranks[r][rank] += size
            if self.max_bytes is not None and self.ranks[r][rank] >= self.max_bytes and self.first[rank] == r:
                self.first[rank] = r + 1
        self.messages[r][source, target] += size
        return r

    def _fits(self, r: int, source: int, target: int, size: int) -> bool:
        while len(self.ranks) <= r:
            self.ranks.append(defaultdict(int))
            self.messages.append(defaultdict(int))
        if self.messages[r][source, target] + size > MESSAGE_BYTES:
            return False
        bound = self.max_bytes
        return bound is None or all(self.ranks[r][rank] + size <= bound for rank in (source, target))
