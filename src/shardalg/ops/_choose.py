"""Matching and choosing: all homes of all wanted elements, then one for each slot to be written.

Between plain boxes without replicas there is nothing to choose (``box_copies``). Otherwise the source is cut
into atoms, matched with the target, and a selector says which holder of an atom each target rank reads.
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np

from .._errors import SelectionError
from .._limits import Budget, Limits
from ..maps import AffineMap
from ..maps._composed import product_scale, reciprocal
from ..maps._map import decided
from ..maps._meet import Blocks, Met, meet
from ..maps._relation import CODOMAIN, DOMAIN, collides, exact_sizes, side_blocks, side_region
from ..maps._space import BoolArray, IntArray
from ..maps._table import Columns, PieceTable, build, concatenate, in_order
from ..plans._plan import RankMap
from ..plans._stats import global_ranks
from ._balance import Demand, as_blocks, block_of, shares
from ._boxes import box_copies
from ._folding import simplified
from ._holders import Atoms, atoms, lowest_slots
from ._select import Requests, Selector


class _Matched(NamedTuple):
    """All homes of all wanted elements: families of (target slot, source slot)."""

    met: Met
    source: PieceTable
    target: PieceTable
    atom: IntArray
    source_rank: IntArray
    target_rank: IntArray

    def take(self, picked: IntArray) -> _Matched:
        rest = (self.atom[picked], self.source_rank[picked], self.target_rank[picked])
        return self._replace(
            met=self.met.take(picked), atom=rest[0], source_rank=rest[1], target_rank=rest[2]
        )


def chosen(
    source: AffineMap,
    target: AffineMap,
    selector: Selector,
    of_source: RankMap,
    of_target: RankMap,
    rank: int | None,
    limits: Limits,
) -> tuple[PieceTable, int]:
    """The copies as a table from target slots to source slots, and how many pairs met."""
    if rank is None and decided(source, CODOMAIN, limits):
        table = box_copies(source, target, limits)
        if table is not None:
            return table, len(table)
    cut = atoms(source, limits)
    source_rank = global_ranks(source, of_source)[cut.table.columns.dom_box]
    target_rank = global_ranks(target, of_target)[target.table.columns.dom_box]
    replicated = any(len(h) > 1 for h in cut.holders)
    if replicated and selector.key == "balanced":
        shared = _balanced(cut, source_rank, target.table, target_rank, limits)
        return simplified(_copies(shared)), len(shared.atom)
    parts = [
        _match(cut, source_rank, target.table, target_rank, picked, limits)
        for picked in _own_part(rank, source_rank, target_rank)
    ]
    met_pairs = sum(len(m.atom) for m in parts)
    if replicated:
        parts = [_select(m, cut, source, of_source, selector) for m in parts]
    if len(parts) == 2:
        # what r sends to others; what it keeps is among what it receives
        parts[1] = parts[1].take(np.flatnonzero(parts[1].target_rank != rank))
    return simplified(concatenate([_copies(m) for m in parts])), met_pairs


_Part: TypeAlias = tuple[IntArray, IntArray]  # positions of source pieces and of target pieces


def _own_part(rank: int | None, source_rank: IntArray, target_rank: IntArray) -> list[_Part]:
    """Which source pieces meet which target pieces: all, or what one rank receives and sends."""
    every_source, every_target = np.arange(len(source_rank)), np.arange(len(target_rank))
    if rank is None:
        return [(every_source, every_target)]
    return [
        (every_source, np.flatnonzero(target_rank == rank)),
        (np.flatnonzero(source_rank == rank), every_target),
    ]


def _match(
    cut: Atoms,
    source_rank: IntArray,
    target: PieceTable,
    target_rank: IntArray,
    picked: _Part,
    limits: Limits,
) -> _Matched:
    s, t = picked
    a = side_blocks(cut.table, CODOMAIN, DOMAIN)
    b = side_blocks(target, CODOMAIN, DOMAIN)
    if len(s) < len(cut.table):
        a = a.take(s)
    if len(t) < len(target):
        b = b.take(t)
    met = meet(a, b, limits, Budget(limits), "copies")
    met = met._replace(left=s[met.left], right=t[met.right])
    return _Matched(met, cut.table, target, cut.atom[met.left], source_rank[met.left], target_rank[met.right])


def _select(m: _Matched, cut: Atoms, source: AffineMap, of_source: RankMap, selector: Selector) -> _Matched:
    """Only the families whose source rank was chosen."""
    if not len(m.atom):
        return m
    width = int(m.target_rank.max()) + 1
    key, where = np.unique(m.atom * width + m.target_rank, return_inverse=True)
    where = where.reshape(-1)
    local = dict(of_source) if of_source is not None else None
    lists = [sorted(local[r] for r in h) if local else list(h) for h in cut.holders]
    counts = np.array([len(h) for h in lists], np.int64)
    starts = np.cumsum(counts) - counts
    atom, target = key // width, key % width
    own = m.source_rank == np.array([h[0] for h in lists], np.int64)[m.atom]
    size = np.zeros(len(key), np.int64)
    np.add.at(size, where[own], np.array(exact_sizes(m.met.shape[:, own]), np.int64))
    requests = Requests(
        atom, target, size, np.array([r for h in lists for r in h], np.int64), starts[atom], counts[atom],
        lambda a: _atom_region(source, cut, a),
    )  # fmt: skip
    answer = np.asarray(selector.choose(requests))
    _check_answers(answer, requests, selector)
    return m.take(np.flatnonzero(answer[where] == m.source_rank))


def _balanced(
    cut: Atoms, source_rank: IntArray, target: PieceTable, target_rank: IntArray, limits: Limits
) -> _Matched:
    """Target pieces cut into the shares of their givers, matched with those alone."""
    holders: list[list[int]] = [[] for _ in cut.holders]
    for a, r in zip(cut.atom.tolist(), source_rank.tolist()):
        if r not in holders[a]:
            holders[a].append(r)
    first = np.array([min(h) for h in holders], np.int64)
    lead = np.flatnonzero(source_rank == first[cut.atom])
    budget = Budget(limits)
    once, once_rank = _wanted_once(target, target_rank, limits, budget)
    from_lead = side_blocks(cut.table, CODOMAIN).take(lead)
    met = meet(from_lead, side_blocks(once, CODOMAIN, DOMAIN, CODOMAIN), limits, budget, "copies")
    demands = [
        Demand(int(piece), tuple(sorted(holders[a])), block_of(met, k))
        for k, (piece, a) in enumerate(zip(met.right.tolist(), cut.atom[lead[met.left]].tolist()))
    ]
    given = list(shares(demands, once_rank[met.right].tolist()))
    piece, giver, wanted = as_blocks(given, once.columns.cod_box, len(met.shape))
    met = meet(side_blocks(cut.table, CODOMAIN, DOMAIN, CODOMAIN), wanted, limits, budget, "copies")
    met = met.take(np.flatnonzero(source_rank[met.left] == giver[met.right]))
    if once is target:
        met = met._replace(
            right=piece[met.right], left_offset=met.left_offset[:1], left_strides=met.left_strides[:1]
        )
    else:
        met = _all_slots(met, once_rank[piece[met.right]], cut.table, target, target_rank, limits, budget)
    return _Matched(met, cut.table, target, cut.atom[met.left], source_rank[met.left], target_rank[met.right])


def _wanted_once(
    target: PieceTable, target_rank: IntArray, limits: Limits, budget: Budget
) -> tuple[PieceTable, IntArray]:
    """The target with one slot per element and rank, and the rank of each piece; the very same
    table where no rank wants an element twice."""
    if not collides(_by_rank(target, target_rank), CODOMAIN, limits):
        return target, target_rank
    parts = {
        int(r): lowest_slots(target.take(target_rank == r), limits, budget) for r in np.unique(target_rank)
    }
    ranks = [np.full(len(part), r, np.int64) for r, part in parts.items()]
    return in_order(list(parts.values())), np.concatenate(ranks)


def _by_rank(table: PieceTable, rank: IntArray) -> PieceTable:
    """The table with its codomain boxes told apart by rank."""
    c = table.columns
    place = np.unique(rank, return_inverse=True)[1].reshape(-1)
    return build(c._replace(cod_box=place * (int(c.cod_box.max(initial=0)) + 1) + c.cod_box))


def _all_slots(
    met: Met,
    rank: IntArray,
    source: PieceTable,
    target: PieceTable,
    target_rank: IntArray,
    limits: Limits,
    budget: Budget,
) -> Met:
    """From shares (source slot, element) of a rank to every slot of that rank that wants them."""
    s, t = source.columns, target.columns
    ranks, place = np.unique(np.concatenate([rank, target_rank]), return_inverse=True)
    place, width = place.reshape(-1), int(max(s.cod_box.max(initial=0), t.cod_box.max(initial=0))) + 1
    given = Blocks(
        place[: len(rank)] * width + s.cod_box[met.left], met.left_offset[1], met.shape, met.left_strides[1],
        met.left_offset[:1], met.left_strides[:1],
    )  # fmt: skip
    wanted = side_blocks(target, CODOMAIN, DOMAIN)._replace(box=place[len(rank) :] * width + t.cod_box)
    every = meet(given, wanted, limits, budget, "copies")
    return every._replace(left=met.left[every.left])


def _check_answers(answer: IntArray, requests: Requests, selector: Selector) -> None:
    for k in np.flatnonzero(~_among(answer, requests)).tolist():
        raise SelectionError(
            f"selector {selector.key!r} chose {answer[k]} for target rank {requests.target[k]},"
            f" but the holders are {requests.holders(k)}"
        )


def _among(answer: IntArray, r: Requests) -> BoolArray:
    """Whether each answer is a holder."""
    if answer.shape != r.target.shape:
        raise SelectionError(f"{len(r.target)} requests got answers of shape {answer.shape}")
    if answer.dtype.kind not in "iu":
        raise SelectionError(f"a selector answers with ranks, got {answer.tolist()[:8]}")
    found = np.zeros(len(answer), bool)
    for k in range(int(r.count.max(initial=0))):
        here = k < r.count
        found |= here & (r.flat[np.where(here, r.start + k, 0)] == answer)
    return found


def _atom_region(source: AffineMap, cut: Atoms, atom: int) -> AffineMap:
    first = cut.holders[atom][0]
    its = cut.table.take((cut.atom == atom) & (cut.rank == first))
    return AffineMap(source.codomain, source.codomain, side_region(its, CODOMAIN))


def _copies(m: _Matched) -> PieceTable:
    """Families as a table from target slots to source slots; a target slot holds
    ``source slot * scale`` with scale = target scale / source scale."""
    s, t, met = m.source.columns, m.target.columns, m.met
    up = (t.numerator[met.right], t.denominator[met.right])
    down = reciprocal((s.numerator[met.left], s.denominator[met.left]))
    numerator, denominator = product_scale(up, down)
    return build(
        Columns(
            t.dom_box[met.right], met.right_offset[0], s.dom_box[met.left], met.left_offset[0],
            numerator, denominator, met.shape, met.right_strides[0], met.left_strides[0],
        )
    )  # fmt: skip
