"""Who holds what: holders are derived from a layout, never declared."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias, overload

import numpy as np

from .._limits import Budget, Limits, require_limits
from ..maps import AffineMap
from ..maps._cells import Cells, cells
from ..maps._map import decided, require_shards
from ..maps._meet import meet
from ..maps._relation import (
    CODOMAIN,
    DOMAIN,
    collides,
    common,
    exact_sizes,
    families_table,
    met_table,
    minus,
    side_blocks,
    side_region,
)
from ..maps._space import IntArray
from ..maps._table import Columns, PieceTable, build, concatenate, empty_table, in_order, unsorted
from ._folding import simplified
from ._points import at_element


class Atoms(NamedTuple):
    """A layout cut so that every piece lies in one *atom*: a set of elements with the same
    holders. Within an atom each holder rank has each element exactly once (its lowest slot).

    ``table`` holds the cut pieces, ``atom`` and ``rank`` say where each belongs, and
    ``holders[a]`` are the ranks of atom ``a``, ascending.
    """

    table: PieceTable
    atom: IntArray
    rank: IntArray
    holders: tuple[tuple[int, ...], ...]


Held: TypeAlias = tuple[tuple[tuple[int, ...], AffineMap], ...]  # ranks, and the region they all hold


@overload
def holders(layout: AffineMap, element: None = None, *, name: str = ..., limits: Limits = ...) -> Held: ...
@overload
def holders(layout: AffineMap, element: int, *, name: str = ..., limits: Limits = ...) -> tuple[int, ...]: ...
def holders(
    layout: AffineMap, element: int | None = None, *, name: str = "", limits: Limits = Limits()
) -> Held | tuple[int, ...]:
    """The ranks that hold each element.

    With ``element`` (a flat index of the logical tensor ``name``) the ranks that hold it,
    ascending. Without, pairs ``(ranks, region)``: the regions are disjoint, cover what is held, and
    every element of one has exactly those holders.

    Raises ``InvalidMapError`` for an element outside its tensor, and for a map that is no layout.

    Cost: of one element, a look at each piece; of all, near-linear, and remembered with the layout.

    >>> from shardalg import Experts, layout
    >>> holders(layout((6,), Experts([[0, 3], [3, 1, 5], [], [2, 4]])), 3)
    (0, 1)
    """
    require_shards(layout, "the layout of holders")
    require_limits(limits)
    if element is None:
        return held_regions(layout, limits)
    boxes = layout.table.columns.dom_box[at_element(layout, element, None, name).left]
    return tuple(sorted(set(layout.domain.box_ranks[boxes].tolist())))


def held_regions(layout: AffineMap, limits: Limits) -> Held:
    """The set of ranks and the region it holds, for each set."""
    cut, space = atoms(layout, limits), layout.codomain
    if not len(cut.table):
        return ()
    sets = sorted(set(cut.holders))
    numbers = {ranks: k for k, ranks in enumerate(sets)}
    number = np.array([numbers[ranks] for ranks in cut.holders], np.int64)[cut.atom]
    first = np.array([ranks[0] for ranks in cut.holders], np.int64)[cut.atom]
    once = np.flatnonzero(cut.rank == first)
    order = once[np.argsort(number[once], kind="stable")]
    parts = np.split(order, np.flatnonzero(np.diff(number[order])) + 1)
    regions = [simplified(side_region(cut.table.take(part), CODOMAIN)) for part in parts]
    return tuple((ranks, AffineMap(space, space, region)) for ranks, region in zip(sets, regions))


def atoms(layout: AffineMap, limits: Limits = Limits()) -> Atoms:
    """The layout cut into atoms; remembered with it, since every plan from it asks."""
    found: Atoms | None = layout.__dict__.get("_atoms")
    if found is None:
        found = _atoms(layout, limits)
        layout.__dict__["_atoms"] = found
    return found


def _atoms(layout: AffineMap, limits: Limits) -> Atoms:
    table = layout.table
    rank = layout.domain.box_ranks[table.columns.dom_box]
    if decided(layout, CODOMAIN, limits):
        return Atoms(table, np.arange(len(table)), rank, tuple((r,) for r in rank.tolist()))
    return _alike(table, rank, limits) or _by_cells(table, rank, limits) or _refined(layout, limits)


def _by_cells(table: PieceTable, rank: IntArray, limits: Limits) -> Atoms | None:
    """Atoms that are cells of the pieces, all cut by each other at once; None where the pieces have no
    cells, or a rank that holds one twice has now this slot lower, now that."""
    cut = cells(side_blocks(table, CODOMAIN, DOMAIN), limits, Budget(limits))
    if cut is None:
        return None
    c, x = table.columns, cut.blocks
    its, box = rank[cut.block], c.dom_box[cut.block]
    order = np.lexsort((x.pay_offset[0], box, its, cut.cell))
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(cut.cell[order]) != 0) | (np.diff(its[order]) != 0)
    kept = order[fresh]
    first, other = np.repeat(kept, np.diff(np.flatnonzero(np.append(fresh, True)))), order
    apart = x.pay_offset[0, other] - x.pay_offset[0, first]
    slopes = (x.pay_strides[0][:, other] - x.pay_strides[0][:, first]) * (x.shape[:, other] - 1)
    lower = (box[first] < box[other]) | (apart + np.minimum(slopes, 0).sum(axis=0) >= 0)
    if not lower.all():
        return None
    return _atoms_of(table, cut, its, kept)


def _atoms_of(table: PieceTable, cut: Cells, rank: IntArray, kept: IntArray) -> Atoms:
    """Some of the cells, sorted by number and rank, as atoms."""
    x, c, k = cut.blocks.take(kept), table.columns, cut.block[kept]
    pieces = unsorted(
        Columns(
            c.dom_box[k], x.pay_offset[0], c.cod_box[k], x.offset, c.numerator[k], c.denominator[k],
            x.shape, x.pay_strides[0], x.strides,
        )
    )  # fmt: skip
    _, first, atom = np.unique(cut.cell[kept], return_index=True, return_inverse=True)
    ranks = rank[kept]
    holders = np.split(ranks, first[1:])
    return Atoms(pieces, atom.reshape(-1), ranks, tuple(tuple(h.tolist()) for h in holders))


def _alike(table: PieceTable, rank: IntArray, limits: Limits) -> Atoms | None:
    """Atoms where replicas are the very same blocks on every holder: the common case."""
    c = table.columns
    form = np.concatenate([[c.cod_box, c.cod_offset], c.shape, c.cod_strides])
    order = np.lexsort((rank, *form[::-1]))
    sorted_form = form[:, order]
    fresh = np.ones(len(order), bool)
    fresh[1:] = (sorted_form[:, 1:] != sorted_form[:, :-1]).any(axis=0)
    atom = np.empty(len(order), np.int64)
    atom[order] = np.cumsum(fresh) - 1
    first = np.sort(order[fresh])
    if collides(table.take(first), CODOMAIN, limits):
        return None
    key = np.stack([atom, rank])
    _, kept, where = np.unique(key, axis=1, return_index=True, return_inverse=True)
    if not _lowest_everywhere(table, kept[where.reshape(-1)]):
        return None
    kept = np.sort(kept)
    ranks: list[list[int]] = [[] for _ in range(int(atom.max()) + 1)]
    for a, r in zip(atom[kept].tolist(), rank[kept].tolist()):
        ranks[a].append(r)
    return Atoms(table.take(kept), atom[kept], rank[kept], tuple(tuple(sorted(r)) for r in ranks))


def _lowest_everywhere(table: PieceTable, first: IntArray) -> bool:
    """Whether each piece's ``first``, which holds the same elements, has the lower slot for each."""
    c = table.columns
    apart = c.dom_offset - c.dom_offset[first]
    slopes = (c.dom_strides - c.dom_strides[:, first]) * (c.shape - 1)
    return bool((apart + np.minimum(slopes, 0).sum(axis=0) >= 0).all())


