"""Running a bound plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from typing import Any, NamedTuple, TypeAlias

import torch

from .._errors import InvalidMapError, ShardalgError, TransferError, UnsupportedError
from ..plans import Program
from ._autograd import Past, recorded, wants_gradients
from ._bound import Bound
from ._context import Context, check_context, check_owner, log
from ._eager import eager
from ._job import Job, Shards
from ._opening import Opening, as_ours, check_tag, closed, opened
from ._ready import Ready, ready_for
from ._report import Clock, RunReport
from ._rounds import travel
from ._words import Word

Progress: TypeAlias = Callable[[int, int], None]  # rounds done, rounds in all


@eager
def run(
    ctx: Context,
    bound: Bound,
    shards: Shards,
    out: Shards = None,
    *,
    tag: int | None = None,
    donate: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Shards:
    """Move data: the target's shards from the source's.

    ``shards`` is ``{rank: tensor}`` with the ranks this process holds (ranks of the source
    layout), or ``{name: {rank: tensor}}`` for a tree; where a process holds one rank, a bare
    tensor stands for ``{rank: tensor}``. The result has the same form, with the target's ranks: fresh
    contiguous tensors, zero where no copy writes. With ``out`` (same form) those tensors are
    written instead, untouched where no copy writes, and returned. Inputs never change and no
    output shares memory with them. Shards that other processes hold may be there, and are left alone;
    names that the plan does not know and ranks that the layout does not have are an error. Collective
    over the context; every rank must run the same plans in the same order with the same ``tag``.

    The owner of ``bound`` is checked first, before anything is sent. What is wrong with one
    rank's tensors becomes an error on every rank before any target is touched. A rank that
    dies, stops or never calls makes this raise ``TransferError`` on the others within the context's
    timeout; the context is of no use then.

    ``donate=True`` gives the source tensors up: each becomes empty as soon as its last copy has left.
    ``verify=True`` compares a checksum per copy; a difference is the same error on every rank and names
    the copy. ``progress`` is called with (rounds done, rounds in all) and leaves the context alone.
    ``ctx.last_report`` says what the run did.

    Differentiable where an input requires gradients: the backward runs ``adjoint(plan)``, so it is
    collective too, and every rank must reach it. A rank that could not (it gives ``out``, runs under
    ``no_grad``, or gets no tensor with gradients) makes the run raise ``UnsupportedError`` on all.
    """
    work = _asked(ctx, bound, shards, out, tag, donate, verify, progress)
    return _answer(*ctx.in_turn(work))


@eager
def run_async(
    ctx: Context,
    bound: Bound,
    shards: Shards,
    out: Shards = None,
    *,
    tag: int | None = None,
    donate: bool = False,
    verify: bool = False,
    progress: Progress | None = None,
) -> Handle:
    """``run`` in the background. Runs of one context follow each other in the order of the calls, these
    and plain ones, so every rank must call in one order. Leave the tensors alone until ``wait()``."""
    work = _asked(ctx, bound, shards, out, tag, donate, verify, progress)
    inference = torch.is_inference_mode_enabled()
    fence = getattr(ctx.transport, "fence", None)
    ready = fence() if fence is not None else None

    def later() -> Performed:
        if ready is not None:
            ready()
        with torch.inference_mode(inference):
            performed = work()
        if ready is not None:
            ctx.transport.settle()  # type: ignore[attr-defined]
        return performed

    return Handle(ctx, ctx.later(later))


class Handle:
    """A run in the background."""

    def __init__(self, ctx: Context, work: Future[Performed]) -> None:
        self._ctx, self._work = ctx, work
        self._answers: list[Shards] = []

    def __repr__(self) -> str:
        return f"<Handle of a run, {'done' if self.done() else 'going on'}>"

    def done(self) -> bool:
        """Whether the run has ended, well or not."""
        return self._work.done()

    def wait(self, timeout: float | None = None) -> Shards:
        """The result of the run, or its error; ``TimeoutError`` after ``timeout`` seconds, and it goes on."""
        if not self._work.done():
            self._ctx.check_free()
        if not self._answers:
            try:
                performed = self._work.result(timeout)
            except CancelledError as error:
                raise TransferError("the context was closed before this run began") from error
            self._answers.append(_answer(*performed))
        return self._answers[0]


# --- one run ------------------------------------------------------------------------------


class Call(NamedTuple):
    """How to run: the caller's options, and whether this is the backward of run ``tag``."""

    tag: int | None
    donate: bool
    verify: bool
    progress: Progress | None
    gradients: bool
    back: bool = False


class Performed(NamedTuple):
    """A run that ended well, and what its backward needs, if there is one."""

    job: Job
    past: Past | None


