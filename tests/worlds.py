"""Worlds to run on: threads of this process over real gloo groups, and processes kept between tests."""

import itertools
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
import time
import traceback
from datetime import timedelta
from multiprocessing import connection
from typing import NamedTuple

import torch
import torch.distributed as dist

import shardalg as sa

TIMEOUT = 5.0  # seconds a message may take
PATIENCE = 60.0  # seconds before a test is given up
PRELOAD = ["torch", "torch.distributed", "shardalg.backends", "worlds", "torch_groups"]


class Outcome(NamedTuple):
    """What each rank returned (None where it raised) and what it raised (None where it did not)."""

    results: list
    errors: list

    def good(self):
        """The results, where nobody raised."""
        for error in self.errors:
            if error is not None:
                raise error
        return self.results


def world(n, fn, *, timeout=TIMEOUT, strategy="fused", before=None):
    """``fn(ctx)`` on ``n`` ranks, one thread each, over a gloo group of their own. ``before(ctx)`` runs
    first, e.g. to wrap the transport. A rank that raises closes its context, so the others hear."""
    store = dist.HashStore()
    results, errors = [None] * n, [None] * n

    def rank(r):
        mine = dist.PrefixStore("world", store)
        limit = timedelta(seconds=timeout)
        try:
            with sa.backends.cpu(store=mine, rank=r, size=n, timeout=limit, strategy=strategy) as ctx:
                if before is not None:
                    before(ctx)
                results[r] = fn(ctx)
        except BaseException as error:
            errors[r] = error

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(PATIENCE)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return Outcome(results, errors)


# --- processes ----------------------------------------------------------------------------


class Broken(Exception):
    """What a worker raised, as text: the kind of error first."""

    def __init__(self, kind, text, touched=None):
        super().__init__(kind, text, touched)
        self.kind, self.text, self.touched = kind, text, touched

    def __str__(self):
        return f"{self.kind}: {self.text}"


class Team:
    """Some worker processes that stay between calls. Each call has a store of its own, in a file: a
    connection to a TCP store asks name servers who it is, and waits for those that do not answer."""

    def __init__(self, size):
        context = multiprocessing.get_context("forkserver")
        multiprocessing.set_forkserver_preload(PRELOAD)
        self.folder = tempfile.mkdtemp(prefix="shardalg-")
        self.pipes, self.workers = [], []
        self.calls = itertools.count()
        for rank in range(size):
            mine, theirs = context.Pipe()
            worker = context.Process(target=serve, args=(theirs, rank, size, self.folder), daemon=True)
            worker.start()
            theirs.close()
            self.pipes.append(mine)
            self.workers.append(worker)

    def start(self, fn, *args, timeout=TIMEOUT, **options):
        """Have every worker do ``fn(ctx, *args)`` on a fresh context; do not wait."""
        call = (next(self.calls), fn, args, timeout, options)
        for pipe in self.pipes:
            pipe.send(call)

    def finish(self):
        """What every worker answered; ``Broken("Gone", ...)`` for one that is gone."""
        answers = [self._answer(pipe, worker) for pipe, worker in zip(self.pipes, self.workers)]
        return Outcome([a if not isinstance(a, Broken) else None for a in answers],
                       [a if isinstance(a, Broken) else None for a in answers])  # fmt: skip

    def run(self, fn, *args, **options):
        self.start(fn, *args, **options)
        return self.finish()

    def _answer(self, pipe, worker):
        ready = connection.wait([pipe, worker.sentinel], PATIENCE)
        if not ready:
            return Broken("Hangs", f"worker {worker.pid} gave no answer within {PATIENCE} s")
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return Broken("Gone", f"worker {worker.pid} is gone")

    def close(self):
        for pipe, worker in zip(self.pipes, self.workers):
            worker.kill()
            worker.join()
            pipe.close()
        shutil.rmtree(self.folder)


def serve(pipe, rank, size, folder):
    """A worker: answer calls until the pipe closes."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    while True:
        try:
            number, fn, args, timeout, options = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(answer(number, fn, args, timeout, options, rank, size, folder))


def answer(number, fn, args, timeout, options, rank, size, folder):
    limit = timedelta(seconds=timeout)
    try:
        mine = dist.FileStore(f"{folder}/{number}", size)
        with sa.backends.cpu(store=mine, rank=rank, size=size, timeout=limit, **options) as ctx:
            return fn(ctx, *args)
    except BaseException as error:
        text = str(error) if isinstance(error, sa.ShardalgError) else traceback.format_exc()
        return Broken(type(error).__name__, text, getattr(error, "targets_touched", None))


def wait_for(happens, seconds=10.0):
    """Wait until ``happens()`` is true."""
    end = time.monotonic() + seconds
    while not happens():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


def exists(pid):
    """Whether a process is there and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def here():
    """This process's number, as a function that workers can run."""
    return os.getpid()


def shared_files() -> set[str]:
    """Files in shared memory; benchmarks and locks of programs that run beside the tests have their own."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(("shardalg-bench", "sem."))}
