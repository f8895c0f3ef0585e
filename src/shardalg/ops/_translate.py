"""Slots or elements of one side moved by an index vector."""

from __future__ import annotations

from typing import Any

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Piece, Space
from ..maps._map import require_map
from ..maps._space import Shape, as_int, describe_key, row_major
from ._questions import say_slot
from ._regions import domain as domain_of
from ._regions import image
from ._sets import subtract
from ._sides import bijection, by_box, moved, side_of


def translate(
    m: AffineMap, *, domain: Any = None, codomain: Any = None, limits: Limits = Limits()
) -> AffineMap:
    """``m`` with every slot (``domain=``) or element (``codomain=``) moved inside its box by an
    index vector, one entry per axis.

    A vector for every box of the side, or ``{rank, name or (rank, name): vector}``. A group
    action where it is defined: moving by v and then by w is moving by v + w. Raises
    ``InvalidMapError`` naming the first address that would leave its box.

    Cost: that of ``compose``.

    >>> from shardalg import AffineMap, Piece, Side, Space
    >>> top = AffineMap.from_pieces(Space.shards({0: (2,)}), Space.logical((6,)),
    ...                             [Piece((2,), Side(0, (1,), 0), Side(0, (1,)))])
    >>> translate(top, codomain=(3,)).pieces[0].codomain
    Side(3, (1,))
    """
    require_map(m, "translate: m")
    here = _translation(m.domain, domain, domain_of(m, limits=limits), limits)
    there = _translation(m.codomain, codomain, image(m, limits=limits), limits)
    return moved(m, here, there, limits)


def _translation(space: Space, given: Any, used: AffineMap, limits: Limits) -> AffineMap | None:
    """The partial bijection of a space that moves its boxes' slots, defined on all used ones."""
    if given is None:
        return None
    vectors = [_vector(b, v) for b, v in zip(space.boxes, by_box(space, given))]
    move = bijection(space, space, [_piece(b, v) for b, v in zip(space.boxes, vectors)])
    lost = subtract(used, domain_of(move, limits=limits), limits=limits)
    if len(lost):
        c = lost.table.columns
        box, address = int(c.dom_box[0]), int(c.dom_offset[0])
        raise InvalidMapError(
            f"moving by {vectors[box]} takes {say_slot(space, box, address)} out of its box of shape"
            f" {space.boxes[box].shape}; {lost.size} addresses in all"
        )
    return move


def _vector(box: Box, given: Any) -> Shape:
    if given is None:
        return (0,) * len(box.shape)
    vector = tuple(as_int(v, "a step") for v in (given if isinstance(given, (tuple, list)) else (given,)))
    if len(vector) != len(box.shape):
        raise InvalidMapError(
            f"a vector of {len(vector)} steps cannot move {describe_key(box.key)} of shape {box.shape}"
        )
    return vector


def _piece(box: Box, vector: Shape) -> Piece:
    """The slots that stay inside when they move by ``vector``."""
    strides = row_major(box.shape)
    stays = tuple(max(0, n - abs(v)) for n, v in zip(box.shape, vector))
    origins = [sum(max(0, sign * v) * s for v, s in zip(vector, strides)) for sign in (-1, 1)]
    return Piece(stays, side_of(box, origins[0], strides), side_of(box, origins[1], strides))
