"""The converse of a map."""

from __future__ import annotations

import numpy as np

from ..maps import AffineMap
from ..maps._map import known, remember, require_map
from ..maps._table import Columns, build


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
    c = m.table.columns
    sign = np.sign(c.numerator)
    swapped = Columns(
        c.cod_box, c.cod_offset, c.dom_box, c.dom_offset, sign * c.denominator, sign * c.numerator,
        c.shape, c.cod_strides, c.dom_strides,
    )  # fmt: skip
    inverse = AffineMap(m.codomain, m.domain, build(swapped))
    return remember(inverse, single_valued=known(m, "injective"), injective=known(m, "single_valued"))
