"""Whatever happens to one rank, every rank that had not finished hears a clear error, in time."""

import os
import random
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import worlds
from cases import columns, full, own, random_layouts, require, rows
from worlds import Team, exists, shared_files, wait_for

import shardalg as sa

SIZE, VICTIM, TIMEOUT = 3, 1, 1.0
SOURCE, TARGET = rows(SIZE, (6, 6)), columns(SIZE, (6, 6))
PROGRAM = sa.schedule(sa.plan(SOURCE, TARGET), max_bytes=32, dtypes="float32")
SOON = 1.5  # seconds that an error takes where nobody has to wait for a timeout


@pytest.fixture
def fresh():
    """A team of its own for tests that end workers; nothing of it is left behind."""
    shared = shared_files()
    team = Team(SIZE)
    yield team
    numbers = [w.pid for w in team.workers]
    team.close()
    assert not any(map(exists, numbers))
    assert shared_files() <= shared


# --- what the workers do ------------------------------------------------------------------


def stop(how):
    os.kill(os.getpid(), getattr(signal, how))


def strike(ctx, when, how):
    """Arrange for something to happen to this rank; the progress callback to pass to run."""
    if when == "inside a round":
        real = ctx.transport.strategy.swap
        ctx.transport.strategy.swap = lambda *given: (stop(how), real(*given))[1]
    if when == "before the closing word":
        real_swap, calls = ctx.swap, []
        ctx.swap = lambda word: (calls.append(word), len(calls) == 2 and stop(how), real_swap(word))[2]
    return lambda done, total: stop(how) if when == "between rounds" and done == 1 else None


def suffer(ctx, when, how):
    """Run; something happens to the victim. What this rank saw: error, its text, seconds, targets."""
    (r,) = ctx.ranks
    bound = sa.bind(ctx, PROGRAM)
    x = full(SOURCE)
    shards = own(ctx, sa.extract(SOURCE, x))
    out = {k: torch.full_like(s, -1) for k, s in own(ctx, sa.extract(TARGET, x)).items()}
    sa.run(ctx, bound, shards, out)
    out[r].fill_(-1)
    progress = None
    if r == VICTIM:
        if when == "before the run":
            stop(how)
        progress = strike(ctx, when, how)
    start = time.monotonic()
    try:
        sa.run(ctx, bound, shards, out, progress=progress)
        if r == VICTIM and when == "after the run":
            stop(how)
        out[r].fill_(-1)
        start = time.monotonic()
        sa.run(ctx, bound, shards, out)
    except sa.TransferError as error:
        seconds = time.monotonic() - start
        require(shards, own(ctx, sa.extract(SOURCE, x)))
        untouched = bool(out[r].eq(-1).all())
        again = after(ctx) if how == "SIGKILL" else True
        return str(error), seconds, error.targets_touched or untouched, ctx.failed != "", again
    return "finished"


def after(ctx):
    """The survivors move the same data on a fresh group."""
    (r,) = ctx.ranks
    store = dist.PrefixStore("again", ctx.transport.store)
    layouts = rows(SIZE - 1, (6, 6)), columns(SIZE - 1, (6, 6))
    with sa.backends.cpu(store=store, rank=r - (r > VICTIM), size=SIZE - 1) as new:
        out = sa.run(new, sa.bind(new, sa.plan(*layouts)), own(new, sa.extract(layouts[0], full(SOURCE))))
        require(out, own(new, sa.extract(layouts[1], full(SOURCE))))
    return True


WHEN = ("before the run", "inside a round", "between rounds", "before the closing word", "after the run")
CASES = [("fused", when) for when in WHEN] + [("shared", WHEN[1]), ("shared", WHEN[4]), ("p2p", WHEN[2])]


@pytest.mark.parametrize(("strategy", "when"), CASES)
def test_a_killed_rank_is_named_by_all_others(fresh, strategy, when):
    results, errors = fresh.run(suffer, when, "SIGKILL", timeout=20, strategy=strategy)
    assert errors[VICTIM].kind == "Gone"
    for rank in {0, 2}:
        text, seconds, honest, failed, again = results[rank]
        assert f"rank {VICTIM}" in text and f"rank {rank}: " in text and ("round" in text or "ing" in text)
        assert seconds < 4 * SOON and honest and failed and again