def _asked(
    ctx: Context, bound: Bound, shards: Shards, out: Shards,
    tag: int | None, donate: bool, verify: bool, progress: Progress | None,
) -> Callable[[], Performed]:  # fmt: skip
    """The run that the caller asks for, once its owner is checked."""
    check_owner(ctx, bound)
    call = Call(tag, donate, verify, progress, torch.is_grad_enabled())
    return lambda: perform(ctx, bound.program, shards, out, call)


def _check(call: Call) -> None:
    """Raise unless the options are of the right kind."""
    check_tag(call.tag)
    if call.progress is not None and not callable(call.progress):
        raise InvalidMapError(
            f"progress must be a function of (rounds done, rounds in all), got {call.progress!r}"
        )


def _answer(job: Job, past: Past | None) -> Shards:
    return job.answer(job.results if past is None else recorded(past, back))


def perform(ctx: Context, program: Program, shards: Shards, out: Shards, call: Call) -> Performed:
    """Run ``program`` from opening to closing words."""
    clock, number = Clock(), ctx.runs
    ctx.runs += 1
    ctx.note = f"; every rank must go back through run {call.tag}" if call.back else ""
    ctx.at("opening", Word(number, -1, False))
    with clock.phase("prepare"):
        job, ready, opening, refusal = _prepared(ctx, program, shards, out, call)
    wanted = opening.gradients
    with clock.phase("open"):
        if ready.rounds:
            wanted = opened(ctx, opening, refusal)
        elif refusal is not None:
            raise refusal
    ctx.note = ""
    past = Past.of(ctx, ready, job, number) if wanted else None
    wrong = travel(ctx, ready, job, call.verify, call.donate, call.progress, clock)
    with clock.phase("close"):
        if ready.rounds:
            ctx.at("closing", Word(number, ready.rounds, False), touched=out is not None)
            _raise_wrong(ctx, ready, closed(ctx, wrong), out is not None)
    ctx.at("idle", Word(number, ready.rounds, True))
    ctx.reports(lambda: _report(ready, call.tag, number, clock))
    if log.isEnabledFor(logging.DEBUG):
        log.debug("%s", ctx.last_report)
    return Performed(job, past)


def _prepared(
    ctx: Context, program: Program, shards: Shards, out: Shards, call: Call
) -> tuple[Job, Ready, Opening, ShardalgError | None]:
    """The tensors, the program, this rank's opening word, and what this rank has against the run."""
    job = Job(ctx, program)
    refusal = _refusal(lambda: _check(call)) or _refusal(lambda: job.take(shards, out))
    ready = ready_for(ctx, program, job, refusal)
    refusal = refusal or _refusal(lambda: ready.check_forms(shards, out))
    refusal = refusal or _refusal(lambda: job.allocate(ready.program))
    wanted = refusal is None and call.gradients and wants_gradients(job)
    refusal = refusal or _refusal(lambda: _check_kept(call, wanted))
    records = call.gradients and out is None
    opening = Opening(refusal is not None, wanted, records, call.verify, call.back, call.tag, ready.word)
    return job, ready, opening, refusal


def back(past: Past, shards: Shards) -> Performed:
    """The backward of an earlier run."""
    ctx = past.ctx
    check_context(ctx)
    call = Call(past.number, False, False, None, torch.is_grad_enabled(), back=True)
    return ctx.in_turn(lambda: perform(ctx, past.ready.adjoint, shards, None, call))


def _check_kept(call: Call, wanted: bool) -> None:
    """Raise where what requires gradients would be given up."""
    if call.donate and wanted:
        raise UnsupportedError(
            "donate=True gives up tensors that require gradients: detach them, or run under torch.no_grad()"
        )


def _refusal(check: Callable[[], Any]) -> ShardalgError | None:
    """What this rank has against the run: whatever it is, the others must hear of it."""
    try:
        check()
    except Exception as error:
        return as_ours(error)
    return None


def _raise_wrong(ctx: Context, ready: Ready, wrong: dict[int, int], touched: bool) -> None:
    """Every rank raises the same error where one received other bytes than were sent."""
    if not wrong:
        return
    rank, number = next(iter(wrong.items()))
    what = "one of its copies" if ready.partial and rank not in ctx.ranks else ready.checks.say(number)
    raise TransferError(f"rank {rank} received other bytes than were sent in {what}", targets_touched=touched)


def _report(ready: Ready, tag: int | None, number: int, clock: Clock) -> RunReport:
    moved, ranks = ready.moved, ready.ranks
    sent, received = (sum(side.get(r, 0) for r in ranks) for side in (moved.sent, moved.received))
    return RunReport(
        number, tag, ready.rounds, moved.wire_bytes, ready.lower_bound, sent, received, moved.peak_staging,
        tuple(clock.spent.items()),
    )  # fmt: skip
