"""Programs carry each element that a rank wants from another exactly once, within their bounds."""

import dataclasses
import time
from fractions import Fraction
from functools import partial

import pytest
from cases import columns, rows
from hypothesis import given
from hypothesis import strategies as st

import shardalg as sa
from shardalg.maps._table import empty_table
from shardalg.ops._schedule import MESSAGE_BYTES, slabs
from shardalg.plans._program import counted_words
from shardalg.plans._stats import box_ranks
from shardalg.testing import layout_pairs

BOUNDS = st.sampled_from([None, 8, 24, 300])
DTYPES = ("uint8", "bfloat16", "float32")


def points(shape, strides, offset):
    """The addresses of all points of a block."""
    found = [offset]
    for extent, stride in zip(shape.tolist(), strides.tolist()):
        found = [at + stride * k for at in found for k in range(extent)]
    return found


def carried(program):
    """(entry, source box, slot, target rank) of every element on the wire, with the round and the sender."""
    p = program.parcels
    for k in range(len(p)):
        number, sender, target, entry, box = p.rows[:5, k].tolist()
        for slot in points(p.shape[:, k], p.strides[:, k], int(p.rows[5, k])):
            yield (entry, box, slot, target), number, sender


def wanted(plan):
    """The same from the copies themselves, point by point: what ranks want from other ranks."""
    found = set()
    of_box, to_box = box_ranks(plan, "source").tolist(), box_ranks(plan, "target").tolist()
    c = plan.map.table.columns
    for k in range(len(plan.map)):
        slots = points(c.shape[:, k], c.cod_strides[:, k], int(c.cod_offset[k]))
        if of_box[c.cod_box[k]] != to_box[c.dom_box[k]]:
            found |= {(0, int(c.cod_box[k]), slot, to_box[c.dom_box[k]]) for slot in slots}
    return found


@given(layout_pairs(), BOUNDS, st.sampled_from(DTYPES), st.booleans())
def test_each_wanted_element_travels_once(pair, max_bytes, dtype, relay):
    plan = sa.plan(*pair, missing="leave")
    program = sa.schedule(plan, max_bytes=max_bytes, dtypes=dtype, relay=relay)
    keys = [key for key, _, _ in carried(program)]
    assert len(keys) == len(set(keys))
    assert set(keys) == wanted(plan)
    assert program == sa.schedule(
        sa.plan(*pair, missing="leave"), max_bytes=max_bytes, dtypes=dtype, relay=relay
    )


@given(layout_pairs(), st.integers(8, 200), st.booleans())
def test_staging_stays_within_the_bound(pair, max_bytes, relay):
    program = sa.schedule(sa.plan(*pair, missing="leave"), max_bytes=max_bytes, dtypes="float64", relay=relay)
    for its in program.rounds:
        assert its.messages
        for rank, size in its.staging.items():
            assert size == its.sent.get(rank, 0) + its.received.get(rank, 0)
            assert size + counted_words(max_bytes, program.plan) <= max_bytes
    assert program.peak_staging <= max_bytes


def test_one_element_must_fit():
    with pytest.raises(sa.LimitError, match=r"8 bytes does not fit max_bytes=7"):
        sa.schedule(sa.plan(rows(2), columns(2)), max_bytes=7, dtypes="float64")


@given(layout_pairs(max_size=12, max_ranks=4), BOUNDS)
def test_relayed_elements_leave_their_holder_once(pair, max_bytes):
    plan = sa.plan(*pair, missing="leave")
    program = sa.schedule(plan, max_bytes=max_bytes, dtypes="uint16", relay=True)
    if plan.map.table.scaled:
        return
    owner = box_ranks(plan, "source").tolist()
    arrived, first = {}, set()
    for (_, box, slot, target), number, sender in sorted(carried(program), key=lambda x: x[1]):
        if sender == owner[box]:
            assert (box, slot) not in first
            first.add((box, slot))
        else:  # it forwards what it got in an earlier round
            assert arrived[box, slot, sender] < number
        arrived[box, slot, target] = number


