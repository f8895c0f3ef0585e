"""Worker processes on this machine: started together, watched, and ended together.

The caller never loads torch: a server process does, while the caller plans, and forks the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.context import ForkServerProcess
from typing import Any, TypeAlias

import shardalg as sa  # its backends load torch on first use

from .._errors import ShardalgError, TransferError
from .._torch import torch

Work: TypeAlias = Callable[[Any, Any], Any]  # of a live context and an argument
GRACE = 1.0  # seconds for other workers to say what went wrong first
PRELOAD = ["shardalg.backends", "shardalg.cli._main"]


def warm_up() -> None:
    """Start loading torch for the workers, whom ``run_workers`` will fork."""
    forkserver.set_forkserver_preload(PRELOAD)
    forkserver.ensure_running()


def run_workers(work: Work, argument: Any, count: int, *, timeout: float) -> list[Any]:
    """``work(context, argument)`` in ``count`` processes joined by gloo; their results by rank.

    The first failure ends all of them and is raised here: an error of the library as itself, a worker that
    died or raised anything else as ``TransferError``. No process outlives the call.
    """
    warm_up()
    context = multiprocessing.get_context("forkserver")
    with (
        tempfile.TemporaryDirectory(prefix="shardalg-", ignore_cleanup_errors=True) as folder,
        _started(context, work, argument, count, folder, timeout) as workers,
    ):
        return _results(workers)


@contextmanager
def _started(
    context: Any, work: Work, argument: Any, count: int, folder: str, timeout: float
) -> Iterator[list[tuple[ForkServerProcess, Any]]]:
    workers = []
    try:
        for rank in range(count):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_enter, args=(theirs, work, argument, rank, count, folder, timeout), daemon=True
            )
            process.start()
            theirs.close()
            workers.append((process, mine))
        yield workers
    finally:
        for process, mine in workers:
            process.kill()
            process.join()
            mine.close()


def _results(workers: list[tuple[ForkServerProcess, Any]]) -> list[Any]:
    """The answers of all workers; the most telling failure of any is raised."""
    answers: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    deadline = float("inf")
    while len(answers) + len(failures) < len(workers) and time.monotonic() < deadline:
        open_ones = {
            mine: rank for rank, (_, mine) in enumerate(workers) if rank not in {*answers, *failures}
        }
        left = None if deadline == float("inf") else max(0.0, deadline - time.monotonic())
        for ready in connection.wait(list(open_ones), timeout=left):
            rank = open_ones[ready]
            ok, value = _answer(workers[rank], rank)
            (answers if ok else failures)[rank] = value
        if failures and deadline == float("inf"):
            deadline = time.monotonic() + GRACE
    if failures:
        raise min(failures.values(), key=lambda e: (_is_echo(e), isinstance(e, TransferError)))
    return [answers[rank] for rank in range(len(workers))]


def _answer(worker: tuple[ForkServerProcess, Any], rank: int) -> tuple[bool, Any]:
    process, mine = worker
    try:
        answer: tuple[bool, Any] = mine.recv()
    except EOFError:
        process.join(GRACE)
        code = process.exitcode
        word = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        return False, TransferError(f"the worker of rank {rank} {word} before it was done")
    return answer


def _is_echo(error: Exception) -> bool:
    """Whether a failure only says that a peer is gone."""
    return isinstance(error, TransferError) and "gloo failed" in str(error)


# --- inside a worker ----------------------------------------------------------------------


def _enter(
    channel: Any, work: Work, argument: Any, rank: int, count: int, folder: str, timeout: float
) -> None:
    threading.Thread(target=_follow_parent, args=(folder,), daemon=True).start()
    torch().set_num_threads(1)
    try:
        limit = timedelta(seconds=timeout)
        store = torch().distributed.FileStore(os.path.join(folder, "store"), count)
        with sa.backends.cpu(store=store, rank=rank, size=count, timeout=limit) as ctx:
            channel.send((True, work(ctx, argument)))
    except ShardalgError as error:
        channel.send((False, error))
    except Exception as error:
        channel.send((False, TransferError(f"rank {rank}: {type(error).__name__}: {error}")))


def _follow_parent(folder: str) -> None:
    """End this worker, and remove the folder the workers met in, when the process that started it ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def peak_memory() -> int:
    """The most bytes of memory this process has held (VmHWM), with the pages of mapped files it read."""
    with open("/proc/self/status") as status:
        words = next(line for line in status if line.startswith("VmHWM:")).split()
    return int(words[1]) << 10
