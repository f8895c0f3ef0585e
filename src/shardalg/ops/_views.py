"""Views: maps between logical tensors. How target tensors are made of source tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, overload

from .._errors import InvalidMapError
from .._struct import struct
from ..maps import AffineMap, Piece, Side, Space
from ..maps._reading import flag
from ..maps._space import Shape, as_int, as_range, as_shape, listed, row_major
from ._sides import bijection

Shapes: TypeAlias = Mapping[str, Shape]


@struct
class Join:
    """A join of source tensors by name, whose shapes ``plan_tree`` fills in."""

    parts: tuple[str, ...]
    axis: int = 0
    stack: bool = False
    interleave: int | None = None

    def resolve(self, shapes: Shapes) -> AffineMap:
        """The map from the named source tensors to the joined one."""
        return _joined({name: shapes[name] for name in self.parts}, self.axis, self.stack, self.interleave)


@struct
class Section:
    """Part of a source tensor by name, whose shape ``plan_tree`` fills in."""

    source: str
    index: tuple[Any, ...]

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.source,)

    def resolve(self, shapes: Shapes) -> AffineMap:
        """The map from the source tensor to its part."""
        return _section(shapes[self.source], self.index, self.source)


View: TypeAlias = "AffineMap | Join | Section"


@overload
def join(
    parts: Mapping[str, Any], axis: int = ..., *, stack: bool = ..., interleave: int | None = ...
) -> AffineMap: ...
@overload
def join(
    parts: Sequence[str], axis: int = ..., *, stack: bool = ..., interleave: int | None = ...
) -> Join: ...
def join(
    parts: Mapping[str, Any] | Sequence[str],
    axis: int = 0,
    *,
    stack: bool = False,
    interleave: int | None = None,
) -> AffineMap | Join:
    """Several logical tensors as one: the map from the parts to the joined tensor.

    The parts are laid end to end along ``axis`` (q, k, v -> qkv), stacked along a new axis with
    ``stack=True`` (experts -> w13), or alternated in blocks of ``interleave`` elements of the axis.
    With shapes (``{name: shape}``) the result is an ``AffineMap``; with names only it is a view that
    ``plan_tree`` resolves against the source tensors. An isomorphism of the elements.

    Raises ``InvalidMapError`` where parts differ along other axes, or are no whole blocks of ``interleave``.

    Cost: a piece per part.

    >>> join({"q": (4, 2), "k": (1, 2)}, axis=0).codomain
    Space.logical((5, 2))
    """
    axis, stack = as_int(axis, "join: axis"), flag(stack, "join: stack")
    if interleave is not None and as_int(interleave, "join: interleave") < 1:
        raise InvalidMapError(f"join: interleave must be at least 1, got {interleave}")
    if stack and interleave is not None:
        raise InvalidMapError("join: stack=True and interleave= exclude each other")
    names = tuple(parts if isinstance(parts, Mapping) else listed(parts, "the parts of join"))
    if not names:
        raise InvalidMapError(f"join needs one or more named parts, got {parts!r}")
    if not all(isinstance(n, str) for n in names):
        raise InvalidMapError(f"join: parts are named by strings, got {parts!r}")
    if isinstance(parts, Mapping):
        return _joined({n: as_shape(s) for n, s in parts.items()}, axis, stack, interleave)
    if len(set(names)) < len(names):
        raise InvalidMapError(f"join: the parts {names} repeat a name")
    return Join(names, axis, stack, interleave)


def _joined(shapes: Shapes, axis: int, stack: bool, interleave: int | None) -> AffineMap:
    first = next(iter(shapes.values()))
    axes = len(first) + stack
    if not -axes <= axis < axes:
        raise InvalidMapError(f"join: axis {axis} of parts of shape {first} (stack={stack})")
    axis %= axes
    _check_parts(shapes, axis, stack, interleave)
    extent = len(shapes) if stack else sum(shape[axis] for shape in shapes.values())
    whole = (*first[:axis], extent, *first[axis + (not stack) :])
    strides = row_major(whole)
    kept = strides[:axis] + strides[axis + 1 :] if stack else strides
    pieces, at = [], 0
    for k, (name, shape) in enumerate(shapes.items()):
        if interleave is not None:
            pieces.append(_interleaved(shape, name, axis, interleave, k, len(shapes), strides))
            continue
        pieces.append(Piece(shape, _whole(shape, name), Side(at * strides[axis], kept)))
        at += 1 if stack else shape[axis]
    return bijection(Space.logical(dict(shapes)), Space.logical(whole), pieces)


def _check_parts(shapes: Shapes, axis: int, stack: bool, interleave: int | None) -> None:
    """Raise unless parts differ along ``axis`` alone, and along it only where they are laid end to end."""
    first = next(iter(shapes.values()))
    alike = stack or interleave is not None
    for name, shape in shapes.items():
        fixed, wanted = (s if alike else s[:axis] + s[axis + 1 :] for s in (shape, first))
        if fixed != wanted or len(shape) != len(first):
            raise InvalidMapError(
                f"join along axis {axis}: {name!r} has shape {shape}, the first part {first}"
            )
    if interleave is not None and first[axis] % interleave:
        raise InvalidMapError(
            f"join: axis {axis} of {first} holds {first[axis]} = {interleave}*{first[axis] // interleave}"
            f" + {first[axis] % interleave} elements, not whole blocks of {interleave}"
        )


def _whole(shape: Shape, name: str) -> Side:
    return Side(0, row_major(shape), None, name)


def _interleaved(shape: Shape, name: str, axis: int, size: int, k: int, count: int, strides: Shape) -> Piece:
    """Block j of part k becomes block ``j * count + k`` of the whole."""
    local = row_major(shape)
    block = (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
    mine = (*local[:axis], local[axis] * size, *local[axis:])
    theirs = (*strides[:axis], strides[axis] * size * count, *strides[axis:])
    return Piece(block, Side(0, mine, None, name), Side(k * size * strides[axis], theirs))


@overload
def section(source: str, index: Any) -> Section: ...
@overload
def section(source: Mapping[str, Any] | Sequence[int] | int, index: Any) -> AffineMap: ...
def section(source: str | Mapping[str, Any] | Sequence[int] | int, index: Any) -> AffineMap | Section:
    """Part of a logical tensor as a tensor of its own: the map from the whole to the part.

    ``index`` is basic NumPy indexing: a slice or int, or a tuple of them, one per axis; ints drop
    their axis. ``source`` is a shape, ``{name: shape}``, or just a name, which gives a view
    that ``plan_tree`` resolves.

    Raises ``InvalidMapError`` for an int outside its axis and for more indices than axes.

    Cost: one piece.

    >>> section((6, 4), (slice(2, 4), 0)).codomain
    Space.logical((2,))
    """
    index = index if isinstance(index, tuple) else (index,)
    if isinstance(source, str):
        return Section(source, index)
    if isinstance(source, Mapping):
        if len(source) != 1:
            raise InvalidMapError(f"section cuts one tensor, got {len(source)}")
        name, shape = next(iter(source.items()))
        return _section(as_shape(shape), index, name)
    return _section(as_shape(source), index, "")


def _section(shape: Shape, index: tuple[Any, ...], name: str) -> AffineMap:
    if len(index) > len(shape):
        raise InvalidMapError(f"section: {len(index)} indices for a tensor of shape {shape}")
    offset, extents, strides = 0, [], []
    for axis, (n, stride) in enumerate(zip(shape, row_major(shape))):
        at = index[axis] if axis < len(index) else slice(None)
        if isinstance(at, slice):
            found = as_range(at, n)
            extents.append(len(found))
            strides.append(found.step * stride)
            offset += found.start * stride if len(found) else 0
        else:
            k = as_int(at, "an index")
            if not -n <= k < n:
                raise InvalidMapError(f"section: index {k} is outside axis {axis} of shape {shape}")
            offset += k % n * stride
    part = tuple(extents)
    whole = Space.logical({name: shape})
    piece = Piece(
        part, Side(offset if 0 not in part else 0, tuple(strides), None, name), Side(0, row_major(part))
    )
    return bijection(whole, Space.logical(part), [piece])
