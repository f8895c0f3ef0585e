"""The map that a map leaves over after another."""

from __future__ import annotations

from .._limits import Limits
from ..maps import AffineMap
from ..maps._map import require_map
from ..maps._relation import CODOMAIN
from ._compose import compose, require_same_space
from ._equivalent import equivalent
from ._invert import invert
from ._points import far_points
from ._questions import Answer, say_slot
from ._sets import subtract


def divide(m: AffineMap, outer: AffineMap, *, limits: Limits = Limits()) -> AffineMap | Answer:
    """The largest x with ``compose(outer, x)`` equivalent to ``m``, or an ``Answer`` that says why
    there is none.

    x goes from the slots of ``m`` to those of ``outer``, on slots that ``outer`` maps. It is the
    only one where ``outer`` is injective; where ``outer`` holds replicas, it names them all.
    The undoing of ``nest``: how the shards of ``outer`` were cut again.

    Raises ``InvalidMapError`` where the two lead to different spaces.

    Cost: that of a few compositions.

    >>> from shardalg import Split, equivalent, layout, nest
    >>> outer, m = layout((8,), Split(0), ranks=2), layout((8,), Split(0), ranks=4)
    >>> equivalent(compose(outer, divide(m, outer)), m)
    True
    >>> divide(m, layout((8,), Split(0, sizes=(4, 4)), ranks=2)) == divide(m, outer)
    True
    """
    require_map(m, "divide: m")
    require_map(outer, "divide: outer")
    require_same_space(m.codomain, outer.codomain, "divide", "the codomain of m", "the codomain of outer")
    back = invert(outer)
    largest = compose(back, m, limits=limits)
    if not outer.single_valued:
        # a slot of outer that brings an element too many is no use for that slot of m
        too_many = subtract(compose(outer, largest, limits=limits), m, limits=limits)
        largest = subtract(largest, compose(back, too_many, limits=limits), limits=limits)
    made = compose(outer, largest, limits=limits)
    return largest if equivalent(made, m, limits=limits) else _reason(m, made, outer, limits)


def _reason(m: AffineMap, made: AffineMap, outer: AffineMap, limits: Limits) -> Answer:
    """The first pair of ``m`` that no slots of ``outer`` can make, and why."""
    rest = subtract(m, made, limits=limits)
    first, c = rest.pieces[0], rest.table.columns
    at = int(c.cod_box[0]), int(c.cod_offset[0])
    slot = say_slot(m.domain, int(c.dom_box[0]), int(c.dom_offset[0]))
    why = (
        "each slot of outer that holds it brings others"
        if far_points(outer, CODOMAIN, *at)
        else "outer lacks it"
    )
    reason = f"slot {slot} needs element {say_slot(m.codomain, *at)}, but {why}"
    witness = ((first.domain.key, first.domain.offset), (first.codomain.key, first.codomain.offset))
    return Answer(False, reason, witness)
