"""Progress words: what each rank last began, kept in a store that outlives a broken group."""

from __future__ import annotations

import threading
import time
from typing import Any, NamedTuple

RARELY = 0.02  # seconds between words that the run waits for
IDLE = 1.0  # seconds without words after which nobody waits for them
GRACE = 0.5  # seconds to wait for the other ranks' last words
PATIENCE = 0.1  # seconds to wait for a connection


class Word(NamedTuple):
    """A run and a round that a rank began; ``ended`` once it raised or finished."""

    run: int
    round: int
    ended: bool

    def __str__(self) -> str:
        return f"run {self.run}, {'opening' if self.round < 0 else f'round {self.round}'}"


class Words:
    """The words of one context's ranks. Writing never raises.

    A word takes a message to the store and back. The first after ``RARELY`` is told at once; of those that
    follow sooner a thread tells the last, so that short runs do not wait for the store.

    They go over a connection of their own: who shares one waits while another waits on it. Where
    connecting takes long (a name server that does not answer), words begin later.
    """

    def __init__(self, store: Any) -> None:
        self._store: Any = None
        self._ranks: tuple[int, ...] = ()
        self._last = self._told = Word(-1, -1, True)
        self._when = 0.0
        self._telling, self._starting = threading.Lock(), threading.Lock()
        self._due = threading.Event()
        self._teller: threading.Thread | None = None
        if store is not None:
            connecting = threading.Thread(target=self._connect, args=(store,), daemon=True)
            connecting.start()
            connecting.join(PATIENCE)

    def _connect(self, store: Any) -> None:
        try:
            self._store = store.clone()
        except Exception:  # a store that cannot be cloned is used as it is
            self._store = store

    def say(self, ranks: tuple[int, ...], word: Word) -> None:
        """Write this process's word, now or soon."""
        self._ranks, self._last = ranks, word
        if self._store is None:
            return
        if time.monotonic() - self._when >= RARELY:
            self._tell()
        elif not self._due.is_set():
            with self._starting:
                self._due.set()
                if self._teller is None:
                    self._teller = threading.Thread(
                        target=self._tell_later, name="shardalg words", daemon=True
                    )
                    self._teller.start()

    def _tell(self) -> None:
        with self._telling:
            self._write()

    def _write(self) -> None:
        word = self._last
        if word == self._told or self._store is None:
            return
        self._told, self._when = word, time.monotonic()
        text = f"{word.run} {word.round} {int(word.ended)}"
        try:
            for rank in self._ranks:
                self._store.set(f"progress/{rank}", text)
        except Exception:  # the store went with its host: errors will name fewer ranks, that is all
            self._store = None

    def _tell_later(self) -> None:
        """Tell the last of the words that come close together; end when none come."""
        while True:
            if self._due.wait(IDLE):
                time.sleep(RARELY)
                self._due.clear()
                self._tell()
                if self._store is None:
                    return
            else:
                with self._starting:
                    if not self._due.is_set():
                        self._teller = None
                        return

    def close(self) -> None:
        """Tell the last word. Afterwards no thread of ours is inside the store: one that came back from there
        while the process ends would abort it."""
        if self._telling.acquire(timeout=GRACE):
            self._write()
            self._store = None
            self._telling.release()
        self._due.set()

    def stale(self, mine: Word, ranks: tuple[int, ...], others: tuple[int, ...]) -> dict[int, Word | None]:
        """Ranks that do not answer within ``GRACE``, with their last word: those behind, if any are."""
        if self._store is None or not others:
            return {}
        self._ranks, self._last = ranks, mine._replace(ended=True)
        self._tell()
        found: dict[int, Word | None] = {}
        reader = threading.Thread(target=_collect, args=(self._store, mine, others, found), daemon=True)
        reader.start()  # a store on a stopped host would hold us: leave it behind
        reader.join(3 * GRACE)
        silent = {r: w for r, w in found.copy().items() if w is None or not w.ended or w.run < mine.run}
        behind = {r: w for r, w in silent.items() if w is None or w[:2] < mine[:2]}
        return dict(sorted((behind or silent).items()))


def _collect(store: Any, mine: Word, others: tuple[int, ...], found: dict[int, Word | None]) -> None:
    """Read words until every rank has ended the run ``mine`` belongs to, or ``GRACE`` is over."""
    end = time.monotonic() + GRACE
    try:
        while True:
            found.update({r: _read(store, r) for r in others})
            if all(w is not None and w.ended and w.run >= mine.run for w in found.values()):
                return
            if time.monotonic() > end:
                return
            time.sleep(GRACE / 20)
    except Exception:  # the store is gone: what was read stands
        return


def _read(store: Any, rank: int) -> Word | None:
    key = f"progress/{rank}"
    if not store.check([key]):
        return None
    run, number, ended = store.get(key).decode().split()
    return Word(int(run), int(number), ended == "1")


def describe_stale(stale: dict[int, Word | None]) -> str:
    """The silent ranks in words, or nothing."""
    if not stale:
        return ""
    said = [f"rank {r} ({'never began' if w is None else f'last seen in {w}'})" for r, w in stale.items()]
    return f"; no answer from {', '.join(said[:8])}{', ...' if len(said) > 8 else ''}"
