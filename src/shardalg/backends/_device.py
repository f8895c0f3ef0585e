"""What backends for accelerators share; ``_cuda`` and ``_xpu`` say only what differs.

Messages are staged in device memory and travel by one of several strategies. At the start all ranks
together exchange small known data by each of them: that warms the group up, and a strategy that
changes a byte is switched off, on every rank, with a warning. (XCCL has done so without an error.)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .._errors import InvalidMapError, TransferError, UnsupportedError
from ._context import Context, log
from ._own import find_place, guarded
from ._strategies import Fused, Pairwise, check_name
from ._transport import Buffers, Exchange, Outgoing, Strategy

TIMEOUT = timedelta(seconds=300)
NAP = 50e-6  # seconds between two looks at work that goes on
PROBE = (0, 1, 7, 64, 4097)  # bytes of the messages of a self-test


class Layer(Protocol):
    """What differs between kinds of devices."""

    @property
    def name(self) -> str:
        """The device type, as in ``torch.device``."""
        ...

    @property
    def group_backend(self) -> str:
        """The process-group backend, as torch names it."""
        ...

    @property
    def strategies(self) -> Sequence[str]:
        """Names of strategies, best first."""
        ...

    def count(self) -> int:
        """Devices of this machine that this process sees; 0 where torch cannot use any."""
        ...

    def select(self, index: int) -> torch.device:
        """Make a device current."""
        ...

    def group(self, store: Any, position: int, size: int, timeout: timedelta) -> Any:
        """A new process group."""
        ...

    def fence(self, device: torch.device) -> Callable[[], None]:
        """Mark what this thread has queued; the returned function makes another thread's work wait for it."""
        ...

    def settle(self, device: torch.device) -> None:
        """Return once what this thread has queued is done."""
        ...


class DeviceTransport:
    """One rank of a group whose messages lie in device memory."""

    def __init__(
        self, layer: Layer, group: Any, rank: int, peers: tuple[int, ...], device: torch.device,
        *, store: Any = None, timeout: timedelta = TIMEOUT,
    ) -> None:  # fmt: skip
        self.layer, self.group, self.device = layer, group, device
        self.ranks = (rank,)
        self.peers = peers
        self.position = peers.index(rank)
        self.store, self.timeout = store, timeout
        self.strategy: Strategy = Fused(self)

    def gather(self, mine: Mapping[int, bytes]) -> dict[int, bytes]:
        (blob,) = mine.values()
        sizes = self._all_gather(torch.tensor([len(blob)], dtype=torch.int64))
        padded = torch.zeros(max(int(n) for n in sizes), dtype=torch.uint8)
        if blob:
            padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        blobs = self._all_gather(padded)
        return {p: bytes(b[: int(n)].numpy()) for p, b, n in zip(self.peers, blobs, sizes)}

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        mine = x.to(self.device)
        found = [torch.empty_like(mine) for _ in self.peers]
        self.finish(self.group.allgather([found], [mine]))
        return [y.cpu() for y in found]

    def exchange(self, parts: Mapping[int, Exchange]) -> None:
        (part,) = parts.values()
        if self.group is None:
            raise TransferError("the context was closed")
        sizes = (part.receive_bytes, part.send_bytes)
        self.finish(
            guarded(lambda: self.group.alltoall_base(part.receive, part.send, *sizes, dist.AllToAllOptions()))
        )

    def finish(self, *works: Any) -> None:
        """Wait until work is done on the device, at most ``timeout``: a dead peer must not hold the host."""
        end = time.monotonic() + self.timeout.total_seconds()
        try:
            for work in works:
                while not work.is_completed():
                    if time.monotonic() > end:
                        raise TransferError(f"no answer within {self.timeout.total_seconds()} s")
                    time.sleep(NAP)
                work.wait()
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            raise TransferError(f"{self.layer.group_backend} failed: {error}") from error

    def fence(self) -> Callable[[], None]:
        """What a run in the background must wait for."""
        return self.layer.fence(self.device)

    def settle(self) -> None:
        """Return once the device is done: results of a run in the background are ready everywhere."""
        self.layer.settle(self.device)

    def close(self) -> None:
        self.strategy.close()
        group, self.group = self.group, None
        if hasattr(group, "abort"):
            group.abort()


