"""Union, intersection, difference and merge."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from laws import agree, alike, empty, inside, line, many, means, randoms, sends, some
from oracle import meaning

from shardalg import (
    AffineMap,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    Side,
    domain,
    equivalent,
    intersect,
    is_single_valued,
    merge,
    restrict,
    subtract,
    union,
)
from shardalg.testing import affine_maps, resplit


@many
@given(alike() | alike(max_size=24, max_extent=4))
def test_they_are_the_set_operations(maps):
    a, b = maps
    assert means(union(a, b), oracle.union(meaning(a), meaning(b)))
    assert means(intersect(a, b), oracle.intersect(meaning(a), meaning(b)))
    assert means(subtract(a, b), oracle.subtract(meaning(a), meaning(b)))


@many
@given(affine_maps(max_size=24, max_extent=4), randoms())
def test_parts_of_a_map_cut_at_random_are_taken_out_and_put_back(m, random):
    cut = list(resplit(m, random, cuts=3).pieces)
    part = AffineMap.from_pieces(m.domain, m.codomain, random.sample(cut, len(cut) // 2))
    rest = subtract(m, part)
    assert means(rest, oracle.subtract(meaning(m), meaning(part)))
    assert agree(union(rest, part), m)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_a_matrix_and_its_transpose_share_the_diagonal(n):
    turned, same = (
        AffineMap.from_pieces(line(n * n), line(n * n), [Piece((n, n), Side(0, (n, 1)), Side(0, strides))])
        for strides in ((1, n), (n, 1))
    )
    assert intersect(turned, same).size == n
    assert means(subtract(turned, same), oracle.subtract(meaning(turned), meaning(same)))
    assert means(union(turned, same), oracle.union(meaning(turned), meaning(same)))


def test_a_diagonal_is_taken_out_of_a_block():
    n = 5
    block = AffineMap.from_pieces(line(25), line(25), [Piece((n, n), Side(0, (n, 1)), Side(0, (1, n)))])
    diagonal = AffineMap.from_pieces(line(25), line(25), [Piece((n,), Side(0, (n + 1,)), Side(0, (n + 1,)))])
    assert means(subtract(block, diagonal), oracle.subtract(meaning(block), meaning(diagonal)))


@given(alike(3))
def test_union_and_intersection_form_a_lattice(maps):
    """C5: commutative, associative, idempotent."""
    a, b, c = maps
    for one, other in ((union, intersect), (intersect, union)):
        assert agree(one(a, b), one(b, a))
        assert agree(one(one(a, b), c), one(a, one(b, c)))
        assert agree(one(a, a), a)
        assert agree(one(a, other(a, b)), a)
        assert agree(one(a, other(b, c)), other(one(a, b), one(a, c)))


@given(some())
def test_the_empty_map_is_the_unit_of_union(a):
    """C5."""
    assert agree(union(a, empty(a)), a)
    assert agree(union(empty(a), a), a)


@given(alike())
def test_a_difference_and_the_common_part_make_the_whole(maps):
    a, b = maps
    assert agree(union(subtract(a, b), intersect(a, b)), a)
    assert len(intersect(subtract(a, b), b)) == 0
    assert inside(subtract(a, b), a)


@given(alike(single_valued=True))
def test_a_union_is_single_valued_exactly_where_both_agree(maps):
    """C11."""
    a, b = maps
    shared = equivalent(restrict(a, domain(b)), restrict(b, domain(a)))
    assert bool(is_single_valued(union(a, b))) == shared


@given(alike(single_valued=True))
def test_merge_is_union_or_names_the_slot(maps):
    a, b = maps
    if union(a, b).single_valued:
        assert agree(merge(a, b), union(a, b))
    else:
        with pytest.raises(InvalidMapError, match=r"cannot merge: slot .* has the two elements"):
            merge(a, b)


def test_agreement_is_about_scales_too():
    assert not is_single_valued(union(sends({0: 0}), sends({0: 0}, scale=2)))


def test_merge_names_the_first_slot_and_both_elements():
    with pytest.raises(
        InvalidMapError, match="slot 1 of the tensor has the two elements 2 of the tensor and 3"
    ):
        merge(sends({0: 0, 1: 2}), sends({0: 0, 1: 3, 2: 1}))


def test_spaces_must_be_equal():
    for operator in (union, intersect, subtract, merge):
        with pytest.raises(InvalidMapError, match=r"shape \(4,\).*shape \(5,\)"):
            operator(sends({}, 4), sends({}, 5))


def test_a_comb_is_taken_out_of_a_run_without_walking_it():
    n = 10**9
    run = AffineMap.from_pieces(line(n), line(n), [Piece((n,), Side(0, (1,)), Side(0, (1,)))])
    comb = AffineMap.from_pieces(line(n), line(n), [Piece((n // 10,), Side(3, (10,)), Side(3, (10,)))])
    rest = subtract(run, comb)
    assert rest.size == n - n // 10
    assert len(rest) <= 4
    assert agree_in_size(union(rest, comb), run)


def agree_in_size(a: AffineMap, b: AffineMap) -> bool:
    """Equal maps too large for the oracle."""
    return equivalent(a, b) and a.size == b.size


def test_more_pieces_than_allowed_are_refused():
    points = {k: k * k % 7 for k in range(7)}
    with pytest.raises(LimitError, match="pieces"):
        union(sends(points, 8, 8), sends({7: 7}, 8, 8), limits=Limits(pieces=1))
