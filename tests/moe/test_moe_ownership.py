"""A plan runs on the buffer that made it and nowhere else; refusals are local and send nothing."""

import copy
import dataclasses
import gc
import pickle

import optree
import pytest
import torch
import torch.utils._pytree as torch_pytree
from groups import on_threads

import shardalg as sa
from shardalg import ProvenanceError, UnsupportedError
from shardalg.moe import Buffer, CommPlan, combine, dispatch, plan_dispatch, prefetch, reduce_grad, simulate
from shardalg.moe._plan import LEAVES

SHAPE = dict(E=4, S=2, K=1, pad=2, B=1, H=2)
TOPK = torch.tensor([[3], [0]])


def solo(**changes):
    return Buffer(None, **(SHAPE | changes))


def calls(buffer, plan):
    """The four functions that take a plan, on tensors that fit ``buffer``."""
    g = buffer.geometry
    tokens = (
        len(plan.dst) // g.K if isinstance(plan, CommPlan) and isinstance(plan.dst, torch.Tensor) else g.S
    )
    return {
        "dispatch": lambda: dispatch(buffer, plan, torch.zeros(tokens, buffer.H)),
        "combine": lambda: combine(buffer, plan, torch.zeros(g.NvS, buffer.H)),
        "prefetch": lambda: prefetch(buffer, plan, [torch.zeros(g.epn, 3)]),
        "reduce_grad": lambda: reduce_grad(buffer, plan, [torch.zeros(g.B, 3)], [torch.zeros(g.epn, 3)]),
    }


def check_refused(buffer, plan, message):
    """Every function refuses, and nothing was sent meanwhile."""
    counters = buffer.transport.counters
    before = dataclasses.replace(counters)
    for call in calls(buffer, plan).values():
        with pytest.raises(ProvenanceError, match=message):
            call()
    assert counters == before


def check_accepted(buffer, plan):
    for call in calls(buffer, plan).values():
        call()


def in_groups(check):
    """Runs ``check(buffer, plan)`` on one rank alone and on each of two gloo ranks."""
    buffer = solo()
    check(buffer, plan_dispatch(buffer, TOPK))

    def work(group, rank):
        buffer = Buffer(group, **SHAPE)
        check(buffer, plan_dispatch(buffer, TOPK))

    on_threads(2, work)


def by_hand(plan):
    return CommPlan(**{f.name: getattr(plan, f.name) for f in dataclasses.fields(plan) if f.init})


def file_round_trip(plan):
    with_pickle = pickle.dumps({"plan": plan})
    return pickle.loads(with_pickle)["plan"]


def saved_by_torch(plan, path="plan.pt"):
    import io

    held = io.BytesIO()
    torch.save(plan, held)
    held.seek(0)
    return torch.load(held, weights_only=False)


def mapped_over_two(plan):
    return sa.tree_map(lambda a, b: b, plan, plan.clone())


def mapped_by_torch(plan):
    return torch_pytree.tree_map(lambda a: a.clone(), plan)


def from_cached_structure(plan):
    """A cache keyed by tree structure hands out the structure of an equal plan."""
    other = plan.clone()
    cache = {
        optree.tree_structure(plan, namespace="shardalg"): optree.tree_structure(plan, namespace="shardalg")
    }
    structure = cache[optree.tree_structure(other, namespace="shardalg")]
    return optree.tree_unflatten(structure, optree.tree_leaves(other, namespace="shardalg"))


def pickled_structure(plan):
    leaves, structure = optree.tree_flatten(plan, namespace="shardalg")
    return optree.tree_unflatten(pickle.loads(pickle.dumps(structure)), leaves)


def with_stolen_field(plan):
    forged = by_hand(plan)
    object.__setattr__(forged, "_seal", plan._seal)
    object.__setattr__(forged, "dst", plan.dst.clone())
    return forged


LOST = {
    "constructed": by_hand,
    "replace": dataclasses.replace,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": file_round_trip,
    "file": saved_by_torch,
    "tree_map over two plans": mapped_over_two,
    "torch tree_map": mapped_by_torch,
    "treedef cache": from_cached_structure,
    "pickled treedef": pickled_structure,
}


@pytest.mark.parametrize("way", LOST)
def test_the_owner_is_lost(way):
    def check(buffer, plan):
        other = LOST[way](plan)
        assert other == plan and repr(other) == repr(plan)
        check_refused(buffer, other, "no owner.*plan_dispatch.*clone")
        check_accepted(buffer, plan)

    in_groups(check)


KEPT = {
    "clone": CommPlan.clone,
    "clone of a clone": lambda p: p.clone().clone(),
    "to": lambda p: p.to("cpu"),
    "tree_map that changes nothing": lambda p: sa.tree_map(lambda x: x, p),
    "torch tree_map that changes nothing": lambda p: torch_pytree.tree_map(lambda x: x, p),
}


@pytest.mark.parametrize("way", KEPT)
def test_the_owner_is_kept(way):
    def check(buffer, plan):
        kept = KEPT[way](plan)
        assert kept == plan
        check_accepted(buffer, kept)

    in_groups(check)


