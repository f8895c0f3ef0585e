"""verify proves plans and finds every kind of lie; report counts; experts' copies are the same algebra."""

import dataclasses
import math

import pytest
import torch
from groups import on_threads
from hypothesis import given

import shardalg as sa
from shardalg.moe import Buffer, placements, plan_dispatch, prefetch, reduce_grad, report, simulate, verify
from shardalg.moe._plan import LEAVES
from shardalg.testing import comm_plans
from shardalg.testing._moe import ROUTINGS, routing

W = [torch.tensor([[0, 1], [0, 0], [2, 0]]), torch.tensor([[0, 1], [1, 3], [0, 2]])]


def w_plans(**shape):
    return plan_dispatch(simulate(2, **(dict(E=4, S=3, K=2, pad=2, H=2) | shape)), W)


@given(comm_plans())
def test_every_plan_is_proved(drawn):
    _, topk, plans = drawn
    assert verify(plans, topk)
    for p, t in zip(plans, topk):
        assert verify(p, t)


def test_one_rank_of_a_group_proves_its_own():
    def work(group, rank):
        plan = plan_dispatch(Buffer(group, E=4, S=3, K=2, pad=2, H=2), W[rank])
        return verify(plan, W[rank])

    assert all(on_threads(2, work))


@pytest.mark.parametrize("name", LEAVES)
def test_verify_finds_a_lie_in_any_table(name):
    """The twin: one changed entry in any tensor of the plan is found, by this rank alone."""
    plan = w_plans()[0]
    value = getattr(plan, name).clone()
    value.view(-1)[0] += 1
    answer = verify(dataclasses.replace(plan, **{name: value}), W[0])
    assert not answer and answer.reason


def test_verify_names_the_first_difference():
    plans = w_plans()
    assert not verify(plans[0], W[1])
    answer = verify(plans, [W[1], W[0]])
    assert not answer and answer.reason.startswith("rank 0: counts of this rank")
    swapped = dataclasses.replace(plans[0], dst=plans[0].dst[[1, 0, 2, 3, 4, 5]])
    assert verify(swapped, W[0]).reason == "dst[0] is -5, should be 0"
    assert "is for (3, 2)" in verify(plans[0], W[0][:2]).reason
    assert "int32" in verify(dataclasses.replace(plans[0], dst=plans[0].dst.long()), W[0]).reason
    assert "ranks 0..R-1" in verify(plans[::-1], W[::-1]).reason
    regrouped = torch.tensor([[0, 0], [1, 1], [3, 2]])  # the same counts, other repeats
    other = plan_dispatch(simulate(2, E=4, S=3, K=2, pad=2, H=2), [W[0], regrouped])
    assert verify(other[1], regrouped)
    assert "slots received by rank 0" in verify([plans[0], other[1]], [W[0], regrouped]).reason


def test_report_of_the_worked_example():
    r = report(w_plans(), expert_bytes=100, break_even=3)
    assert (r.loads_before, r.loads_after) == ((9, 3), (6, 6))
    assert (r.moved, r.moved_at_least, r.copies, r.copied_bytes) == (3, 3, 1, 100)
    assert r.routes == ((4, 2), (2, 4)) and r.rows == ((2, 1), (2, 3))
    assert r.lower_bound == 3 and r.padding == (2, 2)
    assert r.bytes_before[0][1] == 2 * 8 and r.bytes_after[0][1] == 1 * 8
    assert r.rows_saved == 3 and r.pays and not report(w_plans(), break_even=4).pays
    assert (r.imbalance_before, r.imbalance_after) == (1.5, 1.0)


def test_one_rank_knows_its_own_pairs():
    r = report(plan_dispatch(simulate(3, E=3, S=2, K=2, H=2), [torch.ones(2, 2, dtype=torch.int64)] * 3)[0])
    assert [n >= 0 for n in r.rows[0]] == [True] * 3 and r.rows[1][2] == -1 and r.bytes_after[1][2] == -1


@given(comm_plans())
def test_reported_traffic_is_what_the_plans_send(drawn):
    buffer, _, plans = drawn
    r = report(plans)
    assert r.routes == tuple(tuple(p.send_routes.tolist()) for p in plans)
    assert r.rows == tuple(tuple(p.send_rows.tolist()) for p in plans)
    assert r.lower_bound == sum(n for s, row in enumerate(r.rows) for d, n in enumerate(row) if s != d)
    assert r.moved >= r.moved_at_least or buffer.geometry.policy.name != "exact"
    assert str(r)


SHAPES = {"w": (8, 3, 2), "bias": (8,)}


def numbers(shape, start):
    """Small integers, exact in every sum."""
    return torch.arange(start, start + math.prod(shape), dtype=torch.float64).reshape(shape)


def by_algebra(ctx, plan, shards):
    return sa.run(ctx, sa.bind(ctx, plan), shards)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_prefetch_and_reduce_grad_are_the_transfer_of_experts_and_its_adjoint(kind):
    """prefetch = plan_experts(home, home + slots) on every tensor, the same elements on the wire; the
    adjoint of that transfer, run on local and slot gradients, is reduce_grad."""
    R = 4
    buffer = simulate(R, E=8, S=6, K=2, H=1)
    plans = plan_dispatch(buffer, routing(kind, 1, buffer.geometry, [6] * R))
    home, held = placements(plans[0])
    moves = sa.plan_experts(home, held, SHAPES, source_ranks=range(R), target_ranks=range(R))
    ctx = sa.backends.simulate(R)
    own = {
        name: sa.extract(sa.expert_layouts(home, SHAPES)[name], numbers(shape, 1))
        for name, shape in SHAPES.items()
    }
    before = buffer.transport.counters.bytes_sent
    slots = prefetch(buffer, plans, [{name: own[name][r] for name in SHAPES} for r in range(R)])
    crossing = sum(move.stats.elements_crossing for move in moves.values())
    assert buffer.transport.counters.bytes_sent - before == 8 * crossing
    used = [int((row >= 0).sum()) for row in plans[0].experts_to_copy]
    grads = [{n: numbers((2, *s[1:]), 10 + r) for n, s in SHAPES.items()} for r in range(R)]
    slot_grads = [{n: numbers((2, *s[1:]), 50 + r) for n, s in SHAPES.items()} for r in range(R)]
    total = reduce_grad(buffer, plans, slot_grads, grads)
    for name, move in moves.items():
        wanted = by_algebra(ctx, move, own[name])
        packed = {r: torch.cat([grads[r][name], slot_grads[r][name][: used[r]]]) for r in range(R)}
        summed = by_algebra(ctx, sa.adjoint(move), packed)
        for r in range(R):
            assert torch.equal(torch.cat([own[name][r], slots[r][name][: used[r]]]), wanted[r])
            assert not slots[r][name][used[r] :].any()
            assert torch.equal(total[r][name], summed[r])
