"""A plan is a function of (alloc, routing, geometry): equal to the slow planner, and to worked examples."""

import random

import pytest
import torch
from groups import errors_on_threads, on_threads
from hypothesis import given
from moe_oracle import INT32_MIN, slow_plans

from shardalg import InvalidMapError, LimitError, SelectionError
from shardalg.moe import Buffer, Policy, geometry, max_copies, plan_dispatch, simulate
from shardalg.moe._plan import LEAVES
from shardalg.testing import comm_plans
from shardalg.testing._moe import ROUTINGS, routing

CASES = 2000


def tensors(*routings):
    return [torch.tensor(r, dtype=torch.int64) for r in routings]


def as_lists(plan):
    return {name: getattr(plan, name).tolist() for name in LEAVES}


def planned(how, ranks, topk, **shape):
    """The plans of all ranks, in one process or over a real gloo group."""
    if how == "simulate":
        return plan_dispatch(simulate(ranks, **shape), topk)
    return on_threads(ranks, lambda group, rank: plan_dispatch(Buffer(group, **shape), topk[rank]))


everywhere = pytest.mark.parametrize("how", ["simulate", "gloo"])


def check_equal(g, topk, plans, policy="exact"):
    slow = slow_plans(g.R, g.E, g.K, g.B, g.pad, g.layout, g.NvS, [t.tolist() for t in topk], policy)
    for plan, expected in zip(plans, slow):
        assert as_lists(plan) == expected


@pytest.mark.parametrize(
    "sizes, slots, compact",
    [((5, 1, 4), 11, 12), ((6, 2, 5), 22, 25), ((2, 2, 2), 6, 6), ((1024, 8, 128), 3056, 3072)],
)
def test_rows_of_a_buffer(sizes, slots, compact):
    """NvS = S*K + (pad-1)*2*epn, rounded up to a multiple of pad in layout "compact"."""
    routes, epn, pad = sizes
    assert geometry(1, E=epn, S=routes, K=1, pad=pad, B=epn).NvS == slots
    assert geometry(1, E=epn, S=routes, K=1, pad=pad).NvS == compact


@everywhere
def test_example_a(how):
    r = tensors([[3], [3]], [[3], [0]])
    a, b = planned(how, 2, r, E=4, B=1, S=2, K=1, pad=2, H=1)
    assert a.alloc.tolist() == [[1, 0], [0, 0], [0, 0], [1, 2]]
    assert (a.dst.tolist(), b.dst.tolist()) == ([2, 6], [7, 0])
    assert a.experts_to_copy.tolist() == b.experts_to_copy.tolist() == [[3], [-1]]
    assert (a.cu_seqlens.tolist(), b.cu_seqlens.tolist()) == ([2, 2, 2, 2, 4], [0, 0, 0, 2, 2])
    assert (a.remote_stats.tolist(), b.remote_stats.tolist()) == ([1, 0], [0, 1])
    a, b = planned(how, 2, r, E=4, S=2, K=1, pad=2, H=1)
    assert (a.dst.tolist(), b.dst.tolist()) == ([2, 6], [7, 0])
    assert a.experts_to_copy.tolist() == [[3, -1], [-1, -1]]
    assert (a.cu_seqlens.tolist(), b.cu_seqlens.tolist()) == ([2, 2, 4, 4], [0, 2, 2, 2])
    assert a.zero_fill_ranges.tolist() == [[1, 1], [0, 0], [3, 1], [0, 0]]


W = ([[0, 1], [0, 0], [2, 0]], [[0, 1], [1, 3], [0, 2]])


