"""Memory of one buffer, used again: fresh pages cost more than the messages that fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

KEPT = 8  # blocks of either kind

_uses: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)


class Pool:
    """Staging blocks that are taken and given back, and memory of results that nobody holds any more.

    Whether a result is still held is asked of its storage, which views, saved tensors and NumPy arrays
    keep alive alike. Only host memory is reused this way: devices have allocators that do it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.staging: list[torch.Tensor] = []
        self.results: list[torch.Tensor] = []

    def take(self, size: int) -> torch.Tensor:
        """A staging block of at least ``size`` bytes, the smallest kept one that fits."""
        fitting = [i for i, block in enumerate(self.staging) if block.numel() >= size]
        if fitting:
            return self.staging.pop(min(fitting, key=lambda i: self.staging[i].numel()))
        return self._block(size + size // 8 + 64)

    def give(self, *blocks: torch.Tensor) -> None:
        """Returns staging blocks; the largest few are kept."""
        self.staging = sorted([*self.staging, *blocks], key=torch.Tensor.numel)[-KEPT:]

    def result(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialised memory for a result, on pages of an earlier result of its size that is gone."""
        size = dtype.itemsize * math.prod(shape)
        if self.device.type != "cpu" or _uses is None or size == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        block = next((b for b in self.results if b.numel() == size and free(b)), None)
        if block is None:
            block = self._block(size)
            self.results = [*self.results, block][-KEPT:]
        with torch.inference_mode(False):  # a tensor of its own on that memory, not a view of the block
            made = torch.empty(0, dtype=dtype)
            made.set_(block.untyped_storage(), 0, shape, torch.empty(tuple(shape), device="meta").stride())
            return made

    def clear(self) -> None:
        """Forgets all blocks."""
        self.staging, self.results = [], []

    def _block(self, size: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device=self.device)


def free(block: Any) -> bool:
    """Whether nothing but the pool holds the memory of ``block``: itself and the storage asked."""
    return _uses is not None and _uses(block.untyped_storage()._cdata) == 2
