"""A program prepared for one process: made once, then replayed without planning or allocation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..ops._schedule import slabs
from ..plans import Program
from ..plans._program import Parcels
from ._context import Context
from ._pack import (
    Block,
    Kept,
    Tensors,
    bytes_of_block,
    compile_local,
    compile_pack,
    compile_unpack,
    straight_in,
    straight_out,
)
from ._script import Part, Script, Turn, script, within
from ._strategies import Fused
from ._transport import Meanwhile, Outgoing, Strategy


class _Copies(NamedTuple):
    """One rank's copies in one turn. ``out`` and ``into`` are the messages that lie in a shard as they
    are, by position of the peer: the rest is packed and unpacked."""

    pack: Kept
    forward: Kept
    unpack: Kept
    out: dict[int, Block]
    into: dict[int, Block]
    packed_bytes: list[int]


class Stage:
    """The copies and messages of a program for the ranks of one process.

    In each turn: ``pack`` gives the messages, ``swap`` exchanges them, ``unpack`` writes what came.
    ``local`` has the copies done that need no message: while the first messages travel, or at once
    where there are none. Turns are the program's rounds, or parts of them where the strategy wants
    smaller ones: ``fine`` is the program whose rounds are the turns.
    """

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.strategy = _strategy(ctx, program)
        self.fine = _fine(program, self.strategy)
        self.script = _script(ctx, program, self.fine, self.strategy)
        self._local = Kept(compile_local(program, self.script.local))
        straight = self.strategy.straight
        self._copies = [
            {r: _compiled(program, p, straight) for r, p in t.parts.items()} for t in self.script.turns
        ]
        self._meanwhile: Meanwhile = _nothing

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.script.turns

    def local(self, sources: Tensors, targets: Tensors) -> None:
        """Copies within this process."""
        if self.turns:
            self._meanwhile = lambda: self._local.go(sources, targets)
        else:
            self._local.go(sources, targets)

    def pack(self, turn: int, sources: Tensors, targets: Tensors) -> dict[int, Outgoing]:
        """The messages of one turn; what is forwarded is read from the targets."""
        parts = {}
        for rank, part in self.turns[turn].parts.items():
            its = self._copies[turn][rank]
            send = self.strategy.outbox(rank, sum(its.packed_bytes), self.ctx.buffer)
            messages = list(send.split(its.packed_bytes))
            its.pack.go(sources, targets, messages)
            its.forward.go(sources, targets, messages)
            for p, block in its.out.items():
                messages[p] = bytes_of_block(block, sources, targets)
            into = {p: bytes_of_block(block, sources, targets) for p, block in its.into.items()}
            parts[rank] = Outgoing(send, messages, part.receive_bytes, into)
        return parts

    def swap(self, parts: Mapping[int, Outgoing]) -> dict[int, Sequence[Any]]:
        """The messages that the ranks of this process get, by peer. Raises ``TransferError``."""
        meanwhile, self._meanwhile = self._meanwhile, _nothing
        return self.strategy.swap(parts, self.ctx.buffer, meanwhile)

    def unpack(self, turn: int, messages: Mapping[int, Sequence[Any]], targets: Tensors) -> None:
        """Write what came into the targets."""
        for rank, its in messages.items():
            self._copies[turn][rank].unpack.go({}, targets, its)
        self.strategy.release()


def _nothing() -> None:
    """No work while messages travel."""


def _strategy(ctx: Context, program: Program) -> Strategy:
    """The transport's own, or a fused exchange: it is all that others have, and it needs no turns that
    all ranks know, which those who planned only their own part do not."""
    its: Strategy | None = getattr(ctx.transport, "strategy", None)
    partial = any(e.plan.rank is not None for e in program.plan.entries)
    if its is None or (partial and its.name != "direct"):
        return Fused(ctx.transport)
    return its


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


def _compiled(program: Program, part: Part, straight: bool) -> _Copies:
    pack, forward = compile_pack(program, part.pack), compile_pack(program, part.forward, forward=True)
    unpack = compile_unpack(program, part.unpack)
    out: dict[int, Block] = {}
    into: dict[int, Block] = {}
    if straight:
        pack, forward, out = straight_out(pack, forward, part.send_bytes)
        unpack, into = straight_in(unpack, part.receive_bytes)
    packed = [0 if p in out else n for p, n in enumerate(part.send_bytes)]
    return _Copies(Kept(pack), Kept(forward), Kept(unpack), out, into, packed)
