"""f, then g: the category of maps."""

from __future__ import annotations

import re
import time
from fractions import Fraction

import numpy as np
import oracle
import pytest
from hypothesis import given
from laws import agree, composable, empty, forks, inside, line, many, means, randoms, sends, some
from oracle import meaning

from shardalg import (
    AffineMap,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    Side,
    Split,
    compose,
    equivalent,
    identity,
    intersect,
    invert,
    layout,
    merge,
    part,
    plan,
    relabel,
    union,
)
from shardalg.testing import resplit


@many
@given(composable() | composable(max_size=24, max_extent=4))
def test_it_is_the_set_of_pairs_with_a_point_between(maps):
    f, g = maps
    assert means(compose(g, f), oracle.compose(meaning(g), meaning(f)))


@given(some())
def test_identities_are_units(f):
    """C1: ``id @ f = f = f @ id``."""
    assert agree(compose(f, identity(f.domain)), f)
    assert agree(compose(identity(f.codomain), f), f)


@given(composable())
def test_the_empty_map_absorbs(maps):
    """C1: composing with the empty map gives the empty map."""
    f, g = maps
    assert len(compose(empty(g), f)) == len(compose(g, empty(f))) == 0


@given(composable(3), randoms())
def test_it_is_associative(maps, random):
    """C2."""
    f, g, h = maps
    left, right = (resplit(m, random) for m in (compose(h, g), compose(g, f)))
    assert agree(compose(left, f), compose(h, right))


@given(composable(3), randoms())
def test_it_distributes_over_union_on_both_sides(maps, random):
    """C5: ``(g | h) @ f = g @ f | h @ f`` and ``h @ (f | g) = h @ f | h @ g``."""
    f, g, h = maps
    other = resplit(union(g, compose(invert(h), compose(h, g))), random)
    both = union(g, other)
    assert agree(compose(both, f), union(compose(g, f), compose(other, f)))
    assert agree(compose(h, both), union(compose(h, g), compose(h, other)))


@given(forks(single_valued=True))
def test_it_distributes_over_intersection_after_a_single_valued_map(maps):
    """C7: ``(g & h) @ f = g @ f & h @ f``. Needs f single-valued."""
    f, g, h = maps
    assert agree(compose(intersect(g, h), f), intersect(compose(g, f), compose(h, f)))


@given(forks())
def test_after_any_map_it_is_at_least_inside(maps):
    """C7 without its condition: a subset."""
    f, g, h = maps
    assert inside(compose(intersect(g, h), f), intersect(compose(g, f), compose(h, f)))


def test_the_map_before_an_intersection_must_be_single_valued():
    """The counter-example to C7 without it."""
    f, g, h = sends({0: (0, 1)}), sends({0: 0}), sends({1: 0})
    assert not f.single_valued
    assert not equivalent(compose(intersect(g, h), f), intersect(compose(g, f), compose(h, f)))


@given(forks(single_valued=True))
def test_it_distributes_over_intersection_before_an_injective_map(maps):
    """C8: ``h @ (f & g) = h @ f & h @ g``. Needs h injective."""
    h, f, g = map(invert, maps)
    assert h.injective
    assert agree(compose(h, intersect(f, g)), intersect(compose(h, f), compose(h, g)))


def test_the_map_after_an_intersection_must_be_injective():
    """The counter-example to C8 without it."""
    h, f, g = sends({0: 0, 1: 0}), sends({0: 0}), sends({0: 1})
    assert not h.injective
    assert not equivalent(compose(h, intersect(f, g)), intersect(compose(h, f), compose(h, g)))


@given(composable(2), randoms())
def test_the_modular_law(maps, random):
    """C9: ``g @ f & h`` is inside ``(g & h @ ~f) @ f``."""
    f, g = maps
    h = resplit(_half(compose(g, f)), random)
    assert inside(intersect(compose(g, f), h), compose(intersect(g, compose(h, invert(f))), f))


def _half(m: AffineMap) -> AffineMap:
    """Every second piece of a map."""
    return AffineMap.from_pieces(m.domain, m.codomain, list(m.pieces)[::2])


@pytest.mark.parametrize(
    ("f", "g"),
    [
        ({0: (0, 1)}, {0: 2, 1: 2}),
        ({0: 1, 1: (1, 0), 2: (0, 2), 3: 3}, {0: 2, 1: 2}),
        ({1: 0, 2: (2, 0), 3: 1}, {0: 0, 1: 0, 2: 0, 3: 0}),
    ],
)
def test_a_pair_reached_over_two_points_is_listed_once(f, g):
    f, g = sends(f), sends(g)
    assert not f.single_valued and not g.injective
    assert means(compose(g, f), oracle.compose(meaning(g), meaning(f)))


def test_scales_multiply_exactly():
    third, three = sends({0: 0}, scale=Fraction(1, 3)), sends({0: 0}, scale=3)
    assert compose(three, third).pieces[0].scale == 1


def test_middle_spaces_must_be_equal():
    with pytest.raises(InvalidMapError, match=r"shape \(4,\).*shape \(5,\)"):
        compose(sends({}, 5), sends({}, 4, 4))


# --- layouts that others cannot compose -----------------------------------------------------