@everywhere
def test_example_w(how):
    a, b = planned(how, 2, tensors(*W), E=4, S=3, K=2, pad=2, H=1)
    assert a.NvS == 10
    assert a.alloc.tolist() == [[3, 3], [3, 0], [0, 2], [0, 1]]
    assert a.dst.tolist() == [0, -5, 1, -3, 10, -15]
    assert b.dst.tolist() == [15, 5, 6, 12, 16, -12]
    assert (a.cu_seqlens.tolist(), b.cu_seqlens.tolist()) == ([4, 8, 8, 8], [2, 4, 8, 8])
    assert a.zero_fill_ranges.tolist() == [[3, 1], [7, 1], [0, 0], [0, 0]]
    assert b.zero_fill_ranges.tolist() == [[0, 0], [3, 1], [7, 1], [0, 0]]
    assert a.experts_to_copy.tolist() == [[-1, -1], [0, -1]]
    assert a.dup_groups[:2].tolist() == [[0, 0, 1], [1, 1, 1]] and a.dup_loffs[:2].tolist() == [4, 2]
    assert b.dup_groups[:2].tolist() == [[0, 0, 1], [6, 1, 1]] and b.dup_loffs[:2].tolist() == [4, 1]
    a, b = planned(how, 2, tensors(*W), E=4, B=2, S=3, K=2, pad=2, H=1)
    assert (a.cu_seqlens.tolist(), b.cu_seqlens.tolist()) == ([4, 8, 8, 8, 8, 8], [0, 0, 2, 4, 8, 8])


@everywhere
def test_example_ties(how):
    topk = tensors([[0], [0]], [[0], [1]], [[1], [1]], [[0], [1]])
    plans = planned(how, 4, topk, E=4, S=2, K=1, H=1)
    assert [p.dst.tolist() for p in plans] == [[0, 1], [4, 2], [3, 6], [5, 7]]


@everywhere
def test_example_all_to_one(how):
    plans = planned(how, 3, tensors(*[[[1, 1], [1, 1]]] * 3), E=3, S=2, K=2, pad=4, H=1)
    assert plans[0].alloc.tolist()[1] == [4, 4, 4]
    assert [p.dst.tolist() for p in plans] == [[0, -2, 2, -4], [12, -14, 14, -16], [24, -26, 26, -28]]
    assert plans[0].experts_to_copy.tolist() == [[1], [-1], [1]]


def test_example_one_rank():
    """R = 1 needs no process group and makes no collective call."""
    buffer = Buffer(None, E=3, S=3, K=2, pad=4, H=1)
    plan = plan_dispatch(buffer, torch.tensor([[2, 0], [2, 2], [0, 2]]))
    assert plan.NvS == 24 and plan.dst.tolist() == [4, -1, 5, -7, 1, -8]
    assert plan.cu_seqlens.tolist() == [4, 4, 8, 8, 8, 8]
    assert buffer.transport.counters.gathers == buffer.transport.counters.exchanges == 0


@everywhere
def test_example_variable_tokens(how):
    plans = planned(how, 2, tensors([[0], [0], [0]], [[0], [1]]), E=4, S=4, K=1, pad=2, H=1)
    assert plans[0].NvS == 8 and plans[0].alloc.tolist()[:2] == [[2, 2], [1, 0]]
    assert [p.dst.tolist() for p in plans] == [[0, 1, 8], [9, 2]]


def test_thousands_of_random_cases_equal_the_slow_planner():
    rng = random.Random(0)
    moved = 0
    for _ in range(CASES):
        R, epn, K, S = rng.randint(1, 4), rng.randint(1, 3), rng.randint(1, 4), rng.randint(1, 5)
        policy, B = rng.choice(["exact", "exact", "home", "max_copies"]), rng.choice([None, epn])
        buffer = simulate(R, E=R * epn, S=S, K=K, B=B, pad=rng.randint(1, 8), policy=policy, H=1)
        tokens = [rng.randint(0, S) if rng.random() < 0.5 else S for _ in range(R)]
        topk = routing(rng.choice(list(ROUTINGS)), rng.randint(0, 10**6), buffer.geometry, tokens)
        plans = plan_dispatch(buffer, topk)
        check_equal(buffer.geometry, topk, plans, policy)
        moved += int((plans[0].experts_to_copy >= 0).sum())
    assert moved > CASES // 2


