"""Buffers over backend contexts, process groups, and groups that fail."""

import copy
import pickle
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from groups import on_threads

import shardalg as sa
from shardalg import InvalidMapError, ProvenanceError, TransferError, UnsupportedError
from shardalg.moe import Buffer, combine, dispatch, plan_dispatch, prefetch, reduce_grad, simulate
from shardalg.moe._transport import Grouped, transport_of

SHAPE = dict(E=4, S=3, K=2, pad=2, H=2)
W = [torch.tensor([[0, 1], [0, 0], [2, 0]]), torch.tensor([[0, 1], [1, 3], [0, 2]])]


def there_and_back(buffer, plan, hidden):
    rows, _ = dispatch(buffer, plan, hidden)
    return rows, combine(buffer, plan, rows)[0]


def test_contexts_of_backends_carry_the_same_messages():
    """simulate(2) and cpu(store=...) give what the buffer's own reference gives."""
    hidden = [torch.randn(3, 2) for _ in W]
    reference = simulate(2, **SHAPE)
    expected = there_and_back(reference, plan_dispatch(reference, W), hidden)
    with sa.backends.simulate(2) as ctx, Buffer(ctx, **SHAPE) as buffer:
        found = there_and_back(buffer, plan_dispatch(buffer, W), hidden)
        assert all(torch.equal(a, b) for x, y in zip(found, expected) for a, b in zip(x, y))
        assert buffer.transport.counters.exchanges == reference.transport.counters.exchanges
    store = dist.HashStore()

    def work(_, rank):
        with sa.backends.cpu(store=store, rank=rank, size=2) as ctx, Buffer(ctx, **SHAPE) as buffer:
            handle = dispatch(buffer, plan_dispatch(buffer, W[rank]), hidden[rank], async_op=True)
            plan = plan_dispatch(buffer, W[rank])
            found = there_and_back(buffer, plan, hidden[rank])
            assert torch.equal(handle.wait()[0], found[0])
            assert (buffer.transport.counters.gathers, buffer.transport.counters.exchanges) == (3, 5)
        with pytest.raises(ProvenanceError, match="closed"):
            dispatch(buffer, plan, hidden[rank])
        return found

    for rank, found in enumerate(on_threads(2, work)):
        assert all(torch.equal(a, b[rank]) for a, b in zip(found, expected))


def test_one_rank_of_everything():
    """R = 1 over None, a context and a group: the same values and no message."""
    topk, hidden = torch.tensor([[3, 0], [0, 0], [-1, 2]]), torch.randn(3, 2)
    alone = Buffer(None, **SHAPE)
    expected = there_and_back(alone, plan_dispatch(alone, topk), hidden)
    grouped = Buffer(dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=5)), **SHAPE)
    listed = simulate(1, **SHAPE)
    for buffer, wrap in ((grouped, lambda x: x), (listed, lambda x: [x])):
        plan = plan_dispatch(buffer, wrap(topk))
        for a, b in zip(there_and_back(buffer, plan, wrap(hidden)), expected):
            assert torch.equal(a[0] if wrap(0) else a, b)
        assert buffer.transport.counters.exchanges == buffer.transport.counters.gathers == 0


def test_a_dead_peer_is_an_error_within_the_timeout():
    """Rank 1 refuses a foreign plan and leaves; rank 0, which cannot know, raises and does not hang."""
    left = threading.Event()

    def work(group, rank):
        buffer, other = Buffer(group, **SHAPE), Buffer(group, **SHAPE)
        plan = plan_dispatch(buffer, W[rank])
        if rank == 1:
            with pytest.raises(ProvenanceError):
                dispatch(other, plan, torch.zeros(3, 2))
            left.wait(20)
            return True
        with pytest.raises(TransferError, match="exchange failed") as caught:
            dispatch(buffer, plan, torch.zeros(3, 2))
        left.set()
        return caught.value.targets_touched

    assert on_threads(2, work, timedelta(seconds=1)) == [True, True]


