"""Cells: parts of blocks that are the same addresses or share none, against walking every block."""

from __future__ import annotations

from collections import Counter, defaultdict
from unittest.mock import patch

import numpy as np
from blocks import any_blocks, blocks, blocks_of
from hypothesis import given
from hypothesis import strategies as st
from laws import many

from shardalg import Limits
from shardalg._limits import Budget
from shardalg.maps import _cells
from shardalg.maps._cells import cells
from shardalg.maps._digits import Blocks

flat = st.lists(blocks(st.sampled_from([1, 1, 2, 3, 4, 8, 12, 24, -4])), min_size=1, max_size=6)


def walked(x: Blocks, k: int) -> list[tuple[int, tuple[int, ...]]]:
    """(address, payload) of every point of a block."""
    steps = np.indices(x.shape[:, k]).reshape(len(x.shape), -1) if len(x.shape) else np.zeros((0, 1), int)
    address = x.offset[k] + x.strides[:, k] @ steps
    payload = x.pay_offset[:, k, None] + x.pay_strides[:, :, k] @ steps
    return [(int(a), tuple(p)) for a, p in zip(address, payload.T.tolist())]


def cut(x: Blocks):
    return cells(x, Limits(), Budget(Limits()))


@many
@given(flat | any_blocks)
def test_cells_are_parts_of_their_blocks_and_the_same_or_apart(its):
    x = blocks_of(its)
    found = cut(x)
    repeats = any(s == 0 and n > 1 for _, (_, axes) in its for n, s in axes)
    assert (found is None) == (repeats or not its)
    if found is None:
        return
    parts: defaultdict[int, Counter] = defaultdict(Counter)
    addresses: defaultdict[int, set] = defaultdict(set)
    for k, (block, cell) in enumerate(zip(found.block.tolist(), found.cell.tolist())):
        points = walked(found.blocks, k)
        assert found.blocks.box[k] == x.box[block]
        parts[block].update(points)
        addresses[cell].add((int(x.box[block]), tuple(a for a, _ in points)))
    assert dict(parts) == {k: Counter(walked(x, k)) for k in range(len(its))}
    assert all(len(same) == 1 for same in addresses.values())  # also in the same order
    every = [(box, a) for same in addresses.values() for box, points in same for a in points]
    assert len(every) == len(set(every))


def test_blocks_that_repeat_an_address_or_fall_apart_have_none():
    assert cut(blocks_of([("a", (0, ((3, 0), (4, 1))))])) is None
    comb = blocks_of([("a", (0, ((128, 1),))), *(("a", (k, ((9, 7),))) for k in range(7))])
    assert cut(comb) is not None
    with patch.object(_cells, "FEW", 0), patch.object(_cells, "MOST", 1):
        assert cut(comb) is None


def test_ranges_that_overlap_in_a_row_cost_a_sweep():
    """n ranges, each over its ten neighbours on both sides: 20 cells for each."""
    n = 10_000
    zeros = np.zeros(n, np.int64)
    x = Blocks(zeros, 10 * np.arange(n), zeros[None] + 101, zeros[None] + 1, zeros[None], zeros[None, None])
    found = cells(x, Limits(), Budget(Limits(steps=1000)))
    assert len(found.block) < 24 * n and len(np.unique(found.cell)) < 3 * n


def test_columns_that_cannot_meet_are_not_cut_by_each_other():
    """The left half of a matrix in 7 parts of rows, the right half in 11."""
    n = 7 * 11
    its = []
    for at, count in ((0, 7), (1, 11)):
        its += [("a", (2 * (n // count) * k + at, ((n // count, 2),))) for k in range(count)]
    assert len(cut(blocks_of(its)).block) == 18
