"""CPU tensors over gloo."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._errors import InvalidMapError, TransferError
from ._context import Context
from ._transport import Exchange

TIMEOUT = timedelta(seconds=300)


class GlooTransport:
    """One rank of a gloo group; every exchange is one uneven ``all_to_all_single``."""

    def __init__(self, group: Any, rank: int, peers: tuple[int, ...], owned: bool) -> None:
        self.group = group
        self.ranks = (rank,)
        self.peers = peers
        self.device = torch.device("cpu")
        self.owned = owned

    def gather(self, mine: Mapping[int, bytes]) -> dict[int, bytes]:
        (blob,) = mine.values()
        sizes = self._all_gather(torch.tensor([len(blob)], dtype=torch.int64))
        width = max(int(s) for s in sizes)
        padded = torch.zeros(width, dtype=torch.uint8)
        if blob:
            padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        blobs = self._all_gather(padded)
        return {p: bytes(b[: int(n)].numpy()) for p, b, n in zip(self.peers, blobs, sizes)}

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in self.peers]
        self._wait(lambda: self.group.allgather([found], [x]))
        return found

    def exchange(self, parts: Mapping[int, Exchange]) -> None:
        (part,) = parts.values()
        self._wait(
            lambda: self.group.alltoall_base(
                part.receive, part.send, part.receive_bytes, part.send_bytes, dist.AllToAllOptions()
            )
        )

    def _wait(self, start: Any) -> None:
        try:
            start().wait()
        except RuntimeError as error:
            raise TransferError(f"rank {self.ranks[0]}: gloo failed: {error}") from error

    def close(self) -> None:
        if self.owned:
            self.group = None


def cpu(
    group: Any = None,
    *,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: timedelta = TIMEOUT,
) -> Context:
    """A context over a gloo process group: CPU tensors, one rank per process.

    ``group`` is a ``torch.distributed`` group, by default the world; under ``torchrun`` the world
    is initialised if nobody did. Ranks of plans are global ranks. With ``store=``, ``rank=`` and
    ``size=`` the context builds a group of its own and leaves the default one alone; its ranks are
    0 .. size - 1. All members of the group must call this.
    """
    if store is not None:
        if rank is None or size is None or not 0 <= rank < size:
            raise InvalidMapError(f"cpu(store=...) needs 0 <= rank < size, got rank={rank}, size={size}")
        own = dist.ProcessGroupGloo(store, rank, size, timeout)
        return Context(GlooTransport(own, rank, tuple(range(size)), owned=True))
    if group is None:
        if not dist.is_initialized():
            if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
                raise InvalidMapError(
                    "cpu() needs a process group: start under torchrun, call"
                    " torch.distributed.init_process_group, or pass store=, rank= and size="
                )
            dist.init_process_group("gloo", timeout=timeout)
        group = dist.group.WORLD
    backend = dist.get_backend(group)
    if "gloo" not in backend:
        raise InvalidMapError(f"cpu() needs a gloo group, this one is {backend!r}; use backends.auto(group)")
    peers = tuple(dist.get_process_group_ranks(group))
    return Context(GlooTransport(group, dist.get_rank(), peers, owned=False))
