"""A context's own process group, built over the store of one that exists.

Runs may go on in the background, so a context never sends on a group that others use too; and when
it fails or is closed, its own group ends, at once for everybody, and the caller's stays usable.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from .._errors import InvalidMapError, TransferError

WORD = 16  # bytes

T = TypeVar("T")


def own_store(group: Any, device: torch.device) -> Any:
    """A part of the store of ``group`` that is new and the same on every rank; None where torch does
    not know the store. Collective: the first rank's random word names it."""
    try:
        store = distributed_c10d._get_process_group_store(group)
    except (AttributeError, KeyError):
        return None
    word = torch.randint(0, 256, (WORD,), dtype=torch.uint8, generator=_fresh()).to(device)
    words = [torch.empty_like(word) for _ in range(group.size())]
    guarded(lambda: group.allgather([words], [word]).wait())
    return PrefixStore(f"shardalg/{bytes(words[0].cpu().numpy()).hex()}", store)


def _fresh() -> torch.Generator:
    """Leaves the caller's random numbers alone."""
    generator = torch.Generator()
    generator.seed()
    return generator


def guarded(start: Callable[[], T]) -> T:
    """Start a group or a collective; what goes wrong is a ``TransferError``."""
    try:
        return start()
    except (RuntimeError, dist.DistError) as error:
        raise TransferError(f"no group: {error}") from error


# --- where a context begins ---------------------------------------------------------------


class Place(NamedTuple):
    """A rank and its peers, the store for a group of their own, and the group that was given, if one was."""

    store: Any
    rank: int
    peers: tuple[int, ...]
    group: Any = None

    @property
    def position(self) -> int:
        return self.peers.index(self.rank)


def find_place(
    backend: str, kind: str, group: Any, store: Any, rank: int | None, size: int | None,
    timeout: timedelta, device: torch.device,
) -> Place:  # fmt: skip
    """Where the context of ``backend`` begins, over groups of one ``kind``: in a store with a rank and a
    size, in a group, or in the world, which is initialised under ``torchrun`` if nobody did. Collective
    but for stores."""
    if store is not None:
        if rank is None or size is None or not 0 <= rank < size:
            raise InvalidMapError(
                f"{backend}(store=...) needs 0 <= rank < size, got rank={rank}, size={size}"
            )
        return Place(store, rank, tuple(range(size)))
    if group is None:
        if not dist.is_initialized():
            if "RANK" not in os.environ or "MASTER_ADDR" not in os.environ:
                raise InvalidMapError(
                    f"{backend}() needs a process group: start under torchrun, call"
                    " torch.distributed.init_process_group, or pass store=, rank= and size="
                )
            dist.init_process_group(kind, timeout=timeout)
        group = dist.group.WORLD
    if kind not in dist.get_backend(group):
        raise InvalidMapError(
            f"{backend}() needs a {kind} group, this one is {dist.get_backend(group)!r};"
            " use backends.auto(group)"
        )
    peers = tuple(dist.get_process_group_ranks(group))
    return Place(own_store(group, device), dist.get_rank(), peers, group)
