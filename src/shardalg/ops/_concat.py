"""Maps put end to end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Piece, Space
from ..maps._map import known, remember
from ..maps._space import Key, Shape, as_int, describe_key, row_major
from ..maps._table import concatenate
from ._folding import simplified
from ._sides import bijection, moved, side_of

Starts: TypeAlias = dict[Key, int]  # where the box of each key continues along its axis


def concat(maps: Sequence[AffineMap], axis: int | tuple[int, int], *, limits: Limits = Limits()) -> AffineMap:
    """The maps one after the other: boxes with equal keys append along ``axis`` on both sides, or
    along a pair of axes (domain, codomain) where they differ.

    A box that some maps lack is made of the others'. Associative; a map whose boxes are empty
    along the axis is the unit; ``invert`` works segment by segment. Not commutative.

    Raises ``InvalidMapError`` where two boxes differ along another axis.

    >>> from shardalg import Replicate, Segments, Split, equivalent, layout
    >>> q, kv = layout((8, 2), Split(0), ranks=2), layout((3, 2), Replicate(), ranks=2)
    >>> fused = layout((11, 2), Segments(0, ((8, Split(0)), (3, Replicate()))), ranks=2)
    >>> equivalent(concat([q, kv], 0), fused)
    True
    """
    maps = list(maps)
    if not maps:
        raise InvalidMapError("concat needs at least one map")
    axes = axis if isinstance(axis, tuple) else (axis, axis)
    here, there = (as_int(k, "an axis") for k in axes)
    dom, dom_starts = _appended([m.domain for m in maps], here)
    cod, cod_starts = _appended([m.codomain for m in maps], there)
    parts = [
        moved(m, _window(m.domain, dom, here, a), _window(m.codomain, cod, there, b), limits)
        for m, a, b in zip(maps, dom_starts, cod_starts)
    ]
    whole = AffineMap(dom, cod, simplified(concatenate([m.table for m in parts])))
    return remember(whole, **{q: all(known(m, q) for m in parts) for q in ("single_valued", "injective")})


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
