"""Shards cut again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, placed, randoms

from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Replicate,
    Side,
    Space,
    Split,
    compose,
    equivalent,
    is_injective,
    layout,
    nest,
    relabel,
)
from shardalg.testing import layouts, placements, resplit


@st.composite
def towers(draw) -> tuple:
    """A layout, layouts of its shards, and layouts of theirs."""
    outer = draw(placed(max_ranks=2, scaled=True))
    inner = {r: _cut(draw, outer.shard_shape(r)) for r in outer.ranks}
    middle = nest(outer, inner)
    return outer, inner, {r: _cut(draw, middle.shard_shape(r)) for r in middle.ranks}


def _cut(draw, shape):
    return layout(shape, draw(placements(shape, 2)), ranks=2)


@given(towers())
def test_it_is_associative(tower):
    """N1."""
    outer, inner, innermost = tower
    width = 1 + max(i for m in inner.values() for i in m.ranks)
    below = {r: nest(m, {i: innermost[r * width + i] for i in m.ranks}) for r, m in inner.items()}
    assert agree(nest(nest(outer, inner), innermost), nest(outer, below))


@given(towers(), randoms())
def test_it_is_composition(tower, random):
    """N1."""
    outer, inner, _ = tower
    whole = nest(resplit(outer, random), {r: resplit(m, random) for r, m in inner.items()})
    for r, m in inner.items():
        for i in m.ranks:
            slots = range(m.domain.box(i).size)
            through = m(slots, rank=i)
            expected = [int(outer([e], rank=r)[0]) if e >= 0 else -1 for e in through]
            assert whole(slots, rank=2 * r + i).tolist() == expected


@given(layouts())
def test_holding_shards_whole_is_the_unit(m):
    """N1."""
    whole = {r: layout(m.shard_shape(r), Replicate(), ranks=1) for r in m.ranks}
    assert agree(nest(m, whole), m)
    assert agree(nest(layout(m.logical_shape, Replicate(), ranks=1), {0: m}), m)


@given(towers())
def test_it_keeps_single_valued_and_injective(tower):
    """N4."""
    outer, inner, _ = tower
    found = nest(outer, inner)
    assert found.single_valued
    if is_injective(outer) and all(is_injective(m) for m in inner.values()):
        assert is_injective(found)


def test_a_slot_that_an_inner_map_sends_twice_stays_so():
    outer = layout((4,), Replicate(), ranks=1)
    twice = [Piece((), Side(0, (), 0), Side(e, ())) for e in (1, 2)]
    found = nest(outer, {0: AffineMap.from_pieces(Space.shards({0: (1,)}), Space.logical((4,)), twice)})
    assert found.size == 2
    assert not found.single_valued


def chunks(n: int, *ways: int):
    """n rows cut by chunks, and each part again."""
    m = layout((n,), Split(0), ranks=ways[0])
    return m if len(ways) == 1 else nest(m, {r: chunks(m.shard_shape(r)[0], *ways[1:]) for r in m.ranks})


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("q", [1, 2, 3])
def test_cutting_twice_is_cutting_once_where_it_divides(p, q):
    """N2: p parts of q each are p*q parts. Needs p*q to divide n."""
    for n in range(0, 5 * p * q, p * q):
        assert equivalent(chunks(n, p, q), chunks(n, p * q))


def test_otherwise_it_is_not():
    """The counter-example to N2 without it."""
    twice, once = chunks(18, 4, 2), chunks(18, 8)
    assert [twice.shard_shape(r)[0] for r in twice.ranks] == [3, 2, 3, 2, 3, 2, 2, 1]
    assert [once.shard_shape(r)[0] for r in once.ranks] == [3, 3, 3, 3, 3, 3, 0, 0]
    assert not equivalent(twice, once)


def test_ranks_are_outer_times_width_plus_inner_or_as_given():
    outer = layout((4,), Split(0), ranks=2)
    inner = {r: layout((2,), Split(0), ranks=2) for r in outer.ranks}
    assert nest(outer, inner).ranks == (0, 1, 2, 3)
    ranks = {(r, i): 10 * i + r for r in (0, 1) for i in (0, 1)}
    found = nest(outer, inner, ranks)
    assert found.ranks == (0, 1, 10, 11)
    assert equivalent(found, relabel(nest(outer, inner), domain=[0, 10, 1, 11]))


def test_every_rank_needs_an_inner_map_of_its_shard():
    outer = layout((4,), Split(0), ranks=2)
    one = layout((2,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match=r"no inner map for ranks \[1\]"):
        nest(outer, {0: one})
    with pytest.raises(InvalidMapError, match=r"shape \(3,\).*has shape \(2,\)"):
        nest(outer, {0: one, 1: layout((3,), Split(0), ranks=2)})
    with pytest.raises(InvalidMapError, match="no entry for outer rank 1, inner rank 0"):
        nest(outer, {0: one, 1: one}, {(0, 0): 0, (0, 1): 1})


def test_composing_with_the_outer_layout_is_all_there_is():
    outer, inner = layout((8,), Split(0), ranks=1), layout((8,), Split(0), ranks=4)
    assert equivalent(nest(outer, {0: inner}), compose(outer, relabel(inner, codomain=lambda key: (0, ""))))
