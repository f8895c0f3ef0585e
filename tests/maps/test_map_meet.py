"""Where blocks meet, against walking both, and through each of its ways: products, carved runs, solver."""

from __future__ import annotations

import itertools
from collections import Counter
from unittest.mock import patch

import numpy as np
import pytest
from blocks import Block, any_blocks, blocks_of
from hypothesis import given
from hypothesis import strategies as st
from laws import many

from shardalg import AffineMap, LimitError, Limits, Piece, Side, Space
from shardalg._limits import Budget
from shardalg.maps import _meet
from shardalg.maps._meet import meet, overlap_pairs
from shardalg.maps._relation import DOMAIN, side_blocks


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


@many
@given(any_blocks, any_blocks)
def test_every_shared_address_once(a, b):
    assert met(a, b) == walked(a, b)


@many
@given(any_blocks, any_blocks)
def test_every_shared_address_once_in_the_ways_of_many_blocks(a, b):
    """Other chains, blocks cut into slices, and long ranges over short ones, whatever the numbers."""
    with patch.object(_meet, "FEW", -(1 << 20)):
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


ranges = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=9)


@many
@given(ranges, ranges, st.sampled_from([1 << 12, -1]))
def test_overlapping_ranges_in_order(a, b, few):
    low_a, low_b = (np.array([low for low, _ in x], np.int64) for x in (a, b))
    high_a, high_b = (np.array([low + n for low, n in x], np.int64) for x in (a, b))
    both = itertools.product(range(len(a)), range(len(b)))
    want = [(i, j) for i, j in both if low_a[i] <= high_b[j] and low_b[j] <= high_a[i]]
    with patch.object(_meet, "FEW", few):
        left, right = overlap_pairs(low_a, high_a, low_b, high_b, Limits())
    found = list(zip(left.tolist(), right.tolist()))
    assert found == sorted(want, key=lambda pair: (pair[0], low_b[pair[1]], pair[1]))


def columns_with_odd_rows(n, odd):
    """One column of a row-major [16, n] for each point of n, some joined in threes of an odd step."""
    joined = {start + i * step for start, step in odd for i in range(3)}
    single = [("a", (k, ((16, n),))) for k in range(n) if k not in joined]
    return single + [("a", (start, ((3, step), (16, n)))) for start, step in odd]


def test_odd_strides_of_a_few_do_not_spoil_the_digits_of_many():
    n, odd = 4096, [(1, 37), (2, 91), (3, 111), (4, 1300)]
    x = blocks_of(columns_with_odd_rows(n, odd))
    one, two, ranges = _meet.in_digits(x, x, [1], *[np.arange(len(x.box))] * 2, Budget(Limits()))
    assert not len(one.hard) and not len(two.hard) and ranges.total < 4 * n
    found = meet(x, x, Limits(pairs=4 * n), Budget(Limits(steps=10_000)))
    assert (found.left == found.right).all() and np.prod(found.shape, axis=0).sum() == 16 * n
