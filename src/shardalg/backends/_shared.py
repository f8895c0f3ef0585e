"""Messages in memory that the ranks of one host share.

Every rank packs into a segment of its own and reads what it is sent where it lies. Segments are
``memfd`` files: they have no name, so none is left behind however a process ends, and their
memory is reserved when they are made, so that a lack of it is an error then and no crash later.
Others open them through ``/proc`` and prove it by a number only the owner knew.

Two halves take turns. Words next to them say what is ready and what has been read; an aligned
word is written in one piece and, on the processors this is used on, after what it speaks of. Who waits
for a word sleeps on it, so that ranks which share processors do not take them from each other.
"""

from __future__ import annotations

import json
import mmap
import os
import platform
import secrets
import select
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from .._errors import TransferError
from ._futex import sleep_on, wake
from ._strategies import PeerToPeer
from ._transport import Buffers, Meanwhile, Outgoing, Strategy

HALF = 4 << 20  # bytes of messages of one turn: fewer wait for each other more often, more leave the caches
WORD = 8  # a word of its own cache line every 8 words
NONCE, READY, READ, CLOSED, POSTED, POST = (WORD * k for k in range(6))  # two lines of post
STARTS = POST + 2 * WORD
ORDERED = ("x86_64", "AMD64")  # processors that keep writes in order
NAMESPACES = ("pid", "net", "ipc", "uts")
SPINS = 50  # looks before a waiter goes to sleep
NAP = 0.05  # seconds of sleep at most until a waiter asks whether its peer still lives


class Segment:
    """One rank's shared memory: words, and two halves for messages."""

    def __init__(self, memory: mmap.mmap, ranks: int) -> None:
        self.words = np.frombuffer(memory, np.int64, _words(ranks))
        self.data = torch.frombuffer(memory, dtype=torch.uint8, offset=8 * _words(ranks))
        self.ranks = ranks
        self._at = self.words.ctypes.data

    def say(self, word: int, value: int) -> None:
        """Write a word and wake those who wait for it."""
        self.words[word] = value
        wake(self._at + 8 * word)

    def wait(self, word: int, value: int) -> None:
        """Sleep until the word is written next, unless it is ``value`` or more; not for long."""
        found = int(self.words[word])
        if found < value:
            sleep_on(self._at + 8 * word, found, NAP)

    def half(self, turn: int) -> torch.Tensor:
        return self.data[turn % 2 * HALF :][:HALF]

    def starts(self, turn: int) -> Any:
        """The first byte of the message to each peer, for the half of a turn."""
        first = STARTS + turn % 2 * self.ranks
        return self.words[first : first + self.ranks]

    def post(self, number: int) -> Any:
        """Room for a short word to everybody, as bytes."""
        first = POST + number % 2 * WORD
        return self.words[first : first + WORD].view(np.uint8)


