"""The ready-made checks hold for drawn layouts, and each of them can fail."""

from __future__ import annotations

import dataclasses
import json
import re

import numpy as np
import pytest
from hypothesis import given

from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Replicate,
    Side,
    Space,
    Split,
    backends,
    layout,
    ops,
    plan,
)
from shardalg.testing import laws, layout_pairs, layouts

ROWS, COLUMNS = (layout((4, 4), Split(axis), ranks=2) for axis in (0, 1))
BOTH = layout((4, 4), Replicate(), ranks=2)


def fewer(m: AffineMap) -> AffineMap:
    """The map without its first piece."""
    return AffineMap.from_pieces(m.domain, m.codomain, m.pieces[1:])


def two_elements_in_a_slot() -> AffineMap:
    pieces = [Piece((), Side(0, (), 0), Side(e, ())) for e in (0, 1)]
    return AffineMap.from_pieces(Space.shards({0: (1,)}), Space.logical((2,)), pieces)


# --- layouts --------------------------------------------------------------------------------


@given(layouts())
def test_layouts_obey_their_laws(m):
    assert laws.check_layout_laws(m) == tuple(laws.LAYOUT_LAWS)


@given(layouts())
def test_layouts_mean_what_they_say(m):
    """Torch tensors and NumPy arrays alike."""
    shards = laws.round_trip(m)
    assert {r: x.numpy().tolist() for r, x in shards.items()} == {
        r: x.tolist() for r, x in laws.round_trip(m, like="numpy").items()
    }


def test_what_is_no_layout_is_named():
    with pytest.raises(AssertionError, match=r"^broken law: a layout .*: slot 0 of rank 0 has"):
        laws.check_layout_laws(two_elements_in_a_slot())


@pytest.mark.parametrize(
    "check, given, words",
    [
        (laws.round_trip, (lambda full, rank: full,), r"round_trip: m must be an AffineMap.*probe\("),
        (laws.check_layout_laws, (Split(0),), r"got Split: lower a placement with layout\("),
        (laws.check_transfer, (ROWS, Split(0)), "check_transfer: target must be"),
    ],
)
def test_what_is_no_map_breaks_no_law(check, given, words):
    with pytest.raises(InvalidMapError, match=words):
        check(*given)


BROKEN = {
    "K4, how a map is cut does not matter": ("resplit", lambda m, random: fewer(m)),
    "K2, folding keeps the map and is idempotent": ("simplify", fewer),
    "K1 to K4, the canonical form is the map's, and its own": ("canonicalize", fewer),
    "C3, the inverse of the inverse is the map": ("invert", fewer),
    "R7, the map after its inverse is the identity on what is held": ("image", lambda m: fewer(ops.image(m))),
    "every slot holds an element or is padding": ("padding", ops.domain),
    "D2, every element is held or uncovered": ("uncovered", ops.image),
    "every held element has one set of holders": ("holders", lambda m: ops.holders(m)[1:]),
    "T5, nothing moves between equal layouts": ("plan", lambda a, b: plan(a, COLUMNS)),
    "K8, JSON and text give the map back": ("to_text", lambda m: ops.simplify(m) and TEXT(fewer(m))),
}
TEXT = laws.to_text


@pytest.mark.parametrize("law", BROKEN)
def test_each_law_of_layouts_can_fail(law, monkeypatch):
    laws.check_layout_laws(ROWS)
    monkeypatch.setattr(laws, *BROKEN[law])
    with pytest.raises(AssertionError, match=r"^broken law: " + re.escape(law)):
        laws.check_layout_laws(ROWS)


def test_every_law_of_layouts_has_its_failure():
    assert {*BROKEN, "a layout gives each slot at most one element"} == {*laws.LAYOUT_LAWS}


@pytest.mark.parametrize(
    "name, wrong, law",
    [
        ("extract", lambda m, full: {r: x * 0 for r, x in ops.extract(m, full).items()}, "a shard holds"),
        ("rebuild", lambda m, shards: 0 * ops.rebuild(m, shards), "rebuilding shards"),
    ],
)
def test_wrong_values_are_seen(name, wrong, law, monkeypatch):
    monkeypatch.setattr(laws, name, wrong)
    with pytest.raises(AssertionError, match=rf"{law}.*address 0 .* holds 0, not 1; 16 differ"):
        laws.round_trip(ROWS, like="numpy")


# --- partition functions --------------------------------------------------------------------


def halves(full, rank):
    return full.chunk(2)[rank]


def test_a_partition_gives_its_layout():
    assert laws.check_partition(halves, (4, 4), 2, expected=ROWS) == ROWS
    thirds = laws.check_partition(lambda full: [full / 3] * 3, (4,), 3)
    assert {p.scale.denominator for p in thirds.pieces} == {3}


def test_a_partition_of_arrays():
    found = laws.check_partition(lambda x, rank: x[rank::2], (5,), 2, like="numpy")
    assert found.shard_shape(0) == (3,)


@pytest.mark.parametrize(
    "partition, words",
    [
        (lambda full, rank: full.sum(0), "a partition places elements"),
        (lambda full, rank: full.clamp(max=3), "a partition places elements"),
        (lambda full, rank: full[rank : rank + 1], "every element is held by some rank.*; 8 in all"),
        (
            lambda full, rank: halves(full, 1 - rank),
            "0 same, 16 moved.* in the layout and .* in the partition",
        ),
        (lambda full, rank: full.chunk(2, 1)[rank], "expected: domains? differ|expected: .*shape"),
    ],
)
def test_what_partitions_do_wrong_is_named(partition, words):
    with pytest.raises(AssertionError, match=words):
        laws.check_partition(partition, (4, 4), 2, expected=ROWS)