def _refined(layout: AffineMap, limits: Limits) -> Atoms:
    """Atoms in general: the images of the ranks, cut by each other."""
    budget = Budget(limits)
    own = {r: _lowest_slots(layout, r, limits, budget) for r in layout.ranks}
    regions: list[tuple[PieceTable, tuple[int, ...]]] = []
    for r, table in own.items():
        fresh = side_region(table, CODOMAIN)
        cut = []
        for region, ranks in regions:
            both = families_table(common(region, fresh, limits, budget), region)
            if len(both):
                cut.append((both, (*ranks, r)))
                region = minus(region, both, limits, budget)
                fresh = minus(fresh, both, limits, budget)
            if len(region):
                cut.append((region, ranks))
        regions = cut + ([(fresh, (r,))] if len(fresh) else [])
    return _cut_by(own, regions, limits, budget)


def _cut_by(
    own: dict[int, PieceTable],
    regions: list[tuple[PieceTable, tuple[int, ...]]],
    limits: Limits,
    budget: Budget,
) -> Atoms:
    tables, atom, rank = [], [], []
    for a, (region, ranks) in enumerate(regions):
        for r in ranks:
            part = _onto(own[r], region, limits, budget)
            tables.append(part)
            atom += [a] * len(part)
            rank += [r] * len(part)
    table = in_order(tables)
    return Atoms(table, np.array(atom, np.int64), np.array(rank, np.int64), tuple(r for _, r in regions))