# --- the self-test ------------------------------------------------------------------------

MAKERS: dict[str, Callable[[DeviceTransport], Strategy]] = {"fused": Fused, "pairwise": Pairwise}


def choose(transport: DeviceTransport, asked: str | None = None) -> Strategy:
    """The first strategy that brings known data unchanged on every rank. Collective."""
    kind, names = transport.layer.group_backend, transport.layer.strategies if asked is None else (asked,)
    for name in names:
        check_name(name, MAKERS)
        strategy = MAKERS[name](transport)
        bad = self_test(transport, strategy)
        if not bad:
            return strategy
        log.warning("%s: strategy %r changes data on ranks %s; it is switched off", kind, name, bad)
    raise TransferError(
        f"{kind}: every strategy of {list(names)} changes data here; run on the host with backends.cpu()"
    )


def self_test(transport: DeviceTransport, strategy: Strategy) -> list[int]:
    """Ranks where the strategy brought other bytes than were sent. Collective."""
    turns = [_probe(transport, strategy, turn) for turn in range(2)]  # all ranks take every turn
    right = all(turns)
    said = transport.gather({transport.ranks[0]: b"\1" if right else b"\0"})
    return [r for r, word in said.items() if word != b"\1"]


def _probe(transport: DeviceTransport, strategy: Strategy, turn: int) -> bool:
    """Whether this rank gets what the others send in one exchange of known messages of many sizes."""
    me, count, device = transport.position, len(transport.peers), transport.device
    out = [_known(me, p, turn) for p in range(count)]
    wanted = [_known(p, me, turn) for p in range(count)]
    empty = torch.empty(0, dtype=torch.uint8)
    out[me] = wanted[me] = empty
    sizes = [x.numel() for x in out]
    send = strategy.outbox(transport.ranks[0], sum(sizes), _plain_buffers(device))
    send.copy_(torch.cat(out))
    part = Outgoing(send, send.split(sizes), [x.numel() for x in wanted], {})
    found = strategy.swap({transport.ranks[0]: part}, _plain_buffers(device), lambda: None)
    right = all(torch.equal(x.cpu(), y) for x, y in zip(found[transport.ranks[0]], wanted))
    strategy.release()
    return right


def _known(source: int, target: int, turn: int) -> torch.Tensor:
    """The message from one position to another in a self-test."""
    size = PROBE[(source + 2 * target + turn) % len(PROBE)]
    return ((torch.arange(size) * 7 + source * 31 + target * 17 + turn) % 251).to(torch.uint8)


def _plain_buffers(device: torch.device) -> Buffers:
    return lambda rank, use, size: torch.zeros(size, dtype=torch.uint8, device=device)


# --- making a context ---------------------------------------------------------------------


def device_context(
    layer: Layer,
    group: Any = None,
    *,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: timedelta = TIMEOUT,
    device: int | None = None,
    strategy: str | None = None,
) -> Context:
    """A context over the devices of one kind: what ``cuda(...)`` and ``xpu(...)`` do."""
    if layer.count() < 1:
        raise UnsupportedError(
            f"{layer.name}() needs a device and torch built for it, and this process sees none;"
            " use backends.cpu()"
        )
    index = local_index(layer, rank) if device is None else device
    if not 0 <= index < layer.count():
        raise InvalidMapError(f"device {index} of {layer.name} does not exist; there are {layer.count()}")
    chosen = layer.select(index)
    place = find_place(layer.name, layer.group_backend, group, store, rank, size, timeout, chosen)
    own = place.group
    if place.store is not None:
        own = guarded(lambda: layer.group(place.store, place.position, len(place.peers), timeout))
    made = DeviceTransport(layer, own, place.rank, place.peers, chosen, store=place.store, timeout=timeout)
    try:
        made.strategy = choose(made, strategy)
    except BaseException:  # the others wait for this rank's part of the self-test
        made.close()
        raise
    return Context(made)


def local_index(layer: Layer, rank: int | None) -> int:
    """The device of this process: by LOCAL_RANK as torchrun sets it, else ranks in turn."""
    if "LOCAL_RANK" in os.environ:
        return int(os.environ["LOCAL_RANK"])
    if rank is None:
        rank = dist.get_rank() if dist.is_initialized() else 0
    return rank % layer.count()
