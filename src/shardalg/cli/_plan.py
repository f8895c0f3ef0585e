"""Saying what a reshard would move, without moving anything."""

from __future__ import annotations

from collections import Counter

from .._struct import struct
from ..interop._outputs import nbytes
from ..show import show
from ._prepare import Request, prepared


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


def forecast(request: Request) -> Forecast:
    """What a reshard of the same request would move. No process starts and no tensor is read."""
    task = prepared(request)
    sent, received = (Counter[int](), Counter[int]())
    for program in task.programs:
        sent.update(program.sent)
        received.update(program.received)
    tensors, programs, tree = task.checkpoint.logical, task.programs, task.plan
    return Forecast(
        tensors=len(tensors),
        nbytes=sum(map(nbytes, tensors.values())),
        copies=0 if tree is None else len(tree),
        wire_bytes=sum(p.wire_bytes for p in programs),
        lower_bound=sum(p.lower_bound or 0 for p in programs),
        rounds=sum(len(p.rounds) for p in programs),
        most_sent=max(sent.values(), default=0),
        most_received=max(received.values(), default=0),
        picture="read in the slices of the new layout: nothing crosses" if tree is None else str(show(tree)),
    )