def cute(shape: tuple[int, ...], strides: tuple[int, ...]) -> AffineMap:
    """A CuTe layout: digits of a flat index, the left-most fastest, times strides."""
    size, last = int(np.prod(shape)), sum((n - 1) * s for n, s in zip(shape, strides))
    steps = tuple(int(n) for n in np.cumprod([1, *shape[:-1]]))
    return AffineMap.from_pieces(line(size), line(last + 1), [Piece(shape, Side(0, steps), Side(0, strides))])


CUTE = [  # (left layout, length of the run composed into it, what comes out)
    ((2, 2), (1, 0), 3, [0, 1, 0]),
    ((4, 3), (3, 1), 6, [0, 3, 6, 9, 1, 4]),
    ((6, 4), (4, 1), 8, [0, 4, 8, 12, 16, 20, 1, 5]),
]


@pytest.mark.parametrize(("shape", "strides", "run", "values"), CUTE)
def test_pairs_that_cute_refuses_compose(shape, strides, run, values):
    left = cute(shape, strides)
    short = AffineMap.from_pieces(line(run), left.domain, [Piece((run,), Side(0, (1,)), Side(0, (1,)))])
    assert compose(left, short)(range(run)).tolist() == values


def test_two_progressions_meet_in_a_third():
    def progression(first: int, step: int) -> AffineMap:
        n = (199 - first) // step + 1
        return AffineMap.from_pieces(line(200), line(200), [Piece((n,), *[Side(first, (step,))] * 2)])

    both = compose(progression(1, 4), progression(3, 6))
    assert both.pieces == (Piece((16,), *[Side(9, (12,))] * 2),)


# --- addresses and work at their limits ------------------------------------------------------


def test_strides_near_two_to_the_61_do_not_wrap():
    far, n = 2**61 - 1, 2**62 - 2
    f = AffineMap.from_pieces(line(2), line(n), [Piece((2,), Side(0, (1,)), Side(0, (far,)))])
    g = AffineMap.from_pieces(line(n), line(2), [Piece((2,), Side(0, (far,)), Side(1, (-1,)))])
    assert compose(g, f)(range(2)).tolist() == [1, 0]
    assert agree(compose(invert(f), f), identity(line(2)))


@pytest.mark.parametrize("far", [2**31 - 1, 2**31 + 1, 2**59 + 1])
def test_interleaved_far_progressions_meet_where_arithmetic_says(far):
    n = 3 * far + 1
    a = AffineMap.from_pieces(line(4), line(n), [Piece((4,), Side(0, (1,)), Side(0, (far,)))])
    b = AffineMap.from_pieces(line(far), line(n), [Piece((far,), Side(0, (1,)), Side(0, (3,)))])
    met = compose(invert(b), a)
    assert met(range(4)).tolist() == [k * far // 3 if k * far % 3 == 0 and k < 3 else -1 for k in range(4)]


def subset_sums(count: int, seed: int) -> Piece:
    """A piece whose addresses are the sums of the subsets of random strides."""
    strides = np.random.default_rng(seed).integers(2**40, 2**41, count).tolist()
    return Piece((2,) * count, Side(0, tuple(2**k for k in range(count))), Side(0, tuple(strides)))


def test_subset_sums_end_in_a_limit_promptly():
    a, b = (AffineMap.from_pieces(line(2**40), line(2**48), [subset_sums(40, seed)]) for seed in (1, 2))
    before = time.process_time()
    with pytest.raises(LimitError, match=r"Limits\(steps=50000\)"):
        compose(invert(b), a, limits=Limits(steps=50_000))
    assert time.process_time() - before < 5


def test_few_subset_sums_are_solved():
    m = AffineMap.from_pieces(line(2**6), line(2**48), [subset_sums(6, 3)])
    assert agree(compose(invert(m), m), identity(m.domain))


ROWS, COLUMNS = (layout((10, 4), Split(axis), ranks=2) for axis in (0, 1))
NAMED = relabel(ROWS, codomain={(None, ""): (None, "w")})
ADVICE = {
    "other sizes": (lambda: plan(ROWS, layout((12, 4), Split(0), ranks=2)), "target has shape (12, 4)"),
    "other ranks": (lambda: union(ROWS, layout((10, 4), Split(0), ranks=5)), "for rank 0 the first domain"),
    "ranks apart": (lambda: union(ROWS, layout((10, 4), Split(0), ranks=[2, 3])), "for rank 0"),
    "other names": (lambda: plan(ROWS, NAMED), "relabel one side first"),
    "another shape": (lambda: plan(ROWS, layout((8, 5), Split(0), ranks=2)), "reshape one side first"),
    "transposed": (
        lambda: plan(ROWS, layout((4, 10), Split(0), ranks=2)),
        "permute it if it is transposed, else reshape it",
    ),
    "two layouts": (lambda: ROWS @ COLUMNS, "write ~g @ f, or plan(g, f) to move from g to f"),
    "merged": (lambda: merge(part(ROWS, 0), part(ROWS, 1)), "merge needs equal spaces, but for rank 0"),
}


@pytest.mark.parametrize("what", ADVICE)
def test_spaces_that_differ_are_named_with_what_would_help(what):
    """And with nothing where nothing would."""
    make, words = ADVICE[what]
    with pytest.raises(InvalidMapError, match=re.escape(words)) as refusal:
        make()
    helpful = any(verb in words for verb in ("relabel", "reshape", "permute", "write"))
    assert helpful == (";" in str(refusal.value))


def test_what_two_layouts_are_told_works():
    assert equivalent(~ROWS @ COLUMNS, plan(ROWS, COLUMNS).map)
