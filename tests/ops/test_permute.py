"""Axes of one side's boxes in another order."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, composable, means, randoms, small
from oracle import index_of, meaning

from shardalg import InvalidMapError, Split, compose, invert, layout, permute
from shardalg.testing import affine_maps, resplit, spaces

boxy = spaces(max_axes=3, max_size=6, max_boxes=2)


def orders(space, random) -> dict:
    """Axes for each box."""
    return {b.key: tuple(random.sample(range(len(b.shape)), len(b.shape))) for b in space.boxes}


@given(boxy, boxy, st.data(), randoms())
def test_it_moves_each_index_as_torch_permutes(a, b, data, random):
    m = resplit(data.draw(affine_maps(a, b)), random)
    axes = orders(m.domain, random), orders(m.codomain, random)
    found = permute(m, domain=axes[0], codomain=axes[1])

    def mover(old, new, order):
        def move(point):
            index = index_of(old, point)
            return point[0], oracle.address_of(new.shape(*point[0]), tuple(index[k] for k in order[point[0]]))

        return move

    ends = ((m.domain, found.domain, axes[0]), (m.codomain, found.codomain, axes[1]))
    assert means(found, oracle.moved(meaning(m), found.domain, found.codomain, *(mover(*e) for e in ends)))


@given(boxy, boxy, st.data(), randoms())
def test_it_is_a_group_action(a, b, data, random):
    """V2."""
    m = data.draw(affine_maps(a, b))
    p, q = orders(a, random), orders(a, random)
    both = {key: tuple(p[key][k] for k in q[key]) for key in p}
    assert agree(permute(permute(m, domain=p), domain=q), permute(m, domain=both))
    back = {key: tuple(int(k) for k in np.argsort(axes)) for key, axes in p.items()}
    assert agree(permute(permute(m, domain=p), domain=back), m)


@given(composable(), randoms())
def test_it_is_an_isomorphism(maps, random):
    f, g = maps
    axes = orders(f.codomain, random)
    assert agree(compose(permute(g, domain=axes), permute(f, codomain=axes)), compose(g, f))
    assert agree(invert(permute(f, codomain=axes)), permute(invert(f), domain=axes))


@given(small())
def test_the_order_as_it_is_changes_nothing(m):
    assert agree(permute(m, domain={}, codomain={}), m)


def test_axes_must_be_an_order_of_all_axes():
    m = layout((4, 2), Split(0), ranks=2)
    for axes in ((0,), (0, 0), (0, 2), (0, 1, 2)):
        with pytest.raises(InvalidMapError, match=r"no order of the 2 axes of the tensor of shape \(4, 2\)"):
            permute(m, codomain=axes)
