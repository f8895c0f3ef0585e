"""A program prepared for one process: made once, then replayed without planning or allocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..maps import Box
from ..ops._schedule import slabs
from ..plans import Program
from ..plans._program import Parcels
from ._context import Context
from ._pack import Kept, Place, compile_local, compile_pack, compile_unpack
from ._script import Part, Script, Turn, script, within
from ._strategies import Fused
from ._transport import Outgoing, Strategy

Tensors = Mapping[tuple[int, Box], torch.Tensor]  # flat shards by (entry, box)


class _Copies(NamedTuple):
    """One rank's copies in one turn."""

    pack: Kept
    forward: Kept
    unpack: Kept


class Stage:
    """The copies and messages of a program for the ranks of one process.

    In each turn: ``pack`` gives the messages, ``swap`` exchanges them, ``unpack`` writes what came.
    ``local`` does the copies that need no message; it may be called at any time. Turns are the
    program's rounds, or parts of them where the strategy wants smaller ones: ``fine`` is the program
    whose rounds are the turns.
    """

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.strategy: Strategy = getattr(ctx.transport, "strategy", None) or Fused(ctx.transport)
        self.fine = _fine(program, self.strategy)
        self.script = _script(ctx, program, self.fine, self.strategy)
        self._local = Kept(compile_local(program, self.script.local))
        self._copies = [{r: _compiled(program, p) for r, p in t.parts.items()} for t in self.script.turns]

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.script.turns

    def local(self, sources: Tensors, targets: Tensors) -> None:
        """Copies within this process."""
        self._local.go(_places(sources, targets))

    def pack(self, turn: int, sources: Tensors, targets: Tensors) -> dict[int, Outgoing]:
        """The messages of one turn; what is forwarded is read from the targets."""
        places = _places(sources, targets)
        parts = {}
        for rank, part in self.turns[turn].parts.items():
            send = self.strategy.outbox(rank, sum(part.send_bytes), self.ctx.buffer)
            its = self._copies[turn][rank]
            here = {**places, 0: send}
            its.pack.go(here)
            its.forward.go(here)
            parts[rank] = Outgoing(send, part.send_bytes, part.receive_bytes)
        return parts

    def swap(self, parts: Mapping[int, Outgoing]) -> dict[int, Sequence[Any]]:
        """The messages that the ranks of this process get, by peer. Raises ``TransferError``."""
        return self.strategy.swap(parts, self.ctx.buffer)

    def unpack(self, turn: int, messages: Mapping[int, Sequence[Any]], targets: Tensors) -> None:
        """Write what came into the targets."""
        places = _places({}, targets)
        for rank, its in messages.items():
            self._copies[turn][rank].unpack.go({**places, **dict(enumerate(its))})
        self.strategy.release()


def _fine(program: Program, strategy: Strategy) -> Program:
    most = strategy.turn_bytes
    if strategy.name == "direct":
        return dataclasses.replace(program, parcels=Parcels(program.parcels.rows[:, :0]))
    if most is None:
        return program
    if program.max_bytes is not None:  # two turns are in flight
        most = min(most, program.max_bytes // 2)
    return dataclasses.replace(program, parcels=slabs(program, most))


def _script(ctx: Context, program: Program, fine: Program, strategy: Strategy) -> Script:
    if strategy.name == "direct":
        return within(program, ctx.ranks)
    return script(program, ctx.ranks, ctx.peers, fine.parcels)


def _compiled(program: Program, part: Part) -> _Copies:
    pack, forward = compile_pack(program, part.pack), compile_pack(program, part.forward, forward=True)
    return _Copies(Kept(pack), Kept(forward), Kept(compile_unpack(program, part.unpack)))


def _places(sources: Tensors, targets: Tensors) -> dict[Place, torch.Tensor]:
    found: dict[Place, torch.Tensor] = {("source", *k): x for k, x in sources.items()}
    found |= {("target", *k): x for k, x in targets.items()}
    return found
