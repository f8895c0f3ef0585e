"""Live contexts: the processes that can run plans, and what they keep between runs."""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from .._errors import ProvenanceError, ShardalgError, TransferError
from ..plans import Program
from ._bound import Bound as Bound
from ._bound import Owner, check_stamp
from ._lane import Lane
from ._report import RunReport
from ._transport import Exchange, Transport
from ._words import Word, Words, describe_stale

T = TypeVar("T")

LINGER = 0.2  # seconds that a run in the background has to notice that its context is closed
FAREWELL = 10.0  # seconds that runs in the background have to end when the process does

log = logging.getLogger("shardalg")


@dataclasses.dataclass
class Counters:
    """What a context has done: calls of its transport, payload bytes sent by its ranks, programs
    prepared, and buffers or result tensors allocated."""

    gathers: int = 0
    exchanges: int = 0
    payload_bytes: int = 0
    preparations: int = 0
    allocations: int = 0


class Context:
    """A live set of processes that can run plans. Made by a backend, never by hand.

    ``ranks`` are the global ranks this process holds, ``peers`` everybody's. Buffers and prepared
    programs are kept and reused between runs, and freed by ``close``. ``last_report`` says what the
    last run did, ``counters`` what all did.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.counters = Counters()
        self.closed = False
        self.failed = ""
        self.runs = 0
        self.note = ""  # what an error of the present run must say besides
        self._report: RunReport | Callable[[], RunReport] | None = None
        self.others = tuple(p for p in transport.peers if p not in transport.ranks)  # held by other processes
        self._doing, self._word, self._touched = "bind", Word(-1, -1, True), False
        self._owner = Owner()
        self._lane = Lane()
        self._words = Words(getattr(transport, "store", None))
        self._kept: dict[tuple[str, int], tuple[Program, Any]] = {}
        self._pool: dict[tuple[int, str], torch.Tensor] = {}
        self._process = os.getpid()
        self._hush = weakref.finalize(self, _hushed, self._words, self._process)
        self._end = weakref.finalize(self, _ended, transport, self._lane, self._process)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.transport.ranks

    @property
    def peers(self) -> tuple[int, ...]:
        return self.transport.peers

    @property
    def last_report(self) -> RunReport | None:
        """What the last run that ended well did; None before the first."""
        if callable(self._report):
            self._report = self._report()
        return self._report

    def reports(self, make: Callable[[], RunReport]) -> None:
        """Keep how to report the last run: bounds take time to count, so only who asks waits for it."""
        self._report = make

    def kept(self, what: str, program: Program, make: Callable[[], T]) -> T:
        """What this context keeps for a program, made the first time."""
        key = what, id(program)
        found = self._kept.get(key)
        if found is None or found[0] is not program:
            found = self._kept[key] = program, make()
        return found[1]

    def __repr__(self) -> str:
        state = "closed " if self.closed else "failed " if self.failed else ""
        return f"<{state}Context of {len(self.peers)} ranks, holding {self.ranks}>"

    def close(self) -> None:
        """Free buffers and what the context made; bound plans are refused from now on, and ranks that wait
        for this one hear of it: at once, or once the exchange ends that a background run is in. A context
        that is forgotten, or open when its process ends, is closed then; runs in the background have some
        seconds to end before."""
        if not self.closed:
            self.closed = True
            self._release()
            self._hush()

    def _release(self) -> None:
        self._end()
        self._kept.clear()
        self._pool.clear()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- one thing after the other ---

    def in_turn(self, work: Callable[[], T]) -> T:
        """Do it after the runs that were started before. An error that the other ranks cannot know of ends
        the context; ours are told to all ranks alike, or have ended it already."""
        return self._or_broken(lambda: self._lane.run(work))

    def later(self, work: Callable[[], T]) -> Future[T]:
        """The same in the background."""
        return self._lane.start(lambda: self._or_broken(work))

    def check_free(self) -> None:
        """Raise inside a run."""
        self._lane.check_free()

    def _or_broken(self, work: Callable[[], T]) -> T:
        try:
            return work()
        except ShardalgError:
            raise
        except BaseException as error:
            self.broken(error)
            raise

    # --- messages ---

    def at(self, doing: str, word: Word | None = None, *, touched: bool = False) -> None:
        """Note what this process is doing, for errors here and, in the store, on other ranks."""
        word = word or self._word
        self._doing, self._word, self._touched = doing, word, touched
        if self.others:
            self._words.say(self.ranks, word)

    def gather(self, mine: dict[int, bytes], what: str = "") -> dict[int, bytes]:
        """Small byte strings of all ranks. Those that gather for another purpose (``what``) are an error
        on every rank."""
        if not self.others:
            return mine
        self.counters.gathers += 1
        marked = {r: what.encode() + b"\0" + text for r, text in mine.items()}
        said = self._guarded(lambda: self.transport.gather(marked))
        found = {r: text.partition(b"\0") for r, text in said.items()}
        _check_alike({r: its[0].decode() for r, its in found.items()})
        return {r: text for r, (_, _, text) in found.items()}

    def exchange(self, parts: dict[int, Exchange]) -> None:
        """One exchange of bytes between all ranks."""
        self.counters.exchanges += 1
        self._guarded(lambda: self.transport.exchange(parts))

    def _guarded(self, talk: Callable[[], T]) -> T:
        try:
            return talk()
        except TransferError as error:
            raise self.broken(error) from error
        except BaseException as error:
            self.broken(error)
            raise

    def swap(self, word: bytes) -> dict[int, bytes]:
        """This process's word to every rank, and every rank's: one exchange, words of one fixed size."""
        if not self.others:
            return dict.fromkeys(self.ranks, word)
        strategy: Any = getattr(self.transport, "strategy", None)
        if hasattr(strategy, "post") and strategy.takes(word):
            self.counters.exchanges += 1
            return dict(zip(self.peers, self._guarded(lambda: strategy.post(word))))
        size, count = len(word), len(self.peers) - 1
        mark = torch.frombuffer(bytearray(word), dtype=torch.uint8)
        parts = {}
        for rank in self.ranks:
            sizes = [0 if p == rank else size for p in self.peers]
            send, receive = (self.buffer(rank, use, size * count) for use in ("words out", "words in"))
            send.view(count, size).copy_(mark)
            parts[rank] = Exchange(send, sizes, receive, sizes)
        self.exchange(parts)
        rank, part = next(iter(parts.items()))
        said = part.receive.cpu().numpy().tobytes()
        words = [said[at : at + size] for at in range(0, len(said), size)]
        return {rank: word} | dict(zip((p for p in self.peers if p != rank), words))

    def buffer(self, rank: int, use: str, size: int) -> torch.Tensor:
        """A pooled ``uint8`` buffer of at least ``size`` bytes, cut to size."""
        held = self._pool.get((rank, use))
        if held is None or held.numel() < size:
            self.counters.allocations += 1
            with torch.inference_mode(False):  # later runs write it, too, in whatever mode
                held = torch.empty(size, dtype=torch.uint8, device=self.transport.device)
            self._pool[rank, use] = held
        return held[:size]

    # --- faults ---

    def broken(self, error: BaseException) -> TransferError:
        """Give up on this context, so that the other ranks hear at once; what to tell the caller: what
        this process was doing and which ranks do not answer."""
        doing = f"{', '.join(map(str, self.ranks[:4]))}: {self._doing}"
        said = f"rank {doing}: {error or type(error).__name__}{self.note}"
        stale = {}
        if self.others and not self.failed:
            self.failed = said
            self._release()
            stale = self._words.stale(self._word, self.ranks, self.others)
            log.warning("%s%s", said, describe_stale(stale))
        return TransferError(said + describe_stale(stale), targets_touched=self._touched)


def _hushed(words: Words, process: int) -> None:
    """The last word of a context."""
    if os.getpid() == process:
        words.close()


def _ended(transport: Transport, lane: Lane, process: int) -> None:
    """What becomes of a context that is closed, forgotten, or there when its process ends."""
    if os.getpid() != process:
        return  # a forked process has copies of what is its parent's
    leaving = not threading.main_thread().is_alive()
    if leaving:
        lane.rest(FAREWELL)
    lane.close()
    if not lane.busy_elsewhere():
        transport.close()
        return
    # the end of a group waits for the exchange it is in: where the process ends, its end is enough
    end = getattr(transport, "strategy", transport).close if leaving else transport.close
    threading.Thread(target=end, name="shardalg end", daemon=True).start()
    lane.rest(LINGER)


def _check_alike(purposes: dict[int, str]) -> None:
    """Raise the same error on every rank unless all speak for the same purpose."""
    first_rank, first = next(iter(purposes.items()))
    for rank, purpose in purposes.items():
        if purpose != first:
            raise TransferError(
                f"rank {first_rank} is in {first or 'another call'}, rank {rank} in"
                f" {purpose or 'another call'}: make the same calls in the same order on every rank; nothing"
                " was written"
            )


def check_context(ctx: Any) -> None:
    """Raise unless ``ctx`` is an open context that has not failed."""
    if not isinstance(ctx, Context):
        raise ProvenanceError(f"expected a context made by a backend, got {type(ctx).__name__}")
    if ctx._process != os.getpid():
        raise ProvenanceError(
            f"the context belongs to process {ctx._process} and this is {os.getpid()}, forked from it;"
            " make a new one and bind again"
        )
    if ctx.closed:
        raise ProvenanceError("the context is closed; make a new one and bind again")
    if ctx.failed:
        raise TransferError(f"this context failed earlier ({ctx.failed}); make a new one and bind again")


def check_owner(ctx: Any, bound: Any) -> None:
    """Raise unless ``bound`` was stamped by this very context and it is open. Local and silent."""
    if not isinstance(ctx, Context):
        raise ProvenanceError(f"expected a context made by a backend, got {type(ctx).__name__}")
    check_stamp(ctx._owner, bound)
    check_context(ctx)
