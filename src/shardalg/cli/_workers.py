"""Worker processes on this machine: started together, watched, and ended together.

The caller never loads torch: a server process does, while the caller plans, and forks the workers.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from typing import Any, NamedTuple, NoReturn, TypeAlias

import shardalg as sa  # its backends load torch on first use

from .._errors import ShardalgError, TransferError
from .._torch import torch

Work: TypeAlias = Callable[[Any, Any], Any]  # of a live context and an argument
GRACE = 1.0  # seconds for other workers to say what went wrong first
PRELOAD = ["shardalg.backends", "shardalg.cli._main"]
HOST = "127.0.0.1"


class Task(NamedTuple):
    """What a worker is to do, and where the workers meet (0: it opens the port and says which)."""

    work: Work
    argument: Any
    rank: int
    size: int
    timeout: float
    port: int = 0


class Worker(NamedTuple):
    """A process and the pipe it answers through."""

    process: Any
    channel: Any


def warm_up() -> None:
    """Start loading torch for the workers, whom ``run_workers`` will fork."""
    resource_tracker.ensure_running()  # by itself, since it ends with SIGINT let through
    forkserver.set_forkserver_preload(PRELOAD)
    with uninterrupted({signal.SIGINT}):  # the server inherits this: Ctrl-C is for the caller, who ends it
        forkserver.ensure_running()


def run_workers(work: Work, argument: Any, count: int, *, timeout: float) -> list[Any]:
    """``work(context, argument)`` in ``count`` processes joined by gloo; their results by rank.

    The first failure ends all of them and is raised here: an error of the library as itself, a worker that
    died or raised anything else as ``TransferError``. No process outlives the call.
    """
    warm_up()
    workers: list[Worker] = []
    try:
        port = 0
        for rank in range(count):
            with uninterrupted():
                workers.append(_start(Task(work, argument, rank, count, timeout, port)))
            port = port or _received(workers[0], 0)
        return _results(workers)
    finally:
        with uninterrupted():
            _end(workers)


@contextmanager
def uninterrupted(signals: Iterable[int] = (signal.SIGTERM, signal.SIGINT)) -> Iterator[None]:
    """Signals that would end us wait until the block is done."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(task: Task) -> Worker:
    context = multiprocessing.get_context("forkserver")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_enter, args=(theirs, task), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, mine)


def _end(workers: list[Worker]) -> None:
    for w in workers:
        w.process.kill()
    for w in workers:
        w.process.join()
        w.channel.close()


def _results(workers: list[Worker]) -> list[Any]:
    """The answers of all workers; the most telling failure of any is raised."""
    answers: dict[int, Any] = {}
    failures: dict[int, Exception] = {}
    deadline: float | None = None
    while len(answers) + len(failures) < len(workers):
        waiting = {w.channel: rank for rank, w in enumerate(workers) if rank not in {*answers, *failures}}
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            break
        for ready in connection.wait(list(waiting), timeout=left):
            rank = waiting[ready]
            try:
                answers[rank] = _received(workers[rank], rank)
            except Exception as error:
                failures[rank] = error
        if failures and deadline is None:
            deadline = time.monotonic() + GRACE
    if failures:
        raise min(failures.values(), key=lambda e: (_is_echo(e), isinstance(e, TransferError)))
    return [answers[rank] for rank in range(len(workers))]


def _received(worker: Worker, rank: int) -> Any:
    """What a worker says; its failure is raised."""
    try:
        ok, value = worker.channel.recv()
    except EOFError:
        worker.process.join(GRACE)
        code = worker.process.exitcode
        word = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with code {code}"
        raise TransferError(f"the worker of rank {rank} {word} before it was done") from None
    if not ok:
        raise value
    return value


def _is_echo(error: Exception) -> bool:
    """Whether a failure only says that a peer is gone."""
    return isinstance(error, TransferError) and "gloo failed" in str(error)


# --- inside a worker ----------------------------------------------------------------------


def _enter(channel: Any, task: Task) -> NoReturn:
    """The life of a worker; what it answers is all that is left of it."""
    threading.Thread(target=_follow_parent, daemon=True).start()
    torch().set_num_threads(1)
    code = 1
    try:
        channel.send(_answer(channel, task))
        code = 0
    finally:
        os._exit(code)


def _answer(channel: Any, task: Task) -> tuple[bool, Any]:
    try:
        with _met(channel, task) as ctx:
            return True, task.work(ctx, task.argument)
    except ShardalgError as error:
        return False, error
    except Exception as error:
        return False, TransferError(f"rank {task.rank}: {type(error).__name__}: {error}")


def _met(channel: Any, task: Task) -> Any:
    """The live context of all workers. The first opens the port where they meet and says which it is."""
    limit = timedelta(seconds=task.timeout)
    make: Any = torch().distributed.TCPStore
    store = make(HOST, task.port, is_master=not task.rank, wait_for_workers=False, timeout=limit)
    if not task.rank:
        channel.send((True, store.port))
    return sa.backends.cpu(store=store, rank=task.rank, size=task.size, timeout=limit)


def _follow_parent() -> None:
    """End this worker when the process that started it ends, however that happens."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def peak_memory() -> int:
    """The most bytes of memory this process has held (VmHWM), with the pages of mapped files it read."""
    with open("/proc/self/status") as status:
        words = next(line for line in status if line.startswith("VmHWM:")).split()
    return int(words[1]) << 10
