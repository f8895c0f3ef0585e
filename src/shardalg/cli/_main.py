"""Arguments in, text and an exit code out."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from .._errors import ShardalgError, TransferError
from ..interop._checkpoints import open_checkpoint
from ..interop._layout_files import Matches, shipped
from ..interop._outputs import MAPS
from ..show._drawing import many
from ._convert import Conversion, convert
from ._inspect import describe, held_lines, lines_of, say_bytes
from ._plan import Forecast, forecast
from ._prepare import FULL, Options, Request
from ._reshard import Summary, Writing, reshard

DONE, REFUSED, FAILED = 0, 1, 3  # argparse itself ends with 2
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT
SOURCE = "a .safetensors file, an index, or a folder with either or that this tool wrote"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; the exit code.

    0: done. 1: refused, nothing was started. 2: the arguments make no command. 3: a run failed, nothing is
    left of it.
    """
    given = parser().parse_args(arguments)
    before = signal.signal(signal.SIGTERM, _terminate)
    command: Callable[[argparse.Namespace], None] = given.command
    try:
        command(given)
    except BrokenPipeError:  # whoever read our output has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return DONE
    except TransferError as error:
        return _say(f"the run failed: {error}", FAILED)
    except (ShardalgError, OSError) as error:
        return _say(str(error), REFUSED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    finally:
        signal.signal(signal.SIGTERM, before)
    return DONE


def _say(message: str, code: int) -> int:
    print(f"shardalg: {message}", file=sys.stderr)
    return code


def _terminate(*_: object) -> NoReturn:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # while we clean up
    sys.exit(TERMINATED)


def parser() -> argparse.ArgumentParser:
    """The arguments of the command line."""
    top = argparse.ArgumentParser("shardalg", description="Layouts of checkpoints, and moving between them.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    _add_reshard(commands.add_parser("reshard", help="write a checkpoint in another layout"))
    _add_plan(commands.add_parser("plan", help="say what a reshard would move, and move nothing"))
    _add_convert(commands.add_parser("convert", help="write per-rank files by other DeepSpeed maps"))
    look = commands.add_parser("inspect", help="say what a checkpoint holds")
    look.add_argument("path", help=SOURCE)
    look.add_argument("--json", action="store_true", help="print the same for machines")
    look.set_defaults(command=_inspect)
    return top


def _add_reshard(p: argparse.ArgumentParser) -> None:
    p.description = (
        "Read SRC (a Hugging Face checkpoint, or a folder this tool wrote) by slices, move the tensors"
        " between live processes, and write DST, which appears under its name only when complete. Under"
        " torchrun its processes do the work."
    )
    p.add_argument("src", metavar="SRC", help=SOURCE)
    p.add_argument(
        "dst",
        metavar="DST",
        help="what is written; must not exist, unless --force. A folder with a file per rank and a"
        f" layout.json; with --to {FULL} a folder with whole tensors in model.safetensors (more files and an"
        " index beyond --file-bytes), or, where DST ends in .safetensors, that one file",
    )
    _add_layouts(p)
    p.add_argument(
        "--file-bytes", type=_count, default=Options.file_bytes, help="bytes of tensors in a plain file"
    )
    p.add_argument(
        "--timeout", type=_count, default=int(Options.timeout), help="seconds to wait for a process"
    )
    _add_writing(p)
    p.set_defaults(command=_reshard)


def _add_plan(p: argparse.ArgumentParser) -> None:
    p.description = (
        "Print what reshard with the same arguments would move. Nothing is read, moved or written."
    )
    p.add_argument("src", metavar="SRC", help=SOURCE)
    _add_layouts(p)
    p.add_argument("--json", action="store_true", help="print the numbers for machines")
    p.set_defaults(command=_plan)


def _add_convert(p: argparse.ArgumentParser) -> None:
    p.description = (
        "Read a folder of per-rank safetensors or torch files that DeepSpeed maps describe, and write them by"
        " other maps, weights and moments alike; no full tensor is built."
    )
    p.add_argument("src", metavar="SRC", help="a folder with one file per rank, in the order of their names")
    p.add_argument("dst", metavar="DST", help=f"a folder; the new maps are written beside, as {MAPS}")
    p.add_argument("--map", required=True, metavar="MAPS", help="the maps of SRC: a JSON or torch file")
    p.add_argument("--to", required=True, metavar="MAPS|LAYOUT", help=f"the maps of DST, or {_layouts()}")
    p.add_argument("--processes", type=_count, metavar="N", help="ranks, where --to is a layout")
    p.add_argument("--unit", action="append", default=[], type=_unit, metavar="WORD=SIZE")
    p.add_argument("--without-moments", action="store_true", help="leave optimizer moments out")
    _add_writing(p)
    p.set_defaults(command=_convert)


def _layouts() -> str:
    return f"a TOML layout file, or one that ships with this tool: {', '.join(shipped())}"


def _add_writing(p: argparse.ArgumentParser) -> None:
    p.add_argument(
        "--progress", action=argparse.BooleanOptionalAction, default=sys.stderr.isatty(),
        help="draw a bar on the standard error stream (default: on a terminal)",
    )  # fmt: skip
    p.add_argument("--force", action="store_true", help="replace DST once the new one is complete")
    p.add_argument("--json", action="store_true", help="print the numbers for machines")


def _add_layouts(p: argparse.ArgumentParser) -> None:
    """What says how a checkpoint is stored and is to be."""
    p.add_argument(
        "--to",
        required=True,
        metavar="LAYOUT",
        help=f"{_layouts()}; or {FULL} for whole tensors, as Hugging Face writes them",
    )
    p.add_argument("--processes", required=True, type=_count, metavar="N", help="ranks of the new layout")
    p.add_argument(
        "--from", dest="start", metavar="LAYOUT", help="read a plain SRC in this layout, then move it"
    )
    p.add_argument(
        "--from-processes", type=_count, metavar="M", help="ranks of --from, with which it goes (default N)"
    )
    p.add_argument(
        "--unit", action="append", default=[], type=_unit, metavar="WORD=SIZE", help="as in --unit head=64"
    )
    p.add_argument(
        "--group-bytes", type=_count, default=Options.group_bytes, help="bytes of tensors moved at once"
    )
    p.add_argument(
        "--max-bytes", type=_count, default=Options.max_bytes, help="bytes staged by a rank at once"
    )


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a count of at least 1")
    return int(text)


def _unit(text: str) -> tuple[str, int]:
    word, _, size = text.partition("=")
    if not word:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form WORD=SIZE")
    return word, _count(size)


def _inspect(given: argparse.Namespace) -> None:
    found = describe(open_checkpoint(given.path))
    _print(given, found, lines_of(found))


def _reshard(given: argparse.Namespace) -> None:
    options = Options(given.group_bytes, given.max_bytes, given.file_bytes, float(given.timeout))
    writing = Writing(given.dst, given.force, given.progress)
    torchrun = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(os.environ)
    summary = reshard(_request(given, options), writing, joined=torchrun)
    if summary is not None:  # under torchrun the first rank speaks
        _print(given, summary, say_summary(summary))


def _plan(given: argparse.Namespace) -> None:
    found = forecast(_request(given, Options(given.group_bytes, given.max_bytes)))
    _print(given, found, say_forecast(found))


def _request(given: argparse.Namespace, options: Options) -> Request:
    return Request(
        given.src, given.to, given.processes, given.start, given.from_processes, tuple(given.unit), options
    )


def _convert(given: argparse.Namespace) -> None:
    made = convert(
        given.src, given.dst, given.map, given.to, processes=given.processes,
        moments=not given.without_moments, units=dict(given.unit), force=given.force,
        progress=given.progress,
    )  # fmt: skip
    _print(given, made, say_conversion(made))


def _print(given: argparse.Namespace, value: Any, lines: Iterable[str]) -> None:
    text = json.dumps(dataclasses.asdict(value)) if given.json else "\n".join(lines)
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding))  # a name may be what it cannot write