def _words(ranks: int) -> int:
    """Words before the messages: whole pages."""
    return -(-(STARTS + 2 * ranks) // 512) * 512


def _size(ranks: int) -> int:
    return 8 * _words(ranks) + 2 * HALF


def make(ranks: int) -> tuple[Segment, int]:
    """A segment of our own and its file. Raises ``OSError`` where memory or the kind of file is missing."""
    file = os.memfd_create("shardalg", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(file, 0, _size(ranks))
        segment = Segment(mmap.mmap(file, _size(ranks)), ranks)
    except OSError:
        os.close(file)
        raise
    segment.words[NONCE] = secrets.randbits(62) + 1
    return segment, file


def look(process: int, file: int, ranks: int, nonce: int) -> Segment | None:
    """The segment of another process, or None where it cannot be reached or is not the one meant."""
    try:
        mine = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(mine).st_size != _size(ranks):
            return None
        segment = Segment(mmap.mmap(mine, _size(ranks)), ranks)
    except (OSError, ValueError):
        return None
    finally:
        os.close(mine)
    return segment if int(segment.words[NONCE]) == nonce else None


def this_host(name: str | None = None) -> str:
    """What ranks must have in common to share memory: the running system and its namespaces, since
    containers and network namespaces stand for hosts of their own. Empty where sharing is not possible."""
    if platform.machine() not in ORDERED or not hasattr(os, "memfd_create"):
        return ""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES]
            return "/".join([name or "", boot.read().strip(), *spaces])
    except OSError:
        return ""


class Shared:
    """Messages to ranks of this host through shared memory, others (if any) peer to peer."""

    turn_bytes = HALF
    straight = False

    def __init__(
        self, mine: Segment, near: Mapping[int, Segment], far: PeerToPeer, processes: Mapping[int, int]
    ) -> None:
        self.position, self.mine, self.near, self.far = far.position, mine, dict(near), far
        self.name = "mixed" if len(near) + 1 < mine.ranks else "shared"
        self._seconds = far.timeout.total_seconds()
        self._alive = {p: _watch(process) for p, process in processes.items()}
        self._turn = self._posts = 0
        self._readers: list[list[int]] = [[], []]  # who reads each half

    def outbox(self, rank: int, size: int, buffers: Buffers) -> torch.Tensor:
        assert size <= HALF
        turn = self._turn + 1
        for p in self._readers[turn % 2]:
            self._wait(p, READ, turn - 2)
        return self.mine.half(turn)[:size]

    def swap(
        self, parts: Mapping[int, Outgoing], buffers: Buffers, meanwhile: Meanwhile
    ) -> dict[int, Sequence[torch.Tensor]]:
        ((rank, part),) = parts.items()
        self._turn += 1
        turn, sizes = self._turn, part.send_bytes
        self.mine.starts(turn)[:] = list(accumulate(sizes, initial=0))[:-1]
        self._readers[turn % 2] = [p for p in self.near if sizes[p]]
        self.mine.say(READY, turn)
        expected = [0 if p in self.near else n for p, n in enumerate(part.receive_bytes)]
        messages = list(buffers(rank, "receive", sum(expected)).split(expected))
        sent = [x[:0] if p in self.near else x for p, x in enumerate(part.messages)]
        self.far.transfer(sent, messages, turn, meanwhile)
        for p, its in self.near.items():
            if size := part.receive_bytes[p]:
                self._wait(p, READY, turn)
                start = int(its.starts(turn)[self.position])
                messages[p] = its.half(turn)[start : start + size]
        return {rank: messages}

    def release(self) -> None:
        self.mine.say(READ, self._turn)

    def takes(self, word: bytes) -> bool:
        """Whether ``post`` can carry a word: everybody is near, and it is short."""
        return self.name == "shared" and len(word) <= 8 * WORD

    def post(self, word: bytes) -> list[bytes]:
        """A short word to everybody, and everybody's, by position; all of one size. A line is written
        again two posts later, when everybody has posted since and so has read it."""
        self._posts += 1
        number, size = self._posts, len(word)
        self.mine.post(number)[:size] = np.frombuffer(word, np.uint8)
        self.mine.say(POSTED, number)
        said = {self.position: word}
        for p, its in self.near.items():
            self._wait(p, POSTED, number)
            said[p] = its.post(number)[:size].tobytes()
        return [said[p] for p in range(self.mine.ranks)]

    def _wait(self, peer: int, word: int, turn: int) -> None:
        """Look, then sleep, until a peer's word has come to ``turn``; give up when it is gone or late."""
        its = self.near[peer]
        words = its.words
        for _ in range(SPINS):
            if words[word] >= turn:
                return
        began = time.monotonic()
        while words[word] < turn:
            its.wait(word, turn)
            if self.mine.words[CLOSED]:
                raise TransferError("the context was closed")
            if words[CLOSED] and words[word] < turn:  # it may have written, and then closed
                raise TransferError(f"the peer at position {peer} closed its context")
            waited = time.monotonic() - began
            if waited > NAP and _gone(self._alive[peer]) and words[word] < turn:
                raise TransferError(f"the process of the peer at position {peer} is gone")
            if waited > self._seconds:
                raise TransferError(f"the peer at position {peer} did not answer within {self._seconds} s")

    def close(self) -> None:
        """Tell the peers. The memory goes with the last process that sees it."""
        self.far.close()
        self.mine.words[CLOSED] = 1
        for word in (READY, READ, POSTED):
            self.mine.say(word, int(self.mine.words[word]))
        for file in self._alive.values():
            if file is not None:
                os.close(file)
        self._alive = dict.fromkeys(self._alive)


def _watch(process: int) -> int | None:
    """A file that becomes readable when a process ends; None for our own."""
    return None if process == os.getpid() else os.pidfd_open(process)


def _gone(file: int | None) -> bool:
    return file is not None and bool(select.select([file], [], [], 0)[0])


# --- meeting ------------------------------------------------------------------------------


def meet_near(
    gather: Callable[[bytes], Sequence[bytes]], far: PeerToPeer, ranks: int, host: str | None
) -> Strategy | None:
    """Shared memory with every peer that can be reached both ways, ``far`` for the others; None where no
    two ranks share memory. Collective: ``gather`` gives the words of all positions from one's own."""
    words: dict[str, Any] = {"host": this_host(host), "process": os.getpid()}
    segment, file = None, -1
    if words["host"]:
        try:
            segment, file = make(ranks)
            words |= {"file": file, "nonce": int(segment.words[NONCE])}
        except OSError:  # no memory to share: the others reach this rank through the group
            words["host"] = ""
    said = [json.loads(b) for b in gather(json.dumps(words).encode())]
    seen = {} if segment is None else _seen(said, far.position, ranks)
    sights = [set(json.loads(b)) for b in gather(json.dumps(sorted(seen)).encode())]
    if file >= 0:
        os.close(file)
    mutual = [{p for p in its if k in sights[p]} for k, its in enumerate(sights)]
    if not any(mutual):
        return None
    if segment is None or not mutual[far.position]:
        return PeerToPeer(far.group, far.position, far.timeout, HALF)  # in turns as small as the others'
    near = {p: seen[p] for p in mutual[far.position]}
    return Shared(segment, near, far, {p: said[p]["process"] for p in near})


def _seen(said: Sequence[dict[str, Any]], position: int, ranks: int) -> dict[int, Segment]:
    """The segments that can be opened, by position."""
    found = {
        p: look(its["process"], its["file"], ranks, its["nonce"])
        for p, its in enumerate(said)
        if p != position and its["host"] and its["host"] == said[position]["host"]
    }
    return {p: its for p, its in found.items() if its is not None}
