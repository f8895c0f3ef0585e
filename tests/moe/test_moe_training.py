"""A MoE layer over real processes trains as the dense layer on one: losses and all gradients."""

import pytest
import torch
from groups import on_processes, on_threads
from moe_layer import SHARED, by_hand, train_dense, train_spread


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("size", [2, 4])
def test_training_equals_the_dense_layer(size):
    """50 steps; experts are really copied; the loss falls; routers, attention and experts agree."""
    losses, grads, params = train_dense(size)
    for rank, (found, its_grads, its_params, copies) in enumerate(on_processes(size, train_spread)):
        assert min(copies) > 0
        torch.testing.assert_close(found, losses, rtol=1e-9, atol=0)
        assert all(value.isfinite().all() for value in (*its_grads.values(), *its_params.values()))
        for name in its_grads:
            part = slice(None) if name in SHARED else slice(rank * 8 // size, (rank + 1) * 8 // size)
            close(its_grads[name], grads[name][part])
            close(its_params[name], params[name][part])
            assert its_grads[name].abs().max() > 0
    assert losses[-1] < losses[0]


def test_reduce_grad_by_hand_is_what_autograd_does():
    for rank in on_threads(2, by_hand):
        for through_autograd, reduced in rank.values():
            close(reduced, through_autograd)
