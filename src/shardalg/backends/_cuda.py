"""NVIDIA (and, under ROCm's torch, AMD) devices over NCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._context import Context
from ._device import device_context


class Cuda:
    """What differs for CUDA."""

    name = "cuda"
    group_backend = "nccl"
    strategies = ("fused", "pairwise")

    def count(self) -> int:
        return torch.cuda.device_count() if torch.cuda.is_available() and dist.is_nccl_available() else 0

    def select(self, index: int) -> torch.device:
        torch.cuda.set_device(index)
        return torch.device("cuda", index)

    def group(self, store: Any, position: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupNCCL(store, position, size, options)

    def fence(self, device: torch.device) -> Callable[[], None]:
        queued = torch.cuda.Event()  # type: ignore[no-untyped-call]
        queued.record(torch.cuda.current_stream(device))

        def wait() -> None:
            torch.cuda.set_device(device)
            torch.cuda.current_stream(device).wait_event(queued)

        return wait

    def settle(self, device: torch.device) -> None:
        torch.cuda.current_stream(device).synchronize()


def cuda(group: Any = None, **options: Any) -> Context:
    """A context over an NCCL group: CUDA tensors, one rank and one device per process.

    ``group`` is a ``torch.distributed`` group, by default the world; or give ``store=``, ``rank=`` and
    ``size=``. ``device=`` is the index of this process's device (default: ``LOCAL_RANK``, else the rank
    modulo the devices), ``strategy=`` is ``"fused"`` or ``"pairwise"`` (default: the first that passes its
    self-test) and ``timeout=`` bounds every exchange. All members must call this.
    """
    return device_context(Cuda(), group, **options)
