"""Other shapes for the boxes of one side."""

from __future__ import annotations

import math
from typing import Any

from .._errors import InvalidMapError
from ..maps import AffineMap, Box, Space
from ..maps._map import require_map
from ..maps._space import Shape, as_int, as_shape, describe_key
from ._sides import between, boxes_as, by_box


def reshape(m: AffineMap, *, domain: Any = None, codomain: Any = None) -> AffineMap:
    """``m`` with other shapes on the boxes of one or both sides; flat row-major addresses stay.

    A shape for every box of the side, or ``{rank, name or (rank, name): shape}``; one extent may
    be -1. An isomorphism: it commutes with ``compose`` and ``invert``, and reshaping back
    gives ``m``. Raises ``InvalidMapError`` where the sizes differ.

    Cost: none: the pieces stay.

    >>> from shardalg import Split, layout
    >>> m = layout((4, 6), Split(0), ranks=2)
    >>> reshape(m, codomain=(2, 2, 6), domain=(2, -1)).logical_shape
    (2, 2, 6)
    """
    require_map(m, "reshape: m")
    return between(m, _reshaped(m.domain, domain), _reshaped(m.codomain, codomain))


def _reshaped(space: Space, given: Any) -> Space:
    if given is None:
        return space
    found = by_box(space, given)
    return boxes_as(space, [b.shape if s is None else _filled(b, s) for b, s in zip(space.boxes, found)])


def _filled(box: Box, given: Any) -> Shape:
    """The shape with -1 replaced by what is left over, of the size of the box."""
    raw = [as_int(n, "an extent") for n in (given if isinstance(given, (tuple, list)) else (given,))]
    rest = math.prod(n for n in raw if n != -1)
    fill = box.size // rest if rest else 0
    shape = as_shape(tuple(fill if n == -1 else n for n in raw))
    if raw.count(-1) > 1 or math.prod(shape) != box.size:
        raise InvalidMapError(
            f"cannot reshape {describe_key(box.key)} of shape {box.shape} ({box.size} slots) to"
            f" {tuple(raw)} ({rest}{' times the -1' if -1 in raw else ''} slots)"
        )
    return shape
