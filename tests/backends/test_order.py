"""Ranks that make other calls than the rest, or at a wrong moment: errors on all, and nothing hangs."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, WHOLE, columns, full, own, require, rows

import shardalg as sa

HERE = Path(__file__).parent
X = full(ROWS)
PLAN = sa.plan(ROWS, COLUMNS)
ROUNDS = sa.schedule(PLAN, max_bytes=64, dtypes="float32")  # several rounds
SOON = 2.0  # seconds that an error takes where nobody has to wait for a timeout
ODD = 2  # the rank that does something else
STRATEGIES = ("fused", "p2p", "shared")


def shards(ctx):
    return own(ctx, sa.extract(ROWS, X))


def moves(ctx):
    """The context is as good as before."""
    require(sa.run(ctx, sa.bind(ctx, PLAN), shards(ctx)), own(ctx, sa.extract(COLUMNS, X)))


def timed(act):
    """The error of ``act()`` and the seconds until it came."""
    start = time.monotonic()
    with pytest.raises((sa.ShardalgError, KeyboardInterrupt)) as caught:
        act()
    return caught.value, time.monotonic() - start


# --- another call than the others ---------------------------------------------------------

CALLS = {
    "bind": lambda ctx, bound: sa.bind(ctx, sa.plan(ROWS, WHOLE)),
    "run": lambda ctx, bound: sa.run(ctx, bound, shards(ctx)),
    "gather_layouts": lambda ctx, bound: sa.gather_layouts(ctx, sa.part(ROWS, ctx.ranks)),
}


@pytest.mark.parametrize(
    ("most", "odd"), [("run", "bind"), ("bind", "gather_layouts"), ("gather_layouts", "run")]
)
def test_other_calls_are_named_on_every_rank(world, most, odd):
    """What one call says is not taken for what another asks."""

    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        error, seconds = timed(lambda: CALLS[odd if ctx.ranks == (ODD,) else most](ctx, bound))
        assert seconds < SOON
        moves(ctx)
        return str(error)

    (said,) = set(world(4, rank, timeout=20).good())
    assert f"rank 0 is in {most}, rank {ODD} in {odd}" in said


@pytest.mark.parametrize("strategy", ["fused", "shared"])
def test_a_bind_where_others_run_ends_at_the_timeout(world, strategy):
    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        sa.run(ctx, bound, shards(ctx))
        error, seconds = timed(lambda: CALLS["bind" if ctx.ranks == (ODD,) else "run"](ctx, bound))
        return type(error), seconds

    for kind, seconds in world(4, rank, timeout=0.5, strategy=strategy).good():
        assert kind is sa.TransferError and seconds < 0.5 + SOON


def test_a_plan_of_another_context_is_refused_before_the_others_move(world):
    """The others wait for this rank, and hear when it closes its context."""
    other = sa.bind(sa.backends.simulate(4), PLAN)

    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        return sa.run(ctx, other if ctx.ranks == (ODD,) else bound, shards(ctx))

    start = time.monotonic()
    errors = world(4, rank, timeout=20).errors
    assert time.monotonic() - start < SOON
    kinds = [type(error) for error in errors]
    assert kinds == [sa.TransferError, sa.TransferError, sa.ProvenanceError, sa.TransferError]


@pytest.mark.parametrize(
    ("strategy", "how"),
    [("fused", "forgets its context"), ("p2p", "raises"), ("shared", "forgets its context")],
)
def test_a_rank_that_leaves_between_bind_and_run(strategy, how):
    """The others hear at once, also where the context was never closed."""
    store, over, found = dist.HashStore(), threading.Event(), {}

    def leave():
        ctx, bound = begin(1)
        assert bound is not None
        if how == "raises":
            with pytest.raises(ZeroDivisionError), ctx:
                raise ZeroDivisionError("mine")

    def begin(r):
        limit = timedelta(seconds=20)
        mine = dist.PrefixStore("left", store)
        ctx = sa.backends.cpu(store=mine, rank=r, size=2, timeout=limit, strategy=strategy)
        return ctx, sa.bind(ctx, sa.schedule(sa.plan(rows(2), columns(2)), dtypes="float32"))

    def rank(r):
        if r == 1:
            leave()
            gc.collect()
            over.wait(20)
            return
        ctx, bound = begin(0)
        found[r] = timed(lambda: sa.run(ctx, bound, {0: sa.extract(rows(2), X, 0)}))
        over.set()

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    error, seconds = found[0]
    assert type(error) is sa.TransferError and seconds < SOON


# --- options on one rank only -------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", ["donate", "out", "progress"])
def test_options_that_are_a_ranks_own_affair(world, strategy, what):
    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        wanted = own(ctx, sa.extract(COLUMNS, X))
        out = {r: torch.zeros_like(x) for r, x in wanted.items()}
        options = {"donate": True, "out": out, "progress": lambda done, total: None}
        for _ in range(2):
            mine = {what: options[what]} if ctx.ranks == (ODD,) else {}
            require(sa.run(ctx, bound, shards(ctx), **mine), wanted)

    world(4, rank, strategy=strategy).good()


# --- inside a run -------------------------------------------------------------------------

INSIDE = CALLS | {
    "wait": lambda ctx, bound: sa.run_async(ctx, bound, shards(ctx)).wait(),
    "close": lambda ctx, bound: ctx.close(),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("what", INSIDE)
def test_what_one_rank_does_inside_a_run_ends_it_everywhere(world, strategy, what):
    """A run within a run would send where others expect other bytes, a wait would wait for itself."""

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)

        def progress(done, total):
            if ctx.ranks == (ODD,) and done == 1:
                INSIDE[what](ctx, bound)

        error, seconds = timed(lambda: sa.run(ctx, bound, shards(ctx), progress=progress))
        return type(error), str(error), seconds

    found = world(4, rank, timeout=20, strategy=strategy).good()
    assert all(seconds < SOON for _, _, seconds in found)
    kinds = [kind for kind, _, _ in found]
    mine = sa.TransferError if what == "close" else sa.UnsupportedError
    assert kinds == [sa.TransferError, sa.TransferError, mine, sa.TransferError]
    assert ("closed" if what == "close" else "goes on in this very thread") in found[ODD][1]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_refused_inside_a_run_harms_nothing(world, strategy):
    """A function that swallows the error; one that starts a run to come later."""

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        wanted, handles, refused = own(ctx, sa.extract(COLUMNS, X)), [], []

        def progress(done, total):
            if done == 1:
                handles.append(sa.run_async(ctx, bound, shards(ctx)))
                for call in CALLS.values():
                    with pytest.raises(sa.UnsupportedError):
                        call(ctx, bound)
                refused.append(done)

        require(sa.run(ctx, bound, shards(ctx), progress=progress), wanted)
        require(sa.run_async(ctx, bound, shards(ctx), progress=progress).wait(), wanted)
        for handle in handles:
            require(handle.wait(), wanted)
        return len(handles), refused

    assert world(4, rank, strategy=strategy).good() == [(2, [1, 1])] * 4


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_bind_waits_for_the_runs_in_the_background(world, strategy):
    """They use one group: their messages must not cross."""

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        handles = [sa.run_async(ctx, bound, shards(ctx), tag=k) for k in range(4)]
        whole = sa.bind(ctx, sa.plan(ROWS, WHOLE))
        assert all(handle.done() for handle in handles)
        assert sa.gather_layouts(ctx, sa.part(ROWS, ctx.ranks)) == ROWS
        require(sa.run(ctx, whole, shards(ctx)), own(ctx, sa.extract(WHOLE, X)))
        for handle in handles:
            require(handle.wait(), own(ctx, sa.extract(COLUMNS, X)))

    world(4, rank, strategy=strategy).good()


# --- what one rank raises -----------------------------------------------------------------


class Odd(Mapping):
    """A dict of shards that raises when it is asked."""

    def __init__(self, error):
        self.error = error

    def __getitem__(self, key):
        raise self.error

    def __iter__(self):
        return iter((ODD,))

    def __len__(self):
        return 1

    def __contains__(self, key):
        raise self.error


@pytest.mark.parametrize("first", [True, False], ids=["first run", "later run"])
@pytest.mark.parametrize("error", [MemoryError("no room"), ZeroDivisionError("odd"), RuntimeError("broken")])
def test_any_error_while_a_run_is_prepared_is_heard_by_all(world, error, first):
    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        if not first:
            sa.run(ctx, bound, shards(ctx))
        odd = ctx.ranks == (ODD,)
        found, seconds = timed(lambda: sa.run(ctx, bound, Odd(error) if odd else shards(ctx)))
        assert type(found) is sa.TransferError and seconds < SOON
        assert not odd or found.__cause__ is error
        moves(ctx)
        return str(found)

    said = world(4, rank, timeout=20).good()
    text = f"{type(error).__name__}: {error}"
    heard = f"rank {ODD} refused the run: {text}; nothing was written"
    assert said == [heard, heard, text, heard]


ODD_PLANS = {
    "bind": lambda ctx: sa.bind(ctx, PLAN, dtypes={"other": "float32"} if ctx.ranks == (ODD,) else None),
    "gather_layouts": lambda ctx: sa.gather_layouts(
        ctx, {1: 2} if ctx.ranks == (ODD,) else {"a": sa.part(ROWS, ctx.ranks)}
    ),
}


@pytest.mark.parametrize("what", ODD_PLANS)
def test_any_error_before_an_agreement_is_heard_by_all(world, what):
    def rank(ctx):
        error, seconds = timed(lambda: ODD_PLANS[what](ctx))
        assert type(error) is sa.TransferError and seconds < SOON
        moves(ctx)
        return str(error)

    (said,) = set(world(4, rank, timeout=20).good())
    assert f"rank {ODD}" in said


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_what_goes_wrong_while_messages_travel_is_heard_at_once(world, strategy, error):
    """Local copies are made meanwhile: the exchange that goes on must not keep the group alive."""

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        sa.run(ctx, bound, shards(ctx))
        if ctx.ranks == (ODD,):
            stage = next(its.stage for _, its in ctx._kept.values() if hasattr(its, "stage"))
            stage._local = Raising(error)
        start = time.monotonic()
        with pytest.raises(BaseException) as caught:
            sa.run(ctx, bound, shards(ctx))
        return type(caught.value), time.monotonic() - start, bool(ctx.failed)

    found = world(4, rank, timeout=20, strategy=strategy).good()
    assert [kind for kind, _, _ in found] == [
        sa.TransferError,
        sa.TransferError,
        type(error),
        sa.TransferError,
    ]
    assert all(seconds < SOON and failed for _, seconds, failed in found)


class Raising:
    """Copies that fail."""

    def __init__(self, error):
        self.error = error

    def go(self, *given):
        raise self.error


def test_an_interrupt_while_a_run_is_prepared_ends_it_everywhere(world):
    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        given = Odd(KeyboardInterrupt()) if ctx.ranks == (ODD,) else shards(ctx)
        error, seconds = timed(lambda: sa.run(ctx, bound, given))
        return type(error), seconds, bool(ctx.failed)

    found = world(4, rank, timeout=20).good()
    assert [kind for kind, _, _ in found] == [
        sa.TransferError,
        sa.TransferError,
        KeyboardInterrupt,
        sa.TransferError,
    ]
    assert all(seconds < SOON and failed for _, seconds, failed in found)


# --- interrupts, ends ---------------------------------------------------------------------


def interrupted(ctx, where):
    """Rank 1 is interrupted while it waits for rank 2, which comes later."""
    bound = sa.bind(ctx, ROUNDS)
    sa.run(ctx, bound, shards(ctx))
    if ctx.ranks == (2,):
        time.sleep(1)
    if ctx.ranks == (1,):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    if where == "a turn":  # it waits for a run in the background
        sa.run_async(ctx, bound, shards(ctx))
    error, seconds = timed(lambda: sa.run(ctx, bound, shards(ctx)))
    return type(error).__name__, seconds


@pytest.mark.parametrize(
    ("strategy", "where"), [("fused", "a round"), ("p2p", "a turn"), ("shared", "a round")]
)
def test_an_interrupt_in_the_middle_of_a_wait(team, strategy, where):
    """In a wait for the words of others, or for a run in the background."""
    found = team.run(interrupted, where, timeout=20, strategy=strategy).good()
    assert [kind for kind, _ in found] == ["TransferError", "KeyboardInterrupt", *["TransferError"] * 2]
    assert all(seconds < 1 + 2 * SOON for _, seconds in found)
    assert found[1][1] < SOON


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closing_does_not_wait_for_a_run_in_the_background(world, strategy):
    """The run ends with an error: at once, or once the exchange ends that it is in."""
    closed = threading.Barrier(4)

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        if ctx.ranks == (ODD,):
            closed.wait(20)
            return None
        handle = sa.run_async(ctx, bound, shards(ctx))
        while ctx.runs < 1:
            time.sleep(0.01)
        time.sleep(0.1)  # now it waits for the odd one
        start = time.monotonic()
        ctx.close()
        seconds = time.monotonic() - start
        closed.wait(20)
        error, _ = timed(lambda: handle.wait(10))
        return seconds, type(error)

    found = world(4, rank, timeout=20, strategy=strategy).good()
    for r in (0, 1, 3):
        assert found[r][0] < 1 and found[r][1] is sa.TransferError


def test_a_run_that_comes_after_the_end_is_refused(world):
    """Also where the context fails in the background while the caller starts the next run."""

    def rank(ctx):
        bound = sa.bind(ctx, ROUNDS)
        ctx._lane.close()  # as a failure in another thread does, after the check
        with pytest.raises(sa.TransferError, match="closed"):
            sa.run_async(ctx, bound, shards(ctx))

    world(2 + 2, rank).good()


def in_a_fork(ctx):
    """A forked process has the parent's context, and must not use it, nor say its end."""
    bound = sa.bind(ctx, PLAN)
    child = os.fork()
    if not child:
        try:
            sa.run(ctx, bound, shards(ctx))
        except sa.ProvenanceError as error:
            ctx.close()
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    moves(ctx)
    return os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize("strategy", ["fused", "shared"])
def test_a_forked_process_is_another_owner(team, strategy):
    assert team.run(in_a_fork, strategy=strategy, timeout=20).good() == [7] * 4


def test_a_process_ends_with_open_contexts_and_runs(tmp_path):
    """One ends with an exception while two runs in the background wait for the other: one of them ends
    well, since a process that ends waits a little. The other process ends without closing anything."""
    command = [sys.executable, str(HERE / "leaving_script.py"), str(tmp_path / "store")]
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*command, str(r)], **options) for r in range(2)]
    (_, first), (said, second) = (p.communicate(timeout=60) for p in processes)
    assert processes[0].returncode == 1 and "ZeroDivisionError: mine" in first
    assert processes[1].returncode == 0, second
    words = said.split()
    assert words[::2] == ["moved", "failed"] and max(map(float, words[1::2])) < 10  # of 30 seconds
