"""Real processes: values, memory, and what is left when a context is closed."""

import gc
import os
import time

import pytest
import torch
from cases import COLUMNS, ROWS, WHOLE, columns, full, move, own, require, rows
from worlds import shared_files

import shardalg as sa
from shardalg.testing import CHECKS

MiB = 1 << 20
STRATEGIES = ("fused", "p2p", "shared")


def number(ctx):
    return os.getpid()


def test_workers_stay_between_calls(team):
    assert team.run(number).good() == team.run(number).good()
    assert len(set(team.run(number).good())) == 4


@pytest.mark.parametrize("strategy", STRATEGIES[1:])  # fused: in test_suite.py
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_suite_holds_between_processes(team, strategy, check):
    team.run(check, strategy=strategy, timeout=20).good()


def moves(ctx, seed):
    """The same random shards in every process; each run against extraction."""
    torch.manual_seed(seed)
    layouts = {"rows": ROWS, "columns": COLUMNS, "whole": WHOLE}
    for a in layouts.values():
        for b in layouts.values():
            x = torch.randn(8, 6)
            bound = sa.bind(ctx, sa.plan(a, b))
            require(sa.run(ctx, bound, own(ctx, sa.extract(a, x)), verify=True), own(ctx, sa.extract(b, x)))
    return ctx.counters.payload_bytes


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_processes_send_what_the_plans_say(team, strategy):
    sent = sum(team.run(moves, 1, strategy=strategy).good())
    layouts = (ROWS, COLUMNS, WHOLE)
    assert sent == sum(sa.plan(a, b).stats.bytes_crossing(4) for a in layouts for b in layouts)


def train(ctx):
    """Two steps of descent through a transfer: gradients cross processes."""
    bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
    (r,) = ctx.ranks
    w = sa.extract(ROWS, full(ROWS, torch.float64), r).clone().requires_grad_()
    for step in range(2):
        loss = sa.run(ctx, bound, {r: w}, tag=step)[r].pow(2).sum()
        (gradient,) = torch.autograd.grad(loss, w)
        with torch.no_grad():
            w -= gradient / 4
    return w.detach()


def test_gradients_cross_processes(team):
    found = team.run(train).good()
    require(dict(enumerate(found)), sa.extract(ROWS, full(ROWS, torch.float64) / 4))


# --- memory -------------------------------------------------------------------------------


def peak():
    """The most memory this process has held since the last reset, in bytes; resets it."""
    with open("/proc/self/status") as status:
        found = next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
    return found


def extra(ctx, shape, source, target, ranks, options, max_bytes):
    """The most bytes beyond the inputs that a run takes here, given how it runs."""
    plan = sa.plan(source, target, source_ranks=ranks[0], target_ranks=ranks[1])
    bound = sa.bind(ctx, sa.schedule(plan, max_bytes=max_bytes, dtypes="float32"))
    here = [[r for r in range(len(its)) if its[r] in ctx.ranks] for its in ranks]
    given = {r: torch.ones(source.shard_shape(r)) for r in here[0]}
    gc.collect()
    peak()
    before = peak()
    out = sa.run(ctx, bound, given, **options)
    after = peak()
    assert all(bool(x.eq(1).all()) for x in out.values()) and sorted(out) == here[1]
    return after - before, sum(x.numel() * 4 for x in out.values())


SLACK = 6 * MiB  # pages that the allocator and the libraries touch on a first run


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_takes_its_output_and_its_staging_and_no_more(team, strategy):
    """No rank ever holds the full tensor (64 MiB)."""
    shape, bound = (4096, 4096), 2 * MiB
    ranks = (range(4), range(4))
    given = (shape, rows(4, shape), columns(4, shape), [list(r) for r in ranks], {}, bound)
    for more, out in team.run(extra, *given, strategy=strategy, timeout=30).good():
        assert out == 16 * MiB and more <= out + bound + SLACK


def test_neither_side_allocates_the_others_shards(team):
    """Ranks 0 and 1 send 32 MiB each to ranks 2 and 3."""
    shape = (4096, 4096)
    given = (shape, rows(2, shape), columns(2, shape), [[0, 1], [2, 3]], {}, 2 * MiB)
    found = team.run(extra, *given, strategy="fused", timeout=30).good()
    assert all(more <= 2 * MiB + SLACK and out == 0 for more, out in found[:2])
    assert all(more <= 34 * MiB + SLACK and out == 32 * MiB for more, out in found[2:])


def resources(most):
    """Open files and threads of this process, once they are at most ``most``, or after a while."""
    gc.collect()
    end = time.monotonic() + 0.8  # threads end on their own
    while True:
        found = len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
        if found <= most or time.monotonic() > end:
            return found
        time.sleep(0.02)


def come_and_go(ctx, strategy):
    """Contexts that are opened, used and closed leave no file, thread or shared memory."""
    (r,) = ctx.ranks
    shared = shared_files()
    seen = []
    for k in range(4):
        store = torch.distributed.PrefixStore(f"round {k}", ctx.transport.store)
        with sa.backends.cpu(store=store, rank=r, size=4, strategy=strategy) as mine:
            move(mine, ROWS, COLUMNS)
            sa.run_async(
                mine, sa.bind(mine, sa.plan(ROWS, WHOLE)), own(ctx, sa.extract(ROWS, full(ROWS)))
            ).wait()
        del mine
        seen.append(resources(max(seen, default=(0, 0))))
    return seen, shared_files() - shared


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closed_contexts_leave_nothing(team, strategy):
    for seen, shared in team.run(come_and_go, strategy, timeout=20).good():
        assert not shared
        assert max(seen[2:]) <= max(seen[:2]), seen
