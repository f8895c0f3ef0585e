"""Workers end together: an error, a death or a hang of one is an error of the run, and no process is left."""

import multiprocessing
import os
import signal
import time

import pytest

from shardalg import InvalidMapError, TransferError
from shardalg.cli._workers import run_workers


def say_rank(ctx, word):
    return f"{word} {ctx.ranks[0]} of {len(ctx.peers)}"


def refuse_on_one(ctx, rank):
    if ctx.ranks == (rank,):
        raise InvalidMapError(f"rank {rank} will not")
    ctx.gather({ctx.ranks[0]: b"waiting"})


def die_on_one(ctx, how):
    if ctx.ranks == (1,):
        os.kill(os.getpid(), how)
    ctx.gather({ctx.ranks[0]: b"waiting"})


def leave_on_one(ctx, code):
    if ctx.ranks == (0,):
        os._exit(code)
    ctx.gather({ctx.ranks[0]: b"waiting"})


def divide(ctx, by):
    return 1 / by


def sleep_on_one(ctx, seconds):
    if ctx.ranks == (1,):
        time.sleep(seconds)
    ctx.gather({ctx.ranks[0]: b"waiting"})


def test_results_come_by_rank():
    assert run_workers(say_rank, "rank", 3, timeout=60) == ["rank 0 of 3", "rank 1 of 3", "rank 2 of 3"]


FAILURES = [
    (refuse_on_one, 1, InvalidMapError, "rank 1 will not"),
    (die_on_one, signal.SIGKILL, TransferError, "worker of rank 1 was killed by signal 9"),
    (leave_on_one, 7, TransferError, "worker of rank 0 ended with code 7"),
    (divide, 0, TransferError, "ZeroDivisionError: division by zero"),
]


@pytest.mark.parametrize("work, argument, kind, words", FAILURES, ids=lambda x: getattr(x, "__name__", ""))
def test_the_cause_is_raised_and_nobody_is_left(work, argument, kind, words):
    others = set(multiprocessing.active_children())  # worlds that other tests keep alive
    begun = time.monotonic()
    with pytest.raises(kind, match=words):
        run_workers(work, argument, 2, timeout=60)
    assert time.monotonic() - begun < 30
    assert set(multiprocessing.active_children()) <= others


def test_a_worker_that_hangs_is_given_up():
    others = set(multiprocessing.active_children())
    with pytest.raises(TransferError, match="rank 0"):
        run_workers(sleep_on_one, 60, 2, timeout=1)
    assert set(multiprocessing.active_children()) <= others
