"""Plans between expert placements."""

from __future__ import annotations

import pytest

import shardalg as sa
from shardalg import Experts, InvalidMapError, UnsupportedError

UNIFORM, TANGLED = Experts.uniform(4, 2), Experts([[3, 0], [], [1, 2, 0]])
SHAPES = {"w1": (4, 2, 3), "w2": (4, 3, 2)}


def test_five_copies_of_one_expert_each():
    """Case 41."""
    p = sa.plan_experts(UNIFORM, TANGLED, SHAPES)["w1"]
    ends = [(c.source.rank, c.source.offset, c.target.rank, c.target.offset, c.shape) for c in p.copies]
    assert ends == [
        (1, 6, 0, 0, (6,)), (0, 0, 0, 6, (6,)), (0, 6, 2, 0, (6,)), (1, 0, 2, 6, (6,)), (0, 0, 2, 12, (6,)),
    ]  # fmt: skip
    assert p.target.shard_shape(1) == (0, 2, 3)
    assert p.stats.elements_crossing is None and p.stats.lower_bound is None


def test_expert_plans_know_the_processes_when_told():
    p = sa.plan_experts(UNIFORM, TANGLED, SHAPES, source_ranks=[0, 1], target_ranks=[2, 3, 4])["w2"]
    assert p.stats.elements_crossing == p.stats.lower_bound == 30
    with pytest.raises(InvalidMapError, match="source_ranks= and target_ranks="):
        sa.plan_experts(UNIFORM, TANGLED, SHAPES, select="stay")


def test_expert_refusals():
    with pytest.raises(UnsupportedError, match=r"rank 1, position 0: .* expert 2, .* expert 3"):
        sa.plan_experts(UNIFORM, TANGLED, SHAPES, packed=Experts([[0, 1], [3, 2]]))
    live = sa.expert_layouts(UNIFORM, SHAPES)["w1"]
    other = sa.expert_layouts(Experts([[1, 0], [2, 3]]), SHAPES)["w1"]
    assert sa.plan_experts(UNIFORM, TANGLED, SHAPES, published={"w1": (UNIFORM, live)})
    with pytest.raises(InvalidMapError, match="published map is not the live one"):
        sa.plan_experts(UNIFORM, TANGLED, SHAPES, published={"w1": (UNIFORM, other)})
    with pytest.raises(InvalidMapError, match="published placement"):
        sa.plan_experts(UNIFORM, TANGLED, SHAPES, published={"w1": (TANGLED, live)})
    with pytest.raises(InvalidMapError, match="one number of experts"):
        sa.plan_experts(UNIFORM, TANGLED, {"a": (4, 2), "b": (5, 2)})
    with pytest.raises(InvalidMapError, match=r"rank 1 lists expert 3, but .* 3 experts"):
        sa.plan_experts(UNIFORM, TANGLED, {"a": (3, 2)})


def test_a_doubled_expert_crosses_once():
    """Case 31, small: an expert twice on a rank that held none of it."""
    source, target = Experts([[0, 1], [2, 3]]), Experts([[0], [2, 0, 0]])
    p = sa.plan_experts(source, target, {"w": (4, 5)}, source_ranks=[0, 1], target_ranks=[0, 1])["w"]
    assert p.stats.elements == 20 and p.stats.elements_crossing == 5
