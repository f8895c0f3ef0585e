"""One side of a piece in the coordinates of its box: what a person would write as slices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..maps._space import Shape, index_of, row_major

Parts = list[tuple[int, int]]  # (count, step) of nested progressions along one axis, outermost first


class Slice(NamedTuple):
    """``start, start + step, ...``, ``extent`` of them, along one axis of a box."""

    start: int
    extent: int
    step: int = 1


def along_axes(
    offset: int, extents: Sequence[int], strides: Sequence[int], shape: Shape
) -> tuple[tuple[int, ...], list[Parts]] | None:
    """A strided block as a product of progressions, one list per axis of the box, or None.

    Negative strides are walked backwards and strides of 0 left out: the answer is the set.

    >>> along_axes(8, (16,), (1,), (4, 8))
    ((1, 0), [[(2, 1)], [(8, 1)]])
    >>> along_axes(4, (8,), (1,), (4, 8)) is None  # starts inside a row, ends inside the next
    True
    """
    offset += sum(s * (n - 1) for n, s in zip(extents, strides) if s < 0)
    start = index_of(offset, shape)
    parts: list[Parts] = [[] for _ in shape]
    for n, s in zip(extents, strides):
        if not _walk(n, abs(s), start, shape, parts):
            return None
    for at, extent, found in zip(start, shape, parts):
        if at + sum(step * (count - 1) for count, step in found) >= extent:
            return None
        found.sort(key=lambda part: -part[1])
    return start, parts


class Axis(NamedTuple):
    """One axis of a piece: its extent and its stride on both sides."""

    extent: int
    left: int
    right: int


def refined(axes: Sequence[Axis], left: tuple[int, Shape], right: tuple[int, Shape]) -> list[Axis]:
    """Axes cut so that, where it can be, each runs along one coordinate of either box.

    ``left`` and ``right`` are the offset and the box shape of each side.

    >>> refined([Axis(4, 1, 1)], (0, (4,)), (0, (2, 2)))
    [Axis(extent=2, left=2, right=2), Axis(extent=2, left=1, right=1)]
    """
    starts = [(index_of(offset, shape), shape) for offset, shape in (left, right)]
    out: list[Axis] = []
    todo = list(axes)
    while todo:
        n, a, b = axis = todo.pop(0)
        turns = [t for s, side in zip((a, b), starts) if 1 < (t := _turn(n, s, *side)) < n]
        if turns and n % min(turns) == 0:
            t = min(turns)
            todo[:0] = [Axis(n // t, a * t, b * t), Axis(t, a, b)]
        else:
            out.append(axis)
    return out


def _turn(n: int, s: int, start: Sequence[int], shape: Shape) -> int:
    """After how many steps of a progression the next coordinate moves on; 0 for never."""
    strides = row_major(shape)
    k = next((k for k, t in enumerate(strides) if t <= s < t * shape[k]), None)
    if k is None or s % strides[k] or start[k] + s // strides[k] * (n - 1) < shape[k]:
        return 0
    step = s // strides[k]
    return 0 if shape[k] % step else shape[k] // step


def _walk(n: int, s: int, start: Sequence[int], shape: Shape, parts: list[Parts]) -> bool:
    """Put one progression on the axes it runs along; False where it is not a product."""
    strides = row_major(shape)
    while n > 1 and s:
        k = next((k for k, t in enumerate(strides) if t <= s < t * shape[k]), None)
        if k is None or s % strides[k]:
            return False
        step = s // strides[k]
        if start[k] + step * (n - 1) < shape[k]:
            parts[k].append((n, step))
            return True
        turn = shape[k] // step
        if shape[k] % step or n % turn:
            return False
        parts[k].append((turn, step))
        n, s = n // turn, s * turn
    return True


def slices(
    offset: int, extents: Sequence[int], strides: Sequence[int], shape: Shape
) -> tuple[Slice, ...] | None:
    """A block that is one slice per axis and runs through them row-major, or None.

    >>> slices(8, (16,), (1,), (4, 8))
    (Slice(start=1, extent=2, step=1), Slice(start=0, extent=8, step=1))
    """
    reach = [abs(s) * (n - 1) for n, s in zip(extents, strides)]
    nested = all(s > sum(reach[i + 1 :]) for i, s in enumerate(strides))
    found = along_axes(offset, extents, strides, shape) if nested else None
    if found is None:
        return None
    joined = [_joined(parts) for parts in found[1]]
    if any(len(parts) > 1 for parts in joined):
        return None
    return tuple(Slice(at, *(parts[0] if parts else (1, 1))) for at, parts in zip(found[0], joined))


def _joined(parts: Parts) -> Parts:
    """Progressions with each that continues its inner neighbour merged into it."""
    out: Parts = []
    for count, step in reversed(parts):
        if out and step == out[0][0] * out[0][1]:
            out[0] = (count * out[0][0], out[0][1])
        else:
            out.insert(0, (count, step))
    return out


def intervals(start: int, parts: Parts, most: int) -> list[tuple[int, int]] | None:
    """The runs ``(low, high)`` that nested progressions cover, or None where there are over ``most``.

    >>> intervals(0, [(2, 8), (4, 1)], 9)
    [(0, 4), (8, 12)]
    """
    parts = _joined(parts)
    width = parts[-1][0] if parts and parts[-1][1] == 1 else 1
    outer = parts[:-1] if parts and parts[-1][1] == 1 else parts
    lows = [start]
    for count, step in outer:
        if len(lows) * count > most:
            return None
        lows = [low + step * i for low in lows for i in range(count)]
    return sorted((low, low + width) for low in lows)
