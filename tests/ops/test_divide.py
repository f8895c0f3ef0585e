"""What a map leaves over after another."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from laws import agree, composable, line, means, randoms, sends
from oracle import Relation, meaning

from shardalg import (
    AffineMap,
    InvalidMapError,
    Replicate,
    Split,
    compose,
    divide,
    equivalent,
    layout,
    nest,
)


def slow_divide(m: Relation, outer: Relation) -> Relation:
    """Every (slot, slot of outer, scale) that brings nothing that is not in m."""
    found = set()
    for s, e, b in m.triples:
        for t, at, a in outer.triples:
            brought = {(s, x, c * b / a) for u, x, c in outer.triples if u == t}
            if at == e and brought <= m.triples:
                found.add((s, t, b / a))
    return Relation(m.domain, outer.domain, frozenset(found))


@given(composable())
def test_it_undoes_composition(maps):
    f, outer = maps
    m = compose(outer, f)
    x = divide(m, outer)
    assert means(x, slow_divide(meaning(m), meaning(outer)))
    assert agree(compose(outer, x), m)


@given(composable(), randoms())
def test_it_says_when_there_is_no_answer(maps, random):
    f, outer = maps
    whole = compose(outer, f)
    some = [p for p in whole.pieces if random.random() < 0.5]
    m = AffineMap.from_pieces(whole.domain, whole.codomain, some)
    x, slow = divide(m, outer), slow_divide(meaning(m), meaning(outer))
    if oracle.compose(meaning(outer), slow) == meaning(m):
        assert means(x, slow)
    else:
        assert not x
        (slot, element), lost = x.witness, meaning(m).triples - oracle.compose(meaning(outer), slow).triples
        assert (slot, element) in {(s, e) for s, e, _ in lost}


def test_a_layout_cut_again_gives_back_the_inner_layouts():
    outer = layout((8, 2), Split(0), ranks=2)
    inner = layout((4, 2), Split(1), ranks=2)
    x = divide(nest(outer, {0: inner, 1: inner}), outer)
    assert [x.shard_shape(r) for r in x.ranks] == [(4, 1)] * 4
    assert x([0, 1, 2], rank=1).tolist() == inner([0, 1, 2], rank=1).tolist()


def test_replicas_are_all_named():
    x = divide(layout((4,), Split(0), ranks=1), layout((4,), Replicate(), ranks=3))
    assert x.size == 12


def test_an_element_that_outer_lacks_is_named():
    answer = divide(sends({0: 1, 2: 3}), sends({0: 1}))
    assert not answer
    assert answer.reason == "slot 2 of the tensor needs element 3 of the tensor, but outer lacks it"


def test_a_slot_that_brings_too_much_is_named():
    answer = divide(sends({0: 1}), sends({0: (1, 2)}))
    assert not answer
    assert "each slot of outer that holds it brings others" in answer.reason


def test_the_codomains_must_be_equal():
    with pytest.raises(InvalidMapError, match="the codomain of outer"):
        divide(sends({}), sends({}, 4, 5))


def test_an_empty_map_leaves_an_empty_map():
    x = divide(sends({}), sends({0: 1}, 3, 4))
    assert equivalent(x, AffineMap.from_pieces(line(4), line(3), []))
