"""Questions about maps, and the witnesses that answer them."""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction

import numpy as np
import oracle
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import line, placed, sends, small, some
from oracle import meaning

from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Side,
    Space,
    Split,
    check,
    check_layout,
    extract,
    holders,
    identity,
    invert,
    is_injective,
    is_single_valued,
    is_surjective,
    is_total,
    layout,
    multiplicity,
    plan,
    rebuild,
    scaled_by,
    union,
)
from shardalg.maps._table import PieceTable


@given(some())
def test_single_valued_and_injective(f):
    assert bool(is_single_valued(f)) == oracle.is_single_valued(meaning(f))
    assert bool(is_injective(f)) == oracle.is_injective(meaning(f))
    assert bool(is_injective(f)) == bool(is_single_valued(invert(f)))


@given(small())
def test_total_and_surjective(f):
    assert bool(is_total(f)) == oracle.is_total(meaning(f))
    assert bool(is_surjective(f)) == oracle.is_surjective(meaning(f))


@given(some())
def test_a_slot_with_two_elements_is_a_true_witness(f):
    answer = is_single_valued(f)
    if not answer:
        key, slot, first, second = answer.witness
        found = sorted((e, scale) for s, e, scale in meaning(f).triples if s == (key, slot))
        assert {first, second} <= {e for e, _ in found}
        assert first != second or len({scale for e, scale in found if e == first}) > 1


def first_bad(space, ends):
    """The first address among those that occur more than once."""
    places = {b.key: k for k, b in enumerate(space.boxes)}
    return min((e for e, n in Counter(ends).items() if n > 1), key=lambda e: (places[e[0]], e[1]))


@given(some())
def test_the_witness_is_the_first_bad_address(f):
    triples = meaning(f).triples
    for answer, space, k in ((is_single_valued(f), f.domain, 0), (is_injective(f), f.codomain, 1)):
        if not answer:
            assert answer.witness[:2] == first_bad(space, [t[k] for t in triples])


def test_the_first_bad_slot_may_lie_inside_a_block():
    """Two axes of one piece part in its elements; the first meeting is a step along the shorter one."""
    f = AffineMap.from_pieces(
        Space.shards({2: (6, 2)}),
        Space.logical({"": (24,), "a": (5,)}),
        [
            Piece((3,), Side(3, (3,), 2), Side(3, (-1,), None, "a")),
            Piece((3, 4, 3), Side(4, (2, 1, 0), 2), Side(9, (0, -1, 3))),
        ],
    )
    assert (
        is_single_valued(f).witness[:2]
        == ((2, ""), 4)
        == first_bad(f.domain, [s for s, _, _ in meaning(f).triples])
    )


@given(small())
def test_a_slot_or_element_left_out_is_the_first_one(f):
    for answer, rest in ((is_total(f), oracle.padding), (is_surjective(f), oracle.uncovered)):
        if not answer:
            left_out = rest(meaning(f))
            boxes = [b.key for b in left_out.domain.boxes]
            assert answer.witness == min(
                (s for s, _, _ in left_out.triples), key=lambda s: (boxes.index(s[0]), s[1])
            )
            assert f"; {len(left_out.triples)} in all" in answer.reason


@given(small(), st.data())
def test_multiplicity_counts_the_slots_of_an_element(f, data):
    boxes = [b for b in f.codomain.boxes if b.size]
    if boxes:
        box = data.draw(st.sampled_from(boxes))
        element = data.draw(st.integers(0, box.size - 1))
        found = multiplicity(f, element, name=box.name, rank=box.rank)
        assert found == oracle.multiplicity(meaning(f), (box.key, element))


def test_an_element_outside_its_tensor_has_no_multiplicity():
    with pytest.raises(InvalidMapError, match=r"element 4 is outside the tensor, 0..3"):
        multiplicity(sends({0: 0}), 4)


def test_reasons_name_both_ends():
    assert (
        "slot 0 of the tensor has the two elements 1 of the tensor and 2 of"
        in is_single_valued(sends({0: (1, 2)})).reason
    )
    assert "element 3 of the tensor has the two slots 0" in is_injective(sends({0: 3, 2: 3})).reason
    two_scales = union(sends({0: 1}), sends({0: 1}, scale=Fraction(1, 2)))
    assert re.search("at scales 1/[12] and 1/[12]", is_single_valued(two_scales).reason)


# --- what constructors promise ---------------------------------------------------------------


@given(some() | placed())
def test_every_map_passes_its_check(m):
    assert check(m) is m


GOOD = AffineMap.from_pieces(line(4), line(4), [Piece((2,), Side(0, (2,)), Side(1, (1,)))])
BAD = {
    "outside its box": ([0, 3, 0, 0, 1, 1, 2, 2, 1], "covers domain addresses 3..5"),
    "a negative address": ([0, 0, 0, 0, 1, 1, 2, 1, -1], "covers codomain addresses -1..0"),
    "scale 0": ([0, 0, 0, 0, 0, 1, 2, 1, 1], "scale of 0"),
    "denominator 0": ([0, 0, 0, 0, 1, 0, 2, 1, 1], "denominator below 1"),
    "a flipped axis": ([0, 3, 0, 0, 1, 1, 2, -1, 1], "normal form"),
    "a replica listed twice": ([0, 0, 0, 0, 1, 1, 2, 0, 0], "normal form"),
}


@pytest.mark.parametrize("kind", BAD)
def test_check_finds(kind):
    row, message = BAD[kind]
    bad = AffineMap(line(4), line(4), PieceTable(np.array(row, np.int64).reshape(-1, 1)))
    with pytest.raises(InvalidMapError, match=message):
        check(bad)


def test_check_finds_pieces_that_overlap():
    rows = np.repeat(GOOD.table.rows, 2, axis=1)
    with pytest.raises(InvalidMapError, match="list 4 pairs but meet each other in 8"):
        check(AffineMap(line(4), line(4), PieceTable(rows)))


NO_SHARDS = identity(Space.logical((4, 4)))
FROM_SHARDS = {
    "plan": lambda: plan(NO_SHARDS, NO_SHARDS),
    "holders": lambda: holders(NO_SHARDS),
    "one holder": lambda: holders(NO_SHARDS, 3),
    "extract": lambda: extract(NO_SHARDS, np.zeros((4, 4))),
    "rebuild": lambda: rebuild(NO_SHARDS, {}),
    "scaled_by": lambda: scaled_by(NO_SHARDS, (2, 2)),
}


@pytest.mark.parametrize("asked", FROM_SHARDS)
def test_what_needs_shards_refuses_other_maps(asked):
    with pytest.raises(InvalidMapError, match=r"is no layout: that starts from shards of ranks, not from"):
        FROM_SHARDS[asked]()


def test_a_layout_goes_from_shards_to_tensors():
    assert check_layout(layout((5, 2), Split(0), ranks=3))
    with pytest.raises(InvalidMapError, match="starts from shards"):
        check_layout(GOOD)
    shards = Space.shards({0: (4,)})
    with pytest.raises(InvalidMapError, match="ends in logical tensors"):
        check_layout(AffineMap.from_pieces(shards, shards, []))
    double = [Piece((), Side(0, (), 0), Side(e, ())) for e in (0, 1)]
    with pytest.raises(InvalidMapError, match="not a layout: slot 0 of rank 0 has the two elements"):
        check_layout(AffineMap.from_pieces(shards, line(4), double))