def test_clone_has_tensors_of_its_own_and_launders_nothing():
    buffer = solo()
    plan = plan_dispatch(buffer, TOPK)
    assert all(getattr(plan, n).data_ptr() != getattr(plan.clone(), n).data_ptr() for n in LEAVES)
    check_refused(buffer, copy.copy(plan).clone(), "no owner")
    plan.dst.add_(1)
    check_refused(buffer, plan.clone(), "no owner")
    with pytest.raises(UnsupportedError, match="plan with a buffer on meta"):
        plan.to("meta")


def written(plan):
    plan.dst[0] = 1


def written_through_numpy(plan):
    plan.dst.numpy()[0] += 1


def written_through_data(plan):
    plan.dup_counts.data.fill_(7)


def written_with_equal_bits(plan):
    """No sum over the values can see this, only the tensor's version."""
    plan.alloc[:] = plan.alloc.clone()


def cut_through_data(plan):
    plan.dst.data = plan.dst.data[:1]


def given_other_memory(plan):
    plan.dst.data = plan.dst + 1


def resized(plan):
    plan.dst.resize_(1)


def other_leaf(plan):
    object.__setattr__(plan, "dst", plan.dst.clone())


def longer_leaf(plan):
    object.__setattr__(plan, "dst", torch.zeros(9, dtype=torch.int32))


def other_dtype(plan):
    object.__setattr__(plan, "cu_seqlens", plan.cu_seqlens.to(torch.int64))


def no_tensor(plan):
    object.__setattr__(plan, "dst", None)


def other_scalar(plan):
    object.__setattr__(plan, "K", 2)


def other_rank(plan):
    object.__setattr__(plan, "rank", 1 - plan.rank)


