"""The order of runs: one after the other, as they were called, also those in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Lane:
    """One context's queue. All ranks call in one order, so all ranks exchange in one order."""

    def __init__(self) -> None:
        self._one = threading.RLock()
        self._worker: ThreadPoolExecutor | None = None
        self._last: Future[Any] | None = None

    def run(self, work: Callable[[], T]) -> T:
        """Do it here, after everything that was started before."""
        while (last := self._last) is not None and not last.done():
            _settled(last)
        with self._one:
            return work()

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do it in the background, after everything that was started before."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="shardalg")
        self._last = self._worker.submit(self._alone, work)
        return self._last

    def _alone(self, work: Callable[[], T]) -> T:
        with self._one:
            return work()

    def close(self) -> None:
        """Drop what has not begun; what runs ends with its transport."""
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)


def _settled(work: Future[Any]) -> None:
    """Return once ``work`` ended, well or not: whoever waits for it hears how."""
    try:
        work.exception()
    except BaseException:
        if not work.done():
            raise
