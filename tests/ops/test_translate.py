"""Slots or elements moved by an index vector."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, means, sends, some
from oracle import index_of, meaning

from shardalg import InvalidMapError, identity, image, restrict, translate
from shardalg.ops._regions import region
from shardalg.testing import spaces


@st.composite
def windows(draw):
    """The identity on a window of a space of one box, and two vectors that keep it inside."""
    space = draw(spaces(max_boxes=1, max_axes=3, max_size=8, ranked=False))
    (box,) = space.boxes
    cuts = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in box.shape]
    m = restrict(identity(space), region(space, {box.key: tuple(slice(*c) for c in cuts)}))
    moves = [tuple(draw(st.integers(-a, n - b)) for (a, b), n in zip(cuts, box.shape)) for _ in range(2)]
    return m, *moves


@given(windows())
def test_every_element_moves_by_the_vector(drawn):
    m, by, _ = drawn
    space = m.codomain

    def move(point):
        index = index_of(space, point)
        return point[0], oracle.address_of(space.shape(*point[0]), tuple(i + v for i, v in zip(index, by)))

    found = translate(m, codomain=by)
    assert means(found, oracle.moved(meaning(m), m.domain, m.codomain, lambda s: s, move))


@given(windows())
def test_it_is_a_group_action_where_it_is_defined(drawn):
    """V2."""
    m, by, also = drawn
    step = tuple(b - a for a, b in zip(by, also))
    moved = translate(m, codomain=by)
    assert agree(translate(moved, codomain=step), translate(m, codomain=also))
    assert agree(translate(moved, codomain=tuple(-v for v in by)), m)
    assert agree(translate(translate(m, domain=by), codomain=by), image(moved))


@given(some())
def test_no_vectors_move_nothing(m):
    assert agree(translate(m, domain={}, codomain={}), m)


def test_what_would_leave_its_box_is_named():
    with pytest.raises(
        InvalidMapError, match=r"moving by \(2,\) takes 2 of the tensor out .* \(4,\); 2 addresses"
    ):
        translate(sends({2: 0, 3: 1, 1: 2}), domain=(2,))
    with pytest.raises(InvalidMapError, match="a vector of 2 steps"):
        translate(sends({}), domain=(1, 1))