@given(comm_plans())
def test_every_slot_is_written_once(drawn):
    """Used slots and zero fill together are [0, cu_seqlens[-1]), each once; loads keep the capacities."""
    buffer, topk, plans = drawn
    for p in plans:
        used = [v if v >= 0 else ~v for v in p.recv_slots.tolist()]
        filled = [i for start, n in p.zero_fill_ranges.tolist() for i in range(start, start + n)]
        assert sorted(used + filled) == list(range(p.cu_seqlens[-1]))
    everything = [v if v >= 0 else ~v for p in plans for v in p.dst.tolist() if v != INT32_MIN]
    assert len(set(everything)) == len(everything) == sum(int((t >= 0).sum()) for t in topk)
    if buffer.geometry.policy.name == "exact":
        loads = plans[0].alloc.sum(0)
        assert loads.max() - loads.min() <= 1


@pytest.mark.parametrize("R", [1, 2, 3, 4])
def test_gloo_plans_equal_simulated_ones(R):
    shape = dict(E=2 * R, S=6, K=3, pad=2, H=1)
    g = geometry(R, E=2 * R, S=6, K=3)
    routings = [routing(kind, R, g, [6, 0, 5, 3][:R]) for kind in ROUTINGS]
    simulated = simulate(R, **shape)
    expected = [plan_dispatch(simulated, topk) for topk in routings]

    def work(group, rank):
        buffer = Buffer(group, **shape)
        return [plan_dispatch(buffer, topk[rank]) for topk in routings]

    found = on_threads(R, work)
    assert [list(plans) for plans in zip(*found)] == [list(plans) for plans in expected]


def test_one_gather_and_one_exchange_per_plan():
    buffer = simulate(3, E=3, S=2, K=2, H=1)
    before = buffer.transport.counters.gathers
    plan_dispatch(buffer, tensors(*[[[1, 1], [1, 1]]] * 3))
    assert buffer.transport.counters.gathers == before + 1
    assert buffer.transport.counters.exchanges == 1


def test_planning_is_pure():
    buffer = simulate(2, E=4, S=3, K=2, H=1)
    topk = tensors(*W)
    kept = [t.clone() for t in topk]
    assert plan_dispatch(buffer, topk) == plan_dispatch(buffer, [t.to(torch.int32) for t in topk])
    assert all(torch.equal(a, b) for a, b in zip(topk, kept))


@pytest.mark.parametrize(
    "bad, message",
    [
        (torch.tensor([[0], [4]]), r"rank 1: topk\[1, 0\] is expert 4, there are E=4 experts"),
        (torch.tensor([[0.0]]), r"rank 1: topk must be an integer tensor, got torch.float32"),
        (torch.tensor([[True]]), r"rank 1: topk must be an integer tensor, got torch.bool"),
        (torch.tensor([0, 1]), r"rank 1: topk must be \[S_r, K=1\], got \(2,\)"),
        (torch.tensor([[0, 1]]), r"rank 1: topk must be \[S_r, K=1\], got \(1, 2\)"),
        (torch.zeros(3, 1, dtype=torch.int64), r"rank 1: 3 tokens exceed the capacity S=2"),
        (None, r"rank 1: topk must be an integer tensor, got NoneType"),
    ],
)
def test_bad_routing_is_the_same_error_on_every_rank(bad, message):
    good = torch.tensor([[0], [1]])

    def work(group, rank):
        buffer = Buffer(group, E=4, S=2, K=1, H=1)
        try:
            plan_dispatch(buffer, bad if rank == 1 else good)
        finally:
            assert buffer.transport.counters.exchanges == 0

    errors = errors_on_threads(2, work)
    assert all(isinstance(e, InvalidMapError) for e in errors)
    assert str(errors[0]) == str(errors[1])
    with pytest.raises(InvalidMapError, match=message):
        raise errors[0]


def test_too_few_copy_slots_is_an_error_with_the_ways_out():
    topk = tensors(*[[[0], [0], [1], [1]]] * 2)
    with pytest.raises(LimitError, match=r"rank 1 needs 1 copied experts.*B=0 slots: use B=2.*max_copies"):
        plan_dispatch(simulate(2, E=4, B=0, S=4, K=1, H=1), topk)
    plans = plan_dispatch(simulate(2, E=4, B=0, S=4, K=1, H=1, policy="max_copies"), topk)
    assert plans[0].alloc.sum(0).tolist() == [8, 0]


