"""CPU tensors over gloo."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .._errors import InvalidMapError, TransferError
from ._context import Context
from ._own import find_place, guarded
from ._shared import meet_near
from ._strategies import STRATEGIES, Fused, PeerToPeer, check_name
from ._transport import Exchange, Strategy

TIMEOUT = timedelta(seconds=300)
BRIEF = timedelta(milliseconds=10)
NAP = 0.005  # seconds between two looks at work that takes long


class GlooTransport:
    """One rank of a gloo group. ``exchange`` is one uneven ``all_to_all_single``; the messages of
    programs travel by ``strategy``. ``store`` is where ranks leave words that outlive a broken group."""

    def __init__(
        self, group: Any, rank: int, peers: tuple[int, ...], *, store: Any, timeout: timedelta, owned: bool
    ) -> None:
        self.group = group
        self.ranks = (rank,)
        self.peers = peers
        self.device = torch.device("cpu")
        self.store = store
        self.timeout = timeout
        self.owned = owned
        self.strategy: Strategy = Fused(self)

    def gather(self, mine: Mapping[int, bytes]) -> dict[int, bytes]:
        (blob,) = mine.values()
        return dict(zip(self.peers, self.gather_words(blob)))

    def gather_words(self, blob: bytes) -> list[bytes]:
        """The byte strings of all ranks, in the order of ``peers``."""
        sizes = self._all_gather(torch.tensor([len(blob)], dtype=torch.int64))
        width = max(int(s) for s in sizes)
        padded = torch.zeros(width, dtype=torch.uint8)
        if blob:
            padded[: len(blob)] = torch.frombuffer(bytearray(blob), dtype=torch.uint8)
        blobs = self._all_gather(padded)
        return [bytes(b[: int(n)].numpy()) for b, n in zip(blobs, sizes)]

    def _all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        found = [torch.empty_like(x) for _ in self.peers]
        self._wait(lambda: self.group.allgather([found], [x]))
        return found

    def exchange(self, parts: Mapping[int, Exchange]) -> None:
        self.start_exchange(parts)()

    def start_exchange(self, parts: Mapping[int, Exchange]) -> Callable[[], None]:
        """Begin an exchange; what is returned waits for its end. Then nobody holds it: an exchange in the
        frames of an error would hold the group, and the others would not hear that it ended."""
        (part,) = parts.values()
        sizes = (part.receive_bytes, part.send_bytes)
        works = [
            self._guarded(
                lambda: self.group.alltoall_base(part.receive, part.send, *sizes, dist.AllToAllOptions())
            )
        ]
        return lambda: self._wait(works.pop)

    def _wait(self, start: Callable[[], Any]) -> None:
        self._guarded(lambda: _patiently(start()))

    def _guarded(self, talk: Callable[[], Any]) -> Any:
        if self.group is None:
            raise TransferError("the context was closed")
        try:
            return talk()
        except RuntimeError as error:
            raise TransferError(f"gloo failed: {error}") from error

    def close(self) -> None:
        self.strategy.close()
        if self.owned:
            self.group = None


def _patiently(work: Any) -> None:
    """Wait for work, most of a long wait in Python: a process that waits inside gloo hears no interrupt,
    and a thread that does cannot be left behind when the process ends."""
    began = time.monotonic()
    try:
        with suppress(RuntimeError):  # of the work, or it takes longer
            work.wait(BRIEF)
        while not work.is_completed():
            time.sleep(min(NAP, (time.monotonic() - began) / 100))
        work.wait()
    finally:
        del work  # not for the frames of an error


def with_strategy(transport: GlooTransport, name: str | None, host: str | None) -> GlooTransport:
    """The transport with the strategy of that name, or the best one for where the ranks are: shared
    memory takes about half of gloo's time, so it is used wherever two ranks can share it; else peer to
    peer, which saves the copies of whole blocks. Collective."""
    if name is not None:
        check_name(name, STRATEGIES)
    if len(transport.peers) == 1:
        return transport
    asked = [word.decode() for word in transport.gather_words((name or "").encode())]
    if len(set(asked)) > 1:
        words = dict(zip(transport.peers, asked))
        raise InvalidMapError(f"ranks ask for different strategies: {words}")
    if name != "fused":
        position = transport.peers.index(transport.ranks[0])
        p2p = PeerToPeer(transport.group, position, transport.timeout)
        near = None if name == "p2p" else meet_near(transport.gather_words, p2p, len(transport.peers), host)
        transport.strategy = near or p2p
    return transport


def cpu(
    group: Any = None,
    *,
    store: Any = None,
    rank: int | None = None,
    size: int | None = None,
    timeout: timedelta = TIMEOUT,
    strategy: str | None = None,
    host: str | None = None,
) -> Context:
    """A context over a gloo process group: CPU tensors, one rank per process.

    ``group`` is a ``torch.distributed`` group, by default the world; under ``torchrun`` the world
    is initialised if nobody did. Ranks of plans are global ranks. With ``store=``, ``rank=`` and
    ``size=`` the context builds a group of its own and leaves the default one alone; its ranks are
    0 .. size - 1. All members of the group must call this.

    ``strategy`` says how messages travel: ``"fused"`` (one ``all_to_all_single`` per round),
    ``"p2p"`` (one message per peer), ``"shared"`` (memory of one host) or ``"mixed"`` (shared memory on
    each host, peer to peer between them). The default shares memory wherever two ranks can and is
    peer to peer where none can; so do ``"shared"`` and ``"mixed"``. ``host`` names what this rank takes
    for its host, besides what the system says: ranks with other names do not share memory.
    """
    place = find_place("cpu", "gloo", group, store, rank, size, timeout, torch.device("cpu"))
    own = place.group
    if place.store is not None:
        own = guarded(lambda: dist.ProcessGroupGloo(place.store, place.position, len(place.peers), timeout))
    made = GlooTransport(
        own, place.rank, place.peers, store=place.store, timeout=timeout, owned=place.store is not None
    )
    try:
        return Context(with_strategy(made, strategy, host))
    except BaseException:  # the others wait for this rank's words
        made.close()
        raise
