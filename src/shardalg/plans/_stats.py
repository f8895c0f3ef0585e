"""What a plan moves, counted in elements."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from .._limits import Budget, Limits
from .._struct import struct
from ..maps import AffineMap
from ..maps._composed import composed
from ..maps._meet import meet
from ..maps._reading import as_int
from ..maps._relation import CODOMAIN, DOMAIN, collides, disjoint, exact_sizes, side_blocks
from ..maps._space import IntArray
from ..maps._table import Columns, PieceTable, build

if TYPE_CHECKING:
    from ._plan import RankMap, TransferPlan

PerRank: TypeAlias = tuple[tuple[int, int], ...]  # (global rank, elements)
Traffic: TypeAlias = tuple[tuple[int, int, int], ...]  # (source, target, distinct elements)


@struct
class Stats:
    """Counts of a plan. Elements, except ``pieces``, ``pairs`` and ``copies``.

    ``elements`` are slots written. ``elements_crossing`` are distinct (element, target rank)
    pairs whose source is another rank: what the wire carries. ``lower_bound`` is the least any
    plan for the same layouts could cross: the pairs that the target wants and its own rank does
    not hold. Both, and ``sent``/``received``, are None where it is unknown which ranks of the two
    sides are the same process.
    """

    pieces: int
    pairs: int
    copies: int
    elements: int
    elements_crossing: int | None
    lower_bound: int | None
    sent: PerRank | None
    received: PerRank | None

    @classmethod
    def total(cls, parts: Iterable[Stats]) -> Stats:
        """Counts added up."""
        return reduce(_add, parts, Stats(0, 0, 0, 0, 0, 0, (), ()))

    def bytes_crossing(self, itemsize: int) -> int | None:
        """Bytes on the wire for elements of ``itemsize`` bytes."""
        size = as_int(itemsize, "the bytes of an element")
        return None if self.elements_crossing is None else self.elements_crossing * size


def _add(a: Stats, b: Stats) -> Stats:
    def both(x: int | None, y: int | None) -> int | None:
        return None if x is None or y is None else x + y

    def per_rank(x: PerRank | None, y: PerRank | None) -> PerRank | None:
        if x is None or y is None:
            return None
        sums = dict(x)
        for rank, n in y:
            sums[rank] = sums.get(rank, 0) + n
        return tuple(sorted(sums.items()))

    return Stats(
        a.pieces + b.pieces, a.pairs + b.pairs, a.copies + b.copies, a.elements + b.elements,
        both(a.elements_crossing, b.elements_crossing), both(a.lower_bound, b.lower_bound),
        per_rank(a.sent, b.sent), per_rank(a.received, b.received),
    )  # fmt: skip


def transfer_stats(plan: TransferPlan) -> Stats:
    """The counts of one plan."""
    counts = (len(plan.source) + len(plan.target), plan.pairs, len(plan), plan.map.size)
    if not plan.same_ranks:
        return Stats(*counts, None, None, None, None)
    sent: dict[int, int] = {}
    received: dict[int, int] = {}
    for s, t, n in plan.traffic:
        if s != t:
            sent[s] = sent.get(s, 0) + n
            received[t] = received.get(t, 0) + n
    crossing = sum(sent.values())
    ordered = tuple(sorted(sent.items())), tuple(sorted(received.items()))
    bound = lower_bound(plan) if plan.map.single_valued else None  # sums may be made on the way
    return Stats(*counts, crossing, bound, *ordered)


def traffic(plan: TransferPlan) -> Traffic:
    """Distinct elements per (source rank, target rank) pair, global ranks, ascending."""
    table = wire_table(plan)
    c = table.columns
    pairs = np.stack([box_ranks(plan, "source")[c.cod_box], box_ranks(plan, "target")[c.dom_box]])
    if not len(table):
        return ()
    keys, where = np.unique(pairs, axis=1, return_inverse=True)
    sums = [0] * keys.shape[1]
    for k, n in zip(where.reshape(-1).tolist(), exact_sizes(table.shape)):
        sums[k] += n
    return tuple((int(s), int(t), n) for (s, t), n in zip(keys.T.tolist(), sums))


def box_ranks(plan: TransferPlan, side: str) -> IntArray:
    """The global rank of each box of the plan's source or target storage."""
    if side == "source":
        return global_ranks(plan.source, plan.source_ranks)
    return global_ranks(plan.target, plan.target_ranks)


def global_ranks(m: AffineMap, ranks: RankMap) -> IntArray:
    """The global rank of each box of a layout's storage."""
    local = m.domain.box_ranks
    if ranks is None:
        return local
    known = dict(ranks)
    return np.array([known[r] for r in local.tolist()], np.int64)


def wire_table(plan: TransferPlan) -> PieceTable:
    """The plan's copies with each (source slot, target rank) pair once: where a rank wants an
    element in several slots, one of them stands for all."""
    table = plan.map.table
    if plan.target.injective:
        return table
    by_rank = _boxes_by_rank(plan)
    c = table.columns
    # Key every source slot by the target rank: equal keys are the same wire element.
    first = by_rank[c.dom_box]
    width = len(plan.source.domain)
    keyed = c._replace(cod_box=first * width + c.cod_box)
    if not collides(build(keyed), CODOMAIN):
        return table
    one = np.ones(len(table), np.int64)
    strides = c.cod_strides
    slots = Columns(
        keyed.cod_box, c.cod_offset, keyed.cod_box, c.cod_offset, one, one, c.shape, strides, strides
    )
    limits = Limits()
    distinct = disjoint(build(slots), limits, Budget(limits)).columns
    return build(distinct._replace(dom_box=distinct.dom_box // width, cod_box=distinct.cod_box % width))


def _boxes_by_rank(plan: TransferPlan) -> IntArray:
    """For each target box, the first box of the same global rank."""
    ranks = box_ranks(plan, "target")
    _, first, where = np.unique(ranks, return_index=True, return_inverse=True)
    return first[where.reshape(-1)]


def lower_bound(plan: TransferPlan) -> int:
    """Distinct (target rank, element) pairs that the plan delivers and the same rank of the
    source does not hold."""
    limits, width = Limits(), len(plan.source.codomain)
    through = composed(plan.source.table, plan.map.table, limits, Budget(limits))
    wanted = _elements(through, box_ranks(plan, "target"), width, plan.target.injective)
    own = _elements(plan.source.table, box_ranks(plan, "source"), width, plan.source.injective)
    met = meet(side_blocks(wanted, DOMAIN), side_blocks(own, DOMAIN), limits, Budget(limits))
    return sum(exact_sizes(wanted.shape)) - sum(exact_sizes(met.shape))


def _elements(table: PieceTable, ranks: IntArray, width: int, once: bool) -> PieceTable:
    """Distinct (global rank, element) pairs of a table as a region; ``once`` says that none repeats."""
    c = table.columns
    box = ranks[c.dom_box] * width + c.cod_box
    one = np.ones(len(table), np.int64)
    region = build(
        Columns(box, c.cod_offset, box, c.cod_offset, one, one, c.shape, c.cod_strides, c.cod_strides)
    )
    limits = Limits()
    return region if once else disjoint(region, limits, Budget(limits))
