"""Exact equality, its congruence, and the equality of values."""

from __future__ import annotations

import oracle
from hypothesis import given
from laws import alike, composable, line, means, randoms, some
from oracle import meaning

from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Side,
    check,
    complement,
    compose,
    corestrict,
    domain,
    equivalent,
    image,
    intersect,
    invert,
    match,
    permute,
    product,
    relabel,
    restrict,
    simplify,
    subtract,
    union,
)
from shardalg.maps._map import from_columns
from shardalg.testing import affine_maps, resplit


@given(alike() | alike(max_size=24, max_extent=4))
def test_it_is_equality_of_what_maps_mean(maps):
    a, b = maps
    assert equivalent(a, b) == (meaning(a) == meaning(b))


@given(alike(), randoms())
def test_it_is_decided_by_counting(maps, random):
    """K9: equal sizes, equal to the sum of the piece intersections. Needs disjoint pieces."""
    a, b = maps
    shared = intersect(a, resplit(b, random)).size
    assert equivalent(a, b) == (a.size == b.size == shared)


def test_counting_is_wrong_where_pieces_overlap():
    """The counter-example to K9 without them."""
    run = Piece((2,), Side(0, (1,)), Side(0, (1,)))
    honest = AffineMap.from_pieces(line(4), line(4), [run, Piece((2,), Side(2, (1,)), Side(2, (1,)))])
    c = AffineMap.from_pieces(line(4), line(4), [run]).table.columns
    twice = from_columns(line(4), line(4), type(c)(*(x[..., [0, 0]] for x in c)))
    assert set(oracle.triples(twice)) != set(oracle.triples(honest))
    assert twice.size == honest.size
    try:
        check(twice)
    except InvalidMapError as error:
        assert "overlap" in str(error)
    else:
        raise AssertionError("overlapping pieces passed check")


@given(some(), randoms())
def test_it_is_a_congruence_for_operators_on_one_map(m, random):
    """K6."""
    again = resplit(m, random)
    for operator in (invert, domain, image, simplify, lambda f: complement(domain(f))):
        assert equivalent(operator(m), operator(again))


@given(alike(), randoms())
def test_it_is_a_congruence_for_operators_on_two_maps(maps, random):
    """K6."""
    a, b = maps
    c, d = resplit(a, random), resplit(b, random)
    for operator in (union, intersect, subtract, match):
        assert equivalent(operator(a, b), operator(c, d))
    assert equivalent(restrict(a, domain(b)), restrict(c, domain(d)))
    assert equivalent(corestrict(a, image(b)), corestrict(c, image(d)))


@given(composable(stretch=1), randoms())
def test_it_is_a_congruence_for_composition_and_product(maps, random):
    """K6."""
    f, g = maps
    again = resplit(f, random), resplit(g, random)
    assert equivalent(compose(g, f), compose(*again[::-1]))
    f, g, *again = (relabel(m, domain=_plain, codomain=_plain) for m in (f, g, *again))
    assert equivalent(product(f, g), product(*again))


def _plain(key):
    """A key without its name and with a rank, so that products keep their boxes apart."""
    rank, name = key
    return (3 * (rank or 0) + ["", "a", "b"].index(name), "")


@given(some(), randoms())
def test_equal_maps_hash_alike_and_equality_is_an_equivalence(m, random):
    """K5."""
    again = AffineMap.from_pieces(m.domain, m.codomain, random.sample(list(m.pieces), len(m)))
    same = AffineMap.from_dict(m.to_dict())
    assert m == again == same == m
    assert hash(m) == hash(again) == hash(same)
    assert m != invert(m) or m.domain == m.codomain


@given(some(), randoms())
def test_pieces_in_another_form_are_the_same_piece(m, random):
    pieces = [_disguised(p, random) for p in m.pieces]
    void = Piece(
        (0, 3), *(Side(7, (5, -9), b.rank, b.name) for b in (m.domain.boxes[0], m.codomain.boxes[0]))
    )
    assert AffineMap.from_pieces(m.domain, m.codomain, [*pieces, void]) == m


def _disguised(p: Piece, random) -> Piece:
    """A piece with its axes shuffled, some flipped, and a unit axis with odd strides added."""
    axes = [*zip(p.shape, p.domain.strides, p.codomain.strides), (1, random.randint(-9, 9), 5)]
    random.shuffle(axes)
    offsets = [p.domain.offset, p.codomain.offset]
    for k, (n, *steps) in enumerate(axes):
        if random.random() < 0.5:
            offsets = [o + s * (n - 1) for o, s in zip(offsets, steps)]
            axes[k] = (n, -steps[0], -steps[1])
    shape, *strides = zip(*axes)
    sides = [Side(o, s, *side.key) for o, s, side in zip(offsets, strides, (p.domain, p.codomain))]
    return Piece(shape, *sides, p.scale)


@given(affine_maps(stretch=1))
def test_spaces_are_part_of_a_map(m):
    other = relabel(m, domain=lambda key: ((key[0] or 0) + 1, key[1]))
    assert not equivalent(m, other)
    assert m != other


@given(affine_maps(stretch=1))
def test_permuting_there_and_back_is_nothing(m):
    turn = {b.key: tuple(reversed(range(len(b.shape)))) for b in m.domain.boxes}
    there = permute(m, domain=turn)
    assert means(permute(there, domain=turn), meaning(m))
