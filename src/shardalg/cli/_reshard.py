"""Resharding a checkpoint: read slices, move them between live processes, write what each holds."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import shardalg as sa  # its backends load torch on first use

from .._errors import InvalidMapError
from .._struct import struct
from ..interop._arrangements import Arrangement, Stored, components, even, logical_tensors, transfer
from ..interop._checkpoints import Checkpoint, load, open_checkpoint
from ..interop._layout_files import arrange, read_layout_file
from ..interop._outputs import (
    Output,
    appearing,
    finish,
    nbytes,
    partial,
    plain_output,
    prepare,
    rank_output,
    require_free,
    save,
)
from ..ops import schedule
from ..plans import Program, TreePlan
from ._workers import peak_memory, run_workers, warm_up

FULL = "full"
BAR = 24  # characters


@struct
class Step:
    """Tensors that are read, moved and written together. Without a program they stay where they are read."""

    sources: tuple[tuple[str, Stored], ...]
    program: Program | None


@struct
class Job:
    """What every worker does."""

    checkpoint: Checkpoint
    steps: tuple[Step, ...]
    output: Output
    progress: bool = False


@struct
class Summary:
    """What a run did: tensors and their bytes, bytes on the wire and the fewest possible, seconds, and the
    most bytes of memory that any worker held."""

    tensors: int
    nbytes: int
    wire_bytes: int
    lower_bound: int
    rounds: int
    seconds: float
    peak_bytes: int


@struct
class Options:
    """The numbers of a run: how many bytes are moved at once, staged per rank, put in one file; seconds."""

    group_bytes: int = 256 << 20
    max_bytes: int = 64 << 20
    file_bytes: int = 5 * 10**9
    timeout: float = 300.0


def reshard(
    source: str,
    destination: str,
    to: str,
    processes: int,
    *,
    start: str | None = None,
    start_processes: int | None = None,
    units: Mapping[str, int] | None = None,
    options: Options = Options(),
    force: bool = False,
    progress: bool = False,
) -> Summary:
    """Write the checkpoint at ``source`` to ``destination`` in the layout ``to`` on ``processes`` ranks.

    ``to`` is a layout file, one that ships with the library, or ``"full"`` for a plain checkpoint. A plain
    source is read in the target's slices, so that nothing crosses; with ``start`` (a layout, on
    ``start_processes`` ranks) it is read in that one and moved. Everything that can be refused is refused
    before a process starts. ``force`` replaces what is at ``destination``, once the new is complete;
    ``progress`` draws a bar on the standard error stream.
    """
    begun = time.monotonic()
    require_free(Path(destination), force, Path(source))
    task = prepared(source, to, processes, start, start_processes, units, options)
    warm_up()
    with appearing(destination, force=force) as folder:
        job = _job(task, folder, progress)
        prepare(job.output)
        peaks = run_workers(work, job, task.count, timeout=options.timeout)
        finish(job.output)
    return _summary(task.checkpoint, task.steps, time.monotonic() - begun, max(peaks))


def reshard_joined(
    source: str,
    destination: str,
    to: str,
    processes: int,
    *,
    start: str | None = None,
    start_processes: int | None = None,
    units: Mapping[str, int] | None = None,
    options: Options = Options(),
    force: bool = False,
    progress: bool = False,
) -> Summary | None:
    """``reshard`` as one of the processes that ``torchrun`` started, on one or many machines that share the
    file system. Collective; the first returns the summary, the others None."""
    begun = time.monotonic()
    require_free(Path(destination), force, Path(source))
    task = prepared(source, to, processes, start, start_processes, units, options)
    with sa.backends.cpu(timeout=timedelta(seconds=options.timeout)) as ctx:
        if len(ctx.peers) < task.count:
            raise InvalidMapError(
                f"the layouts have {task.count} ranks, torchrun started {len(ctx.peers)} processes; pass"
                f" --nproc-per-node {task.count}"
            )
        if ctx.ranks[0] != min(ctx.peers):
            job = _job(task, partial(Path(destination)), progress)
            _gathered(ctx, 0)  # the files are there
            _gathered(ctx, work(ctx, job))
            return None
        with appearing(destination, force=force) as folder:
            job = _job(task, folder, progress)
            prepare(job.output)
            _gathered(ctx, 0)
            peaks = _gathered(ctx, work(ctx, job))
            finish(job.output)
    return _summary(task.checkpoint, task.steps, time.monotonic() - begun, max(peaks))


def _gathered(ctx: Any, number: int) -> list[int]:
    """A number of every process, once all are here."""
    return [int(word) for word in ctx.gather({ctx.ranks[0]: b"%d" % number}).values()]


@struct
class Prepared:
    """A run that nothing refuses: what is read, the new arrangement, the steps, how many ranks take part."""

    checkpoint: Checkpoint
    to: str
    target: tuple[tuple[str, Stored], ...]
    steps: tuple[Step, ...]
    processes: int
    count: int
    units: tuple[tuple[str, int], ...]
    options: Options


def prepared(
    source: str,
    to: str,
    processes: int,
    start: str | None,
    start_processes: int | None,
    units: Mapping[str, int] | None,
    options: Options,
) -> Prepared:
    """Everything about a run but its output; what can be refused is refused here."""
    checkpoint = open_checkpoint(source)
    words = dict(checkpoint.units) | dict(units or {})
    target = arranged(checkpoint, to, processes, words)
    origin, count = origin_of(checkpoint, target, start, start_processes or processes, words)
    steps = plan_steps(origin, target, options)
    return Prepared(
        checkpoint, to, tuple(target.items()), steps, processes, max(processes, count),
        tuple(words.items()), options,
    )  # fmt: skip


def _job(task: Prepared, folder: Path, progress: bool) -> Job:
    output = _output(
        folder, task.checkpoint, task.to, dict(task.target), task.processes, dict(task.units), task.options
    )
    return Job(task.checkpoint, task.steps, output, progress)


def arranged(checkpoint: Checkpoint, to: str, processes: int, units: Mapping[str, int]) -> dict[str, Stored]:
    """The arrangement that ``to`` means for a checkpoint."""
    if processes < 1:
        raise InvalidMapError(f"the number of processes must be at least 1, got {processes}")
    if to == FULL:
        return even(checkpoint.logical, processes)
    return arrange(read_layout_file(to), checkpoint.logical, processes, units)


def origin_of(
    checkpoint: Checkpoint,
    target: dict[str, Stored],
    start: str | None,
    processes: int,
    units: Mapping[str, int],
) -> tuple[dict[str, Stored], int]:
    """How the workers hold the source after reading, and how many do."""
    if not checkpoint.plain:
        if start is not None:
            raise InvalidMapError(f"{checkpoint.path} says itself how it is stored: leave out --from {start}")
        return dict(checkpoint.stored), max(checkpoint.ranks) + 1
    return (target, 1) if start is None else (arranged(checkpoint, start, processes, units), processes)


def plan_steps(origin: dict[str, Stored], target: dict[str, Stored], options: Options) -> tuple[Step, ...]:
    """Groups of tensors that are moved together, each of about ``options.group_bytes`` bytes."""
    groups: list[tuple[list[str], list[str]]] = [([], [])]
    room = options.group_bytes
    for here, there in components(origin, target):
        size = sum(map(nbytes, logical_tensors({n: target[n] for n in there}).values()))
        if groups[-1][1] and size > room:
            groups.append(([], []))
            room = options.group_bytes
        groups[-1][0].extend(here)
        groups[-1][1].extend(there)
        room -= size
    if origin is target:
        return tuple(Step(_picked(origin, here), None) for here, _ in groups)
    entries = {e.target: e for e in transfer(origin, target).entries}
    plans = (TreePlan(tuple(entries[n] for n in there)) for _, there in groups)
    dtypes = [{n: target[n].dtype for n in there} for _, there in groups]
    programs = [schedule(p, max_bytes=options.max_bytes, dtypes=d) for p, d in zip(plans, dtypes)]
    return tuple(Step(_picked(origin, here), p) for (here, _), p in zip(groups, programs))


def _picked(arrangement: Arrangement, names: list[str]) -> tuple[tuple[str, Stored], ...]:
    return tuple((name, arrangement[name]) for name in names)


def _output(
    folder: Path,
    checkpoint: Checkpoint,
    to: str,
    target: Arrangement,
    processes: int,
    units: Mapping[str, int],
    options: Options,
) -> Output:
    single = folder.name.endswith(".safetensors.partial")
    if to == FULL:
        most = sys.maxsize if single else options.file_bytes
        return plain_output(folder, checkpoint.logical, processes, dict(checkpoint.metadata), most)
    if single:
        raise InvalidMapError(f"a layout on ranks is written to a folder, not to {folder.name[1:-8]}")
    return rank_output(folder, target, processes, dict(checkpoint.metadata), units)


def work(ctx: Any, job: Job) -> int:
    """One rank's part: step by step read, move, write. The most bytes of memory it held."""
    (rank,) = ctx.ranks
    for k, step in enumerate(job.steps):
        shards = load(job.checkpoint, dict(step.sources), rank)
        save(job.output, rank, moved(ctx, step, shards))
        if job.progress and rank == min(ctx.peers):
            print(bar(k + 1, len(job.steps)), end="", file=sys.stderr, flush=True)
    return peak_memory()