@pytest.mark.parametrize("strategy", ["fused", "p2p", "shared"])
def test_a_stopped_rank_is_named_at_the_timeout(fresh, strategy):
    fresh.start(suffer, "between rounds", "SIGSTOP", timeout=TIMEOUT, strategy=strategy)
    (_, first), (_, third) = ((k, fresh.pipes[k].recv()) for k in (0, 2))
    for text, seconds, honest, failed, _ in (first, third):
        assert f"rank {VICTIM}" in text
        assert seconds < TIMEOUT + 2 * SOON and honest and failed
    os.kill(fresh.workers[VICTIM].pid, signal.SIGCONT)
    late = fresh.pipes[VICTIM].recv()  # it wakes up and hears that the others have gone
    assert late[1] < 2 * TIMEOUT + 2 * SOON and late[3]


def test_an_interrupt_on_one_rank_ends_the_others_at_once(fresh):
    results, errors = fresh.run(suffer, "between rounds", "SIGINT", timeout=20)
    assert errors[VICTIM].kind == "KeyboardInterrupt"
    for rank in {0, 2}:
        text, seconds, honest, failed, _ = results[rank]
        assert seconds < 2 * SOON and honest and failed and "round" in text


def stay_away(ctx):
    """One rank binds, and then never runs."""
    bound = sa.bind(ctx, PROGRAM)
    store = ctx.transport.store
    if ctx.ranks == (VICTIM,):
        store.wait(["over/0", "over/2"], timedelta(seconds=20))
        return None
    start = time.monotonic()
    with pytest.raises(sa.TransferError) as refused:
        sa.run(ctx, bound, own(ctx, sa.extract(SOURCE, full(SOURCE))))
    seconds = time.monotonic() - start
    store.set(f"over/{ctx.ranks[0]}", "")
    return str(refused.value), seconds, refused.value.targets_touched


def test_a_rank_that_never_calls_is_named_at_the_timeout(fresh):
    answers = fresh.run(stay_away, timeout=TIMEOUT).good()
    for rank in {0, 2}:
        text, seconds, touched = answers[rank]
        assert f"rank {VICTIM} (never began)" in text
        assert TIMEOUT * 0.8 < seconds < TIMEOUT + 2 * SOON and not touched


def die_in_bind(ctx):
    """One rank is killed while the others compare their plans."""
    sa.bind(ctx, PROGRAM)
    if ctx.ranks == (VICTIM,):
        ctx.transport.gather = lambda mine: stop("SIGKILL")
    start = time.monotonic()
    with pytest.raises(sa.TransferError) as refused:
        sa.bind(ctx, PROGRAM)
    return str(refused.value), time.monotonic() - start


def test_a_rank_that_is_killed_in_bind_is_named(fresh):
    results, errors = fresh.run(die_in_bind, timeout=20)
    assert errors[VICTIM].kind == "Gone"
    for rank in (0, 2):
        text, seconds = results[rank]
        assert f"rank {rank}: bind" in text and f"rank {VICTIM}" in text and seconds < 2 * SOON


def bind_alone(ctx):
    """One rank never binds."""
    if ctx.ranks == (VICTIM,):
        return None
    with pytest.raises(sa.TransferError) as refused:
        sa.bind(ctx, PROGRAM)
    return str(refused.value)


def test_a_rank_that_never_binds(world):
    said = world(SIZE, bind_alone, timeout=1).good()
    assert all("bind" in said[r] for r in (0, 2))


