"""holders: derived from the layout, slot by slot in the oracle."""

from __future__ import annotations

import time
from collections import defaultdict
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given
from laws import recut
from oracle import meaning

from shardalg import (
    AffineMap,
    Experts,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    equivalent,
    holders,
    image,
    intersect,
    is_injective,
    layout,
    plan,
    simplify,
    union,
)
from shardalg.ops import _holders
from shardalg.ops._holders import atoms
from shardalg.testing import layouts


def held_by(m):
    """element -> ranks, one by one."""
    found = defaultdict(set)
    for (key, _), (_, element), _ in meaning(m).triples:
        found[element].add(key[0])
    return found


@given(one=recut(layouts()))
def test_regions_of_holders_partition_what_is_held(one):
    found = holders(one)
    want = held_by(one)
    assert sum(region.size for _, region in found) == len(want)
    for ranks, region in found:
        for (_, element), *_ in meaning(region).triples:
            assert tuple(sorted(want[element])) == ranks
    for k, (_, region) in enumerate(found):
        for _, other in found[k + 1 :]:
            assert not len(intersect(region, other))
    if found:
        whole = found[0][1]
        for _, region in found[1:]:
            whole = union(whole, region)
        assert equivalent(whole, image(one))


@given(one=recut(layouts()))
def test_holders_of_one_element(one):
    want = held_by(one)
    for element in range(one.codomain.size):
        assert holders(one, element) == tuple(sorted(want.get(element, ())))


@given(one=recut(layouts()))
def test_an_atom_gives_each_holder_each_element_once_from_its_lowest_slot(one):
    cut = atoms(one)
    lowest = {}
    for (key, slot), (_, element), _ in meaning(one).triples:
        at = (key[0], element)
        lowest[at] = min(lowest.get(at, slot), slot)
    seen = {}
    c = cut.table.columns
    for k in range(len(cut.table)):
        for x in _points(c.shape[:, k].tolist()):
            slot = int(c.dom_offset[k] + sum(i * s for i, s in zip(x, c.dom_strides[:, k].tolist())))
            element = int(c.cod_offset[k] + sum(i * s for i, s in zip(x, c.cod_strides[:, k].tolist())))
            at = (int(cut.rank[k]), element)
            assert at not in seen
            seen[at] = slot
    assert seen == lowest


def _points(shape):
    points = [()]
    for n in shape:
        points = [(*p, i) for p in points for i in range(n)]
    return points


def test_replicated_rows_and_experts():
    """Cases 7 and 9."""
    qkv = layout((48, 8), Segments(0, ((32, Split(0)), (16, Replicate()))), ranks=4)
    assert {ranks: region.size for ranks, region in holders(qkv)} == {
        (0,): 64, (1,): 64, (2,): 64, (3,): 64, (0, 1, 2, 3): 128,
    }  # fmt: skip
    placed = layout((6, 5), Experts([[0, 3], [3, 1, 5], [], [2, 4]]))
    assert holders(placed, 3 * 5) == (0, 1) and placed.shard_shape(2) == (0, 5)


def test_own_rows_that_run_on_into_replicated_ones_cost_no_more_than_others():
    n = 128
    qkv = layout((48 * n, 64), Segments(0, ((32 * n, Split(0)), (16 * n, Replicate()))), ranks=n)
    assert len(qkv.pieces_of(n - 1)) == 1
    start = time.perf_counter()
    found = holders(qkv)
    assert time.perf_counter() - start < 1
    assert [len(ranks) for ranks, _ in found] == [1] + [n] + [1] * (n - 1)


def test_an_element_outside_is_refused():
    with pytest.raises(InvalidMapError, match=r"element 9 is outside the tensor, 0\.\.3"):
        holders(layout((4,), Split(0), ranks=2), 9)


