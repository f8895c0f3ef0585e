"""Intel devices over XCCL."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ._context import Context
from ._device import device_context


class Xpu:
    """What differs for XPU. XCCL has changed the data of batched sends and receives without an error, so
    messages go one by one where the fused exchange fails its self-test."""

    name = "xpu"
    group_backend = "xccl"
    strategies = ("fused", "pairwise")

    def count(self) -> int:
        usable = torch.xpu.is_available() and getattr(dist, "is_xccl_available", bool)()
        return torch.xpu.device_count() if usable else 0

    def select(self, index: int) -> torch.device:
        torch.xpu.set_device(index)
        return torch.device("xpu", index)

    def group(self, store: Any, position: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupXCCL.Options()
        options._timeout = timeout
        return dist.ProcessGroupXCCL(store, position, size, options)

    def fence(self, device: torch.device) -> Callable[[], None]:
        queued = torch.xpu.Event()  # type: ignore[no-untyped-call]
        queued.record(torch.xpu.current_stream(device))

        def wait() -> None:
            torch.xpu.set_device(device)
            torch.xpu.current_stream(device).wait_event(queued)

        return wait

    def settle(self, device: torch.device) -> None:
        torch.xpu.current_stream(device).synchronize()


def xpu(group: Any = None, **options: Any) -> Context:
    """A context over an XCCL group: XPU tensors, one rank and one device per process. Arguments as for
    ``cuda``. All members must call this."""
    return device_context(Xpu(), group, **options)
