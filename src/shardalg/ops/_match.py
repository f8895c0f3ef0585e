"""Which slots of two layouts hold the same element."""

from __future__ import annotations

from .._limits import Limits
from ..maps import AffineMap
from ..maps._map import require_map
from ._compose import compose, require_same_space
from ._invert import invert


def match(source: AffineMap, target: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The full relation from source slots to target slots that share an element.

    ``compose(invert(target), source)``; the scale says how many times the target's value the
    source's is. ``invert(match(a, b)) = match(b, a)``, and ``M M^ M = M``: every home of an
    element meets every home, so one block is one multicast group.

    Raises ``InvalidMapError`` where the two lay out different tensors.

    Cost: that of ``compose``; its size is the sum over elements of source homes times target homes.

    >>> from shardalg import Replicate, Split, layout
    >>> match(layout((4,), Split(0), ranks=2), layout((4,), Replicate(), ranks=3)).size
    12
    """
    require_map(source, "match: source")
    require_map(target, "match: target")
    require_same_space(source.codomain, target.codomain, "match", "the source tensor", "the target tensor")
    return compose(invert(target), source, limits=limits)
