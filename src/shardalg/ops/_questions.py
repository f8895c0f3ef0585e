"""Questions about maps, answered with a witness."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._errors import InvalidMapError
from .._limits import Budget, Limits, require_limits
from .._struct import struct
from ..maps import AffineMap, Space
from ..maps._map import check_bounds, decided, require_map, require_shards
from ..maps._meet import Met, meet
from ..maps._relation import CODOMAIN, DOMAIN, count_common, exact_sizes, side_blocks
from ..maps._space import IntArray, describe_key, index_of
from ..maps._table import build
from ._points import at_element
from ._regions import padding, uncovered


@struct
class Answer:
    """Yes or no, in a form that can be read: false answers carry a witness and a reason.

    ``witness`` is plain data (keys, slots, elements); truth value and comparison with a bool
    are the answer itself.
    """

    holds: bool
    reason: str = ""
    witness: Any = None

    def __bool__(self) -> bool:
        return self.holds


YES = Answer(True)


def is_single_valued(m: AffineMap, *, limits: Limits = Limits()) -> Answer:
    """Whether every slot has at most one element and one scale (every layout does).

    Cost: near-linear, once: a map remembers it.

    >>> from shardalg import Replicate, invert, layout
    >>> is_single_valued(invert(layout((2,), Replicate(), ranks=2))).reason
    'slot 0 of the tensor has the two elements 0 of rank 0 and 0 of rank 1'
    """
    require_map(m, "is_single_valued: m")
    return _one_to(m, DOMAIN, "slot", "elements", limits)


def is_injective(m: AffineMap, *, limits: Limits = Limits()) -> Answer:
    """Whether every element sits in at most one slot, at one scale (no replicas).

    Cost: near-linear, once: a map remembers it.

    >>> from shardalg import Replicate, layout
    >>> is_injective(layout((2,), Replicate(), ranks=2)).witness
    ((None, ''), 0, ((0, ''), 0), ((1, ''), 0))
    """
    require_map(m, "is_injective: m")
    return _one_to(m, CODOMAIN, "element", "slots", limits)


def is_total(m: AffineMap, *, limits: Limits = Limits()) -> Answer:
    """Whether every slot of the domain is mapped (no padding).

    Cost: near-linear.

    >>> from shardalg import Split, layout
    >>> m = layout((5,), Split(0, rule="pad"), ranks=2)
    >>> is_total(m).reason
    'slot 2 of rank 1 is mapped nowhere; 1 in all'
    """
    require_map(m, "is_total: m")
    return _covers(m, DOMAIN, "slot", "is mapped nowhere", limits)


def is_surjective(m: AffineMap, *, limits: Limits = Limits()) -> Answer:
    """Whether every element of the codomain is reached (nothing uncovered).

    Cost: near-linear.

    >>> from shardalg import Experts, layout
    >>> is_surjective(layout((4, 2), Experts([[0], [3]]))).reason
    'element 2 (index (1, 0)) of the tensor is held by nobody; 4 in all'
    """
    require_map(m, "is_surjective: m")
    return _covers(m, CODOMAIN, "element", "is held by nobody", limits)


def multiplicity(m: AffineMap, element: int, *, name: str = "", rank: int | None = None) -> int:
    """How many slots hold one element (a flat index of its logical tensor).

    Over all elements these add up to the number of slots that are not padding. Raises ``InvalidMapError``
    for an element outside its tensor.

    Cost: a look at each piece.

    >>> from shardalg import Replicate, layout
    >>> multiplicity(layout((2,), Replicate(), ranks=3), 1)
    3
    """
    require_map(m, "multiplicity: m")
    return sum(exact_sizes(at_element(m, element, rank, name).shape))


def check(m: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """``m`` itself, after proving what its constructor promises: bounds, normal form, and that
    its pieces are disjoint and list each pair once. Raises ``InvalidMapError``.

    Cost: near-linear.

    >>> from shardalg import Split, layout
    >>> m = layout((4,), Split(0), ranks=2)
    >>> check(m) is m
    True
    """
    require_map(m, "check: m")
    check_bounds(m.domain, m.codomain, m.table.columns)
    if (m.table.rows[5] < 1).any() or (m.table.rows[4] == 0).any():
        raise InvalidMapError("a piece has a scale of 0 or a denominator below 1")
    if build(m.table.columns) != m.table:
        raise InvalidMapError("the pieces are not in normal form; build maps with AffineMap.from_pieces")
    listed = sum(exact_sizes(m.table.shape))
    met = count_common(m.table, m.table, limits, Budget(limits))
    if met != listed:
        raise InvalidMapError(
            f"the pieces overlap: they list {listed} pairs but meet each other in {met};"
            " build maps with AffineMap.from_pieces"
        )
    return m


def check_layout(m: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """``m`` itself, after proving that it is a layout: from storage of ranks to logical tensors,
    one element and one scale per slot. Raises ``InvalidMapError`` with the first bad slot.

    Cost: near-linear.

    >>> from shardalg import Split, layout
    >>> m = layout((4,), Split(0), ranks=2)
    >>> check_layout(m) is m
    True
    """
    check(m, limits=limits)
    require_shards(m, "the map")
    if m.codomain.ranks:
        raise InvalidMapError(f"a layout ends in logical tensors; its codomain is {m.codomain}")
    answer = is_single_valued(m, limits=limits)
    if not answer:
        raise InvalidMapError(f"not a layout: {answer.reason}")
    return m


# --- witnesses ----------------------------------------------------------------------------


def say_slot(space: Space, box: int, address: int) -> str:
    """An address in words: ``3 (index (0, 3)) of rank 1``."""
    b = space.boxes[box]
    where = f" (index {index_of(address, b.shape)})" if len(b.shape) > 1 else ""
    return f"{address}{where} of {describe_key(b.key)}"


def _one_to(m: AffineMap, side: int, one: str, many: str, limits: Limits) -> Answer:
    """Whether no address of one side pairs with two on the other."""
    require_limits(limits)
    return YES if decided(m, side, limits) else _collision(m, side, one, many, limits)


def _collision(m: AffineMap, side: int, one: str, many: str, limits: Limits) -> Answer:
    """The first address of one side that pairs with two on the other, with both."""
    blocks = side_blocks(m.table, side, DOMAIN, CODOMAIN)
    met = meet(blocks, blocks, limits, Budget(limits))
    near, far = (m.domain, m.codomain) if side == DOMAIN else (m.codomain, m.domain)
    c = m.table.columns
    other = 1 - side
    box, far_box = c.side(side)[0], c.side(other)[0]
    picked, at, to = _first_apart(met, side)
    k = int(np.lexsort((at[side], box[met.left[picked]]))[0])
    i, j = int(met.left[picked[k]]), int(met.right[picked[k]])
    b, address = int(box[i]), int(at[side, k])
    ends = ((i, int(at[other, k])), (j, int(to[other, k])))
    scales = [f"{c.numerator[p]}/{c.denominator[p]}" for p in (i, j)]
    said = [say_slot(far, int(far_box[p]), end) for p, end in ends]
    at_scale = "" if scales[0] == scales[1] else f" at scales {scales[0]} and {scales[1]}"
    reason = f"{one} {say_slot(near, b, address)} has the two {many} {said[0]} and {said[1]}{at_scale}"
    first, second = ((far.boxes[int(far_box[p])].key, end) for p, end in ends)
    return Answer(False, reason, (near.boxes[b].key, address, first, second))


def _first_apart(met: Met, side: int) -> tuple[IntArray, IntArray, IntArray]:
    """Of the families of meetings of two pieces, and of a piece with itself at other indices, each with the
    meeting that has the least address on ``side``: its two ends.

    That is where every index is at its low end. A piece meets itself there at one index if it does; then it
    is one step further along the shortest of the axes on which the two ends part.
    """
    a, b = met.left_strides, met.right_strides
    low = np.where(a[side] < 0, met.shape - 1, 0)
    at, to = met.left_offset + (a * low).sum(axis=1), met.right_offset + (b * low).sum(axis=1)
    alike = (met.left == met.right) & (at == to).all(axis=0)
    parts = (met.shape > 1) & (a != b).any(axis=0)
    step = np.where(parts, np.abs(a[side]), np.iinfo(np.int64).max)
    one = (np.arange(len(step))[:, None] == step.argmin(axis=0)) & alike if len(step) else low
    further = np.where(one, np.where(low > 0, -1, 1), 0)
    at, to = at + (a * further).sum(axis=1), to + (b * further).sum(axis=1)
    apart = (met.left < met.right) | (met.left == met.right) & (~alike | parts.any(axis=0))
    picked = np.flatnonzero(apart)
    return picked, at[:, picked], to[:, picked]


def _covers(m: AffineMap, side: int, what: str, verb: str, limits: Limits) -> Answer:
    space = m.domain if side == DOMAIN else m.codomain
    rest = padding(m, limits=limits) if side == DOMAIN else uncovered(m, limits=limits)
    if not len(rest):
        return YES
    c = rest.table.columns
    box, address = int(c.dom_box[0]), int(c.dom_offset[0])
    reason = f"{what} {say_slot(space, box, address)} {verb}; {rest.size} in all"
    return Answer(False, reason, (space.boxes[box].key, address))
