"""A map cut where the holders of its elements change."""

from __future__ import annotations

from collections import Counter

import numpy as np

from .._limits import Budget, Limits
from ..maps import AffineMap
from ..maps._map import decided
from ..maps._meet import meet
from ..maps._relation import CODOMAIN, DOMAIN, exact_sizes, met_table, side_blocks
from ..maps._space import IntArray
from ..maps._table import PieceTable, concatenate, in_order
from ._folding import simplified
from ._holders import held_regions


def by_holders(m: AffineMap, limits: Limits) -> list[PieceTable]:
    """The pieces of ``m`` sorted by the set of ranks that hold their elements, one table per set.

    A piece that lies wholly in one set stays as it is; others are cut. Slots in boxes without
    a rank hold nothing for anybody: elements that only they map form a set of their own.
    """
    plainer = AffineMap(m.domain, m.codomain, simplified(m.table))
    ranked = m.domain.box_ranks[plainer.table.columns.dom_box] >= 0
    if decided(plainer, CODOMAIN, limits) or not ranked.any():
        return [m.table]
    owned = AffineMap(m.domain, m.codomain, plainer.table.take(ranked))
    regions = [region.table for _, region in held_regions(owned, limits)]
    where = in_order(regions)
    number = np.repeat(np.arange(len(regions)), [len(r) for r in regions])
    return _cut(m.table, where, number, limits)


def _cut(table: PieceTable, where: PieceTable, number: IntArray, limits: Limits) -> list[PieceTable]:
    """The table by the numbers of the regions its elements lie in; those in none come last."""
    met = meet(
        side_blocks(table, CODOMAIN, DOMAIN, CODOMAIN), side_blocks(where, DOMAIN), limits, Budget(limits)
    )
    sizes, its, lefts = exact_sizes(table.shape), number[met.right], met.left.tolist()
    inside: Counter[tuple[int, int]] = Counter()
    for part, left, found in zip(its.tolist(), lefts, exact_sizes(met.shape)):
        inside[part, left] += found
    whole = np.zeros(len(table), bool)
    home = np.full(len(table), -1)
    for (part, left), found in inside.items():
        home[left] = part
        whole[left] |= found == sizes[left]
    parts = []
    for k in range(int(number.max()) + 1):
        cut = np.flatnonzero((its == k) & ~whole[met.left])
        pieces = met_table(met.take(cut), table)
        parts.append(concatenate([table.take(whole & (home == k)), pieces]))
    return [*parts, table.take(home < 0)]
