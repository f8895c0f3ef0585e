"""What differs between two maps."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from laws import alike, sends
from oracle import meaning

from shardalg import Cyclic, Split, equivalent, explain, layout


@given(alike())
def test_it_counts_what_the_oracle_counts(maps):
    a, b = maps
    found = explain(a, b)
    mine, other = meaning(a).triples, meaning(b).triples
    slots_of_a, slots_of_b = ({s for s, _, _ in some} for some in (mine, other))
    assert found.same == len(mine & other)
    assert found.moved == sum(s in slots_of_b for s, _, _ in mine - other)
    assert found.missing == sum(s not in slots_of_b for s, _, _ in mine - other)
    assert found.extra == sum(s not in slots_of_a for s, _, _ in other - mine)
    assert bool(found) == equivalent(a, b)


@given(alike())
def test_it_names_the_first_slot_that_differs(maps):
    a, b = maps
    found = explain(a, b)
    boxes = [box.key for box in a.domain.boxes]
    different = {s for s, _, _ in meaning(a).triples ^ meaning(b).triples}
    expected = min(different, key=lambda s: (boxes.index(s[0]), s[1]), default=None)
    assert found.slot == expected
    assert str(found)


def test_it_is_said_in_words():
    words = str(explain(layout((6,), Split(0), ranks=3), layout((6,), Cyclic(0, 1), ranks=3)))
    assert words == (
        "2 same, 4 moved, 0 missing, 0 extra; slot 1 of rank 0 holds element 1 in the first map"
        " and element 3 in the second"
    )


def test_nothing_and_scales_are_said_too():
    assert "slot 0 of the tensor holds nothing in the first map and element 2 times 1/3 in" in str(
        explain(sends({}), sends({0: 2}, scale=Fraction(1, 3)))
    )
    assert "holds element 0 and element 1 and element 2 and more in" in str(
        explain(sends({0: (0, 1, 2, 3)}), sends({}))
    )


def test_equal_maps_say_so():
    assert str(explain(sends({0: 1}), sends({0: 1}))) == "equal: 1 same, 0 moved, 0 missing, 0 extra"


def test_other_spaces_are_the_difference():
    found = explain(sends({}, 4), sends({}, 5))
    assert not found
    assert found.slot is None
    assert "the domain of the first map has shape (4,) and that of the second has shape (5,)" in str(found)
