"""The blocks of a plan that cross ranks: direct ones, and ones that receivers forward."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._errors import LimitError
from ..maps._space import IntArray
from ..maps._table import Columns
from ..plans import TransferPlan, TreePlan
from ..plans._program import PARCEL_HEAD
from ..plans._stats import box_ranks, wire_table
from ._holders import atoms

FEW = 256  # elements per receiver below which a relayed region goes to one of them whole
MOST_BLOCKS = 1 << 23  # as many as Limits().copies


class Wire(NamedTuple):
    """Columns as in ``Parcels`` (rounds still 0), and for each forwarded block the position of
    the block that brings it to its sender, -1 for others."""

    rows: IntArray
    feed: IntArray


def tree_wire(tree: TreePlan, most: IntArray, relay: bool) -> Wire:
    """The blocks of all entries, none of entry k with more than ``most[k]`` elements.

    Entries that share a plan share the work.
    """
    made: dict[tuple[int, int], Wire] = {}
    parts = []
    for k, e in enumerate(tree.entries):
        key = (id(e.plan), int(most[k]))
        if key not in made:
            made[key] = relayed(e.plan, key[1]) if relay else direct(e.plan, key[1])
        parts.append(made[key])
    joined = _joined(parts)
    joined.rows[3] = np.repeat(np.arange(len(parts)), np.array([len(p.feed) for p in parts], np.int64))
    return joined


def _joined(parts: list[Wire]) -> Wire:
    """The blocks of all parts as one."""
    if not len(parts):
        return Wire(np.zeros((PARCEL_HEAD, 0), np.int64), np.zeros(0, np.int64))
    axes = max((len(p.rows) - PARCEL_HEAD) // 2 for p in parts)
    counts = np.array([p.rows.shape[1] for p in parts], np.int64)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    feed = np.concatenate([p.feed for p in parts])
    rows = np.concatenate([_widened(p.rows, axes) for p in parts], axis=1)
    return Wire(rows, np.where(feed < 0, -1, feed + before))


def _widened(rows: IntArray, axes: int) -> IntArray:
    mine = (len(rows) - PARCEL_HEAD) // 2
    extra = ((0, axes - mine), (0, 0))
    shape, strides = rows[PARCEL_HEAD : PARCEL_HEAD + mine], rows[PARCEL_HEAD + mine :]
    return np.concatenate(
        [rows[:PARCEL_HEAD], np.pad(shape, extra, constant_values=1), np.pad(strides, extra)]
    )


def direct(plan: TransferPlan, most: int) -> Wire:
    """Each block from the rank that the plan chose."""
    c = wire_table(plan).columns
    source, target = box_ranks(plan, "source")[c.cod_box], box_ranks(plan, "target")[c.dom_box]
    away = np.flatnonzero(source != target)
    rows = cut(_columns(c, away, source[away], target[away]), most)
    return Wire(rows, np.full(rows.shape[1], -1, np.int64))


def _columns(c: Columns, picked: IntArray, source: IntArray, target: IntArray) -> IntArray:
    """Pieces as blocks of source slots, strides made positive."""
    shape, strides, offset = c.shape[:, picked], c.cod_strides[:, picked], c.cod_offset[picked]
    offset = offset + np.where(strides < 0, strides * (shape - 1), 0).sum(axis=0)
    zero = np.zeros(len(picked), np.int64)
    head = np.stack([zero, source, target, zero, c.cod_box[picked], offset, zero])
    return np.concatenate([head, shape, np.abs(strides)])


def _sizes(rows: IntArray) -> IntArray:
    """Elements of each block."""
    shape = rows[PARCEL_HEAD : PARCEL_HEAD + (len(rows) - PARCEL_HEAD) // 2]
    sizes: IntArray = np.prod(shape, axis=0, dtype=np.int64)
    return sizes


def cut(rows: IntArray, most: int) -> IntArray:
    """Blocks of more than ``most`` elements in even slabs along their outer axes."""
    axes = (len(rows) - PARCEL_HEAD) // 2
    for k in range(axes):
        size = _sizes(rows)
        if not (size > most).any():
            break
        extent = rows[PARCEL_HEAD + k]
        step = np.maximum(1, most // (size // extent))
        count = np.where(size > most, -(-extent // step), 1)
        total = int(count.sum(dtype=object))
        if total > MOST_BLOCKS:
            raise LimitError(
                f"cutting to blocks of {most} elements gives {total} blocks, more than {MOST_BLOCKS};"
                " raise max_bytes"
            )
        even = -(-extent // count)
        count = -(-extent // even)
        rows, even = np.repeat(rows, count, axis=1), np.repeat(even, count)
        start = even * (np.arange(rows.shape[1]) - np.repeat(np.cumsum(count) - count, count))
        rows[PARCEL_HEAD + k] = np.minimum(even, rows[PARCEL_HEAD + k] - start)
        rows[5] += start * rows[PARCEL_HEAD + axes + k]
    return rows


# --- relay --------------------------------------------------------------------------------


def relayed(plan: TransferPlan, most: int) -> Wire:
    """Each region once from its holder, in even parts to the ranks that want it; each of them then
    sends its part to the others. Nobody sends more than it would in a ring."""
    if plan.map.table.scaled:
        return direct(plan, most)
    parts = [_spread(rows, wanted, turn, most) for turn, (rows, wanted) in enumerate(_wanted(plan))]
    return _joined(parts) if parts else direct(plan, most)


def _wanted(plan: TransferPlan) -> list[tuple[IntArray, list[int]]]:
    """Blocks of source slots with the other ranks that want all of them, ascending."""
    found = atoms(plan.map)
    c = found.table.columns
    source = box_ranks(plan, "source")[c.cod_box]
    to_global = dict(plan.target_ranks) if plan.target_ranks is not None else None
    wanted = [[to_global[r] for r in h] if to_global else list(h) for h in found.holders]
    once = np.flatnonzero(found.rank == np.array([h[0] for h in found.holders], np.int64)[found.atom])
    groups: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for k, a, s in zip(once.tolist(), found.atom[once].tolist(), source[once].tolist()):
        others = tuple(sorted(r for r in wanted[a] if r != s))
        if others:
            groups.setdefault((s, others), []).append(k)
    made = []
    for (s, others), its in sorted(groups.items()):
        picked = np.array(its, np.int64)
        made.append((_columns(c, picked, np.full(len(its), s), np.full(len(its), others[0])), list(others)))
    return made


def _spread(rows: IntArray, wanted: list[int], turn: int, most: int) -> Wire:
    """First hops in even parts over the ranks that want the blocks, then the forwarding."""
    ranks = np.roll(np.array(wanted, np.int64), -turn)
    count = len(ranks)
    total = int(_sizes(rows).sum())
    few = count == 1 or total < FEW * count
    rows = cut(rows, most if few else min(most, -(-total // count)))
    size = _sizes(rows)
    middle = np.cumsum(size) - (size + 1) // 2
    part = np.zeros(len(size), np.int64) if few else middle * count // total
    rows[2] = ranks[part]
    hops, feed = [rows], [np.full(len(size), -1, np.int64)]
    for shift in range(1, count):
        hop = rows.copy()
        hop[1], hop[2], hop[6] = ranks[part], ranks[(part + shift) % count], 1
        hops.append(hop)
        feed.append(np.arange(len(size)))
    return Wire(np.concatenate(hops, axis=1), np.concatenate(feed))
