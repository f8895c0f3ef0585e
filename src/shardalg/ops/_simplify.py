"""Fold neighbouring pieces into fewer."""

from __future__ import annotations

from .._limits import Limits, require_limits
from ..maps import AffineMap
from ..maps._map import inherit, require_map
from ..maps._reading import flag
from ..maps._table import concatenate
from ._folding import simplified
from ._homogeneous import by_holders

FEW = 4096  # points of a group up to which it is also folded point by point


def simplify(m: AffineMap, *, homogeneous: bool = False, limits: Limits = Limits()) -> AffineMap:
    """The same map with neighbouring pieces folded.

    ``equivalent(simplify(m), m)`` and ``simplify(simplify(m)) == simplify(m)``. Local and
    cheap: pieces in the same two boxes at the same scale are joined end to end along an axis,
    stacked where their offsets are nested progressions, and re-cut to their common granule
    where an accidental join hides such a progression. No promise of the fewest pieces.

    With ``homogeneous`` all elements of a piece have the same holders: pieces are cut where the
    set of ranks that hold the element changes, and never folded across.

    Cost: n log n for the n pieces of each pair of boxes.

    >>> from shardalg import BlockGather, Replicate, Segments, Split, layout
    >>> len(simplify(layout((8,), BlockGather(0, 2, {0: (0, 1), 1: (2, 3)}))))
    2
    >>> rows = layout((48, 8), Segments(0, ((32, Split(0)), (16, Replicate()))), ranks=4)
    >>> len(simplify(rows)), len(simplify(rows, homogeneous=True))
    (7, 8)
    """
    require_map(m, "simplify: m")
    require_limits(limits)
    parts = by_holders(m, limits) if flag(homogeneous, "homogeneous") else [m.table]
    tables = [simplified(part, listed=FEW) for part in parts]
    table = tables[0] if len(tables) == 1 else concatenate(tables)
    limits.hold("pieces", len(table))
    if table == m.table:
        return m
    return inherit(AffineMap(m.domain, m.codomain, table), m)