CHANGES = [
    written_with_equal_bits,
    cut_through_data,
    written, written_through_numpy, written_through_data, given_other_memory, resized, other_leaf,
    longer_leaf, other_dtype, no_tensor, other_scalar, other_rank,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_a_changed_plan_is_refused(change):
    def check(buffer, plan):
        check_accepted(buffer, plan)
        change(plan)
        check_refused(buffer, plan, "no longer what its buffer planned.*plan again")

    in_groups(check)


@pytest.mark.parametrize("forge", [with_stolen_field], ids=lambda f: f.__name__)
def test_a_forged_owner_does_not_fit_the_tensors(forge):
    in_groups(lambda buffer, plan: check_refused(buffer, forge(plan), "dst is not the tensor"))


@pytest.mark.parametrize("value", [None, 3, "plan", [1], {"dst": 0}])
def test_what_is_no_plan(value):
    buffer = solo()
    check_refused(buffer, value, "expected a CommPlan")


def test_what_is_no_buffer():
    plan = plan_dispatch(solo(), TOPK)
    with pytest.raises(ProvenanceError, match="expected a Buffer, got NoneType"):
        dispatch(None, plan, torch.zeros(2, 2))


def test_another_buffer_of_equal_geometry():
    """Same geometry: a second buffer, one on the same group, another group, another order of ranks."""
    one, two = solo(), solo()
    check_refused(two, plan_dispatch(one, TOPK), "another Buffer")

    def second_on_the_group(group, rank):
        a, b = Buffer(group, **SHAPE), Buffer(group, **SHAPE)
        check_refused(b, plan_dispatch(a, TOPK), "another Buffer")

    on_threads(2, second_on_the_group)
    foreign = on_threads(2, lambda group, rank: plan_dispatch(Buffer(group, **SHAPE), TOPK))
    on_threads(2, lambda group, rank: check_refused(Buffer(group, **SHAPE), foreign[rank], "another Buffer"))
    on_threads(
        2, lambda group, rank: check_refused(Buffer(group, **SHAPE), foreign[1 - rank], "another Buffer")
    )


def test_a_longer_plan_that_shape_checks_miss():
    """A: N=2 entries, NvS=6; B: N=6, NvS=6. On A's plan B would read 6 entries of 2."""
    a = dict(E=4, B=1, S=2, K=1, pad=2, H=2)
    b = dict(E=4, B=1, S=6, K=1, pad=1, H=2)

    def work(group, rank):
        first, second = Buffer(group, **a), Buffer(group, **b)
        assert first.geometry.NvS == second.geometry.NvS == 6
        plan = plan_dispatch(first, torch.tensor([[3], [0]]))
        assert len(plan.dst) == 2
        check_refused(second, plan, "another Buffer")

    on_threads(2, work)


def test_a_plan_that_copies_an_expert_which_is_not_there():
    """E=8 against E=4: shapes without a groups or experts axis agree, and the plan copies expert 7 of 4."""
    eight, four = (dict(E=E, B=1, S=2, K=1, pad=1, H=2, layout="slots") for E in (8, 4))

    def work(group, rank):
        plans = [plan_dispatch(Buffer(group, **s), torch.full((2, 1), s["E"] - 1)) for s in (eight, four)]
        assert plans[0].dst.tolist() == plans[1].dst.tolist()
        assert plans[0].experts_to_copy.tolist() == [[7], [-1]]
        assert [getattr(plans[0], n) == getattr(plans[1], n) for n in ("N", "R", "NvS", "B", "K")] == [
            True
        ] * 5
        check_refused(Buffer(group, **four), plans[0], "another Buffer")

    on_threads(2, work)


def test_a_same_owner_plan_of_another_geometry_is_refused_by_its_signature():
    """Were the token shared by force, the signature would still tell the two buffers apart."""
    a, b = solo(), solo(S=6, pad=1)
    plan = plan_dispatch(a, TOPK)
    b._owner = a._owner
    check_refused(b, plan, "this plan has N=2, the buffer has N=6")


def test_a_buffer_born_at_the_address_of_a_dead_one():
    """The token is an object that its plans keep alive, so no later buffer can have it."""
    plans = []
    for _ in range(8):
        buffer = solo()
        for plan in plans:
            with pytest.raises(ProvenanceError, match="another Buffer"):
                prefetch(buffer, plan, [torch.zeros(4, 1)])
        plans = [plan_dispatch(buffer, TOPK)]
        del buffer
        gc.collect()


def test_a_closed_buffer():
    def check(buffer, plan):
        buffer.close()
        check_refused(buffer, plan, "the buffer is closed")
        with pytest.raises(ProvenanceError, match="closed"):
            plan_dispatch(buffer, TOPK)

    in_groups(check)


def test_the_owner_is_checked_before_the_buffer_is_open():
    one, two = solo(), solo()
    two.close()
    check_refused(two, plan_dispatch(one, TOPK), "another Buffer")


def test_closing_the_context_closes_the_buffer():
    ctx = sa.backends.simulate(2)
    buffer = Buffer(ctx, **SHAPE)
    plans = plan_dispatch(buffer, [TOPK, TOPK])
    rows, _ = dispatch(buffer, plans, [torch.zeros(2, 2)] * 2)
    ctx.close()
    with pytest.raises(ProvenanceError, match="closed"):
        combine(buffer, plans, rows)


def test_plans_of_a_simulated_buffer_are_refused_in_another_order():
    buffer = simulate(2, **SHAPE)
    a, b = plan_dispatch(buffer, [TOPK, TOPK])
    for plans, message in (
        ((b, a), "rank=1, the buffer has rank=0"),
        ((a,), "one plan per rank"),
        (a, "one plan per rank"),
    ):
        with pytest.raises(ProvenanceError, match=message):
            dispatch(buffer, plans, [torch.zeros(2, 2)] * 2)
    assert buffer.transport.counters.exchanges == 1


def test_owner_is_neutral_in_tree_structure():
    """Equal plans of two buffers have equal trees, equal hashes of them, and no leaf more."""
    one, two = (plan_dispatch(solo(), TOPK) for _ in range(2))
    trees = [optree.tree_structure(p, namespace="shardalg") for p in (one, two, by_hand(one))]
    assert trees[0] == trees[1] == trees[2] and len({hash(t) for t in trees}) == 1
    specs = [torch_pytree.tree_structure(p) for p in (one, two, by_hand(one))]
    assert specs[0] == specs[1] == specs[2]
    assert len(sa.tree_leaves(one)) == len(LEAVES) == len(torch_pytree.tree_leaves(one))
    assert optree.tree_leaves(one) == [one]


def test_pickles_carry_no_owner():
    """Not even a hidden one: what is written for an owned plan is what is written for any."""
    plan = plan_dispatch(solo(), TOPK)
    structures = [optree.tree_structure(p, namespace="shardalg") for p in (plan, by_hand(plan))]
    assert pickle.dumps(structures[0]) == pickle.dumps(structures[1])
    assert plan._seal is not None and "_seal" not in plan.__getstate__()


def test_equality_ignores_the_owner_and_plans_are_unhashable():
    one, two = (plan_dispatch(solo(), TOPK) for _ in range(2))
    assert one == two == by_hand(one)
    assert one != plan_dispatch(solo(), torch.tensor([[3], [3]]))
    assert one != plan_dispatch(solo(S=3), TOPK)
    assert one != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(one)
    assert "seal" not in repr(one).lower()


def test_under_compile_the_gate_still_looks():
    """Compiled callers run the gate eagerly, on every call, whatever was compiled before."""
    one, two = solo(), solo()
    plan = plan_dispatch(one, TOPK)

    def step(buffer, plan, x):
        return dispatch(buffer, plan, x * 2)[0] + 1

    compiled = torch.compile(step, backend="eager")
    x = torch.ones(2, 2)
    assert torch.equal(compiled(one, plan, x), step(one, plan, x))
    with pytest.raises(ProvenanceError, match="another Buffer"):
        compiled(two, plan, x)
    with pytest.raises(ProvenanceError, match="no owner"):
        compiled(one, copy.copy(plan), x)
    assert torch.equal(compiled(one, plan.clone(), x), step(one, plan, x))


def test_plans_made_under_inference_mode_are_ordinary():
    with torch.inference_mode():
        buffer = solo()
        plan = plan_dispatch(buffer, TOPK)
        check_accepted(buffer, plan)
    check_accepted(buffer, plan)
