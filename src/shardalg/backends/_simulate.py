"""All ranks in one process: the oracle for every other backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .._errors import InvalidMapError
from ..maps._space import as_int
from ._context import Context
from ._transport import Exchange


class SimulatedTransport:
    """Messages are slices of each other's buffers."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = self.peers = ranks
        self.device = torch.device("cpu")

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

    def close(self) -> None:
        """Nothing to release."""


def simulate(ranks: int) -> Context:
    """A context that holds ranks 0 .. ranks - 1 in this process.

    ``run`` takes and gives the shards of all ranks. It is the reference that every other
    backend equals bit for bit.

    >>> simulate(4).ranks
    (0, 1, 2, 3)
    """
    count = as_int(ranks, "the number of ranks")
    if count < 1:
        raise InvalidMapError(f"simulate needs at least 1 rank, got {count}")
    return Context(SimulatedTransport(tuple(range(count))))
