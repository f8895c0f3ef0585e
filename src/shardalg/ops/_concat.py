"""Maps put end to end."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TypeAlias

import numpy as np

from .._errors import InvalidMapError
from .._limits import Limits, require_limits
from ..maps import AffineMap, Box, Piece, Space
from ..maps._map import inherit, require_map
from ..maps._space import IntArray, Key, Shape, as_int, describe_key, listed, row_major
from ..maps._table import PieceTable, concatenate
from ._folding import simplified
from ._sides import bijection, moved, side_of

Starts: TypeAlias = dict[Key, int]  # where the box of each key continues along its axis
Place: TypeAlias = tuple[Space, int, Starts]  # boxes put end to end, along which axis, and where


def concat(maps: Sequence[AffineMap], axis: int | tuple[int, int], *, limits: Limits = Limits()) -> AffineMap:
    """The maps one after the other: boxes with equal keys append along ``axis`` on both sides, or
    along a pair of axes (domain, codomain) where they differ.

    A box that some maps lack is made of the others'. Associative; a map whose boxes are empty
    along the axis is the unit; ``invert`` works segment by segment. Not commutative.

    Raises ``InvalidMapError`` where two boxes differ along another axis.

    Cost: one pass where boxes grow along their first axis longer than 1, else a composition per map.

    >>> from shardalg import Replicate, Segments, Split, equivalent, layout
    >>> q, kv = layout((8, 2), Split(0), ranks=2), layout((3, 2), Replicate(), ranks=2)
    >>> fused = layout((11, 2), Segments(0, ((8, Split(0)), (3, Replicate()))), ranks=2)
    >>> equivalent(concat([q, kv], 0), fused)
    True
    """
    maps = listed(maps, "the maps of concat")
    if not maps:
        raise InvalidMapError("concat needs at least one map")
    for m in maps:
        require_map(m, "each map of concat")
    axes = axis if isinstance(axis, tuple) and len(axis) == 2 else (axis, axis)
    require_limits(limits)
    here, there = (as_int(k, "an axis") for k in axes)
    dom, dom_starts = _appended([m.domain for m in maps], here)
    cod, cod_starts = _appended([m.codomain for m in maps], there)
    tables = [
        _placed(m, (dom, here, a), (cod, there, b), limits) for m, a, b in zip(maps, dom_starts, cod_starts)
    ]
    table = simplified(concatenate(tables))
    limits.hold("pieces", len(table))
    return inherit(AffineMap(dom, cod, table), *maps)


def _appended(spaces: Sequence[Space], axis: int) -> tuple[Space, list[Starts]]:
    """The space of all boxes end to end, and where each space's boxes start in it."""
    shapes: dict[Key, Shape] = {}
    begins: list[Starts] = []
    for space in spaces:
        begins.append({})
        for b in space.boxes:
            k = _axis(b, axis)
            so_far = shapes.get(b.key, (*b.shape[:k], 0, *b.shape[k + 1 :]))
            begins[-1][b.key] = so_far[k] if k < len(so_far) else 0
            shapes[b.key] = _longer(so_far, b, k)
    return Space(tuple(Box(shape, *key) for key, shape in shapes.items())), begins


def _axis(box: Box, axis: int) -> int:
    if not -len(box.shape) <= axis < len(box.shape):
        raise InvalidMapError(
            f"{describe_key(box.key)} of shape {box.shape} has no axis {axis} to append along"
        )
    return axis % len(box.shape)


def _longer(so_far: Shape, box: Box, k: int) -> Shape:
    if (*so_far[:k], *so_far[k + 1 :]) != (*box.shape[:k], *box.shape[k + 1 :]):
        raise InvalidMapError(
            f"{describe_key(box.key)} has shapes {so_far} and {box.shape},"
            f" which cannot be put end to end along axis {k}"
        )
    return (*so_far[:k], so_far[k] + box.shape[k], *so_far[k + 1 :])


def _placed(m: AffineMap, domain: Place, codomain: Place, limits: Limits) -> PieceTable:
    """The pieces of ``m``, each of its boxes put where the box of its key continues."""
    slots, elements = _shifts(m.domain, *domain), _shifts(m.codomain, *codomain)
    if slots is None or elements is None:
        windows = _window(m.domain, *domain), _window(m.codomain, *codomain)
        return moved(m, *windows, limits).table
    rows = m.table.rows.copy()
    for k, (box, shift) in ((0, slots), (2, elements)):
        rows[k + 1] += shift[rows[k]]
        rows[k] = box[rows[k]]
    return PieceTable(rows)  # boxes keep their order, and pieces theirs


def _shifts(part: Space, whole: Space, axis: int, starts: Starts) -> tuple[IntArray, IntArray] | None:
    """The place of each box of ``part`` in ``whole`` and how far its addresses move, where that is
    all that changes: no box is longer than 1 along an axis before the one it grows along."""
    if any(prod(b.shape[: _axis(b, axis)]) > 1 for b in part.boxes):
        return None
    box = [whole.index(*b.key) for b in part.boxes]
    shift = [starts[b.key] * row_major(b.shape)[_axis(b, axis)] for b in part.boxes]
    return np.array(box, np.int64), np.array(shift, np.int64)


def _window(part: Space, whole: Space, axis: int, starts: Starts) -> AffineMap | None:
    """The map that places each box of ``part`` in the box of its key of ``whole``; None where
    that changes nothing."""
    if part == whole:
        return None
    pieces = []
    for b in part.boxes:
        wide = whole.box(*b.key)
        strides = row_major(wide.shape)
        offset = starts[b.key] * strides[_axis(b, axis)]
        pieces.append(Piece(b.shape, side_of(b, 0, row_major(b.shape)), side_of(wide, offset, strides)))
    return bijection(part, whole, pieces)
