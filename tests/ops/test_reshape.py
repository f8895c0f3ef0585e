"""Other shapes for the boxes of one side."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, alike, composable, placed, some
from oracle import meaning

from shardalg import AffineMap, InvalidMapError, Split, compose, invert, layout, reshape, union


@st.composite
def reshapings(draw, m: AffineMap) -> dict:
    """Other shapes for the codomain of ``m``."""
    flat = {b.key: (b.size,) for b in m.codomain.boxes}
    wide = {b.key: (1, *b.shape, 1) for b in m.codomain.boxes}
    return draw(st.sampled_from([flat, wide, {}]))


@given(some(), st.data())
def test_flat_addresses_stay(m, data):
    shapes = data.draw(reshapings(m))
    other = reshape(m, codomain=shapes)
    assert meaning(other).triples == meaning(m).triples
    assert [b.shape for b in other.codomain.boxes] == [shapes.get(b.key, b.shape) for b in m.codomain.boxes]
    assert reshape(other, codomain={b.key: b.shape for b in m.codomain.boxes}) == m


@given(composable(), st.data())
def test_it_is_an_isomorphism(maps, data):
    """V1: it commutes with compose and invert."""
    f, g = maps
    shapes = data.draw(reshapings(f))
    there, back = reshape(f, codomain=shapes), reshape(g, domain=shapes)
    assert agree(compose(back, there), compose(g, f))
    assert agree(invert(there), reshape(invert(f), domain=shapes))


@given(alike(), st.data())
def test_it_commutes_with_union(maps, data):
    a, b = maps
    shapes = data.draw(reshapings(a))
    assert agree(
        reshape(union(a, b), codomain=shapes), union(reshape(a, codomain=shapes), reshape(b, codomain=shapes))
    )


@given(placed())
def test_one_extent_may_be_left_open(m):
    assert reshape(m, codomain=(-1,)).logical_shape == (m.codomain.size,)


def test_a_rank_a_name_or_a_pair_chooses_the_box():
    m = layout((4, 2), Split(0), ranks=2)
    assert reshape(m, domain={1: 4}).domain.shape(1) == (4,)
    assert reshape(m, domain={1: 4}).domain.shape(0) == (2, 2)
    assert reshape(m, domain={(0, ""): (4, 1)}).domain.shape(0) == (4, 1)


def test_sizes_must_be_equal():
    m = layout((4, 2), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match=r"shape \(4, 2\) \(8 slots\) to \(3, 3\) \(9 slots\)"):
        reshape(m, codomain=(3, 3))
    with pytest.raises(InvalidMapError, match=r"\(3, -1\)"):
        reshape(m, codomain=(3, -1))
    with pytest.raises(InvalidMapError, match=r"\(-1, -1\)"):
        reshape(m, codomain=(-1, -1))
    with pytest.raises(InvalidMapError, match="no box has the rank or name 5; the space has rank 0, rank 1"):
        reshape(m, domain={5: (4,)})
