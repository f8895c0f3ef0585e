"""Drawn plans, programs, expert placements and shards: what they promise, and where they shrink to."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from laws import sound

from shardalg import (
    Attention,
    Experts,
    Piece,
    Replicate,
    Side,
    Split,
    context_parallel,
    extract,
    gate_up,
    is_surjective,
    layout,
    padded_vocabulary,
    predivided_bias,
    qkv_codegen,
)
from shardalg.plans._plan import verify_plan
from shardalg.testing import (
    expert_placements,
    layout_pairs,
    layouts,
    plans,
    programs,
    sharded,
    tree_plans,
)

HELD = (Piece((), Side(0, (), rank=0), Side(0, ())),)  # one element on rank 0


def sample(strategy, count):
    """Values that a strategy generates, the simplest one first."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], derandomize=True, database=None, deadline=None)
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


def smallest(strategy):
    """What a strategy shrinks towards: all its choices the simplest ones."""
    return sample(strategy, 1)[0]


# --- what they promise ----------------------------------------------------------------------


@given(plans())
def test_plans_do_their_job(p):
    verify_plan(p)
    sound(p.map)


@given(plans(complete=True))
def test_plans_of_complete_sources_fill_their_targets(p):
    assert p.map.size == p.target.size


@given(tree_plans(max_tensors=2))
def test_trees_stay_in_bounds(tree):
    assert 1 <= len(tree.entries) <= 2
    for e in tree.entries:
        verify_plan(e.plan)


@given(programs())
def test_programs_keep_their_bound_and_the_least_traffic(program):
    assert program.max_bytes is None or program.peak_staging <= program.max_bytes
    assert program.wire_bytes == program.lower_bound


@given(expert_placements(5, max_ranks=3, complete=True))
def test_complete_placements_hold_every_expert(placement):
    assert {e for _, its in placement.by_rank for e in its} == set(range(5))
    assert len(placement.by_rank) <= 3


@given(layouts((3, 2), complete=True), layout_pairs((3, 2), complete=True))
def test_complete_layouts_hold_every_element(m, pair):
    assert is_surjective(m) and is_surjective(pair[0])


@given(sharded(max_size=4))
def test_shards_are_those_of_their_layout(s):
    full = np.arange(1, s.layout.codomain.size + 1).reshape(s.layout.logical_shape)
    want = extract(s.layout, full)
    assert {r: x.tolist() for r, x in s.shards.items()} == {r: x.tolist() for r, x in want.items()}


def test_shards_of_a_given_layout_as_torch_tensors():
    halves = layout((4,), Split(0), ranks=2)
    assert smallest(sharded(halves, like="torch")).shards[1].tolist() == [3, 4]


# --- what they reach ------------------------------------------------------------------------

NAMED = {
    "gate_up": [gate_up((12, 2), n) for n in (2, 3)],
    "padded_vocabulary": [padded_vocabulary((12, 2), n, height=12 + n) for n in (2, 3)],
    "context_parallel": [context_parallel((12, 2), n) for n in (2, 3)],
    "predivided_bias": [predivided_bias((12, 2), n) for n in (2, 3)],
    "codegen": [qkv_codegen((12, 2), Attention(kv_heads=2), 2, mp_blocks=1)],
}


def test_named_layouts_are_drawn():
    found = set(sample(layouts((12, 2)), 150))
    assert [name for name, some in NAMED.items() if not found.intersection(some)] == []


# --- where they shrink to -------------------------------------------------------------------


@pytest.mark.parametrize("strategy", [layouts(), layouts(complete=True)])
def test_layouts_shrink_to_one_element(strategy):
    assert smallest(strategy).pieces == HELD


def test_plans_shrink_to_one_element_that_stays():
    p = smallest(plans())
    assert p.source.pieces == p.target.pieces == HELD and p.select == "stay"


def test_trees_and_programs_shrink_to_one_tensor():
    assert len(smallest(tree_plans()).entries) == 1
    program = smallest(programs())
    assert (program.rounds, program.dtypes, program.max_bytes) == ((), (("uint8", "uint8"),), None)


def test_placements_shrink_to_one_rank():
    assert smallest(expert_placements(2)) == Experts([[]])
    assert smallest(expert_placements(2, complete=True)) == Experts([[0, 1]])
    assert smallest(sharded()).layout == layout((), Replicate(), ranks=1)
