"""A map called on slots."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from laws import placed, raises, sends, small
from oracle import meaning, slots

from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Replicate,
    Side,
    Space,
    Split,
    UnsupportedError,
    layout,
)


@given(placed())
def test_each_slot_gives_its_element_or_minus_one(m):
    held = {s: e for s, (_, e), _ in meaning(m).triples}
    for b in m.domain.boxes:
        here = np.arange(b.size).reshape(b.shape)
        found = m(here, rank=b.rank, name=b.name)
        assert found.shape == b.shape
        assert found.reshape(-1).tolist() == [held.get((b.key, a), -1) for a in range(b.size)]


@given(small(single_valued=True))
def test_without_a_rank_slots_and_elements_count_through_the_boxes(m):
    held = {s: e for s, e, _ in meaning(m).triples}
    number = {e: k for k, e in enumerate(slots(m.codomain))}
    expected = [number[held[s]] if s in held else -1 for s in slots(m.domain)]
    assert m(range(m.domain.size)).tolist() == expected


def test_slots_may_repeat_and_come_in_any_order():
    m = layout((6,), Split(0), ranks=2)
    assert m([2, 0, 2, 2], rank=1).tolist() == [5, 3, 5, 5]
    assert m([], rank=0).tolist() == []


def test_a_slot_outside_is_refused():
    m = layout((6,), Replicate(), ranks=2)
    assert "slot 6 is outside rank 1, which has 6 slots" in raises(InvalidMapError, lambda: m([0, 6], rank=1))
    assert "slot -1 is outside the domain, which has 12 slots" in raises(InvalidMapError, lambda: m([-1]))


def test_two_elements_in_one_slot_are_refused():
    with pytest.raises(InvalidMapError, match="not single-valued"):
        sends({0: (1, 2)})([0])


def test_slots_are_integers():
    with pytest.raises(InvalidMapError, match="float64"):
        sends({0: 1})([0.5])


def test_boxes_beyond_an_int64_are_not_counted_through():
    big = 2**62 - 2
    wide = Space.logical(dict.fromkeys("abcd", big))
    m = AffineMap.from_pieces(
        Space.shards({0: (3,)}), wide, [Piece((3,), Side(0, (1,), 0), Side(big - 3, (1,), None, "d"))]
    )
    assert f"have {4 * big} slots" in raises(UnsupportedError, lambda: m([0, 1, 2], rank=0))
    shards = layout((big,), Replicate(), ranks=4)
    assert f"have {4 * big} slots" in raises(UnsupportedError, lambda: shards([0, 1, 2]))
    assert shards([0, big - 1], rank=3).tolist() == [0, big - 1]
