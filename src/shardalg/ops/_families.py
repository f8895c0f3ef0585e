"""Arrays of elements as few strided families."""

from __future__ import annotations

import numpy as np

from ..maps._space import IntArray, Shape, row_major
from ._folding import Axis, Family, fold_points

SHORT = 256  # points folded one by one
MANY = 64  # kinds of rows, or of run lengths, beyond which an axis says nothing
ODD = 0x1E3779B97F4A7C15


def families_in(elements: IntArray) -> list[Family]:
    """The pairs (slot, element) of an array that holds, slot by slot, an element or -1.

    Slots are row-major addresses of the array. Each axis is tried as an axis of the families: rows
    that differ by a shift alone share one description. Vectorised: a few passes over the array, and
    Python work only for what it comes to.

    >>> families_in(np.array([[0, 1], [8, 9], [16, 17]]))
    [((0, 0), ((3, 2, 8), (2, 1, 1)))]
    """
    return _block(elements, row_major(elements.shape))


def _block(elements: IntArray, strides: Shape) -> list[Family]:
    if elements.ndim < 2 or not elements.size:
        flat = elements.reshape(-1)
        slots = np.flatnonzero(flat >= 0)
        return _line(slots * (strides[-1] if strides else 1), flat[slots])
    kinds = _kinds(elements.reshape(len(elements), -1))
    if kinds is None:
        return _block(elements.reshape(-1), strides[-1:])
    families: list[Family] = []
    for rows, shifts in kinds:
        outer = _line(rows * strides[0], shifts)
        inner = _block(elements[rows[0]], strides[1:])
        families += [_product(a, b) for a in outer for b in inner]
    return families


def _product(outer: Family, inner: Family) -> Family:
    """The family that repeats ``inner`` at every point of ``outer``."""
    (slot, element), (at, to) = outer[0], inner[0]
    return (slot + at, element + to), outer[1] + inner[1]


def _kinds(rows: IntArray) -> list[tuple[IntArray, IntArray]] | None:
    """Rows that are shifts of each other: their positions, and the shift of each from the first.
    None where there are too many kinds to be worth it."""
    held = rows >= 0
    some = np.flatnonzero(held.any(axis=1))
    if not len(some):
        return []
    first = rows[np.arange(len(rows)), held.argmax(axis=1)]
    marks = np.where(held, rows - first[:, None], np.iinfo(np.int64).min)
    weights = np.random.default_rng(0).integers(1, 2**62, rows.shape[1], dtype=np.int64)
    _, kind = np.unique((marks @ weights)[some], return_inverse=True)
    if kind.max() >= MANY:
        return None
    found = []
    for k in range(int(kind.max()) + 1):
        picked = some[kind == k]
        if (marks[picked] != marks[picked[0]]).any():  # two kinds with one code
            return None
        found.append((picked, first[picked] - first[picked[0]]))
    return found


def _line(slots: IntArray, elements: IntArray) -> list[Family]:
    """Points in ascending order of slots as few nested progressions."""
    if len(slots) <= SHORT:
        return fold_points(list(zip(slots.tolist(), elements.tolist())))
    whole = _nested(slots, elements)
    if whole is not None:
        return [((int(slots[0]), int(elements[0])), whole)]
    steps = np.diff(slots) * ODD + np.diff(elements)  # wraps: a code of both steps
    codes, where, counts = np.unique(steps, return_index=True, return_counts=True)
    top = int(counts.argmax())
    starts = np.concatenate([[0], np.flatnonzero(steps != codes[top]) + 1])
    extents = np.diff(starts, append=len(slots))
    at = int(where[top])
    step = int(slots[at + 1] - slots[at]), int(elements[at + 1] - elements[at])
    kinds = np.unique(extents)
    told = 2 * len(starts) <= len(slots) and len(kinds) <= MANY
    families: list[Family] = []
    for n in kinds.tolist():
        heads = starts[extents == n]
        inner: tuple[Axis, ...] = ((n, *step),) if n > 1 else ()
        outer = _line(slots[heads], elements[heads]) if told else _points(slots[heads], elements[heads])
        families += [(head, axes + inner) for head, axes in outer]
    return families


def _points(slots: IntArray, elements: IntArray) -> list[Family]:
    """Each point alone."""
    return [(point, ()) for point in zip(slots.tolist(), elements.tolist())]


def _nested(slots: IntArray, elements: IntArray) -> tuple[Axis, ...] | None:
    """The points as one nested progression, if they are one, outermost axis first."""
    count = len(slots)
    if count == 1:
        return ()
    step = int(slots[1] - slots[0]), int(elements[1] - elements[0])
    n = min(_run(slots, step[0]), _run(elements, step[1]))
    if count % n or not (_repeats(slots, n, step[0]) and _repeats(elements, n, step[1])):
        return None
    outer = _nested(slots[::n], elements[::n])
    return None if outer is None else (*outer, (n, *step))


def _run(values: IntArray, step: int) -> int:
    """How many values from the first on form one progression."""
    breaks = np.flatnonzero(np.diff(values) != step)
    return int(breaks[0]) + 1 if len(breaks) else len(values)


def _repeats(values: IntArray, n: int, step: int) -> bool:
    """Whether each row of ``n`` values is a progression by ``step``."""
    rows = values.reshape(-1, n)
    return all(bool((part - part[:, :1] == np.arange(n) * step).all()) for part in (rows[:4], rows))
