"""All ranks in one process: the oracle for every other backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._errors import InvalidMapError
from ..maps._space import as_int
from ..plans import Message
from ._context import Context
from ._strategies import Direct, Fused
from ._transport import Exchange


class SimulatedTransport:
    """Messages are slices of each other's buffers. ``sent`` records the messages of each exchange."""

    def __init__(self, ranks: tuple[int, ...], *, messages: bool = False) -> None:
        self.ranks = self.peers = ranks
        self.device = torch.device("cpu")
        self.strategy = Fused(self) if messages else Direct()
        self.sent: list[tuple[Message, ...]] = []

    def gather(self, mine: Mapping[int, bytes]) -> dict[int, bytes]:
        return dict(mine)

    def exchange(self, parts: Mapping[int, Exchange]) -> None:
        sent = {
            (source, target): piece
            for source, part in parts.items()
            for target, piece in zip(self.peers, part.send.split(part.send_bytes))
        }
        for target, part in parts.items():
            slots = part.receive.split(part.receive_bytes)
            for source, slot in zip(self.peers, slots):
                slot.copy_(sent[source, target])
        self.sent.append(tuple(Message(s, t, x.numel(), 1) for (s, t), x in sent.items() if x.numel()))

    def close(self) -> None:
        """Nothing to release."""


def simulate(ranks: int, *, messages: bool = False) -> Context:
    """A context that holds ranks 0 .. ranks - 1 in this process.

    ``run`` takes and gives the shards of all ranks. It is the reference that every other
    backend equals bit for bit: copies go straight from shard to shard. With ``messages=True`` they are
    packed and exchanged in rounds as between processes, and ``ctx.transport.sent`` records what
    was sent: a list, per exchange, of ``Message``.

    >>> simulate(4).ranks
    (0, 1, 2, 3)
    """
    count = as_int(ranks, "the number of ranks")
    if count < 1:
        raise InvalidMapError(f"simulate needs at least 1 rank, got {count}")
    return Context(SimulatedTransport(tuple(range(count)), messages=messages))
