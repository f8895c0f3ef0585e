"""Plain data that was damaged is refused with words, or still says the same."""

from __future__ import annotations

import copy
import json
import math

import pytest
from laws import raises

from shardalg import (
    AffineMap,
    InvalidMapError,
    Limits,
    Replicate,
    ShardalgError,
    Side,
    Space,
    Split,
    StridedSplit,
    TransferPlan,
    layout,
    plan,
)
from shardalg.maps import Piece

ROWS = layout((4, 2), Split(0), ranks=2)
NAMED = AffineMap.from_pieces(
    Space.shards({0: {"a": (3, 2)}, 4: {"b": (2,)}}),
    Space.logical({"x": (4, 4), "y": (2,)}),
    [
        Piece((3, 2), Side(0, (2, 1), 0, "a"), Side(0, (4, 1), None, "x"), 3),
        Piece((2,), Side(0, (1,), 4, "b"), Side(1, (-1,), None, "y")),
    ],
)
STORED = {
    "a map": (AffineMap, ROWS),
    "a map of named boxes": (AffineMap, NAMED),
    "a space": (Space, NAMED.domain),
    "a plan": (TransferPlan, plan(ROWS, layout((4, 2), StridedSplit(0, 2), ranks=2))),
    "a plan of one rank": (TransferPlan, plan(ROWS, ROWS, source_ranks=[3, 4], target_ranks=[4, 3], rank=3)),
}
ODD = (
    None, True, False, -1, 0, 1, 7, 2**31, -(2**63), 2**62, 2**70, 0.5, math.nan, math.inf, "", "x", "1", [],
    [0], [[0, 0]], [[0, 0, 0]], [None], {}, {"boxes": []}, {0: 1}, (1, 2), b"x", object(),
)  # fmt: skip


def places(data):
    """The way to every value inside plain data."""
    inside = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    for key, value in inside:
        yield (key,)
        yield from ((key, *rest) for rest in places(value))


def changed(data, way, value):
    """The data with one value replaced, or dropped where ``value`` is the data itself."""
    made = copy.deepcopy(data)
    at = made
    for key in way[:-1]:
        at = at[key]
    if value is data:
        del at[way[-1]]
    else:
        at[way[-1]] = value
    return made


def read_back(kind, value):
    return kind.from_dict(json.loads(json.dumps(value.to_dict())))


@pytest.mark.parametrize("name", STORED)
def test_damaged_data_is_refused_or_says_something_true(name):
    """What is read is whole: it can be stored and read again, and answers what it is asked."""
    kind, value = STORED[name]
    assert read_back(kind, value) == value
    data = json.loads(json.dumps(value.to_dict()))
    refused = 0
    for way in places(data):
        for odd in (*ODD, data):
            try:
                found = kind.from_dict(changed(data, way, odd))
            except ShardalgError:
                refused += 1
                continue
            assert read_back(kind, found) == found
            if kind is TransferPlan:
                assert found.stats.copies == len(found.copies) and len(found.digest) == 64
    assert refused > 100


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("kind", [AffineMap, TransferPlan, Space])
def test_what_is_no_data_at_all_is_refused(kind, odd):
    if kind is not Space or odd != {"boxes": []}:
        raises(InvalidMapError, lambda: kind.from_dict(odd))


def dropped(key):
    return {k: v for k, v in ROWS.to_dict().items() if k != key}


SAID = {
    "a field that is missing": (
        lambda: AffineMap.from_dict(dropped("pieces")),
        "the field 'pieces' is missing",
    ),
    "a space that is none": (
        lambda: AffineMap.from_dict({**ROWS.to_dict(), "domain": {}}),
        "the field 'domain' is no space: the field 'boxes' is missing",
    ),
    "a row that is a number": (
        lambda: AffineMap.from_dict({**ROWS.to_dict(), "pieces": [3]}),
        "each row of the field 'pieces' must be a sequence, got 3",
    ),
    "a number that is a word": (
        lambda: AffineMap.from_dict({**ROWS.to_dict(), "pieces": [["x"] * 9]}),
        "a number of the field 'pieces' must be an integer, got 'x'",
    ),
    "limits of a map": (
        lambda: AffineMap.from_dict(ROWS.to_dict(), limits=None),
        "limits must be Limits(...)",
    ),
    "limits of a plan": (
        lambda: TransferPlan.from_dict(plan(ROWS, ROWS).to_dict(), limits=None),
        "limits must be Limits(...)",
    ),
    "a plan with a map that is none": (
        lambda: TransferPlan.from_dict({**plan(ROWS, ROWS).to_dict(), "map": dropped("domain")}),
        "the field 'map' is no map: the field 'domain' is missing",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_the_refusal_names_the_field(case):
    call, words = SAID[case]
    assert words in raises(InvalidMapError, call)


# --- plans that are none ----------------------------------------------------------------------------


def forged(p, **fields):
    return lambda: TransferPlan.from_dict({**p.to_dict(), **fields})


FOUR = layout((4,), Replicate(), ranks=2)
ONE = layout((4,), Replicate(), ranks=1)
NOTHING = {**plan(FOUR, FOUR).map.to_dict(), "pieces": []}


def other_tensor():
    target = AffineMap.from_pieces(
        ONE.domain, Space.logical({"z": (9,)}), [Piece((4,), Side(0, (1,), 0), Side(0, (1,), None, "z"))]
    )
    return forged(plan(ONE, ONE), target=target.to_dict())()


FORGED = {
    "between two tensors": (other_tensor, "of one tensor"),
    "missing that is no word": (forged(plan(FOUR, FOUR), missing="nope", map=NOTHING), '"error" or "leave"'),
    "a rank below 0": (forged(plan(FOUR, FOUR), rank=-1, map=NOTHING), "must be at least 0, got -1"),
    "a rank without its copies": (forged(plan(FOUR, FOUR), rank=1, map=NOTHING), "write 0 of the 4 slots"),
    "copies between other ranks": (forged(plan(FOUR, FOUR), rank=1), "copies between other ranks"),
    "a rank that is a word": (forged(plan(FOUR, FOUR), rank="x"), "the field 'rank' must be an integer"),
    "a global rank below 0": (
        forged(plan(ONE, ONE), source_ranks=[[0, -5]]),
        "distinct global ranks of at least",
    ),
    "one global rank twice": (
        forged(plan(FOUR, FOUR), target_ranks=[[0, 0], [1, 0]]),
        "distinct global ranks",
    ),
    "ranks that are not there": (forged(plan(ONE, ONE), source_ranks=[[7, 7]]), "names ranks [7]"),
    "fewer pairs than none": (forged(plan(ONE, ONE), pairs=-4), "'pairs' must be at least 0"),
    "a selector without a name": (forged(plan(ONE, ONE), select=None), "'select' must be a str, got None"),
    "a rank map of triples": (forged(plan(ONE, ONE), source_ranks=[[0, 0, 0]]), "has 2 entries"),
}


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_plan_is_refused(case):
    call, words = FORGED[case]
    assert words in raises(InvalidMapError, call)


def test_limits_hold_while_reading():
    with pytest.raises(ShardalgError, match="1 pieces"):
        AffineMap.from_dict(ONE.to_dict(), limits=Limits(pieces=0))
