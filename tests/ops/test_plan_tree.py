"""One plan for a tree of layouts: views, ties, names, equal pairs."""

from __future__ import annotations

import optree
import pytest

import shardalg as sa
from shardalg import InvalidMapError, Replicate, Split, layout


def test_q_k_v_become_one_tensor_in_six_copies():
    """Case 44."""
    whole = {n: layout(s, Replicate(), ranks=1) for n, s in (("q", (8, 4)), ("k", (2, 4)), ("v", (2, 4)))}
    fused = layout((12, 4), sa.Segments(0, ((8, Split(0)), (2, Split(0)), (2, Split(0)))), ranks=2)
    p = sa.plan_tree(whole, {"qkv": fused}, views={"qkv": sa.join(["q", "k", "v"], axis=0)})
    assert len(p) == 6


def test_experts_become_one_tensor_in_four_copies():
    """Case 45."""
    names = [f"e{i}" for i in range(4)]
    whole = {n: layout((6, 4), Replicate(), ranks=1) for n in names}
    w13 = layout((4, 6, 4), Split(0), ranks=2)
    assert len(sa.plan_tree(whole, {"w": w13}, views={"w": sa.join(names, stack=True)})) == 4


def test_names_on_one_side_only_list_both_sets():
    one = layout((4,), Split(0), ranks=2)
    with pytest.raises(
        InvalidMapError, match=r"wanted but not among the sources \['b'\].*not wanted \['a'\]"
    ):
        sa.plan_tree({"a": one}, {"b": one})
    with pytest.raises(InvalidMapError, match="views= and tied= name targets"):
        sa.plan_tree({"a": one}, {"a": one}, views={"c": sa.join(["a"])})


def test_equal_layout_pairs_are_planned_once():
    rows, columns = (layout((8, 8), Split(a), ranks=2) for a in (0, 1))
    names = [f"layer{i}" for i in range(5)]
    p = sa.plan_tree(dict.fromkeys(names, rows), dict.fromkeys(names, columns))
    assert len({id(e.plan) for e in p.entries}) == 1


def test_tied_targets_are_written_once():
    """Case 46."""
    rows, columns = (layout((8, 8), Split(a), ranks=2) for a in (0, 1))
    p = sa.plan_tree({"embed": rows}, {"embed": columns, "head": columns}, tied={"head": "embed"})
    assert [e.target for e in p.entries] == ["embed"]
    with pytest.raises(InvalidMapError, match="different layouts"):
        sa.plan_tree({"embed": rows}, {"embed": columns, "head": rows}, tied={"head": "embed"})


def test_the_plans_by_name_are_a_dict_of_the_callers_own():
    rows = layout((4, 2), Split(0), ranks=2)
    tree = sa.plan_tree({"w": rows}, {"w": rows})
    tree.plans.clear()
    assert tree.plans == {"w": tree.entries[0].plan}


@pytest.mark.parametrize("tree", [{1: 0, "1": 0}, {"a": {"b": 0}, "a.b": 0}])
def test_two_tensors_of_one_name_are_refused(tree):
    """Neither is dropped silently."""
    rows = layout((4, 2), Split(0), ranks=2)
    layouts = optree.tree_map(lambda _: rows, tree)
    with pytest.raises(InvalidMapError, match="several tensors are called"):
        sa.plan_tree(layouts, layouts)