def say_forecast(f: Forecast) -> list[str]:
    """The lines printed for a plan."""
    lines = [f"{many(f.tensors, 'tensor')}, {say_bytes(f.nbytes)}", *_matches(f.matches)]
    if f.copies:
        lines += [
            f"{many(f.copies, 'copy')}, {_wire(f.wire_bytes, f.lower_bound, f.rounds)}",
            f"a rank sends at most {say_bytes(f.most_sent)} and gets at most {say_bytes(f.most_received)}",
            "", f.picture,
        ]  # fmt: skip
    else:
        lines += [f.picture]
    if f.rank_bytes:
        low, high = min(f.rank_bytes), max(f.rank_bytes)
        each = say_bytes(low) if low == high else f"{say_bytes(low)} to {say_bytes(high)}"
        lines += ["", f"then each of {many(len(f.rank_bytes), 'rank')} holds {each}:", *held_lines(f.held)]
    return lines


def _wire(wire_bytes: int, lower_bound: int, rounds: int) -> str:
    said = f"{say_bytes(wire_bytes)} on the wire, lower bound {say_bytes(lower_bound)}"
    return f"{said}, {many(rounds, 'round')}"


def _matches(matches: Matches | None) -> list[str]:
    return [] if matches is None else [str(matches)]


def say_conversion(c: Conversion) -> list[str]:
    """The lines printed after a conversion."""
    moments = many(c.moments, "moment")
    return [
        f"{many(c.tensors, 'tensor')} ({moments}) from {c.source_ranks} to {many(c.target_ranks, 'rank')}",
        *_matches(c.matches),
        f"{many(c.copies, 'copy')}, {say_bytes(c.nbytes)} written to {c.path}, the new maps as {MAPS} beside",
    ]


def say_summary(s: Summary) -> list[str]:
    """The lines printed after a run."""
    return [
        f"{many(s.tensors, 'tensor')}, {say_bytes(s.nbytes)}",
        *_matches(s.matches),
        _wire(s.wire_bytes, s.lower_bound, s.rounds) if s.rounds else "nothing crossed between ranks",
        f"{s.seconds:.1f} s, at most {say_bytes(s.peak_bytes)} of memory in a process",
        f"wrote {s.path}: {many(s.files, 'tensor file')}, {say_bytes(s.file_bytes)}",
    ]
