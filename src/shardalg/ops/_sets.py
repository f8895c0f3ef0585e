"""Set operations on maps between the same spaces; others are an ``InvalidMapError``."""

from __future__ import annotations

from .._errors import InvalidMapError
from .._limits import Budget, Limits
from ..maps import AffineMap
from ..maps._map import known, remember, require_map
from ..maps._relation import common, families_table, minus
from ..maps._table import concatenate
from ._compose import require_same_space
from ._folding import simplified
from ._questions import is_single_valued


def union(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The pairs in ``a`` or in ``b``.

    Commutative, associative, idempotent; distributes over composition on both sides. Total:
    the result need not be single-valued (``merge`` insists on that).

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import Cyclic, Split, layout
    >>> halves, turns = (layout((4,), p, ranks=2) for p in (Split(0), Cyclic(0, 1)))
    >>> union(halves, turns).size, halves.size
    (6, 4)
    """
    _same_spaces(a, b, "union")
    extra = minus(b.table, a.table, limits, Budget(limits))
    table = simplified(concatenate([a.table, extra]))
    limits.hold("pieces", len(table))
    return AffineMap(a.domain, a.codomain, table)


def intersect(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The pairs in both ``a`` and ``b``, at the same scale.

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import Cyclic, Split, layout
    >>> halves, turns = (layout((4,), p, ranks=2) for p in (Split(0), Cyclic(0, 1)))
    >>> intersect(halves, turns).size
    2
    """
    _same_spaces(a, b, "intersect")
    found = common(a.table, b.table, limits, Budget(limits))
    return _part_of(AffineMap(a.domain, a.codomain, simplified(families_table(found, a.table))), a, b)


def subtract(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The pairs in ``a`` that are not in ``b`` at the same scale.

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import Cyclic, Split, layout
    >>> halves, turns = (layout((4,), p, ranks=2) for p in (Split(0), Cyclic(0, 1)))
    >>> subtract(halves, turns).size
    2
    """
    _same_spaces(a, b, "subtract")
    table = simplified(minus(a.table, b.table, limits, Budget(limits)))
    return _part_of(AffineMap(a.domain, a.codomain, table), a)


def merge(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The union of two layouts; raises where a slot would get two elements or two scales.

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import layout, Split
    >>> rows = layout((4,), Split(0), ranks=2)
    >>> merge(rows, rows) == rows
    True
    """
    _same_spaces(a, b, "merge")
    both = union(a, b, limits=limits)
    answer = is_single_valued(both, limits=limits)
    if not answer:
        raise InvalidMapError(f"cannot merge: {answer.reason}")
    return remember(both, single_valued=True)


def _part_of(result: AffineMap, *wholes: AffineMap) -> AffineMap:
    """A subset of a single-valued (injective) map is so too."""
    return remember(
        result,
        single_valued=any(known(m, "single_valued") for m in wholes),
        injective=any(known(m, "injective") for m in wholes),
    )


def _same_spaces(a: AffineMap, b: AffineMap, verb: str) -> None:
    require_map(a, f"the first of {verb}")
    require_map(b, f"the second of {verb}")
    require_same_space(a.domain, b.domain, verb, "the first domain", "the second")
    require_same_space(a.codomain, b.codomain, verb, "the first codomain", "the second")
