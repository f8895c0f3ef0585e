"""Which slots of two layouts hold the same element."""

from __future__ import annotations

from fractions import Fraction

import oracle
import pytest
from hypothesis import given
from laws import agree, means, placed_pairs
from oracle import meaning

from shardalg import InvalidMapError, Replicate, Split, compose, invert, layout, match, product


@given(placed_pairs())
def test_it_pairs_all_homes_of_an_element(pair):
    a, b = pair
    assert means(match(a, b), oracle.compose(oracle.invert(meaning(b)), meaning(a)))


@given(placed_pairs())
def test_it_turns_around_with_its_arguments(pair):
    """T1: ``~match(A, B) = match(B, A)``."""
    a, b = pair
    assert agree(invert(match(a, b)), match(b, a))


@given(placed_pairs())
def test_it_is_difunctional(pair):
    """T2: ``M @ ~M @ M = M``."""
    m = match(*pair)
    assert agree(compose(m, compose(invert(m), m)), m)


@given(placed_pairs(max_size=3), placed_pairs(max_size=3))
def test_it_is_a_product_on_products(first, second):
    """T16."""
    (a1, b1), (a2, b2) = first, second
    assert agree(match(product(a1, a2), product(b1, b2)), product(match(a1, b1), match(a2, b2)))


def test_its_scale_is_the_ratio_of_what_is_stored():
    halves, thirds = (layout((4,), Replicate(Fraction(1, n)), ranks=n) for n in (2, 3))
    assert {p.scale for p in match(halves, thirds).pieces} == {Fraction(3, 2)}


def test_layouts_of_different_tensors_do_not_match():
    with pytest.raises(InvalidMapError, match=r"shape \(4,\).*shape \(5,\)"):
        match(layout((4,), Split(0), ranks=2), layout((5,), Split(0), ranks=2))
