"""Maps put end to end."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, means, recut
from oracle import Relation, index_of, meaning

from shardalg import (
    AffineMap,
    Box,
    InvalidMapError,
    Replicate,
    Segments,
    Space,
    Split,
    concat,
    equivalent,
    invert,
    layout,
)
from shardalg.testing import affine_maps


@st.composite
def rows(draw, length: int = 2) -> tuple[tuple[AffineMap, ...], tuple[int, int]]:
    """Maps whose boxes differ along one axis of each side at most, and the two axes."""
    axes = draw(st.tuples(*[st.integers(0, 1)] * 2))
    ranks = [draw(st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True)) for _ in range(length)]
    maps = []
    for its in ranks:
        dom = Space(tuple(Box(_shape(axes[0], draw(st.integers(0, 2)), 2), r) for r in its))
        cod = Space.logical(_shape(axes[1], draw(st.integers(0, 2)), 3))
        maps.append(draw(recut(affine_maps(dom, cod, max_pieces=2))))
    return tuple(maps), axes


def _shape(axis: int, extent: int, other: int) -> tuple[int, int]:
    return (extent, other) if axis == 0 else (other, extent)


def slow(maps: list[Relation], axes: tuple[int, int], domain: Space, codomain: Space) -> Relation:
    """Each map's indices moved past the boxes of the maps before."""
    found, at = set(), [{}, {}]

    def move(point, side, old, new):
        index = list(index_of(old, point))
        index[axes[side]] += at[side].get(point[0], 0)
        return point[0], oracle.address_of(new.shape(*point[0]), tuple(index))

    for m in maps:
        for s, e, a in m.triples:
            found.add((move(s, 0, m.domain, domain), move(e, 1, m.codomain, codomain), a))
        for side, space in enumerate((m.domain, m.codomain)):
            for b in space.boxes:
                at[side][b.key] = at[side].get(b.key, 0) + b.shape[axes[side]]
    return Relation(domain, codomain, frozenset(found))


@given(rows(3))
def test_each_map_follows_the_ones_before(drawn):
    maps, axes = drawn
    found = concat(maps, axes)
    assert means(found, slow([meaning(m) for m in maps], axes, found.domain, found.codomain))


@given(rows(3))
def test_it_is_associative(drawn):
    """P5."""
    (a, b, c), axes = drawn
    assert agree(concat([concat([a, b], axes), c], axes), concat([a, b, c], axes))
    assert agree(concat([a, concat([b, c], axes)], axes), concat([a, b, c], axes))


@given(rows(2))
def test_it_inverts_segment_by_segment(drawn):
    """P5: ``~concat(maps) = concat(~m for m in maps)``."""
    maps, axes = drawn
    assert agree(invert(concat(maps, axes)), concat([invert(m) for m in maps], axes[::-1]))


@given(rows(1))
def test_the_empty_segment_is_the_unit(drawn):
    """P5."""
    (m,), axes = drawn
    ends = [
        Space(tuple(Box((*b.shape[:k], 0, *b.shape[k + 1 :]), b.rank) for b in space.boxes))
        for space, k in zip((m.domain, m.codomain), axes)
    ]
    none = AffineMap.from_pieces(*ends, [])
    assert agree(concat([m], axes), m)
    assert agree(concat([none, m], axes), m)
    assert agree(concat([m, none], axes), m)


def test_it_is_not_commutative():
    """P5."""
    a, b = layout((4,), Split(0), ranks=2), layout((4,), Replicate(), ranks=2)
    assert not equivalent(concat([a, b], 0), concat([b, a], 0))


def test_segments_are_concatenated_layouts():
    parts = ((5, Split(1)), (2, Replicate()), (0, Split(1)))
    each = [layout((3, n), p, ranks=2) for n, p in parts]
    assert equivalent(concat(each, -1), layout((3, 7), Segments(1, parts), ranks=2))


def test_boxes_that_do_not_fit_are_named():
    with pytest.raises(InvalidMapError, match=r"rank 0 has shapes \(2, 3\) and \(1, 4\)"):
        concat([layout((4, 3), Split(0), ranks=2), layout((2, 4), Split(0), ranks=2)], 0)
    with pytest.raises(InvalidMapError, match=r"shape \(2,\) has no axis 1"):
        concat([layout((4,), Split(0), ranks=2)], 1)
    with pytest.raises(InvalidMapError, match="at least one map"):
        concat([], 0)
