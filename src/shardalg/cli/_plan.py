"""Saying what a reshard would move, without moving anything."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from .._struct import struct
from ..interop._arrangements import transfer
from ..interop._checkpoints import open_checkpoint
from ..interop._outputs import nbytes
from ..show import show
from ._reshard import Options, arranged, origin_of, plan_steps


@struct
class Forecast:
    """What a run would move: tensors and their bytes, copies, bytes on the wire and the fewest possible,
    rounds, most bytes that a rank sends and gets; and the picture as text. No copies: nothing crosses."""

    tensors: int
    nbytes: int
    copies: int
    wire_bytes: int
    lower_bound: int
    rounds: int
    most_sent: int
    most_received: int
    picture: str


def forecast(
    source: str,
    to: str,
    processes: int,
    *,
    start: str | None = None,
    start_processes: int | None = None,
    units: Mapping[str, int] | None = None,
    options: Options = Options(),
) -> Forecast:
    """What ``reshard`` with the same arguments would move. No process starts and no tensor is read."""
    checkpoint = open_checkpoint(source)
    words = dict(checkpoint.units) | dict(units or {})
    target = arranged(checkpoint, to, processes, words)
    origin, _ = origin_of(checkpoint, target, start, start_processes or processes, words)
    size = sum(map(nbytes, checkpoint.logical.values()))
    if origin is target:
        picture = "read in the slices of the new layout: nothing crosses"
        return Forecast(len(checkpoint.logical), size, 0, 0, 0, 0, 0, 0, picture)
    programs = [s.program for s in plan_steps(origin, target, options) if s.program is not None]
    tree = transfer(origin, target)
    sent, received = (Counter[int](), Counter[int]())
    for program in programs:
        sent.update(program.sent)
        received.update(program.received)
    return Forecast(
        len(checkpoint.logical), size, len(tree), sum(p.wire_bytes for p in programs),
        sum(p.lower_bound or 0 for p in programs), sum(len(p.rounds) for p in programs),
        max(sent.values(), default=0), max(received.values(), default=0), str(show(tree)),
    )  # fmt: skip
