"""Strided blocks cut into *cells*: two cells hold the same addresses or share none.

One sweep for all blocks, digit by digit from the slowest. Blocks that cannot meet are told apart first:
those whose ranges in a digit do not touch, and progressions of one step in other residues. What is left
together is cut at every end of a range in the digit; pieces between the same two ends go on together to
the next digit. So n blocks give their cells in n log n, where comparing them in pairs takes n squared.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ._digits import Blocks, Digits, forward, pad_axes, repeated, stack
from ._meet import cut_hard, groups, in_digits
from ._space import IntArray

FEW = 1 << 20  # cells that are always made
MOST = 64  # cells per block up to which a sweep is worth its cuts


class Cells(NamedTuple):
    """Cell k is a part of block ``block[k]``; ``cell[k]`` numbers its set of addresses. ``blocks`` are the
    cells as blocks; those of one number have the same axes in the same order."""

    block: IntArray
    cell: IntArray
    blocks: Blocks


def cells(x: Blocks, limits: Limits, budget: Budget) -> Cells | None:
    """The blocks cut into cells; None where they are no products of digits, repeat an address, or
    would fall apart into very many."""
    x = forward(x)
    if ((x.strides == 0) & (x.shape > 1)).any():
        return None
    parts: list[Cells] = []
    for some, _, chain in groups(x, x):
        its = x.take(some)
        cut = cut_hard(in_digits(its, its, chain, some, some, budget)[0], budget)
        rest = FEW + MOST * len(x.box) - sum(len(p.block) for p in parts)
        swept = None if len(cut.hard) else _swept(cut.digits, cut.blocks.box, rest)
        if swept is None:
            return None
        part = _written(swept, cut.blocks, cut.digits, cut.chain)
        first = parts[-1].cell.max() + 1 if parts else 0
        parts.append(Cells(cut.names[part.block], part.cell + first, part.blocks))
    if not parts:
        return None
    limits.hold("pieces", sum(len(p.block) for p in parts))
    return parts[0] if len(parts) == 1 else _joined(parts)


class _Level(NamedTuple):
    """One digit of all cells: the first address and index in the block, how many, and the step."""

    start: IntArray
    at: IntArray
    extent: IntArray
    step: IntArray

    def take(self, picked: IntArray) -> _Level:
        return _Level(*(x[picked] for x in self))


class _Swept(NamedTuple):
    """The block and number of each cell, and its digits, slowest first."""

    block: IntArray
    cell: IntArray
    levels: list[_Level]


def _swept(d: Digits, box: IntArray, most: int) -> _Swept | None:
    """All digits in turn, or None once there are more cells than ``most``."""
    row = np.arange(len(box))
    _, group = np.unique(box, return_inverse=True)
    group = group.reshape(-1)
    done: list[_Level] = []
    for k in reversed(range(len(d.start))):
        group = _apart(d, k, row, group)
        cut = _cut(d.start[k][row], d.step[k][row], d.extent[k][row], group, most)
        if cut is None:
            return None
        group, of, level = cut
        row = row[of]
        done = [*(x.take(of) for x in done), level]
    return _Swept(row, group, done)


def _apart(d: Digits, k: int, row: IntArray, group: IntArray) -> IntArray:
    """Finer groups, none of whose blocks meet in the digits up to ``k``."""
    while True:
        before = int(group.max()) + 1
        for j in range(k + 1):
            low = d.start[j][row]
            group = _islands(group, low, low + d.step[j][row] * (d.extent[j][row] - 1))
        if int(group.max()) + 1 == before:
            return group


def _islands(group: IntArray, low: IntArray, high: IntArray) -> IntArray:
    """Numbers of the maximal sets of closed ranges that touch each other within a group."""
    order = np.lexsort((low, group))
    ends, place = np.unique(np.concatenate([low, high]), return_inverse=True)
    first, last = place.reshape(2, -1)[:, order] + group[order] * len(ends)
    fresh = np.ones(len(order), bool)
    fresh[1:] = first[1:] > np.maximum.accumulate(last)[:-1]
    island = np.empty(len(order), np.int64)
    island[order] = np.cumsum(fresh) - 1
    return island


def _cut(
    start: IntArray, step: IntArray, extent: IntArray, group: IntArray, most: int
) -> tuple[IntArray, IntArray, _Level] | None:
    """Progressions cut where one of their group begins or ends: the new groups, which one each part
    is of, and the parts. A step longer than the group's common one is cut into single points."""
    common = _common_step(np.where(extent > 1, step, 0), group)[group]
    times = np.where((extent > 1) & (step > common), extent, 1)
    if int(times.sum()) > most:
        return None
    of, index = repeated(times)
    start = start[of] + index * step[of]
    extent, common = np.where(times[of] > 1, 1, extent[of]), common[of]
    at, residue = np.divmod(start, common)
    _, group = np.unique(np.stack([group[of], residue]), axis=1, return_inverse=True)
    group = _islands(group.reshape(-1), at, at + extent - 1)
    ends, place = np.unique(np.concatenate([at, at + extent]), return_inverse=True)
    low, high = place.reshape(2, -1) + group * len(ends)
    cuts = np.unique(np.concatenate([low, high]))
    low, high = np.searchsorted(cuts, low), np.searchsorted(cuts, high)
    if int((high - low).sum()) > most:
        return None
    part, on = repeated(high - low)
    here = low[part] + on
    begin, end = ends[cuts[here] % len(ends)], ends[cuts[here + 1] % len(ends)]
    level = _Level(
        begin * common[part] + residue[part], index[part] + begin - at[part], end - begin, common[part]
    )
    return here, of[part], level


def _common_step(step: IntArray, group: IntArray) -> IntArray:
    """The gcd of the steps of each group, 1 where there are none."""
    order = np.argsort(group, kind="stable")
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    found = np.gcd.reduceat(step[order], first)
    return np.where(found > 0, found, 1)


def _written(s: _Swept, x: Blocks, d: Digits, chain: list[int]) -> Cells:
    """The cells as blocks, their payload that of the blocks they are cut from."""
    offset = np.zeros(len(s.block), np.int64)
    pay, pay_strides, strides = x.pay_offset[:, s.block], [], []
    for level, k in zip(s.levels, reversed(range(len(chain)))):
        offset = offset + level.start * chain[k]
        per_step = d.payload[:, k][:, s.block]
        pay = pay + per_step * level.at
        live = level.extent > 1
        strides.append(np.where(live, level.step * chain[k], 0))
        pay_strides.append(np.where(live, per_step, 0))
    shape = np.array([level.extent for level in s.levels], np.int64)
    blocks = Blocks(
        x.box[s.block], offset, shape, np.array(strides, np.int64), pay, np.stack(pay_strides, axis=1)
    )
    return Cells(s.block, s.cell, blocks)


def _joined(parts: list[Cells]) -> Cells:
    axes = max(len(p.blocks.shape) for p in parts)
    wide = [pad_axes(p.blocks, axes) for p in parts]
    block, cell = (np.concatenate([p[i] for p in parts]) for i in (0, 1))
    return Cells(block, cell, stack(wide))
