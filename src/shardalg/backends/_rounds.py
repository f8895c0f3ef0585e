"""The rounds of a run, between its opening and closing words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .._errors import TransferError
from ._context import Context
from ._job import Job
from ._ready import Ready
from ._reduce import add_up
from ._report import Clock
from ._transport import Exchange, Outgoing
from ._verify import first_difference, sums_of
from ._words import Word


def travel(
    ctx: Context,
    ready: Ready,
    job: Job,
    verify: bool,
    donate: bool,
    progress: Callable[[int, int], None] | None,
    clock: Clock,
) -> int | None:
    """Do all copies; the number of the first that arrived changed, if ``verify`` finds one.

    An error on the way ends the context, since the other ranks cannot know where this one stopped.
    """
    trip = _Trip(ctx, ready, job, clock)
    try:
        trip.begin()
        for turn in range(ready.turns):
            trip.turn(turn, verify)
            if ready.ends_round(turn):
                _round_done(trip, ready.round_of(turn), donate, progress)
        if not ready.turns:
            _round_done(trip, 0, donate, progress)
        with clock.phase("unpack"):
            trip.end()
    except TransferError as error:
        raise ctx.broken(error) from error
    except BaseException as error:
        ctx.broken(error)
        raise
    return trip.wrong


def _round_done(trip: _Trip, number: int, donate: bool, progress: Callable[[int, int], None] | None) -> None:
    if donate:
        trip.job.leave(trip.ready.leaving[number])
        trip.ctx.note = "; donated tensors that had left are gone"
    if progress is not None:
        progress(number + 1, max(1, trip.ready.rounds if trip.ready.turns else 1))


class _Trip:
    """One pass over the turns of a program: where the tensors are, and what arrived changed."""

    def __init__(self, ctx: Context, ready: Ready, job: Job, clock: Clock) -> None:
        self.ctx, self.ready, self.job, self.clock = ctx, ready, job, clock
        self.wrong: int | None = None
        self.targets = dict(job.targets)
        for entry, its in ready.sums.items():
            dtype = ready.dtype_of(entry)
            for s in its:
                if (entry, s.target) in job.targets:
                    name = f"deposit {entry} {s.deposit.rank} {s.deposit.name}"
                    size = s.deposit.size * dtype.itemsize
                    self.targets[entry, s.deposit] = ctx.buffer(ctx.ranks[0], name, size).view(dtype)

    def begin(self) -> None:
        """Copies that need no message."""
        with self.clock.phase("local"):
            self.ready.stage.local(self.job.sources, self.targets)

    def turn(self, turn: int, verify: bool) -> None:
        """Pack, exchange and unpack the messages of one turn."""
        ctx, stage, clock, rounds = self.ctx, self.ready.stage, self.clock, self.ready.rounds
        number = self.ready.round_of(turn)
        touched = self.job.out is not None
        ctx.at(f"round {number} of {rounds}", Word(ctx.runs - 1, number, False), touched=touched)
        with clock.phase("pack"):
            parts = self.ready.messages(turn, self.job.sources, self.targets)
        with clock.phase("exchange"):
            ctx.counters.exchanges += 1
            ctx.counters.payload_bytes += sum(sum(p.send_bytes) for p in parts.values())
            arrived = stage.swap(parts)
        if verify:
            self._verify(turn, parts, arrived)
        with clock.phase("unpack"):
            if turn < len(stage.turns):
                stage.unpack(turn, arrived, self.targets)

    def end(self) -> None:
        """Add deposits up, and copy back what has no flat view."""
        for entry, its in self.ready.sums.items():
            for s in its:
                if (entry, s.target) in self.job.targets:
                    add_up(s, self.targets[entry, s.deposit], self.job.targets[entry, s.target])
        self.job.store()

    def _verify(self, turn: int, parts: dict[int, Outgoing], arrived: Any) -> None:
        """Exchange the checksums of this turn's copies and compare."""
        checks, peers = self.ready.checks, self.ctx.peers
        exchange = {}
        for rank, part in parts.items():
            said = [sums_of(checks.sent.get((turn, rank, p), []), m) for p, m in zip(peers, part.messages)]
            sizes = [4 * len(checks.received.get((turn, rank, p), ())) for p in peers]
            send, receive = b"".join(said), self.ctx.buffer(rank, "sums in", sum(sizes))
            buffer = self.ctx.buffer(rank, "sums out", len(send))
            if send:
                buffer.copy_(torch.frombuffer(bytearray(send), dtype=torch.uint8))
            exchange[rank] = Exchange(buffer, [len(s) for s in said], receive, sizes)
        self.ctx.transport.exchange(exchange)
        for rank, sums in exchange.items():
            for p, message, theirs in zip(peers, arrived[rank], sums.receive.split(sums.receive_bytes)):
                its = checks.received.get((turn, rank, p), [])
                if its and self.wrong is None:
                    self.wrong = first_difference(its, _tensor(message), theirs.cpu().numpy().tobytes())


def _tensor(message: Any) -> torch.Tensor:
    if not isinstance(message, torch.Tensor):
        raise TransferError(f"a strategy gave a message of type {type(message).__name__}")
    return message