def test_a_buffer_is_live_and_cannot_be_copied():
    buffer = Buffer(None, **SHAPE)
    for way in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(UnsupportedError, match="live context"):
            way(buffer)
    assert "H" not in repr(buffer) and repr(buffer).startswith("<Buffer of Geometry(R=1 E=4")
    buffer.close()
    assert repr(buffer).startswith("<closed Buffer")


def test_what_a_buffer_can_stand_on():
    with pytest.raises(InvalidMapError, match=r"needs None \(one rank\), a process group, a context"):
        Buffer(3, **SHAPE)
    with pytest.raises(InvalidMapError, match="simulate needs at least 1 rank, got 0"):
        simulate(0, **SHAPE)

    class Strange:
        alltoall_base = None
        name = staticmethod(lambda: "undefined")
        size = rank = staticmethod(lambda: 0)

    with pytest.raises(InvalidMapError, match=r"cannot tell the device.*pass device="):
        transport_of(Strange())
    assert Grouped(Strange(), "cpu").device == torch.device("cpu")


def test_no_copy_slots_at_all():
    """B = 0 with policy "home": prefetch gives empty trees, reduce_grad the local gradients."""

    def work(group, rank):
        buffer = Buffer(group, **(SHAPE | dict(B=0, policy="home")))
        plan = plan_dispatch(buffer, W[rank])
        assert plan.alloc.sum(0).tolist() == [9, 3]
        slots = prefetch(buffer, plan, {"w": torch.ones(2, 5)})
        total = reduce_grad(buffer, plan, slots, {"w": torch.full((2, 5), 3.0)})
        return tuple(slots["w"].shape), total["w"].mean().item()

    assert on_threads(2, work) == [((0, 5), 3.0)] * 2


def test_staging_memory_is_reused():
    """From the second call on, the pool serves all staging and results of equal size."""
    buffer = simulate(2, **SHAPE)
    plans = plan_dispatch(buffer, W)
    hidden = [torch.zeros(3, 2)] * 2
    there_and_back(buffer, plans, hidden)
    pool = buffer.pool
    held = {block.data_ptr() for block in (*pool.staging, *pool.results)}
    for _ in range(3):
        there_and_back(buffer, plans, hidden)
    assert {block.data_ptr() for block in (*pool.staging, *pool.results)} == held
    buffer.close()
    assert not pool.staging and not pool.results


@pytest.mark.parametrize("hold", [lambda t: t, lambda t: t[1:2], lambda t: t.numpy(), lambda t: t.T])
def test_memory_of_a_result_is_not_reused_while_anything_holds_it(hold):
    buffer = Buffer(None, **SHAPE)
    plan = plan_dispatch(buffer, W[0])
    kept = hold(dispatch(buffer, plan, torch.ones(3, 2))[0])
    before = kept.copy() if hasattr(kept, "copy") else kept.clone()
    for n in range(3):
        dispatch(buffer, plan, torch.full((3, 2), float(n)))
    assert (kept == before).all()


def test_results_are_tensors_of_their_own():
    """They may be changed in place under autograd, like any result."""
    buffer = Buffer(None, **SHAPE)
    plan = plan_dispatch(buffer, W[0])
    x = torch.ones(3, 2, requires_grad=True)
    rows, _ = dispatch(buffer, plan, x)
    assert not rows._is_view() and rows._base is None
    rows.mul_(3.0)
    rows[0] = 0.0
    combine(buffer, plan, rows)[0].sum().backward()
    assert x.grad.sum() == 3.0 * 2 * 5
    with torch.inference_mode():
        combine(buffer, plan, dispatch(buffer, plan, torch.ones(3, 2))[0])


def test_memory_of_a_result_is_not_reused_while_a_graph_needs_it():
    buffer = Buffer(None, **SHAPE)
    plan = plan_dispatch(buffer, W[0])
    x = torch.ones(3, 2, requires_grad=True)
    loss = dispatch(buffer, plan, x)[0].square().sum()
    dispatch(buffer, plan, torch.full((3, 2), 9.0))
    loss.backward()
    assert torch.equal(x.grad, torch.full((3, 2), 4.0))