def _onto(table: PieceTable, region: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """The pieces of ``table`` that arrive in a region."""
    met = meet(side_blocks(table, CODOMAIN, DOMAIN, CODOMAIN), side_blocks(region, DOMAIN), limits, budget)
    return met_table(met, table)


def _lowest_slots(layout: AffineMap, rank: int, limits: Limits, budget: Budget) -> PieceTable:
    """The pieces of one rank, without slots whose element it holds in a lower slot."""
    boxes = np.flatnonzero(layout.domain.box_ranks == rank)
    return lowest_slots(layout.table.take(np.isin(layout.table.columns.dom_box, boxes)), limits, budget)


def lowest_slots(table: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """The pieces of one rank with one slot per element: its lowest, however the map is cut."""
    if not collides(table, CODOMAIN, limits):
        return table
    blocks = side_blocks(table, CODOMAIN)
    met = meet(blocks, blocks, limits, budget)
    repeated = np.zeros(len(table), bool)
    repeated[met.left[met.left != met.right]] = True
    own = np.zeros(len(table), object)
    itself = np.flatnonzero(met.left == met.right)
    for piece, n in zip(met.left[itself].tolist(), exact_sizes(met.shape[:, itself])):
        own[piece] += n
    repeated |= own != np.array(exact_sizes(table.shape), object)
    kept = [table.take(~repeated)]
    seen = empty_table()
    for piece in _in_slot_order(table.take(repeated), limits, budget):
        fresh = minus(side_region(piece, CODOMAIN), seen, limits, budget)
        kept.append(_onto(piece, fresh, limits, budget))
        seen = concatenate([seen, fresh])
    return concatenate(kept)


def _in_slot_order(table: PieceTable, limits: Limits, budget: Budget) -> list[PieceTable]:
    """Pieces cut until their slots do not interleave and none repeats an element, in slot order."""
    waiting = [table.take(slice(k, k + 1)) for k in range(len(table))]
    done: list[PieceTable] = []
    while waiting:
        waiting.sort(key=_span)
        piece = waiting.pop(0)
        tangled = bool(waiting) and _span(piece)[2] >= _span(waiting[0])[1] and _same_box(piece, waiting[0])
        if piece.axes and (tangled or collides(piece, CODOMAIN, limits)):
            waiting += _outer_slices(piece, budget)
        else:
            done.append(piece)
    return done


def _span(piece: PieceTable) -> tuple[int, int, int]:
    """Domain box, lowest and highest slot of a single piece."""
    c = piece.columns
    low = int(c.dom_offset[0])
    return int(c.dom_box[0]), low, low + int((c.dom_strides[:, 0] * (c.shape[:, 0] - 1)).sum())


def _same_box(a: PieceTable, b: PieceTable) -> bool:
    return int(a.columns.dom_box[0]) == int(b.columns.dom_box[0])


def _outer_slices(piece: PieceTable, budget: Budget) -> list[PieceTable]:
    """A piece cut along its axis of largest slot stride, the first in normal form."""
    c = piece.columns
    count = int(c.shape[0, 0])
    budget.spend(count)
    steps = np.arange(count)
    wide = Columns(*(np.repeat(x, count, axis=-1) for x in c))
    shape = wide.shape.copy()
    shape[0] = 1
    slices = build(
        wide._replace(
            dom_offset=wide.dom_offset + steps * c.dom_strides[0, 0],
            cod_offset=wide.cod_offset + steps * c.cod_strides[0, 0],
            shape=shape,
        )
    )
    return [slices.take(slice(k, k + 1)) for k in range(count)]
