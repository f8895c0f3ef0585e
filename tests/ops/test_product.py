"""Maps side by side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, means, placed, recut, sends
from oracle import Point, Relation, meaning

from shardalg import (
    AffineMap,
    Cyclic,
    InvalidMapError,
    LimitError,
    Limits,
    Space,
    Split,
    compose,
    equivalent,
    identity,
    invert,
    is_injective,
    is_single_valued,
    is_surjective,
    is_total,
    layout,
    product,
    union,
)
from shardalg.testing import affine_maps, spaces

UNIT = identity(Space.logical(()))


@st.composite
def unnamed(draw, length: int = 1, *, void: bool = True) -> tuple[AffineMap, ...]:
    """A chain of maps between spaces whose boxes have ranks or are single: products keep them apart."""
    ends = [draw(spaces(max_boxes=2, max_size=3).map(_plain)) for _ in range(length + 1)]
    if not void:
        ends = [Space(tuple(b for b in s.boxes if b.size)) for s in ends]
        ends = [s if len(s) else Space.logical(()) for s in ends]
    return tuple(draw(recut(affine_maps(a, b, max_pieces=2, max_axes=2))) for a, b in zip(ends, ends[1:]))


def _plain(space: Space) -> Space:
    if space.boxes[0].rank is None:
        return Space.logical(space.boxes[0].shape)
    return Space.shards({b.rank: b.shape for b in space.boxes})


def slow(f: Relation, g: Relation, domain: Space, codomain: Space) -> Relation:
    """Pairs of slots and of elements, numbered as the product's boxes say."""

    def pair(a: Point, b: Point, left: Space, right: Space) -> Point:
        width = 1 + max(right.ranks, default=0)
        rank = None if a[0][0] is None and b[0][0] is None else (a[0][0] or 0) * width + (b[0][0] or 0)
        return (rank, ""), a[1] * right.box(*b[0]).size + b[1]

    found = {
        (pair(s, t, f.domain, g.domain), pair(e, x, f.codomain, g.codomain), a * b)
        for s, e, a in f.triples
        for t, x, b in g.triples
    }
    return Relation(domain, codomain, frozenset(found))


@given(unnamed(), unnamed())
def test_it_pairs_slots_and_elements(one, other):
    (a,), (b,) = one, other
    found = product(a, b)
    assert means(found, slow(meaning(a), meaning(b), found.domain, found.codomain))


def test_scales_that_multiply_to_the_same_are_one_pair():
    twice = union(sends({0: 0}), sends({0: 0}, scale=2))
    found = product(twice, twice)
    assert means(found, slow(meaning(twice), meaning(twice), found.domain, found.codomain))
    assert found.size == 3


@given(unnamed(2), unnamed(2))
def test_it_is_a_functor_in_both(one, other):
    """P1: ``product(g1, g2) @ product(f1, f2) = product(g1 @ f1, g2 @ f2)``."""
    (f1, g1), (f2, g2) = one, other
    assert agree(compose(product(g1, g2), product(f1, f2)), product(compose(g1, f1), compose(g2, f2)))


@given(unnamed(), unnamed(), unnamed())
def test_invert_distributes_and_it_is_associative_with_a_unit(one, other, third):
    """P2."""
    (a,), (b,), (c,) = one, other, third
    assert agree(invert(product(a, b)), product(invert(a), invert(b)))
    assert agree(product(product(a, b), c), product(a, product(b, c)))
    assert agree(product(UNIT, a), a)
    assert agree(product(a, UNIT), a)


@given(unnamed(void=False), unnamed(void=False))
def test_it_keeps_and_reflects_classes(one, other):
    """P4: single-valued, injective, total, onto. Needs non-empty factors."""
    (a,), (b,) = one, other
    if len(a) and len(b):
        for question in (is_single_valued, is_injective, is_total, is_surjective):
            assert bool(question(product(a, b))) == (bool(question(a)) and bool(question(b)))


def test_an_empty_factor_reflects_nothing():
    """The counter-example to P4 without them."""
    double, none = sends({0: (0, 1)}), sends({})
    assert is_single_valued(product(double, none)) and not is_single_valued(double)


@given(placed(max_size=3), placed(max_size=3))
def test_ranks_are_row_major(a, b):
    """P4: rank = r1*R2 + r2."""
    width = 1 + max(b.ranks)
    assert product(a, b).ranks == tuple(r1 * width + r2 for r1 in a.ranks for r2 in b.ranks)


def test_a_mesh_of_two_cuts_is_a_product():
    both = product(layout((6,), Cyclic(0, 2), ranks=2), layout((5,), Split(0), ranks=3))
    assert equivalent(both, layout((6, 5), [Cyclic(0, 2), Split(1)], mesh=(2, 3)))


def test_names_are_joined_and_must_stay_apart():
    q = AffineMap.from_pieces(Space.logical({"a": 1}), Space.logical({"b": 1}), [])
    assert product(q, q).domain.names == ("a.a",)
    both = AffineMap.from_pieces(Space.logical({"": 1, "a": 1}), Space.logical(1), [])
    with pytest.raises(InvalidMapError, match="share the key 'a'"):
        product(both, both)


def test_too_many_pieces_are_refused_before_they_are_built():
    ends = sends({k: k * k % 7 for k in range(7)}, 7, 7)
    with pytest.raises(LimitError, match="pieces"):
        product(ends, ends, limits=Limits(pieces=3))
