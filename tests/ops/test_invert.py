"""The converse of a map."""

from __future__ import annotations

from fractions import Fraction

import oracle
from hypothesis import given
from laws import agree, alike, composable, means, sends, some
from oracle import meaning

from shardalg import compose, equivalent, intersect, invert, subtract, union


@given(some())
def test_it_swaps_the_sides_and_inverts_the_scale(f):
    assert means(invert(f), oracle.invert(meaning(f)))


@given(some())
def test_twice_is_nothing(f):
    """C3: ``~~f = f``."""
    assert invert(invert(f)) == f


@given(composable())
def test_it_turns_composition_around(maps):
    """C4: ``~(g @ f) = ~f @ ~g``."""
    f, g = maps
    assert agree(invert(compose(g, f)), compose(invert(f), invert(g)))


@given(alike())
def test_it_distributes_over_set_operations(maps):
    """C6."""
    a, b = maps
    for operator in (union, intersect, subtract):
        assert agree(invert(operator(a, b)), operator(invert(a), invert(b)))


@given(some(single_valued=True, injective=True))
def test_one_to_one_maps_are_regular(f):
    """R9: ``f @ ~f @ f = f``. Needs f one to one."""
    assert agree(compose(f, compose(invert(f), f)), f)


def test_only_one_to_one_maps_are_regular():
    """The counter-example to R9 without it."""
    f = sends({0: (0, 1), 1: 1})
    assert not equivalent(compose(f, compose(invert(f), f)), f)


@given(some(single_valued=True, injective=True, scaled=False))
def test_idempotents_commute(f):
    """R9: idempotents of one-to-one maps commute."""
    back, forth = compose(invert(f), f), compose(invert(f), compose(f, compose(invert(f), f)))
    assert agree(compose(back, forth), compose(forth, back))


def test_a_third_inverts_to_three():
    assert invert(sends({0: 2}, scale=Fraction(-1, 3))).pieces[0].scale == -3