def test_one_trainer_feeds_many_engines():
    plan = sa.plan(
        sa.layout((64, 64), sa.Replicate(), ranks=1), sa.layout((64, 64), sa.Replicate(), ranks=[1, 2, 3, 4])
    )
    plain, relayed = (sa.schedule(plan, dtypes="float32", relay=r) for r in (False, True))
    size = 64 * 64 * 4
    assert plain.sent == {0: 4 * size}
    assert relayed.sent == {0: size} | dict.fromkeys((1, 2, 3, 4), size * 3 // 4)
    assert relayed.wire_bytes == plain.wire_bytes == plain.lower_bound == 4 * size
    assert len(relayed.rounds) == 2


def test_scaled_copies_are_not_forwarded():
    half = sa.layout((8,), sa.Replicate(scale=Fraction(1, 2)), ranks=[1, 2])
    program = sa.schedule(
        sa.plan(sa.layout((8,), sa.Replicate(), ranks=1), half), dtypes="float32", relay=True
    )
    assert program.sent == {0: 64}


# --- bounds that no test could allocate ---------------------------------------------------


def test_messages_stay_below_31_bits():  # case 35
    source, target = rows(2, (1 << 18, 1 << 18)), columns(2, (1 << 18, 1 << 18))
    program = sa.schedule(sa.plan(source, target), dtypes="float64")
    sizes = [m.size for its in program.rounds for m in its.messages]
    assert max(sizes) <= MESSAGE_BYTES < 1 << 31
    assert sum(sizes) == (1 << 36) // 2 * 8
    assert program.parcels.elements.max() * 8 < 1 << 31
    whole = sa.schedule(sa.plan(source, target), dtypes="float64", max_bytes=1 << 40)
    assert max(m.size for its in whole.rounds for m in its.messages) < 1 << 31


def test_many_copies_are_refused_before_they_are_built():  # case 28
    stripes = rows(128, (128, 128)), columns(128, (128, 128))
    assert len(sa.plan(*stripes)) == 16384
    with pytest.raises(sa.LimitError, match="16384"):
        sa.plan(*stripes, limits=sa.Limits(copies=1000))


def test_a_plan_with_too_few_copies_is_refused():  # case 29
    plan = sa.plan(rows(2), columns(2))
    for table in (empty_table(), plan.map.table.take(slice(0, 2))):
        broken = dataclasses.replace(plan, map=dataclasses.replace(plan.map, table=table))
        with pytest.raises(sa.InvalidMapError, match=r"writes \d+ of 48 target slots"):
            sa.schedule(broken)


# --- pairing and fusing -------------------------------------------------------------------


def test_no_rank_idles_while_all_have_the_same_to_do():
    program = sa.schedule(sa.plan(rows(8, (64, 64)), columns(8, (64, 64))), dtypes="float32", max_bytes=1024)
    room = 1024 - counted_words(1024, program.plan)
    per_rank = 2 * 7 * 8 * 8 * 4
    assert len(program.rounds) <= -(-per_rank // room) + 1
    for its in program.rounds[:-1]:
        assert set(its.staging) == set(range(8))


def test_small_tensors_share_messages_and_big_ones_are_cut():
    source = {f"w{k}": rows(2, (4, 4)) for k in range(50)} | {"big": rows(2, (256, 256))}
    target = {f"w{k}": columns(2, (4, 4)) for k in range(50)} | {"big": columns(2, (256, 256))}
    tree = sa.plan_tree(source, target)
    assert [len(r.messages) for r in sa.schedule(tree, dtypes="float32").rounds] == [2]
    bounded = sa.schedule(tree, dtypes="float32", max_bytes=16384)
    assert bounded.wire_bytes == sa.schedule(tree, dtypes="float32").wire_bytes
    assert len(bounded.rounds) <= -(-2 * bounded.wire_bytes // 2 // 16000) + 1


def test_a_rank_with_nothing_to_do_has_the_same_rounds():  # case 32
    plan = sa.plan(sa.layout((8, 4), sa.Split(0, sizes=(4, 4, 0)), ranks=3), columns(2, (8, 4)))
    program = sa.schedule(plan, dtypes="float32", max_bytes=32)
    assert 2 not in program.sent and 2 not in program.received
    assert len(program.rounds) > 1


def test_turns_of_a_round_keep_its_blocks_and_a_smaller_bound():
    program = sa.schedule(sa.plan(rows(4, (64, 64)), columns(4, (64, 64))), dtypes="float32", max_bytes=4096)
    fine = dataclasses.replace(program, parcels=slabs(program, 600))
    assert fine.peak_staging - counted_words(4096, program.plan) <= 600
    assert {key for key, _, _ in carried(fine)} == {key for key, _, _ in carried(program)}
    assert fine.wire_bytes == program.wire_bytes
    assert slabs(program, 4096) is program.parcels


# --- dtypes -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pair, size", [(("float32", "bfloat16"), 2), (("bfloat16", "float32"), 2), (("float32", "float32"), 4)]
)
def test_the_smaller_dtype_travels(pair, size):  # case 30
    program = sa.schedule(sa.plan(rows(2), columns(2)), dtypes=pair)
    assert program.wire_bytes == 24 * size


def test_scaled_copies_travel_in_the_source_dtype():
    half = sa.layout((8,), sa.Replicate(scale=Fraction(1, 2)), ranks=[1])
    plan = sa.plan(sa.layout((8,), sa.Replicate(), ranks=1), half)
    assert sa.schedule(plan, dtypes=("float32", "bfloat16")).wire_bytes == 32


# --- reading and cost ---------------------------------------------------------------------


def test_programs_print_their_messages():
    program = sa.schedule(sa.plan(rows(2, (2, 2)), columns(2, (2, 2))), dtypes="uint8")
    assert str(program).splitlines() == [
        "<Program of 1 round, 2 bytes on the wire>",
        "round 0: 0->1 1 B, 1->0 1 B",
    ]
    assert str(sa.Round(())) == "nothing"


def test_a_program_without_dtypes_says_what_it_assumes():
    """480 bytes of float32 are not 960: the width stands beside the count."""
    plan = sa.plan(rows(2, (2, 2)), columns(2, (2, 2)))
    assert repr(sa.schedule(plan)) == "<Program of 1 round, 16 bytes on the wire at 8 bytes an element>"
    bound = repr(sa.schedule(plan, max_bytes=64))
    assert bound == "<Program of 1 round, 16 bytes on the wire at 8 bytes an element, max_bytes=64>"


def test_equal_layouts_send_nothing():
    program = sa.schedule(sa.plan(rows(4), rows(4)))
    assert (program.rounds, program.wire_bytes, program.peak_staging) == ((), 0, 0)
    split = sa.schedule(sa.plan(sa.layout((8, 6), sa.Replicate(), ranks=4), rows(4)))
    assert split.wire_bytes == 0


def test_processes_that_are_not_named_cannot_be_scheduled():
    plan = dataclasses.replace(sa.plan(rows(2), columns(2)), same_ranks=False)
    with pytest.raises(sa.UnsupportedError, match="source_ranks="):
        sa.schedule(plan)
    for options in ({"max_bytes": 64}, {"relay": True}):
        with pytest.raises(sa.UnsupportedError, match="rank="):
            sa.schedule(sa.plan(rows(2), columns(2), rank=0), **options)


def seconds(work):
    start = time.process_time()
    work()
    return time.process_time() - start


def test_scheduling_is_quick():
    shapes = [(4096, 1024), (1024, 4096), (1024,), (3072, 1024)]
    names = [(f"{k}.{j}", shape) for k in range(100) for j, shape in enumerate(shapes)]
    trees = [{name: sa.layout(shape, sa.Split(0), ranks=n) for name, shape in names} for n in (8, 16)]
    tree = sa.plan_tree(*trees)
    assert len(tree.entries) == 400
    grid = sa.plan(rows(256, (512, 512)), columns(256, (512, 512)))
    for plan, max_bytes in ((tree, None), (tree, 64 << 20), (grid, None), (grid, 1 << 13)):
        work = partial(sa.schedule, plan, dtypes="bfloat16", max_bytes=max_bytes)
        assert min(seconds(work) for _ in range(2)) < 1


@pytest.mark.parametrize(
    "dtypes, said",
    [
        ({}, r"\['a', 'b'\] are missing"),
        ({"a": "float32", "b": "float32", "c": "int8"}, r"\[\] are missing, \['c'\] unknown"),
        (("float32", "float32", "float32"), "a pair of dtypes is"),
        ({"a": "float33", "b": "float32"}, "unknown dtype 'float33'"),
    ],
)
def test_dtypes_that_do_not_fit_the_plan_are_refused(dtypes, said):
    rows = sa.layout((4,), sa.Split(0), ranks=2)
    with pytest.raises(sa.InvalidMapError, match=said):
        sa.schedule(sa.plan_tree({"a": rows, "b": rows}, {"a": rows, "b": rows}), dtypes=dtypes)