def test_the_lowest_slot_wins_where_pieces_interleave():
    """Slots 0, 2, 4 hold elements 0, 1, 2 and slots 1, 3, 5 hold 2, 1, 0: element 2 has slot 1, though the
    piece of slot 1 comes second."""
    one = AffineMap.from_pieces(
        Space.shards({0: (6,)}),
        Space.logical((3,)),
        [Piece((3,), Side(0, (2,), 0), Side(0, (1,))), Piece((3,), Side(1, (2,), 0), Side(2, (-1,)))],
    )
    cut = atoms(one).table.columns
    starts, steps = (
        zip(cut.dom_offset.tolist(), cut.cod_offset.tolist()),
        zip(cut.dom_strides.sum(axis=0).tolist(), cut.cod_strides.sum(axis=0).tolist()),
    )
    slots = {
        element + i * along: slot + i * step
        for (slot, element), (step, along), n in zip(starts, steps, cut.shape.prod(axis=0).tolist())
        for i in range(n)
    }
    assert slots == {0: 0, 1: 2, 2: 1}


@given(one=recut(layouts()))
def test_without_cells_the_regions_are_the_same(one):
    """Rank by rank, which is left for pieces that have no cells."""
    again = AffineMap(one.domain, one.codomain, one.table)
    with patch.object(_holders, "cells", lambda *_: None):
        slowly = holders(again)
    found = holders(one)
    assert [ranks for ranks, _ in found] == [ranks for ranks, _ in slowly]
    assert all(equivalent(a, b) for (_, a), (_, b) in zip(found, slowly))


def replicated_experts(experts, ranks, most):
    """Each expert on up to ``most`` ranks, the ids of a rank ascending, as serving engines place them."""
    g = np.random.default_rng(0)
    rows = [[] for _ in range(ranks)]
    for e in range(experts):
        for r in g.choice(ranks, size=int(g.integers(1, most + 1)), replace=False):
            rows[int(r)].append(e)
    return rows, layout((experts, 64, 32), Experts(rows))


def test_thousands_of_replicated_experts_cost_a_sweep():
    rows, m = replicated_experts(1024, 256, 16)
    assert len(m) > 8000
    start = time.perf_counter()
    assert not is_injective(m)
    found = holders(m)
    p = plan(m, layout((1024, 64, 32), Experts.uniform(1024, 256)))
    assert time.perf_counter() - start < 4
    want = {tuple(sorted(r for r in range(256) if e in rows[r])) for e in range(1024)}
    assert {ranks for ranks, _ in found} == want and p.map.size == 1024 * 64 * 32


def halo(ranks, rows, around, columns, width):
    """Rows of a matrix per rank with ``around`` more on either side, only the left ``width`` columns."""
    shape = (ranks * rows, columns)
    ends = [(max(0, r * rows - around), min(shape[0], (r + 1) * rows + around)) for r in range(ranks)]
    pieces = [
        Piece((high - low, width), Side(0, (width, 1), rank=r), Side(low * columns, (columns, 1)))
        for r, (low, high) in enumerate(ends)
    ]
    boxes = Space.shards({r: (high - low, width) for r, (low, high) in enumerate(ends)})
    return AffineMap.from_pieces(boxes, Space.logical(shape), pieces)


@pytest.mark.parametrize("width", [64, 40])
def test_halos_cost_a_sweep(width):
    m = halo(500, 200, 1000, 64, width)
    start = time.perf_counter()
    found = holders(m)
    assert time.perf_counter() - start < 1
    assert {ranks: region.size for ranks, region in found} == {
        tuple(range(max(0, r - 5), min(500, r + 6))): 200 * width for r in range(500)
    }
    p = plan(m, layout((100_000, 64), Split(0), ranks=503), missing="leave")
    pieces = len(simplify(m, homogeneous=True))
    assert time.perf_counter() - start < 4
    assert p.map.size == 100_000 * width and 5000 < pieces < 6000


def to_rows(m, limits):
    return plan(m, layout(m.logical_shape, Split(0), ranks=4), limits=limits)


@pytest.mark.parametrize("ask", [is_injective, holders, to_rows])
def test_the_bound_that_is_given_is_the_one_that_holds(ask):
    _, m = replicated_experts(64, 8, 4)
    with pytest.raises(LimitError, match=r"Limits\(pairs=3\)"):
        ask(m, limits=Limits(pairs=3))
    assert "injective" not in m.__dict__  # the first question already held it
    ask(m, limits=Limits())
