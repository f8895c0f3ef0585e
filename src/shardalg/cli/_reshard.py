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
from ..interop._checkpoints import Checkpoint, load
from ..interop._layout_files import Matches
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
from ._prepare import FULL, Prepared, Request, Step, prepared
from ._progress import draw
from ._workers import peak_memory, run_workers, warm_up


@struct
class Job:
    """What every worker does."""

    checkpoint: Checkpoint
    steps: tuple[Step, ...]
    output: Output
    progress: bool = False


@struct
class Writing:
    """Where a run writes, whether what is there is replaced, and whether a bar is drawn."""

    destination: str
    force: bool = False
    progress: bool = False


@struct
class Summary:
    """What a run did: tensors and their bytes, bytes on the wire and the fewest possible, seconds, the most
    bytes of memory that any worker held; what it wrote, in how many tensor files of how many bytes, and which
    patterns placed the tensors."""

    tensors: int
    nbytes: int
    wire_bytes: int
    lower_bound: int
    rounds: int
    seconds: float
    peak_bytes: int
    path: str
    files: int
    file_bytes: int
    matches: Matches | None = None


def reshard(request: Request, writing: Writing, *, joined: bool = False) -> Summary | None:
    """Write the checkpoint of a request in its new layout.

    Everything that can be refused is refused before a process starts. ``joined``: this is one of the
    processes that ``torchrun`` started, on one or many machines that share the file system, and all call it;
    the first gets the summary, the others None.
    """
    begun = time.monotonic()
    require_free(Path(writing.destination), writing.force, Path(request.source))
    task = prepared(request)
    peaks = _joined(task, writing) if joined else _started(task, writing)
    return _summary(task, Path(writing.destination), time.monotonic() - begun, max(peaks)) if peaks else None


def _started(task: Prepared, writing: Writing) -> list[int]:
    """The run in processes that we start; the most bytes of memory that each held."""
    warm_up()
    with appearing(writing.destination, force=writing.force) as folder:
        job = _job(task, folder, writing)
        prepare(job.output)
        peaks: list[int] = run_workers(work, job, task.count, timeout=task.request.options.timeout)
        finish(job.output)
    return peaks


def _joined(task: Prepared, writing: Writing) -> list[int]:
    """The same as one of the processes there are; no numbers but on the first."""
    with sa.backends.cpu(timeout=timedelta(seconds=task.request.options.timeout)) as ctx:
        if len(ctx.peers) < task.count:
            raise InvalidMapError(
                f"the layouts have {task.count} ranks, torchrun started {len(ctx.peers)} processes; pass"
                f" --nproc-per-node {task.count}"
            )
        if ctx.ranks[0] != min(ctx.peers):
            job = _job(task, partial(Path(writing.destination)), writing)
            _gathered(ctx, 0)  # the files are there
            _gathered(ctx, work(ctx, job))
            return []
        with appearing(writing.destination, force=writing.force) as folder:
            job = _job(task, folder, writing)
            prepare(job.output)
            _gathered(ctx, 0)
            peaks = _gathered(ctx, work(ctx, job))
            finish(job.output)
    return peaks


def _gathered(ctx: Any, number: int) -> list[int]:
    """A number of every process, once all are here."""
    return [int(word) for word in ctx.gather({ctx.ranks[0]: b"%d" % number}).values()]


def _job(task: Prepared, folder: Path, writing: Writing) -> Job:
    return Job(task.checkpoint, task.steps, _output(folder, task), writing.progress)


def _output(folder: Path, task: Prepared) -> Output:
    request, metadata = task.request, dict(task.checkpoint.metadata)
    single = folder.name.endswith(".safetensors.partial")
    if request.to == FULL:
        most = sys.maxsize if single else request.options.file_bytes
        return plain_output(folder, task.checkpoint.logical, request.processes, metadata, most)
    if single:
        raise InvalidMapError(f"a layout on ranks is written to a folder, not to {folder.name[1:-8]}")
    return rank_output(folder, dict(task.target), request.processes, metadata, dict(task.units))


def work(ctx: Any, job: Job) -> int:
    """One rank's part: step by step read, move, write. The most bytes of memory it held."""
    (rank,) = ctx.ranks
    for k, step in enumerate(job.steps):
        shards = load(job.checkpoint, dict(step.sources), rank)
        save(job.output, rank, moved(ctx, step, shards))
        draw(job.progress and rank == min(ctx.peers), k + 1, len(job.steps), "steps")
    return peak_memory()


def moved(ctx: Any, step: Step, shards: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's shards ``{name: tensor}`` after a step."""
    if step.program is None:
        return dict(shards)
    (rank,) = ctx.ranks
    given = {name: {rank: shards[name]} if name in shards else {} for name, _ in step.sources}
    out = sa.run(ctx, sa.bind(ctx, step.program), given)
    return {name: its[rank] for name, its in out.items() if rank in its}


def _summary(task: Prepared, path: Path, seconds: float, peak: int) -> Summary:
    tensors, programs = task.checkpoint.logical, task.programs
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    return Summary(
        len(tensors), sum(map(nbytes, tensors.values())), sum(p.wire_bytes for p in programs),
        sum(p.lower_bound or 0 for p in programs), sum(len(p.rounds) for p in programs), seconds, peak,
        str(path), len(files), sum(f.stat().st_size for f in files), task.matches,
    )  # fmt: skip
