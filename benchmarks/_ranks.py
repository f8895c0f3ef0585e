"""Methods timed side by side over several processes.

Every method once per round inside one process group, order rotated; a method's time is from the
earliest start to the latest end over ranks; ratios are medians over rounds.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Call = Callable[[], Any]
Setup = Callable[..., "Methods"]


@dataclass
class Methods:
    """What one rank can do: calls by name, a check of each result, and what else to report."""

    calls: dict[str, Call]
    checks: dict[str, Callable[[Any], bool]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    close: Call = lambda: None


@dataclass(frozen=True)
class Times:
    """Seconds of each method by round, processor seconds over all ranks, and every rank's facts."""

    seconds: Mapping[str, list[float]]
    work: Mapping[str, list[float]]
    facts: list[dict[str, Any]]

    def median(self, name: str) -> float:
        return statistics.median(self.seconds[name])

    def ratio(self, slow: str, quick: str) -> float:
        """How many times ``quick`` is faster than ``slow``: median of per-round ratios."""
        return statistics.median(a / b for a, b in zip(self.seconds[slow], self.seconds[quick]))

    def work_ratio(self, slow: str, quick: str) -> float:
        """The same for processor seconds, which other programs on the machine disturb less."""
        return statistics.median(a / b for a, b in zip(self.work[slow], self.work[quick]))


def timed(setup: Setup, ranks: int, *arguments: Any, rounds: int = 9) -> Times:
    """Run ``setup(rank, *arguments)`` in ``ranks`` processes and time the methods it returns."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.tensor", "shardalg.backends"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes, workers = [], []
    for rank in range(ranks):
        mine, theirs = context.Pipe(duplex=False)
        worker = context.Process(
            target=_work, args=(theirs, store.port, rank, ranks, setup, arguments, rounds), daemon=True
        )
        worker.start()
        theirs.close()
        pipes.append(mine)
        workers.append(worker)
    patience = 0.0
    try:
        answers = [pipe.recv() for pipe in pipes]
        patience = 30.0
    finally:
        for worker in workers:
            worker.join(patience)
            worker.kill()
            worker.join()
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    spans = {name: _spans([a[0][name] for a in answers]) for name in answers[0][0]}
    work = {name: [sum(x[2] for x in its) for its in zip(*(a[0][name] for a in answers))] for name in spans}
    return Times(spans, work, [a[1] for a in answers])


Span = tuple[float, float, float]  # start, end, processor seconds


def _spans(by_rank: list[list[Span]]) -> list[float]:
    return [max(x[1] for x in its) - min(x[0] for x in its) for its in zip(*by_rank)]


def _work(
    channel: Any, port: int, rank: int, ranks: int, setup: Setup, arguments: tuple[Any, ...], rounds: int
) -> None:
    torch.set_num_threads(1)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
        )
        methods = setup(rank, *arguments)
        channel.send((_rounds(methods, rounds), methods.facts))
        methods.close()
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        channel.send(RuntimeError(f"rank {rank}: {type(error).__name__}: {error}"))


def _rounds(methods: Methods, rounds: int) -> dict[str, list[Span]]:
    names = list(methods.calls)
    for name in names:
        _warm(name, methods)
    found: dict[str, list[Span]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    for k in range(rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            dist.barrier()
            start, busy = time.monotonic(), time.process_time()
            result = methods.calls[name]()
            found[name].append((start, time.monotonic(), time.process_time() - busy))
            del result  # freed before the next barrier
    gc.enable()
    return found


def _warm(name: str, methods: Methods) -> None:
    for _ in range(2):
        result = methods.calls[name]()
        check = methods.checks.get(name)
        if check is not None and not check(result):
            raise RuntimeError(f"{name} gives a wrong result")
