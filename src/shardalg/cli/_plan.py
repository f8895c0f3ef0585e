"""Saying what a reshard would move and what each rank would then hold, without moving anything."""

from __future__ import annotations

from collections import Counter

from .._struct import struct
from ..interop._layout_files import Matches
from ..interop._outputs import nbytes, shard_bytes
from ..show import show
from ._inspect import Held, stored_as
from ._prepare import FULL, Prepared, Request, prepared


@struct
class Forecast:
    """What a run would move: tensors and their bytes, copies, bytes on the wire and the fewest possible,
    rounds, most bytes that a rank sends and gets; the picture as text; which patterns place the tensors, how
    they are then stored, and the bytes of each rank (none where they are written whole). No copies: nothing
    crosses."""

    tensors: int
    nbytes: int
    copies: int
    wire_bytes: int
    lower_bound: int
    rounds: int
    most_sent: int
    most_received: int
    picture: str
    matches: Matches | None = None
    held: tuple[Held, ...] = ()
    rank_bytes: tuple[int, ...] = ()


def forecast(request: Request) -> Forecast:
    """What a reshard of the same request would move. No process starts and no tensor is read."""
    task = prepared(request)
    sent, received = (Counter[int](), Counter[int]())
    for program in task.programs:
        sent.update(program.sent)
        received.update(program.received)
    tensors, programs, tree = task.checkpoint.logical, task.programs, task.plan
    whole = request.to == FULL
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
        matches=task.matches,
        held=() if whole else tuple(sorted(stored_as(task.target), key=lambda h: h.name)),
        rank_bytes=() if whole else tuple(_bytes_of(task, rank) for rank in range(request.processes)),
    )


def _bytes_of(task: Prepared, rank: int) -> int:
    """Bytes of all shards of a rank."""
    return sum(shard_bytes(s, rank) for _, s in task.target if rank in s.layout.ranks)
