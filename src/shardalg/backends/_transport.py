"""What a backend is: a few methods that move bytes between ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

Tensor = Any
Buffers: TypeAlias = Callable[[int, str, int], Any]  # (rank, use, bytes) -> a pooled uint8 tensor


class Exchange(NamedTuple):
    """One rank's part of one exchange: contiguous ``uint8`` buffers and bytes per peer, in the
    order of ``Transport.peers``. Nothing is sent to oneself."""

    send: Tensor
    send_bytes: list[int]
    receive: Tensor
    receive_bytes: list[int]


class Outgoing(NamedTuple):
    """One rank's messages of one turn, by position of the peer, and the bytes it expects from each.

    ``send`` is the buffer that holds the messages one after the other, without those that lie in a
    shard as they are. ``into`` are places that messages may be received into directly.
    """

    send: Tensor
    messages: Sequence[Tensor]
    receive_bytes: list[int]
    into: Mapping[int, Tensor]

    @property
    def send_bytes(self) -> list[int]:
        return [m.numel() for m in self.messages]


Meanwhile: TypeAlias = Callable[[], None]  # work to do while messages travel


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


class Strategy(Protocol):
    """How the messages of one turn travel."""

    @property
    def name(self) -> str: ...

    @property
    def turn_bytes(self) -> int | None:
        """The most that a rank's buffers should hold in one turn, where smaller turns are faster."""
        ...

    @property
    def straight(self) -> bool:
        """Whether messages may leave from and arrive in shards without a copy."""
        ...

    def outbox(self, rank: int, size: int, buffers: Buffers) -> Tensor:
        """Memory to pack a rank's messages of the next turn into."""
        ...

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[Tensor]]:
        """The message of each peer to each held rank, valid until ``release``. Calls ``meanwhile`` once."""
        ...

    def release(self) -> None:
        """What ``swap`` returned has been read."""
        ...

    def close(self) -> None:
        """Give back what the strategy holds; ranks that wait for this one hear of it."""
        ...
