"""A context's own process group, built over the store of one that exists.

Runs may go on in the background, so a context never sends on a group that others use too; and when
it fails or is closed, its own group ends, at once for everybody, and the caller's stays usable.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, distributed_c10d  # type: ignore[attr-defined]

from .._errors import TransferError

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
