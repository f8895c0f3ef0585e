"""holders: derived from the layout, slot by slot in the oracle."""

from __future__ import annotations

import time
from collections import defaultdict

import pytest
from hypothesis import given
from laws import recut
from oracle import meaning

from shardalg import (
    AffineMap,
    Experts,
    InvalidMapError,
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
    layout,
    union,
)
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