def test_geometry_that_does_not_fit_int32_prints_the_numbers():
    with pytest.raises(InvalidMapError, match=r"R\*NvS = 2\*1073741824 = 2147483648 slots do not fit int32"):
        simulate(2, E=2, S=2**30, K=1, H=1)
    assert geometry(1, E=1, S=2**31 - 1, K=1).NvS == 2**31 - 1


@pytest.mark.parametrize(
    "shape, message",
    [
        (dict(E=3), r"E=3 experts do not divide over R=2 ranks: 3 = 2\*1 \+ 1"),
        (dict(S=0), "S must be at least 1, got 0"),
        (dict(K=1.5), "K must be an integer, got 1.5"),
        (dict(layout="wide"), "layout must be one of"),
        (dict(layout="compact", B=1), 'layout "compact" has B = E // R = 2 copy slots, got B=1'),
        (dict(policy="best"), "policy must be one of"),
        (dict(H=0), "H must be at least 1, got 0"),
        (dict(dtype=torch.int32), "dtype must be one of"),
    ],
)
def test_bad_geometry(shape, message):
    with pytest.raises(InvalidMapError, match=message):
        simulate(2, **(dict(E=4, S=2, K=1, H=1) | shape))


def test_ranks_that_disagree_all_say_so():
    errors = errors_on_threads(2, lambda group, rank: Buffer(group, E=4, S=2 + rank, K=1, H=1))
    assert [str(e) for e in errors] == ["ranks make different Buffers: S is 2 on rank 0 and 3 on rank 1"] * 2
    errors = errors_on_threads(2, lambda group, rank: Buffer(group, E=4 + rank, S=2, K=1, H=1))
    assert "rank 1 could not make its Buffer" in str(errors[0]) and "do not divide" in str(errors[1])


def spread_evenly(counts, capacity):
    alloc = [[int(c) // len(capacity)] * len(capacity) for c in counts]
    for e, c in enumerate(counts):
        alloc[e][0] += int(c) % len(capacity)
    return alloc


def test_a_policy_is_any_function_that_keeps_the_contract():
    buffer = simulate(2, E=2, B=1, S=4, K=1, H=1, policy=spread_evenly)
    plans = plan_dispatch(buffer, tensors([[0], [0], [1], [1]], [[0], [0], [0], [1]]))
    assert plans[0].alloc.tolist() == [[3, 2], [2, 1]]
    assert plans[0].experts_to_copy.tolist() == [[1], [0]]


@pytest.mark.parametrize(
    "policy, message",
    [
        (Policy("short", lambda c, k: [[0]]), r"must return integers of shape \(2, 2\)"),
        (Policy("float", lambda c, k: [[1.0, 0], [0, 0]]), "must return integers"),
        (Policy("negative", lambda c, k: [[3, -1], [0, 2]]), "expert 0 on rank 1 the negative count -1"),
        (Policy("loses", lambda c, k: [[1, 0], [0, 2]]), "places 1 tokens of expert 0, which has 2"),
        (Policy("heavy", lambda c, k: [[2, 0], [2, 0]], L=3), "gives rank 0 4 tokens, it declares L=3"),
        (
            Policy("wide", lambda c, k: [[1, 1], [0, 2]], M=0),
            "gives rank 1 1 remote experts, it declares M=0",
        ),
    ],
)
def test_a_policy_that_breaks_the_contract(policy, message):
    buffer = simulate(2, E=2, S=4, K=1, H=1, policy=policy)
    with pytest.raises(SelectionError, match=message):
        plan_dispatch(buffer, tensors([[0], [0]], [[1], [1]]))


def test_policies_size_the_buffer():
    shape = dict(E=8, S=10, K=2, pad=4)
    assert geometry(4, **shape).L == 20 and geometry(4, **shape, policy="home").L == 80
    assert geometry(4, **shape, policy="home").M == 0
    assert geometry(4, **shape, B=3, policy=max_copies(1)).M == 1
