"""Where blocks meet, against walking both, and through each of its ways: products, carved runs, solver."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import many

from shardalg import AffineMap, LimitError, Limits, Piece, Side, Space
from shardalg._limits import Budget
from shardalg.maps._meet import meet
from shardalg.maps._relation import DOMAIN, side_blocks

Block = tuple[int, tuple[tuple[int, int], ...]]  # offset, (extent, stride) per axis
SPACE = Space.logical({"a": (200,), "b": (200,)})


def blocks_of(found: list[tuple[str, Block]]):
    """Blocks that carry their own addresses and the index along each axis."""
    axes = max((len(b[1]) for _, b in found), default=0)
    tables = [AffineMap.from_pieces(SPACE, SPACE, []).table]
    rows = np.zeros((6 + 3 * axes, len(found)), np.int64)
    rows[4:6] = 1
    rows[6 : 6 + axes] = 1
    for j, (name, (offset, its)) in enumerate(found):
        rows[0, j], rows[1, j] = "ab".index(name), offset
        for i, (n, s) in enumerate(its):
            rows[6 + i, j], rows[6 + axes + i, j] = n, s
    return side_blocks(type(tables[0])(rows), DOMAIN, DOMAIN, index=True)


def walked(a: list[tuple[str, Block]], b: list[tuple[str, Block]]) -> Counter:
    """(block, its index, block, its index) of every shared address."""
    found: Counter = Counter()
    for (i, (x, p)), (j, (y, q)) in itertools.product(enumerate(a), enumerate(b)):
        if x == y:
            for u, v in itertools.product(_points(p), _points(q)):
                if u[0] == v[0]:
                    found[i, u[1], j, v[1]] += 1
    return found


def _points(block: Block):
    offset, axes = block
    for index in itertools.product(*(range(n) for n, _ in axes)):
        yield offset + sum(i * s for i, (_, s) in zip(index, axes)), index


def met(a, b) -> Counter:
    found: Counter = Counter()
    result = meet(blocks_of(a), blocks_of(b), Limits(), Budget(Limits()))
    for k in range(len(result.left)):
        i, j = int(result.left[k]), int(result.right[k])
        sides = ((result.left_offset, result.left_strides), (result.right_offset, result.right_strides))
        for t in itertools.product(*(range(n) for n in result.shape[:, k])):
            ends = [
                off[:, k] + (steps[:, :, k] @ np.array(t, np.int64).reshape(-1) if t else 0)
                for off, steps in sides
            ]
            assert ends[0][0] == ends[1][0]
            index = [tuple(e[1 : 1 + len(block[1][1])].tolist()) for e, block in zip(ends, (a[i], b[j]))]
            found[i, index[0], j, index[1]] += 1
    return found


@st.composite
def blocks(draw, strides=st.integers(-12, 12)):
    axes = draw(st.lists(st.tuples(st.integers(1, 4), strides), max_size=3))
    low = sum(min(0, s) * (n - 1) for n, s in axes)
    return draw(st.sampled_from("ab")), (draw(st.integers(0, 40)) - low, tuple(axes))


digits = st.sampled_from([0, 1, 1, 2, 4, 8, 12, 24, -4])
any_blocks = st.lists(blocks() | blocks(digits), max_size=3)


@many
@given(any_blocks, any_blocks)
def test_every_shared_address_once(a, b):
    assert met(a, b) == walked(a, b)


WAYS = {
    "products": ([("a", (3, ((4, 8), (2, 1))))], [("a", (0, ((3, 16), (8, 1))))]),
    "carved runs": ([("a", (5, ((30, 1),)))], [("a", (0, ((5, 8), (4, 1))))]),
    "carved strided runs": ([("a", (5, ((13, 3),)))], [("a", (0, ((5, 12), (4, 1))))]),
    "progressions": ([("a", (1, ((10, 4),)))], [("a", (3, ((12, 6),)))]),
    "a short progression": ([("a", (0, ((3, 4),)))], [("a", (0, ((10, 6),)))]),
    "progressions that start apart": ([("a", (30, ((9, 4),)))], [("a", (0, ((12, 6),)))]),
    "progressions in one digit of two": ([("a", (16, ((5, 2), (2, 64))))], [("a", (13, ((5, 3), (3, 64))))]),
    "the solver": ([("a", (0, ((3, 5), (3, 7), (3, 11))))], [("a", (0, ((4, 6), (4, 9))))]),
    "repeats on both sides": ([("a", (0, ((3, 0), (4, 1))))], [("a", (0, ((2, 0), (2, 3))))]),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way(way):
    a, b = WAYS[way]
    assert met(a, b) == walked(a, b)
    assert walked(a, b)


@pytest.mark.parametrize(
    ("s", "t"), [(2**31 + 11, 2**31 + 1), (2**45 + 3, 2**44 + 1), (3 * 2**58 + 1, 2**59 + 7)]
)
def test_far_progressions_meet_once(s, t):
    start = 3 * s - 2 * t
    a, b = ("a", (max(0, -start), ((5, s),))), ("a", (max(0, start), ((5, t),)))
    assert met([a], [b]) == walked([a], [b]) == Counter({(0, (3,), 0, (2,)): 1})


def test_bounds_hold_before_anything_is_built():
    n = 40
    rows = [Piece((n,), Side(n * k, (1,)), Side(0, (1,))) for k in range(n)]
    columns = [Piece((n,), Side(k, (n,)), Side(0, (1,))) for k in range(n)]
    square, flat = Space.logical((n * n,)), Space.logical((n,))
    a, b = (AffineMap.from_pieces(square, flat, its) for its in (rows, columns))
    ends = [side_blocks(m.table, DOMAIN) for m in (a, b)]
    with pytest.raises(LimitError, match="pairs"):
        meet(*ends, Limits(pairs=n), Budget(Limits()))
    with pytest.raises(LimitError, match="pieces"):
        meet(*ends, Limits(pieces=n), Budget(Limits()))
    assert len(meet(*ends, Limits(), Budget(Limits())).left) == n * n
