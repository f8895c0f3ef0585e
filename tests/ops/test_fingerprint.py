"""A digest that is blind to cuts and to nothing else."""

from __future__ import annotations

import itertools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from laws import alike, placed, randoms, some

from shardalg import AffineMap, Piece, Side, Space, Split, equivalent, fingerprint, invert, layout, relabel
from shardalg.maps._fingerprint import PRIME, _geometric, _powers
from shardalg.testing import resplit


@given(some() | placed(), randoms())
def test_it_is_the_same_for_every_way_of_cutting(m, random):
    """K4."""
    assert fingerprint(resplit(m, random, cuts=3)) == fingerprint(m)


@given(alike())
def test_it_tells_maps_apart_exactly_when_they_differ(maps):
    a, b = maps
    assert (fingerprint(a) == fingerprint(b)) == equivalent(a, b)


def one(shape=(2,), slot=0, slots=(1,), element=0, elements=(1,), scale=1, rank=0, name="", space=(4,)):
    """One piece on one of two ranks, each with two named boxes of four slots."""
    domain = Space.shards({r: {"": space, "b": (4,)} for r in (0, 1)})
    piece = Piece(shape, Side(slot, slots, rank, name), Side(element, elements), Fraction(scale))
    return AffineMap.from_pieces(domain, Space.logical((8,)), [piece])


def test_each_part_of_a_piece_counts():
    parts = [
        {}, {"slot": 1}, {"element": 1}, {"rank": 1}, {"name": "b"}, {"scale": 2}, {"scale": "1/2"},
        {"scale": -1}, {"shape": (3,)}, {"slots": (2,)}, {"elements": (0,)},
        {"element": 1, "elements": (-1,)}, {"slots": (0,)}, {"space": (2, 2)},
    ]  # fmt: skip
    assert len({fingerprint(one(**part)) for part in parts}) == len(parts)


def test_boxes_count_by_key_and_not_by_position():
    m = layout((4,), Split(0), ranks=2)
    moved = relabel(m, domain={0: 0, 1: 5})
    assert fingerprint(moved) != fingerprint(m)
    wider = AffineMap.from_pieces(Space.shards({0: (2,), 1: (2,), 2: (2,)}), m.codomain, m.pieces)
    assert len({fingerprint(x) for x in (m, wider)}) == 2


def test_every_subset_of_a_grid_has_its_own():
    cells = list(itertools.product(range(3), range(3)))
    space, found = Space.logical((3,)), set()
    for chosen in itertools.product((False, True), repeat=len(cells)):
        points = [Piece((), Side(s, ()), Side(e, ())) for (s, e), take in zip(cells, chosen) if take]
        found.add(fingerprint(AffineMap.from_pieces(space, space, points)))
    assert len(found) == 2**9


@pytest.mark.parametrize("axis", [(5, 3, -2), (5, 0, 4), (5, 7, 0), (1, 0, 0), (5, 0, 0)])
def test_a_series_is_the_sum_of_its_terms(axis):
    x, y = 12345, 67890
    extent, slot, element = axis
    ratio = pow(x, slot, PRIME) * pow(y, element, PRIME)
    assert _geometric(*axis, x, y) == sum(pow(ratio, k, PRIME) for k in range(extent)) % PRIME


def test_a_ratio_of_one_is_a_multiplicity():
    assert _geometric(PRIME + 5, 1, -1, 3, 3) == 5


def test_powers_are_powers():
    exponents = np.array([0, 5, 2**62 - 3, 5, 17], np.int64)
    assert _powers(7, exponents) == [pow(7, int(e), PRIME) for e in exponents]


def test_huge_extents_cost_nothing():
    tall, wide = (layout((2**31, 2**30), Split(axis), ranks=2) for axis in (0, 1))
    assert len({fingerprint(m) for m in (tall, wide, invert(tall))}) == 3


def test_another_process_with_another_hash_seed_finds_the_same():
    code = "import shardalg as sa; print(sa.fingerprint(sa.layout((12, 5), sa.Split(0), ranks=3)))"
    run = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONHASHSEED": "7"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == fingerprint(layout((12, 5), Split(0), ranks=3))


def test_the_format_is_pinned():
    pinned = "7a21ab2c225391d5adbf9aec16321d7c373d48413561931962f4caa46056cf28"
    assert fingerprint(layout((12, 5), Split(0), ranks=3)) == pinned
