"""The converse of a map."""

from __future__ import annotations

from ..maps import AffineMap
from ..maps._composed import reciprocal
from ..maps._map import known, remember, require_map
from ..maps._table import build


def invert(m: AffineMap) -> AffineMap:
    """The map with its sides exchanged; a scale s becomes 1/s.

    ``invert(invert(m)) == m`` and ``invert(compose(g, f))`` equals ``compose(invert(f), invert(g))``.

    Cost: one pass over the pieces.

    >>> from shardalg import AffineMap, Piece, Side, Space
    >>> m = AffineMap.from_pieces(Space.shards({0: (2,)}), Space.logical((4,)),
    ...                           [Piece((2,), Side(0, (1,), rank=0), Side(1, (2,)))])
    >>> invert(m).pieces[0]
    Piece((2,), Side(1, (2,)), Side(0, (1,), rank=0))
    """
    require_map(m, "invert: m")
    c = m.table.columns.swapped()
    numerator, denominator = reciprocal((c.numerator, c.denominator))
    table = build(c._replace(numerator=numerator, denominator=denominator))
    inverse = AffineMap(m.codomain, m.domain, table)
    return remember(inverse, single_valued=known(m, "injective"), injective=known(m, "single_valued"))