def test_a_failed_context_says_so_and_sends_nothing(world):
    def rank(ctx):
        bound = sa.bind(ctx, PROGRAM)
        if ctx.ranks == (VICTIM,):
            return None
        shards = own(ctx, sa.extract(SOURCE, full(SOURCE)))
        with pytest.raises(sa.TransferError):
            sa.run(ctx, bound, shards)
        for use in (lambda: sa.run(ctx, bound, shards), lambda: sa.bind(ctx, PROGRAM)):
            with pytest.raises(sa.TransferError, match="failed earlier"):
                use()
        return repr(ctx)

    said = world(SIZE, rank).good()
    assert said[0].startswith("<failed")


def test_an_error_in_a_callback_is_raised_as_it_is_and_ends_the_others(world):
    def rank(ctx):
        def progress(done, total):
            if ctx.ranks == (VICTIM,):
                raise ZeroDivisionError("mine")

        bound = sa.bind(ctx, PROGRAM)
        sa.run(ctx, bound, own(ctx, sa.extract(SOURCE, full(SOURCE))), progress=progress)

    errors = world(SIZE, rank, timeout=20).errors
    assert isinstance(errors[VICTIM], ZeroDivisionError)
    assert all(isinstance(errors[r], sa.TransferError) for r in (0, 2))


def test_donated_sources_of_a_failed_run_are_said_to_be_gone(world):
    def rank(ctx):
        bound = sa.bind(ctx, PROGRAM)
        shards = own(ctx, sa.extract(SOURCE, full(SOURCE)))

        def progress(done, total):
            if ctx.ranks == (VICTIM,) and done == total:
                raise ZeroDivisionError("mine")

        sa.run(ctx, bound, shards, donate=True, progress=progress)

    errors = world(SIZE, rank, timeout=20).errors
    assert all("donated" in str(errors[r]) for r in (0, 2))


# --- many random faults -------------------------------------------------------------------


def endure(ctx, seed, victim, at, plans):
    """Random plans until the victim ends itself; how many were done, and what was said last."""
    draw = random.Random(seed)
    done = 0
    try:
        for step in range(plans):
            source, target = random_layouts(draw, len(ctx.peers))
            x = full(source)
            bound = sa.bind(ctx, sa.schedule(sa.plan(source, target), max_bytes=draw.choice([None, 64])))

            def progress(k, total, step=step):
                if ctx.ranks == (victim,) and step * 10 + k >= at:
                    stop("SIGKILL")

            shards = own(ctx, sa.extract(source, x))
            out = sa.run(ctx, bound, shards, tag=step, progress=progress, verify=draw.random() < 0.5)
            require(out, own(ctx, sa.extract(target, x)))
            require(shards, own(ctx, sa.extract(source, x)))
            done += 1
    except sa.TransferError as error:
        return done, str(error)
    return done, ""


def stress(seed, plans):
    """One team, one victim (or none), random plans; how many were done, and whether somebody was hurt."""
    draw = random.Random(seed)
    victim, at = draw.choice([None, 0, 1, 2]), draw.randrange(10 * plans)
    team = Team(SIZE)
    try:
        results, errors = team.run(
            endure, seed, victim, at, plans, timeout=10, strategy=draw.choice(["fused", "shared"])
        )
    finally:
        team.close()
    hurt = victim is not None and errors[victim] is not None
    for rank in range(SIZE):
        if hurt and rank == victim:
            assert errors[rank].kind == "Gone"
            continue
        assert errors[rank] is None, errors[rank]
        done, text = results[rank]
        assert (done == plans and not text) or (hurt and f"rank {victim}" in text), results
    return max(done for done, _ in filter(None, results)), hurt


def test_random_plans_and_kills():
    assert all(stress(seed, 6)[0] for seed in range(2))


@pytest.mark.stress
def test_many_random_plans_and_kills():
    done, hurt = zip(*(stress(seed, 60) for seed in range(100, 160)))
    assert sum(done) > 1500 and any(hurt) and not all(hurt)


def test_the_workers_leave_nothing(fresh):
    numbers = fresh.run(pid).good()
    assert all(map(exists, numbers)) and len(set(numbers)) == SIZE
    fresh.workers[0].kill()
    wait_for(lambda: not exists(numbers[0]))
    assert exists(numbers[1])


def pid(ctx):
    return worlds.here()
