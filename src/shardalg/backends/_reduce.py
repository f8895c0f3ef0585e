"""Plans that add: several slots arrive at one.

Such a plan (an ``adjoint``) runs as an ordinary one into a *deposit*, one slot per arrival, and
each rank then adds its deposit up locally, in (source rank, slot) order. So the sum does not depend
on rounds or on the order in which messages come.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from .._limits import Budget, Limits
from ..maps import AffineMap, Box, Space
from ..maps._composed import composed
from ..maps._map import remember
from ..maps._relation import DOMAIN, collides
from ..maps._space import IntArray, Shape
from ..maps._table import Columns, build
from ..ops._blocks import block
from ..plans import TransferPlan
from ..plans._stats import box_ranks

# Dtypes that torch cannot add in place are added in these.
WIDER = {
    torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64,
    torch.float8_e4m3fn: torch.float32, torch.float8_e5m2: torch.float32,
    torch.float8_e4m3fnuz: torch.float32, torch.float8_e5m2fnuz: torch.float32,
}  # fmt: skip


class Addition(NamedTuple):
    """A block of a deposit and the block of the target it is added to; ``clash`` where it adds
    several of its slots to one."""

    shape: Shape
    at: int
    offset: int
    strides: Shape


class Sum(NamedTuple):
    """What one target box adds up from its deposit: blocks in order, or, where blocks of one
    rank clash, layers of (target slot, deposit slot) without a duplicate inside."""

    target: Box
    deposit: Box
    blocks: tuple[Addition, ...]
    layers: tuple[tuple[IntArray, IntArray], ...]


def adds(plan: TransferPlan) -> bool:
    """Whether several slots arrive at one."""
    return not plan.map.single_valued


def deposited(plan: TransferPlan) -> tuple[TransferPlan, tuple[Sum, ...]]:
    """The plan that brings every arrival to a slot of its own, and how each target box adds up."""
    c = plan.map.table.columns
    source_rank = box_ranks(plan, "source")[c.cod_box]
    order = np.lexsort((c.cod_offset, c.cod_box, source_rank, c.dom_box))
    c = Columns(*(x[..., order] for x in c))
    sizes = np.prod(c.shape, axis=0, dtype=np.int64)
    ends = np.cumsum(sizes)
    first = np.searchsorted(c.dom_box, np.arange(len(plan.target.domain)))
    before = np.concatenate([[0], ends])[first]
    at = ends - sizes - before[c.dom_box]
    counts = np.diff([*before, ends[-1]])
    boxes = tuple(Box((int(n),), b.rank, b.name) for n, b in zip(counts, plan.target.domain.boxes))
    strides = _row_major(c.shape)
    table = build(c._replace(dom_offset=at, dom_strides=strides))
    limits = Limits()
    space = Space(boxes)
    copies = remember(AffineMap(space, plan.source.domain, table), single_valued=True)
    held = AffineMap(space, plan.source.codomain, composed(plan.source.table, table, limits, Budget(limits)))
    whole = TransferPlan(
        plan.source, held, copies, f"deposit({plan.select})", "leave", plan.source_ranks,
        plan.target_ranks, plan.rank, plan.pairs, plan.same_ranks,
    )  # fmt: skip
    return whole, tuple(_sums(plan, boxes, c, at, source_rank[order]))


def _row_major(shape: IntArray) -> IntArray:
    strides = np.ones_like(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return strides


def _sums(
    plan: TransferPlan, boxes: tuple[Box, ...], c: Columns, at: IntArray, source_rank: IntArray
) -> list[Sum]:
    clash = _clashing(c, source_rank)
    found = []
    for k, (target, deposit) in enumerate(zip(plan.target.domain.boxes, boxes)):
        its = np.flatnonzero(c.dom_box == k)
        if np.isin(k, clash):
            found.append(Sum(target, deposit, (), _layers(c, its, at, source_rank)))
        else:
            found.append(Sum(target, deposit, tuple(_addition(c, i, at) for i in its.tolist()), ()))
    return found


def _addition(c: Columns, i: int, at: IntArray) -> Addition:
    return Addition(
        tuple(c.shape[:, i].tolist()), int(at[i]), int(c.dom_offset[i]), tuple(c.dom_strides[:, i].tolist())
    )


def _clashing(c: Columns, source_rank: IntArray) -> IntArray:
    """Target boxes where one source rank sends several slots to one."""
    width = int(source_rank.max(initial=0)) + 1
    if not collides(build(c._replace(dom_box=c.dom_box * width + source_rank)), DOMAIN):
        return np.zeros(0, np.int64)
    return np.unique(c.dom_box)


def _layers(
    c: Columns, its: IntArray, at: IntArray, source_rank: IntArray
) -> tuple[tuple[IntArray, IntArray], ...]:
    """Arrivals slot by slot, in (source rank, slot) order: the k-th arrivals of all slots together."""
    rows = []
    for i in its.tolist():
        shape = tuple(c.shape[:, i].tolist())
        index = np.indices(shape).reshape(len(shape), math.prod(shape))
        slot = c.dom_offset[i] + c.dom_strides[:, i] @ index
        sent = c.cod_offset[i] + c.cod_strides[:, i] @ index
        same = np.ones_like(slot)
        place = at[i] + np.arange(len(slot))
        rows.append(np.stack([slot, source_rank[i] * same, c.cod_box[i] * same, sent, place]))
    if not rows:
        return ()
    all_ = np.concatenate(rows, axis=1)
    slot, *_, deposit = all_[:, np.lexsort((all_[3], all_[2], all_[1], all_[0]))]
    starts = np.flatnonzero(np.diff(slot, prepend=-1))
    turn = np.arange(len(slot)) - np.repeat(starts, np.diff([*starts, len(slot)]))
    return tuple((slot[turn == k], deposit[turn == k]) for k in range(int(turn.max()) + 1))


def add_up(its: Sum, deposit: torch.Tensor, target: torch.Tensor) -> None:
    """Write the sums of a flat deposit into a flat target; slots where nothing arrives stay."""
    wide = WIDER.get(target.dtype)
    into = target if wide is None else target.to(wide)
    _add(its, deposit if wide is None else deposit.to(wide), into)
    if wide is not None:
        target.copy_(into)


def _add(its: Sum, deposit: torch.Tensor, into: torch.Tensor) -> None:
    views = [block(into, b.shape, b.strides, b.offset) for b in its.blocks]
    for view in views:
        view.zero_()
    for view, b in zip(views, its.blocks):
        view.add_(deposit[b.at : b.at + view.numel()].view(view.shape))
    for k, (slot, sent) in enumerate(its.layers):
        at, values = _index(slot, into), deposit[_index(sent, into)]
        into[at] = values if k == 0 else into[at] + values


def _index(numbers: IntArray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(like.device)
