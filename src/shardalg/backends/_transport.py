"""What a backend is: a few methods that move bytes between ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

Tensor = Any


class Exchange(NamedTuple):
    """One rank's part of one exchange: contiguous ``uint8`` buffers and bytes per peer, in the
    order of ``Transport.peers``. Nothing is sent to oneself."""

    send: Tensor
    send_bytes: list[int]
    receive: Tensor
    receive_bytes: list[int]


class Transport(Protocol):
    """Moves bytes between ranks. A process holds some ranks: one, or all when simulated."""

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks that this process holds."""
        ...

    @property
    def peers(self) -> tuple[int, ...]:
        """Global ranks of everybody, in group order."""
        ...

    @property
    def device(self) -> Any:
        """Where buffers live."""
        ...

    def gather(self, mine: Mapping[int, bytes]) -> dict[int, bytes]:
        """Small byte strings of all ranks, from each rank's own."""
        ...

    def exchange(self, parts: Mapping[int, Exchange]) -> None:
        """Fill the receive buffers of the held ranks; returns when they are complete."""
        ...

    def close(self) -> None:
        """Release what the transport made itself."""
        ...
