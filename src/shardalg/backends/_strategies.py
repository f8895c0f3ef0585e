"""Strategies: how the messages of a turn travel."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from .._errors import InvalidMapError, TransferError
from ._own import guarded
from ._transport import Buffers, Exchange, Meanwhile, Outgoing, Transport

# How messages between processes can travel; the default is chosen by where the processes are. Devices
# have "fused" and "pairwise" instead.
STRATEGIES = ("fused", "p2p", "shared", "mixed")


def check_name(name: str, known: Iterable[str]) -> None:
    """Raise unless a strategy of that name is among those that there are."""
    if name not in known:
        raise InvalidMapError(f"no strategy {name!r}; there are {tuple(known)}")


class Fused:
    """One uneven exchange for all messages of a turn: ``all_to_all_single`` on process groups."""

    name = "fused"
    turn_bytes = None
    straight = False

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    def outbox(self, rank: int, size: int, buffers: Buffers) -> torch.Tensor:
        return buffers(rank, "send", size)  # type: ignore[no-any-return]

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[torch.Tensor]]:
        whole = {
            r: Exchange(p.send, p.send_bytes, buffers(r, "receive", sum(p.receive_bytes)), p.receive_bytes)
            for r, p in parts.items()
        }
        start = getattr(self.transport, "start_exchange", None)
        if start is None:
            self.transport.exchange(whole)
            meanwhile()
        else:
            finish = start(whole)
            try:
                meanwhile()
                finish()
            finally:
                del finish  # an exchange in the frames of an error would hold the group
        return {r: x.receive.split(x.receive_bytes) for r, x in whole.items()}

    def release(self) -> None:
        """Buffers are ours."""

    def close(self) -> None:
        """Nothing to give back."""


class Direct:
    """Every rank is in this process: copies go from shard to shard and nothing is sent."""

    name = "direct"
    turn_bytes = None
    straight = False

    def outbox(self, rank: int, size: int, buffers: Buffers) -> torch.Tensor:
        raise AssertionError("nothing is sent")

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[torch.Tensor]]:
        raise AssertionError("nothing is sent")

    def release(self) -> None:
        """Nothing was lent."""

    def close(self) -> None:
        """Nothing to give back."""


class PeerToPeer:
    """One message per peer that there is something for: all receives are posted first. Blocks that are
    contiguous leave from the shard and arrive in it."""

    name = "p2p"
    straight = True

    def __init__(self, group: Any, position: int, timeout: timedelta, turn_bytes: int | None = None) -> None:
        self.group, self.position, self.timeout = group, position, timeout
        self.turn_bytes = turn_bytes
        self._turn = 0

    def outbox(self, rank: int, size: int, buffers: Buffers) -> torch.Tensor:
        return buffers(rank, "send", size)  # type: ignore[no-any-return]

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[torch.Tensor]]:
        ((rank, part),) = parts.items()
        sizes = [0 if p in part.into else n for p, n in enumerate(part.receive_bytes)]
        messages = list(buffers(rank, "receive", sum(sizes)).split(sizes))
        for p, place in part.into.items():
            messages[p] = place
        self._turn += 1
        self.transfer(part.messages, messages, self._turn, meanwhile)
        return {rank: messages}

    def transfer(
        self, out: Sequence[torch.Tensor], into: Sequence[torch.Tensor], tag: int, meanwhile: Meanwhile
    ) -> None:
        """Send ``out[p]`` to and fill ``into[p]`` from the peer at position p; empty ones are left out."""
        if self.group is None:
            raise TransferError("the context was closed")
        works: list[Any] = []
        try:
            works += [self.group.recv([x], p, tag) for p, x in enumerate(into) if x.numel()]
            works += [self.group.send([x], p, tag) for p, x in _from(self.position, out) if x.numel()]
            meanwhile()
            works.reverse()
            while works:
                works.pop().wait(self.timeout)
        except RuntimeError as error:
            raise TransferError(f"gloo failed: {error}") from error
        finally:
            works.clear()  # what the frames of an error hold would hold the group

    def release(self) -> None:
        """Buffers are ours."""

    def close(self) -> None:
        """Leave the group: it ends with the last one who holds it."""
        self.group = None


def _from(position: int, out: Sequence[torch.Tensor]) -> list[tuple[int, torch.Tensor]]:
    """Messages by shift, so that not all ranks send to the same one first."""
    count = len(out)
    order = [(position + shift) % count for shift in range(1, count)]
    return [(p, out[p]) for p in order]


class Pairwise:
    """Messages to one peer at a time, in the order of a round-robin tournament: in each step a rank talks
    to one other, and the lower position speaks first, so that no order of calls can block."""

    name = "pairwise"
    turn_bytes = None
    straight = False

    def __init__(self, transport: Any) -> None:
        self.transport = transport  # of a device: it knows how to wait for work there

    def outbox(self, rank: int, size: int, buffers: Buffers) -> torch.Tensor:
        return buffers(rank, "send", size)  # type: ignore[no-any-return]

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[torch.Tensor]]:
        ((rank, part),) = parts.items()
        into = buffers(rank, "receive", sum(part.receive_bytes)).split(part.receive_bytes)
        for peer in tournament(self.transport.position, len(self.transport.peers)):
            self._talk(peer, part.messages[peer], into[peer])
        meanwhile()
        return {rank: into}

    def _talk(self, peer: int, out: torch.Tensor, into: torch.Tensor) -> None:
        group = self.transport.group
        calls = [(group.send, out), (group.recv, into)]
        for call, x in calls if self.transport.position < peer else reversed(calls):
            if x.numel():
                self.transport.finish(guarded(lambda call=call, x=x: call([x], peer, 0)))  # type: ignore[misc]

    def release(self) -> None:
        """Buffers are ours."""

    def close(self) -> None:
        """Nothing to give back."""


def tournament(position: int, count: int) -> list[int]:
    """Whom a rank meets, step by step; in every step the meetings are mutual.

    >>> [tournament(k, 3) for k in range(3)]
    [[1, 2], [2, 0], [1, 0]]
    """
    met = [(step - position) % count for step in range(count)]
    return [peer for peer in met if peer != position]
