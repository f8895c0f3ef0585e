"""The signs on maps are the operators of the same meaning."""

from __future__ import annotations

import pytest
from hypothesis import given
from laws import alike, composable, sends, some

from shardalg import compose, corestrict, domain, image, intersect, invert, restrict, subtract, union


@given(composable())
def test_at_is_composition(maps):
    f, g = maps
    assert g @ f == compose(g, f)
    assert f @ domain(f) == restrict(f, domain(f))
    assert image(f) @ f == corestrict(f, image(f))


@given(alike())
def test_bars_and_minus_are_set_operations(maps):
    a, b = maps
    assert (a | b, a & b, a - b) == (union(a, b), intersect(a, b), subtract(a, b))


@given(some())
def test_tilde_is_the_converse(m):
    assert ~m == invert(m)


def test_other_operands_are_refused_by_python():
    with pytest.raises(TypeError, match="unsupported operand"):
        sends({}) @ 3
    with pytest.raises(TypeError, match="unsupported operand"):
        sends({}) | {1}
