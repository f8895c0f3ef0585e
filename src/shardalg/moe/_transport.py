"""The few messages an MoE plan needs, as an interface; all ranks in one process, or one each.

Everything else in this package is local. A transport drives ``ranks`` (one, or all in
simulation) of a group of ``size`` and is the only thing that talks.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
import torch.distributed as dist

from .._errors import InvalidMapError, TransferError
from ..backends._context import Context
from ..backends._transport import Exchange

Wait: TypeAlias = Callable[[], None]


@dataclass
class Counters:
    """What was sent so far: gathers of small integers, exchanges, and the bytes exchanges carried."""

    gathers: int = 0
    exchanges: int = 0
    bytes_sent: int = 0


@runtime_checkable
class Transport(Protocol):
    """What a live group offers; per-rank arguments are sequences over ``ranks``."""

    size: int
    ranks: tuple[int, ...]
    device: torch.device
    counters: Counters
    many: bool  # one value per rank is passed and returned (a sequence), not the value itself

    @property
    def closed(self) -> bool:
        """Whether what carries the messages is gone."""
        ...

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        """Every rank's integers, by rank; all rows have one length."""
        ...

    def exchange(self, sends: Sequence[Bundle], receives: Sequence[Bundle]) -> Wait:
        """Starts one all-to-all of bytes; the returned function completes it."""
        ...


@dataclass(frozen=True)
class Bundle:
    """Contiguous ``uint8`` data of one rank and how many bytes of it belong to each peer."""

    data: torch.Tensor
    splits: tuple[int, ...]


class Solo:
    """A group of one rank: nothing is ever sent and no process group is needed."""

    size = 1
    ranks: tuple[int, ...] = (0,)
    many = False
    closed = False

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self.counters = Counters()

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        return [list(mine[0])]

    def exchange(self, sends: Sequence[Bundle], receives: Sequence[Bundle]) -> Wait:
        return nothing


class Simulated:
    """All ranks in this process, as the reference: messages are copies, counted as if sent."""

    many = True
    closed = False

    def __init__(self, size: int, device: torch.device | str = "cpu") -> None:
        self.size = size
        self.ranks = tuple(range(size))
        self.device = torch.device(device)
        self.counters = Counters()

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        self.counters.gathers += self.size > 1
        return [list(row) for row in mine]

    def exchange(self, sends: Sequence[Bundle], receives: Sequence[Bundle]) -> Wait:
        count(self.counters, sends, self.size)
        parts = [torch.split(send.data, list(send.splits)) for send in sends]
        for d, receive in enumerate(receives):
            for s, into in enumerate(torch.split(receive.data, list(receive.splits))):
                if into.numel() != parts[s][d].numel():
                    sent, wanted = parts[s][d].numel(), into.numel()
                    raise TransferError(f"rank {s} sends {sent} bytes to rank {d}, which expects {wanted}")
                into.copy_(parts[s][d])
        return nothing


class Grouped:
    """One rank of a ``torch.distributed`` process group, given as an object or by default."""

    many = False
    closed = False

    def __init__(self, group: Any, device: torch.device | str | None = None) -> None:
        self.group = group
        self.size = group.size()
        self.ranks: tuple[int, ...] = (group.rank(),)
        self.device = torch.device(device) if device is not None else _device_of(group)
        self.counters = Counters()

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        self.counters.gathers += self.size > 1
        if self.size == 1:
            return [list(mine[0])]
        row = torch.tensor(mine[0], dtype=torch.int64, device=self.device)
        rows = [torch.empty_like(row) for _ in range(self.size)]
        _wait(self.group.allgather([rows], [row]))
        return [r.tolist() for r in rows]

    def exchange(self, sends: Sequence[Bundle], receives: Sequence[Bundle]) -> Wait:
        count(self.counters, sends, self.size)
        if self.size == 1:
            return nothing
        (send,), (receive,) = sends, receives
        options = dist.AllToAllOptions()
        work = self.group.alltoall_base(
            receive.data, send.data, list(receive.splits), list(send.splits), options
        )

        def wait() -> None:
            _wait(work, send.data)

        return wait


class Lent:
    """A backend context, used for the messages of a buffer; with it the buffer is closed, or fails."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self.size = len(context.peers)
        self.ranks = tuple(context.peers.index(r) for r in context.ranks)
        self.many = not context.others
        self.device = torch.device(context.transport.device)
        self.counters = Counters()

    @property
    def closed(self) -> bool:
        return self.context.closed or bool(self.context.failed)

    def all_gather(self, mine: Sequence[Sequence[int]]) -> list[list[int]]:
        self.counters.gathers += self.size > 1
        said = self.context.gather({r: as_bytes(row) for r, row in zip(self.context.ranks, mine)})
        return [list(struct.unpack(f"<{len(said[p]) // 8}q", said[p])) for p in self.context.peers]

    def exchange(self, sends: Sequence[Bundle], receives: Sequence[Bundle]) -> Wait:
        count(self.counters, sends, self.size)
        if self.size == 1:
            return nothing
        parts = {
            rank: Exchange(send.data, list(send.splits), receive.data, list(receive.splits))
            for rank, send, receive in zip(self.context.ranks, sends, receives)
        }
        start = getattr(self.context.transport, "start_exchange", None)
        if start is None:
            self.context.exchange(parts)
            return nothing
        wait = self._guarded(lambda: start(parts))
        return lambda: self._guarded(wait)

    def _guarded(self, talk: Callable[[], Any]) -> Any:
        try:
            return talk()
        except TransferError as error:
            raise self.context.broken(error) from error


def nothing() -> None:
    """What there is to wait for when a message needs no waiting."""


def transport_of(ctx: Any, device: torch.device | str | None = None) -> Transport:
    """The transport meant by None (one rank), a process group, a context or a transport itself."""
    if ctx is None:
        return Solo("cpu" if device is None else device)
    if isinstance(ctx, Context):
        return Lent(ctx)
    if isinstance(ctx, Transport):
        return ctx
    if isinstance(ctx, dist.ProcessGroup) or hasattr(ctx, "alltoall_base"):
        return Grouped(ctx, device)
    raise InvalidMapError(
        f"a Buffer needs None (one rank), a process group, a context or a transport, got {type(ctx).__name__}"
    )


def as_bytes(row: Sequence[int]) -> bytes:
    """Integers as 8 bytes each."""
    return struct.pack(f"<{len(row)}q", *row)


def count(counters: Counters, sends: Sequence[Bundle], size: int) -> None:
    """One exchange more, unless there is nobody to talk to."""
    counters.exchanges += size > 1
    counters.bytes_sent += sum(sum(send.splits) for send in sends)


def _wait(work: Any, *kept: torch.Tensor) -> None:
    """Waits; ``kept`` are tensors the work still reads."""
    try:
        work.wait()
    except RuntimeError as error:
        raise TransferError(f"the exchange failed: {error}", targets_touched=True) from error


def _device_of(group: Any) -> torch.device:
    """Where a group's tensors live, by the name of its backend."""
    name = str(group.name()).lower()
    kinds = {"gloo": "cpu", "mpi": "cpu", "nccl": "cuda", "xccl": "xpu"}
    found = [kind for backend, kind in kinds.items() if backend in name]
    if len(found) != 1:
        raise InvalidMapError(
            f"cannot tell the device of a process group with backend {name!r}; pass device="
        )
    if found[0] == "cpu":
        return torch.device("cpu")
    return torch.device(found[0], torch.get_device_module(found[0]).current_device())
