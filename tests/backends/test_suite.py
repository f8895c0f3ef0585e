"""Every backend of ours passes the suite that third parties prove theirs with (also in processes)."""

import functools

import pytest
import torch
import worlds
from devices import Pretended, pretend

import shardalg as sa
from shardalg.testing import CHECKS, backend_suite


def simulated(n, check, **options):
    with sa.backends.simulate(n, **options) as ctx:
        check(ctx)


def threads(n, check, **options):
    worlds.world(n, check, timeout=20, **options).good()


def devices(n, check, strategy):
    pretend(n, check, Pretended((strategy,))).good()


BACKENDS = {
    "simulate": simulated,
    "simulate with messages": functools.partial(simulated, messages=True),
    "fused": threads,
    "device, fused": functools.partial(devices, strategy="fused"),
    "device, pairwise": functools.partial(devices, strategy="pairwise"),
}


@pytest.mark.parametrize("backend", BACKENDS)
def test_ours_pass(backend):
    found = backend_suite(
        BACKENDS[backend], sizes=(1, 2, 3) if backend == "simulate" else (3,) if backend == "fused" else (2,)
    )
    assert found == tuple(check.__name__ for check in CHECKS)


def lossy(n, check):
    """A backend that changes one byte now and then."""
    with sa.backends.simulate(n, messages=True) as ctx:
        real = ctx.transport.exchange

        def exchange(parts):
            real(parts)
            for part in parts.values():
                if part.receive.numel() > 3:
                    part.receive[3] ^= 1

        ctx.transport.exchange = exchange
        check(ctx)


def forgetful(n, check):
    """A backend whose gather leaves the last rank's words out."""

    def rank(ctx):
        real = ctx.transport.gather
        ctx.transport.gather = lambda mine: real(mine) | {ctx.peers[-1]: b""}
        check(ctx)

    worlds.world(n, rank).good()


@pytest.mark.parametrize(
    ("world", "name"), [(lossy, "layouts_of_every_kind_move"), (forgetful, "words_are_gathered")]
)
def test_a_bad_backend_fails_by_name(world, name):
    with pytest.raises(AssertionError, match=f"{name} on 2 ranks"):
        backend_suite(world, sizes=(2,))


def test_checks_have_names_and_reasons():
    assert len({check.__name__ for check in CHECKS}) == len(CHECKS)
    assert isinstance(torch.device("cpu"), torch.device)