def bar(done: int, total: int) -> str:
    """A bar that is drawn over the one before it; the last ends its line.

    >>> bar(1, 4), bar(4, 4)
    ('\\r[######                  ] 1/4 steps', '\\r[########################] 4/4 steps\\n')
    """
    full = BAR * done // total
    return f"\r[{'#' * full}{' ' * (BAR - full)}] {done}/{total} steps" + ("\n" if done == total else "")


def moved(ctx: Any, step: Step, shards: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's shards ``{name: tensor}`` after a step."""
    if step.program is None:
        return dict(shards)
    (rank,) = ctx.ranks
    given = {name: {rank: shards[name]} if name in shards else {} for name, _ in step.sources}
    out = sa.run(ctx, sa.bind(ctx, step.program), given)
    return {name: its[rank] for name, its in out.items() if rank in its}


def _summary(checkpoint: Checkpoint, steps: tuple[Step, ...], seconds: float, peak: int) -> Summary:
    programs = [s.program for s in steps if s.program is not None]
    tensors = checkpoint.logical
    return Summary(
        len(tensors), sum(map(nbytes, tensors.values())), sum(p.wire_bytes for p in programs),
        sum(p.lower_bound or 0 for p in programs), sum(len(p.rounds) for p in programs), seconds, peak,
    )  # fmt: skip
