"""What differs between two maps, in numbers and in words."""

from __future__ import annotations

from fractions import Fraction

from .._errors import InvalidMapError
from .._limits import Limits
from .._struct import struct
from ..maps import AffineMap
from ..maps._map import require_map
from ..maps._reading import listed
from ..maps._relation import DOMAIN
from ..maps._space import Key
from ._compose import require_same_space
from ._points import far_points
from ._questions import say_slot
from ._regions import domain, restrict
from ._sets import intersect, subtract


@struct
class Difference:
    """How a second map differs from a first, counted in (slot, element) pairs.

    ``same`` are in both; ``moved`` are pairs of the first whose slot the second maps otherwise
    (another element or another scale); ``missing`` are pairs of the first whose slot the second
    leaves unmapped; ``extra`` are pairs of the second whose slot the first leaves unmapped.
    ``slot`` is the first slot that differs, as (key, address). True where nothing differs.
    """

    same: int = 0
    moved: int = 0
    missing: int = 0
    extra: int = 0
    slot: tuple[Key, int] | None = None
    reason: str = ""

    def __bool__(self) -> bool:
        return not self.reason

    def __str__(self) -> str:
        counts = f"{self.same} same, {self.moved} moved, {self.missing} missing, {self.extra} extra"
        if self.slot is None:
            return self.reason or f"equal: {counts}"
        return f"{counts}; {self.reason}"


def explain(
    a: AffineMap,
    b: AffineMap,
    *,
    names: tuple[str, str] = ("the first map", "the second"),
    limits: Limits = Limits(),
) -> Difference:
    """How ``b`` differs from ``a``: the first slot that differs, and counts.

    True exactly where ``equivalent(a, b)``. ``same + moved + missing`` is the size of ``a``.
    ``names`` are what the two are called in the words.

    Cost: near-linear in the pieces and in where they meet, as ``compose``.

    >>> from shardalg import Cyclic, Split, layout
    >>> print(explain(layout((6,), Split(0), ranks=3), layout((6,), Cyclic(0, 1), ranks=3)))
    2 same, 4 moved, 0 missing, 0 extra;
    slot 1 of rank 0 holds element 1 in the first map and element 3 in the second
    """
    require_map(a, "the first of explain")
    require_map(b, "the second of explain")
    if len(listed(names, "explain: names")) != 2:
        raise InvalidMapError(f"explain: names are two, got {names!r}")
    try:
        for word, x, y in (("domain", a.domain, b.domain), ("codomain", a.codomain, b.codomain)):
            require_same_space(x, y, "a comparison", f"the {word} of {names[0]}", f"that of {names[1]}")
    except InvalidMapError as error:
        return Difference(reason=str(error))
    same = intersect(a, b, limits=limits)
    lost, found = subtract(a, same, limits=limits), subtract(b, same, limits=limits)
    if not len(lost) and not len(found):
        return Difference(same=same.size)
    moved = restrict(lost, domain(b, limits=limits), limits=limits)
    new = found.size - restrict(found, domain(a, limits=limits), limits=limits).size
    box, address = _first(lost, found)
    reason = (
        f"slot {say_slot(a.domain, box, address)} holds {_held(a, box, address)} in {names[0]}"
        f" and {_held(b, box, address)} in {names[1]}"
    )
    slot = (a.domain.boxes[box].key, address)
    return Difference(same.size, moved.size, lost.size - moved.size, new, slot, reason)


def _first(*maps: AffineMap) -> tuple[int, int]:
    """The first slot that any of the maps maps: pieces are sorted by slot and run upwards."""
    return min((int(m.table.rows[0, 0]), int(m.table.rows[1, 0])) for m in maps if len(m))


def _held(m: AffineMap, box: int, address: int) -> str:
    """What a slot holds, in words."""
    c = m.table.columns
    words = []
    for to, element, k in far_points(m, DOMAIN, box, address):
        scale = Fraction(int(c.numerator[k]), int(c.denominator[k]))
        where = str(element) if len(m.codomain) == 1 else say_slot(m.codomain, to, element)
        words.append(f"element {where}" + ("" if scale == 1 else f" times {scale}"))
    more = " and more" if len(words) > 3 else ""
    return " and ".join(words[:3]) + more if words else "nothing"
