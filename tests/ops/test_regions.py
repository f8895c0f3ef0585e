"""Regions, and maps restricted to them."""

from __future__ import annotations

import itertools
import time
from random import Random

import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import agree, alike, composable, line, means, placed, recut, sends, small, some
from oracle import meaning

from shardalg import (
    AffineMap,
    BlockGather,
    InvalidMapError,
    Piece,
    Side,
    Space,
    complement,
    compose,
    corestrict,
    domain,
    equivalent,
    identity,
    image,
    intersect,
    invert,
    is_injective,
    layout,
    multiplicity,
    padding,
    permute,
    region,
    restrict,
    uncovered,
    union,
)
from shardalg.testing import affine_maps, spaces


@st.composite
def regions_of(draw, m: AffineMap) -> AffineMap:
    """A region of the domain of ``m``."""
    return draw(recut(affine_maps(m.domain, scaled=False).map(domain)))


@st.composite
def restricted(draw) -> tuple[AffineMap, AffineMap, AffineMap]:
    """A map and two regions of its domain."""
    m = draw(some())
    return m, draw(regions_of(m)), draw(regions_of(m))


@given(some())
def test_domain_and_image_are_the_mapped_slots_and_elements(f):
    assert means(domain(f), oracle.domain(meaning(f)))
    assert means(image(f), oracle.image(meaning(f)))


@given(small())
def test_the_rest_is_padding_and_uncovered(f):
    assert means(padding(f), oracle.padding(meaning(f)))
    assert means(uncovered(f), oracle.uncovered(meaning(f)))


@given(restricted())
def test_restriction_keeps_the_pairs_of_a_region(drawn):
    f, d, _ = drawn
    assert means(restrict(f, d), oracle.restrict(meaning(f), meaning(d)))
    assert means(corestrict(invert(f), d), oracle.corestrict(meaning(invert(f)), meaning(d)))


# --- restriction categories -------------------------------------------------------------------


@given(alike(2))
def test_the_bar_is_a_restriction(maps):
    """R1 to R3, for ``bar f = domain(f)``: ``f @ bar f = f``, bars commute, and multiply."""
    f, g = maps
    assert agree(compose(f, domain(f)), f)
    assert agree(compose(domain(f), domain(g)), compose(domain(g), domain(f)))
    assert agree(domain(compose(g, domain(f))), compose(domain(g), domain(f)))


@given(composable(single_valued=True))
def test_the_bar_slides_through_a_single_valued_map(maps):
    """R4: ``bar g @ f = f @ bar(g @ f)``. Needs f single-valued."""
    f, g = maps
    assert agree(compose(domain(g), f), compose(f, domain(compose(g, f))))


def test_the_bar_slides_through_no_other_map():
    """The counter-example to R4 without it."""
    f, g = sends({0: (0, 1)}), sends({0: 0})
    assert not equivalent(compose(domain(g), f), compose(f, domain(compose(g, f))))


@given(restricted())
def test_restrictions_add_up_to_their_intersection(drawn):
    """R5: restricting to D and then to E is restricting to both."""
    f, d, e = drawn
    assert agree(restrict(restrict(f, d), e), restrict(f, intersect(d, e)))


@given(composable(), st.data())
def test_restriction_commutes_with_composition(maps, data):
    """R5 and R6: ``(g @ f) @ D = g @ (f @ D)`` and ``(g @ E) @ f = g @ (E @ f)``."""
    f, g = maps
    d, e = data.draw(regions_of(f)), data.draw(regions_of(g))
    assert agree(restrict(compose(g, f), d), compose(g, restrict(f, d)))
    assert agree(compose(restrict(g, e), f), compose(g, corestrict(f, e)))


@given(restricted())
def test_inverting_a_restriction_gives_a_corestriction(drawn):
    """R6: ``~(f @ D) = D @ ~f``."""
    f, d, _ = drawn
    assert agree(invert(restrict(f, d)), corestrict(invert(f), d))


@given(some(single_valued=True))
def test_there_and_back_is_the_identity_on_the_image(f):
    """R7: ``f @ ~f = image(f)``. Needs f single-valued."""
    assert agree(compose(f, invert(f)), image(f))


def test_there_and_back_needs_a_single_valued_map():
    """The counter-example to R7 without it."""
    f = sends({0: (0, 1)})
    assert not equivalent(compose(f, invert(f)), image(f))
    two_scales = union(sends({0: 0}), sends({0: 0}, scale=2))
    assert not equivalent(compose(two_scales, invert(two_scales)), image(two_scales))


@given(some(injective=True))
def test_back_and_forth_is_the_identity_on_the_domain(f):
    """R8: ``~f @ f = domain(f)``. Needs f injective."""
    assert agree(compose(invert(f), f), domain(f))


def test_back_and_forth_needs_an_injective_map():
    """The counter-example to R8 without it."""
    f = sends({0: 0, 1: 0})
    assert not equivalent(compose(invert(f), f), domain(f))


@given(placed(max_size=4))
def test_multiplicities_add_up_to_the_slots_that_hold_something(m):
    """R11, for layouts; ``~f @ f`` is "same element"."""
    counts = [multiplicity(m, e) for e in range(m.codomain.size)]
    assert sum(counts) == domain(m).size == m.domain.size - padding(m).size
    same = compose(invert(m), m)
    assert same.size == sum(n * n for n in counts)


