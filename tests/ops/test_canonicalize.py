"""The normal form that depends on the relation alone."""

from __future__ import annotations

import itertools
import time
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, alike, placed, randoms, small, some

from shardalg import (
    AffineMap,
    Attention,
    BlockGather,
    LimitError,
    Limits,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    canonicalize,
    equivalent,
    holders,
    intersect,
    invert,
    layout,
    qkv_codegen,
    simplify,
    subtract,
    union,
)
from shardalg.ops import _chains
from shardalg.testing import affine_maps, layouts, resplit


@given(some() | placed())
def test_it_changes_nothing_but_the_pieces(m):
    """K1."""
    assert agree(canonicalize(m), m)


@given(some() | placed(), randoms())
def test_it_is_the_same_for_every_way_of_cutting(m, random):
    """K4."""
    assert canonicalize(resplit(m, random, cuts=3)) == canonicalize(m)


@pytest.mark.parametrize("homogeneous", [False, True])
@given(m=some() | placed())
def test_it_is_idempotent(homogeneous, m):
    """K2."""
    once = canonicalize(m, homogeneous=homogeneous)
    assert canonicalize(once, homogeneous=homogeneous) == once


@given(alike(), randoms())
def test_forms_are_equal_exactly_when_maps_are_equivalent(maps, random):
    """K3."""
    a, b = maps
    assert (canonicalize(a) == canonicalize(b)) == equivalent(a, b)
    again = union(subtract(a, b), intersect(resplit(a, random), b))
    assert canonicalize(again) == canonicalize(a)


def points(pairs, slots, elements):
    """A map given point by point."""
    space = Space.logical((slots,)), Space.logical((elements,))
    return AffineMap.from_pieces(*space, [Piece((), Side(s, ()), Side(e, ())) for s, e in pairs])


def test_every_subset_of_a_grid_has_its_own_through_different_cuts():
    cells, random = list(itertools.product(range(3), range(4))), Random(1)
    forms = set()
    for chosen in range(2**12):
        m = points([cell for k, cell in enumerate(cells) if chosen >> k & 1], 3, 4)
        form = canonicalize(m)
        assert canonicalize(resplit(form, random)) == form
        forms.add(form)
    assert len(forms) == 2**12


@given(small(max_pieces=4) | layouts(scaled=False), randoms(), st.sampled_from([(0, 0), (2, 1)]))
def test_listing_points_changes_nothing(m, random, few):
    form = canonicalize(m)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_chains, "FEW", few[0])
        patch.setattr(_chains, "DENSE", few[1])
        assert canonicalize(resplit(m, random)) == form


@given(affine_maps(stretch=2**59 + 1, max_extent=3), randoms())
def test_addresses_near_the_bound_are_ordinary(m, random):
    assert canonicalize(resplit(m, random)) == canonicalize(m)


def test_empty_pieces_unit_axes_and_the_order_of_pieces_do_not_count():
    """K4."""
    here, there = Space.logical((8,)), Space.logical((8,))
    plain = [Piece((3,), Side(0, (1,)), Side(0, (2,))), Piece((2,), Side(5, (1,)), Side(1, (4,)))]
    odd = [
        Piece((1, 2), Side(5, (77, 1)), Side(1, (-9, 4))),
        Piece((0, 5), Side(900, (1, 1)), Side(0, (1, 1))),
        Piece((3, 1), Side(2, (-1, 0)), Side(4, (-2, 3))),
    ]
    forms = [canonicalize(AffineMap.from_pieces(here, there, its)) for its in (plain, odd)]
    assert forms[0] == forms[1]


# --- how many pieces, and how fast ----------------------------------------------------------


@pytest.mark.parametrize("cuts", [0, 3])
def test_a_column_split_of_a_billion_rows_is_one_piece_per_rank(cuts):
    m = resplit(layout((10**9, 8), Split(1), ranks=2), Random(0), cuts=cuts)
    start = time.perf_counter()
    form = canonicalize(m)
    assert time.perf_counter() - start < 2
    assert [len(form.pieces_of(r)) for r in (0, 1)] == [1, 1]


def test_odd_columns_of_a_billion_rows_are_found_by_their_period():
    columns = layout((10**9, 32), BlockGather(1, 1, [(0, 3, 4, 9, 17, 30)]))
    form = canonicalize(resplit(columns, Random(0), cuts=1))
    assert equivalent(form, columns) and len(form) <= 6


@pytest.mark.parametrize(
    "rows, columns, ranks",
    [(24, 8, 2), (48, 16, 2), (96, 32, 2), (96, 8, 4), (192, 8, 8), (24 * 10**6, 4096, 2)],
)
def test_the_codegen_order_is_one_piece_per_rank(rows, columns, ranks):
    m = qkv_codegen((rows, columns), Attention(kv_heads=32), ranks)
    form = canonicalize(resplit(m, Random(rows), cuts=2))
    assert [len(form.pieces_of(r)) for r in range(ranks)] == [1] * ranks


def test_two_slopes_interleaved_are_two_pieces_and_a_wild_order_is_refused_when_large():
    halves = [Piece((10**6,), Side(k, (2,)), Side(k, (step,))) for k, step in enumerate((3, 5))]
    two = AffineMap.from_pieces(Space.logical((2 * 10**6,)), Space.logical((5 * 10**6,)), halves)
    assert len(canonicalize(resplit(two, Random(2)))) == 2
    slopes = (2, 3, 5, 7, 11, 13, 17, 19, 23)
    parts = [Piece((10**6,), Side(k, (len(slopes),)), Side(k, (s,))) for k, s in enumerate(slopes)]
    wild = AffineMap.from_pieces(Space.logical((10**7,)), Space.logical((3 * 10**7,)), parts)
    with pytest.raises(LimitError, match="9000000 elements without a common step"):
        canonicalize(wild)


def test_limits_bound_the_listing_and_the_pieces():
    order = list(range(600))
    Random(3).shuffle(order)
    m = layout((600, 2), BlockGather(0, 1, [order]))
    assert agree(canonicalize(m), m)
    with pytest.raises(LimitError, match="steps=1000"):
        canonicalize(m, limits=Limits(steps=1000))
    with pytest.raises(LimitError, match="pieces=5"):
        canonicalize(m, limits=Limits(pieces=5))


# --- holders --------------------------------------------------------------------------------

QUERY_SPLIT = Segments(0, ((32, Split(0)), (16, Replicate())))


def test_pieces_stop_where_the_holders_change():
    m = layout((48, 8), QUERY_SPLIT, ranks=4)
    assert (len(canonicalize(m)), len(canonicalize(m, homogeneous=True))) == (7, 8)


@given(layouts(scaled=False), randoms())
def test_homogeneous_forms_depend_on_the_relation_alone(m, random):
    form = canonicalize(m, homogeneous=True)
    assert agree(form, m)
    assert canonicalize(resplit(m, random, cuts=3), homogeneous=True) == form


@given(layouts(scaled=False), st.sampled_from([canonicalize, simplify]))
def test_all_elements_of_a_homogeneous_piece_have_the_same_holders(m, form):
    for piece in form(m, homogeneous=True).pieces:
        touched = set()
        for index in itertools.product(*map(range, piece.shape)):
            at = piece.codomain.offset + sum(i * s for i, s in zip(index, piece.codomain.strides))
            touched.add(holders(m, at, name=piece.codomain.name))
        assert len(touched) == 1


def test_slots_without_a_rank_hold_nothing():
    m = invert(layout((48, 8), QUERY_SPLIT, ranks=4))
    assert canonicalize(m, homogeneous=True) == canonicalize(m)
