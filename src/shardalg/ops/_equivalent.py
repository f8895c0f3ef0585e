"""Exact extensional equality of maps."""

from __future__ import annotations

from .._limits import Budget, Limits
from ..maps import AffineMap
from ..maps._map import require_map
from ..maps._relation import count_common, exact_sizes


def equivalent(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> bool:
    """Whether two maps have equal spaces and the same (slot, element, scale) triples.

    Exact, and decided by counting: pieces of a map are disjoint, so the maps are equal exactly
    when both sizes equal the sum of all piece intersections. No element is walked.

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import layout, Split
    >>> halves = layout((8,), Split(0), ranks=2)
    >>> equivalent(halves, layout((8,), Split(0, sizes=(4, 4)), ranks=2))
    True
    """
    require_map(a, "the first of equivalent")
    require_map(b, "the second of equivalent")
    if a is b:
        return True
    if a.domain != b.domain or a.codomain != b.codomain:
        return False
    if a.table == b.table:
        return True
    sizes = sum(exact_sizes(a.table.shape)), sum(exact_sizes(b.table.shape))
    if sizes[0] != sizes[1]:
        return False
    return count_common(a.table, b.table, limits, Budget(limits)) == sizes[0]