@given(small())
def test_a_region_and_its_complement_are_everything_and_apart(f):
    """D2."""
    for d in (domain(f), image(f)):
        rest = complement(d)
        assert agree(union(d, rest), identity(d.domain))
        assert len(intersect(d, rest)) == 0
        assert agree(complement(rest), d)


# --- boxes as sugar ---------------------------------------------------------------------------


@st.composite
def windows(draw) -> tuple[Space, dict, list]:
    """A space, ranges per key, and the index ranges they stand for."""
    space = draw(spaces())
    where, wanted = {}, []
    for b in space.boxes:
        ends = [sorted(draw(st.tuples(*[st.integers(0, n)] * 2))) for n in b.shape]
        where[b.key] = tuple(slice(*ends_) for ends_ in ends)
        wanted += [
            (b.key, oracle.address_of(b.shape, i)) for i in itertools.product(*(range(*e) for e in ends))
        ]
    return space, where, wanted


@given(windows())
def test_ranges_name_boxes_of_slots(window):
    space, where, wanted = window
    assert means(region(space, where), oracle.region(space, wanted))


def test_pairs_and_ints_are_ranges_too():
    space = Space.logical((4, 4))
    assert equivalent(region(space, ((1, 3), 2)), region(space, (slice(1, 3), slice(2, 3))))


def test_ranges_that_do_not_fit_are_refused():
    with pytest.raises(InvalidMapError, match=r"range 3:5 does not fit axis 0 .* shape \(4, 4\)"):
        region(Space.logical((4, 4)), ((3, 5),))
    with pytest.raises(InvalidMapError, match="3 ranges"):
        region(Space.logical((4, 4)), (0, 0, 0))


def test_a_map_that_moves_slots_is_no_region():
    with pytest.raises(InvalidMapError, match="moves or scales"):
        restrict(sends({0: 0}), sends({0: 1}))
    with pytest.raises(InvalidMapError, match="a region of"):
        restrict(sends({0: 0}), identity(line(5)))


@pytest.mark.parametrize(("shape", "most"), [((6,), 1), ((3, 4), 3), ((3, 3, 3), 5), ((3, 3, 3, 3), 7)])
def test_a_flat_interval_needs_at_most_two_d_minus_one_boxes(shape, most):
    """V1."""
    size = oracle.address_of(shape, tuple(n - 1 for n in shape)) + 1
    space = Space.logical((size,))
    turned = permute(identity(Space.logical(shape)), codomain=tuple(reversed(range(len(shape)))))
    found = []
    intervals = list(itertools.combinations(range(size + 1), 2))
    ones = (1,) * (len(shape) - 1)
    worst = tuple(oracle.address_of(shape, (n, *ones)) for n in (0, shape[0] - 1))
    for start, stop in [worst, *Random(0).sample(intervals, min(len(intervals), 200))]:
        flat = region(space, ((start, stop),))
        seen = compose(turned, AffineMap(turned.domain, turned.domain, flat.table))
        assert seen.size == stop - start
        found.append(len(seen))
    assert max(found) == most


@pytest.mark.parametrize("keys", [(0, (0, "")), ((0, ""), 0)])
def test_a_region_names_each_box_once(keys):
    space = Space.shards({0: (4,)})
    where = dict(zip(keys, (slice(0, 3), slice(1, 4))))
    with pytest.raises(InvalidMapError, match="two keys of a region name one box"):
        region(space, where)
    with pytest.raises(InvalidMapError, match="name one box"):
        region(Space.logical((4,)), {None: slice(0, 3), "": slice(1, 4)})


def in_parts(size, *counts):
    """One tensor cut in each of these numbers of parts, by a rank for each part."""
    ends = [(size * k // n, size * (k + 1) // n) for n in counts for k in range(n)]
    boxes = Space.shards([stop - start for start, stop in ends])
    pieces = [
        Piece((stop - start,), Side(0, (1,), rank=r), Side(start, (1,)))
        for r, (start, stop) in enumerate(ends)
    ]
    return AffineMap.from_pieces(boxes, Space.logical((size,)), pieces)


def test_what_partly_overlapping_pieces_reach_costs_a_sweep():
    m = in_parts(640_000, 5000, 4999)
    start = time.perf_counter()
    assert len(image(m)) == 1 and not len(uncovered(m))
    assert time.perf_counter() - start < 3


def shuffled(seed, rows=8192, ranks=8):
    order, own = Random(seed).sample(range(rows), rows), rows // ranks
    blocks = {r: tuple(order[r * own : (r + 1) * own]) for r in range(ranks)}
    return layout((rows, 16), BlockGather(0, 1, blocks))


def test_two_orders_of_rows_cost_a_sweep():
    """Rows in random order fold by accident, and so do strides of no meaning."""
    a, b = shuffled(1), shuffled(2)
    start = time.perf_counter()
    both = union(a, b)
    assert equivalent(intersect(a, both), a)
    assert domain(both).size == a.size and len(domain(both)) == 8
    assert is_injective(permute(a, codomain=(1, 0)))
    assert time.perf_counter() - start < 10