def test_an_incomplete_partition_can_be_meant():
    some = laws.check_partition(lambda full, rank: full[rank : rank + 1], (4, 4), 2, complete=False)
    assert some.size == 8


def test_a_partition_that_changes_its_mind_is_seen(monkeypatch):
    monkeypatch.setattr(laws, "probe", lambda *_, seed, **__: [ROWS, BOTH][seed])
    with pytest.raises(AssertionError, match="a partition has one layout"):
        laws.check_partition(halves, (4, 4), 2)


def test_data_elsewhere_are_seen(monkeypatch):
    monkeypatch.setattr(laws, "probe", lambda *_, **__: BOTH)
    with pytest.raises(AssertionError, match=r"other data land .* shards of shapes \{0: \(2, 4\)"):
        laws.check_partition(halves, (4, 4), 2)
    shifted = layout((4, 4), Split(0), ranks=[1, 0])
    monkeypatch.setattr(laws, "probe", lambda *_, **__: shifted)
    with pytest.raises(AssertionError, match=r"other data land .* address 0 of .* holds 1"):
        laws.check_partition(halves, (4, 4), 2)


# --- transfers ------------------------------------------------------------------------------


@given(layout_pairs())
def test_transfers_are_right(pair):
    assert laws.check_transfer(*pair, missing="leave").target == pair[1]


@pytest.mark.parametrize("select", ["stay", "lowest", "balanced"])
def test_transfers_by_any_selector_are_right(select):
    assert len(laws.check_transfer(BOTH, COLUMNS, select=select))


@pytest.mark.parametrize("ranks", [([0, 1], [2, 3]), ([3, 1], [1, 0]), ({0: 5, 1: 0}, {0: 1, 1: 5})])
def test_transfers_between_other_processes_are_right(ranks):
    """Both sides number their ranks from 0; what they hold and where they are differs."""
    made = laws.check_transfer(ROWS, COLUMNS, source_ranks=ranks[0], target_ranks=ranks[1])
    same = sum(ranks[0][r] == ranks[1][t] for r in (0, 1) for t in (0, 1))
    assert made.stats.elements_crossing == 16 - 4 * same


def test_a_transfer_without_a_source_is_named():
    with pytest.raises(AssertionError, match=r"^broken law: a transfer can be planned: .*"):
        laws.check_transfer(fewer(ROWS), COLUMNS)


def other_slots(a, b, **options):
    """A plan that reads the wrong rows."""
    return dataclasses.replace(plan(a, b, **options), map=plan(layout((4, 4), Split(0), [1, 0]), b).map)


def too_little(a, b, **options):
    made = plan(a, b, **options)
    return dataclasses.replace(made, map=fewer(made.map))


def too_far(a, b, **options):
    """A plan that never reads the rank's own copy."""
    made = plan(BOTH, b, select=lambda request: request.candidates[-1 - request.target])
    return dataclasses.replace(made, select="stay")


def alone(a, b, *, rank=None, **options):
    made = plan(a, b, rank=rank, **options)
    return made if rank is None else dataclasses.replace(made, map=fewer(made.map))


def other_select(data, **options):
    return json.JSONEncoder().encode({**data, "select": "lowest"} if "select" in data else data)


MISPLANNED = {
    "T1,": ("match", lambda a, b: ops.match(a, b) if a is BOTH else fewer(ops.match(a, b))),
    "T3, a plan stays": ("plan", other_slots),
    "T3, a plan writes": ("plan", too_little),
    "T4,": ("restrict", lambda m, where: fewer(m)),
    "T9,": ("plan", too_far),
    "T14,": ("plan", alone),
}


@pytest.mark.parametrize("law", MISPLANNED)
def test_each_law_of_transfers_can_fail(law, monkeypatch):
    source = ROWS if law == "T3, a plan stays" else BOTH
    laws.check_transfer(source, COLUMNS)
    monkeypatch.setattr(laws, *MISPLANNED[law])
    with pytest.raises(AssertionError, match=r"^broken law: " + re.escape(law)):
        laws.check_transfer(source, COLUMNS)


def test_a_plan_that_is_stored_wrong_is_seen(monkeypatch):
    monkeypatch.setattr(laws.json, "dumps", other_select)
    with pytest.raises(AssertionError, match=r"^broken law: K8, JSON gives the plan back: its digest"):
        laws.check_transfer(ROWS, COLUMNS)


def test_a_wrong_run_is_seen(monkeypatch):
    real = backends.run
    monkeypatch.setattr(backends, "run", lambda *a: {r: 0 * x for r, x in real(*a).items()})
    with pytest.raises(AssertionError, match=r"^broken law: a run gives the shards .*; 16 differ in all"):
        laws.check_transfer(ROWS, COLUMNS)


def test_test_data_tell_elements_apart():
    full = laws._data(Space.logical({"a": (3,), "b": (2, 2)}), "numpy")
    values = np.concatenate([x.reshape(-1) for x in full.values()])
    assert sorted(full) == ["a", "b"] and len(set(values.tolist())) == 7
