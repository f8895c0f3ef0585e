"""Arguments in, text and an exit code out."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from .._errors import ShardalgError, TransferError
from ..interop._checkpoints import open_checkpoint
from ..interop._layout_files import shipped
from ._inspect import inspect, say_bytes
from ._reshard import FULL, Options, Summary, reshard

DONE, REFUSED, FAILED = 0, 1, 3  # argparse itself ends with 2
TERMINATED = 128 + signal.SIGTERM
INTERRUPTED = 128 + signal.SIGINT


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
    look = commands.add_parser("inspect", help="say what a checkpoint holds")
    look.add_argument("path", help="a .safetensors file, an index, or a folder")
    look.set_defaults(command=_inspect)
    return top


def _add_reshard(p: argparse.ArgumentParser) -> None:
    layouts = f"a TOML layout file, or one that ships with this tool: {', '.join(shipped())}"
    p.description = (
        "Read SRC (a Hugging Face checkpoint, or a folder this tool wrote) by slices, move the tensors"
        " between live processes, and write DST, which appears under its name only when complete."
    )
    p.add_argument("src", metavar="SRC", help="a .safetensors file, an index, or a folder")
    p.add_argument(
        "dst", metavar="DST", help="a folder, or with --to full a .safetensors file; must not exist"
    )
    p.add_argument(
        "--to", required=True, metavar="LAYOUT", help=f"{layouts}; or {FULL} for a plain checkpoint"
    )
    p.add_argument("--processes", required=True, type=_count, metavar="N", help="ranks of the new layout")
    p.add_argument(
        "--from", dest="start", metavar="LAYOUT", help="read a plain SRC in this layout, then move it"
    )
    p.add_argument("--from-processes", type=_count, metavar="M", help="ranks of --from (default N)")
    p.add_argument(
        "--unit", action="append", default=[], type=_unit, metavar="WORD=SIZE", help="as in --unit head=64"
    )
    p.add_argument(
        "--group-bytes", type=_count, default=Options.group_bytes, help="bytes of tensors moved at once"
    )
    p.add_argument(
        "--max-bytes", type=_count, default=Options.max_bytes, help="bytes staged by a rank at once"
    )
    p.add_argument(
        "--file-bytes", type=_count, default=Options.file_bytes, help="bytes of tensors in a plain file"
    )
    p.add_argument(
        "--timeout", type=_count, default=int(Options.timeout), help="seconds to wait for a process"
    )
    p.set_defaults(command=_reshard)


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
    for line in inspect(open_checkpoint(given.path)):
        print(line)


def _reshard(given: argparse.Namespace) -> None:
    options = Options(given.group_bytes, given.max_bytes, given.file_bytes, float(given.timeout))
    summary = reshard(
        given.src, given.dst, given.to, given.processes, start=given.start,
        start_processes=given.from_processes, units=dict(given.unit), options=options,
    )  # fmt: skip
    print("\n".join(say_summary(summary)))


def say_summary(s: Summary) -> list[str]:
    """The lines printed after a run."""
    return [
        f"{s.tensors} tensors, {say_bytes(s.nbytes)}",
        f"{say_bytes(s.wire_bytes)} on the wire, lower bound {say_bytes(s.lower_bound)}, {s.rounds} rounds",
        f"{s.seconds:.1f} s, at most {say_bytes(s.peak_bytes)} of memory in a process",
    ]
