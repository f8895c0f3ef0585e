"""A map looked up at single addresses."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Budget, Limits
from ..maps import AffineMap, Space
from ..maps._meet import Blocks, Met, meet
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import IntArray, as_int, describe_key

FEW = 4
LAST = 2**63 - 1  # the largest number of an int64


def at_points(m: AffineMap, side: int, box: IntArray, address: IntArray, limits: Limits = Limits()) -> Met:
    """Where pieces (left) meet points (right) on one side; payloads are the far addresses of the
    pieces, one family for each piece that meets a point."""
    n = len(box)
    points = Blocks(
        box, address, np.ones((0, n), np.int64), np.ones((0, n), np.int64),
        np.zeros((0, n), np.int64), np.zeros((0, 0, n), np.int64),
    )  # fmt: skip
    return meet(side_blocks(m.table, side, 1 - side), points, limits, Budget(limits))


def at_element(m: AffineMap, element: int, rank: int | None, name: str) -> Met:
    """Where pieces (left) hold one element, a flat index in the box of the codomain with this key."""
    at = m.codomain.index(rank, name)
    size = m.codomain.boxes[at].size
    if not 0 <= as_int(element, "an element") < size:
        raise InvalidMapError(f"element {element} is outside {describe_key((rank, name))}, 0..{size - 1}")
    return at_points(m, CODOMAIN, np.array([at]), np.array([element]))


def far_points(m: AffineMap, side: int, box: int, address: int) -> list[tuple[int, int, int]]:
    """(box, address, piece) of what one address of one side pairs with, in order; of a piece that
    repeats there (stride 0), the first few along each axis."""
    met = at_points(m, side, np.array([box]), np.array([address]))
    far = m.table.columns.side(1 - side)[0]
    found = set()
    for k, piece in enumerate(met.left.tolist()):
        steps = met.left_strides[0, :, k].tolist()
        for index in itertools.product(*(range(min(n, FEW)) for n in met.shape[:, k].tolist())):
            shift = sum(i * step for i, step in zip(index, steps))
            found.add((int(far[piece]), int(met.left_offset[0, k]) + shift, piece))
    return sorted(found)


def elements_at(
    m: AffineMap,
    slots: Any,
    rank: int | None = None,
    name: str | None = None,
    *,
    limits: Limits = Limits(),
) -> IntArray:
    """The elements that an array of slots holds, -1 for padding: ``m(slots)``.

    Slots are flat row-major addresses in the shard of ``rank`` (and ``name``); without either
    they count through all boxes of the domain in key order. Elements count through the boxes
    of the codomain likewise: for one logical tensor they are its flat addresses. Scales are
    not applied. Raises ``InvalidMapError`` on a map that is not single-valued, ``UnsupportedError`` where
    an int64 cannot count through the boxes.

    >>> from shardalg import Cyclic, layout
    >>> m = layout((5,), Cyclic(0, 2), ranks=2)
    >>> m([0, 1, 2], rank=0).tolist(), m([[0], [1]], rank=1).tolist()
    ([0, 1, 4], [[2], [3]])
    """
    if not m.single_valued:
        raise InvalidMapError("m(slots) needs one element per slot, and this map is not single-valued")
    asked = np.asarray(slots)
    if asked.size and asked.dtype.kind not in "iu":
        raise InvalidMapError(f"slots are integers, got an array of {asked.dtype}")
    box, address = _located(m.domain, asked.reshape(-1).astype(np.int64), rank, name)
    met = at_points(m, DOMAIN, box, address, limits)
    found = np.full(len(box), -1, np.int64)
    begins = _begins(m.codomain)
    found[met.right] = begins[m.table.columns.cod_box[met.left]] + met.left_offset[0]
    return found.reshape(asked.shape)


def _begins(space: Space) -> IntArray:
    """The number of the first slot of each box when they are counted box after box."""
    if space.size > LAST:
        raise UnsupportedError(
            f"the boxes of {space} have {space.size} slots, more than the 2**63 - 1 that can be counted"
            " through: read the pieces, or divide the space"
        )
    return np.cumsum([0, *space.sizes.tolist()])[:-1].astype(np.int64)


def _located(space: Space, slots: IntArray, rank: int | None, name: str | None) -> tuple[IntArray, IntArray]:
    """Box and address of each slot."""
    if rank is None and name is None:
        where, begins, size = "the domain", _begins(space), space.size
        box = np.searchsorted(begins, slots, side="right") - 1
    else:
        at = space.index(rank, "" if name is None else name)
        where, begins, size = (
            describe_key(space.boxes[at].key),
            np.zeros(at + 1, np.int64),
            space.boxes[at].size,
        )
        box = np.full(len(slots), at, np.int64)
    out = (slots < 0) | (slots >= size)
    if out.any():
        raise InvalidMapError(f"slot {int(slots[out][0])} is outside {where}, which has {size} slots")
    return box, slots - begins[box]
