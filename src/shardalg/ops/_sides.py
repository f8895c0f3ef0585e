"""What the operators on one side share: a value per box, and moving a side along a map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Piece, Side, Space
from ..maps._map import inherit, remember
from ..maps._space import as_key, describe_key
from ._compose import compose
from ._invert import invert


def by_box(space: Space, given: Any) -> list[Any]:
    """One value per box. ``given`` is a value for every box, or ``{key: value}``, where a rank
    stands for all its boxes, a name for all of that name, and (rank, name) for one; boxes that
    are not named get None."""
    if not isinstance(given, Mapping):
        return [given] * len(space)
    values: list[Any] = [None] * len(space)
    for key, value in given.items():
        for i in _named(space, key):
            values[i] = value
    return values


def _named(space: Space, key: Any) -> list[int]:
    if isinstance(key, tuple):
        return [space.index(*as_key(key))]
    found = [i for i, b in enumerate(space.boxes) if key == (b.name if isinstance(key, str) else b.rank)]
    if not found:
        near = ", ".join(describe_key(b.key) for b in space.boxes[:8])
        raise InvalidMapError(f"no box has the rank or name {key!r}; the space has {near or 'none'}")
    return found


def moved(m: AffineMap, domain: AffineMap | None, codomain: AffineMap | None, limits: Limits) -> AffineMap:
    """``m`` with its slots moved along ``domain`` and its elements along ``codomain``, which are
    injective and single-valued."""
    after = m if domain is None else compose(m, invert(domain), limits=limits)
    return after if codomain is None else compose(codomain, after, limits=limits)


def bijection(source: Space, target: Space, pieces: Sequence[Piece]) -> AffineMap:
    """The map of the pieces, which the caller knows to be single-valued and injective."""
    return remember(AffineMap.from_pieces(source, target, pieces), single_valued=True, injective=True)


def between(m: AffineMap, domain: Space, codomain: Space) -> AffineMap:
    """The table of ``m`` between other spaces whose boxes have the same order and sizes."""
    if domain is m.domain and codomain is m.codomain:
        return m
    return inherit(AffineMap(domain, codomain, m.table), m)


def boxes_as(space: Space, shapes: Sequence[Any]) -> Space:
    """The space with other shapes on its boxes, in order."""
    return Space(tuple(Box(shape, b.rank, b.name) for b, shape in zip(space.boxes, shapes)))


def side_of(b: Box, offset: int, strides: Sequence[int]) -> Side:
    """A side in a box."""
    return Side(offset, tuple(strides), b.rank, b.name)
