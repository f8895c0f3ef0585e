"""The order of runs: one after the other, as they were called, also those in the background."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeVar

from .._errors import TransferError, UnsupportedError

T = TypeVar("T")


class Task(NamedTuple):
    """Work for the background, the promise of its result, and a sign that it is over."""

    work: Callable[[], Any]
    promise: Future[Any]
    over: threading.Event


class Lane:
    """One context's queue. All ranks call in one order, so all ranks exchange in one order.

    The thread for the background is a daemon: a process whose run never ends can still end.
    """

    def __init__(self) -> None:
        self._one = threading.Lock()
        self._holder: int | None = None  # the thread whose work goes on
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._worker: threading.Thread | None = None
        self._last = threading.Event()  # keeps no result alive, as a promise would
        self._last.set()
        self._gate = threading.Lock()  # no work is put after the end
        self._ended = False

    def run(self, work: Callable[[], T]) -> T:
        """Do it here, after everything that was started before."""
        self.check_free()
        while not (last := self._last).is_set():
            last.wait()
        return self._alone(work)

    def start(self, work: Callable[[], T]) -> Future[T]:
        """Do it in the background, after everything that was started before."""
        with self._gate:
            if self._ended:
                raise TransferError("the context was closed before this run began")
            if self._worker is None:
                self._worker = threading.Thread(target=self._serve, name="shardalg", daemon=True)
                self._worker.start()
            task = Task(work, Future(), threading.Event())
            self._last = task.over
            self._tasks.put(task)
            return task.promise

    def check_free(self) -> None:
        """Raise inside a run: what waits for its end there, waits for itself."""
        if self._holder == threading.get_ident():
            raise UnsupportedError(
                "a run of this context goes on in this very thread: nothing of the context can be run, bound"
                " or waited for from its progress= function; do it after the run"
            )

    def busy_elsewhere(self) -> bool:
        """Whether work goes on in another thread."""
        return self._holder not in (None, threading.get_ident())

    def rest(self, seconds: float) -> None:
        """Wait until all that was started is over, at most so long."""
        self._last.wait(seconds)
        if self._one.acquire(timeout=seconds):
            self._one.release()

    def close(self) -> None:
        """Drop what has not begun; what runs ends with its transport."""
        with self._gate:
            self._ended = True
        with suppress(Empty):
            while True:
                if (task := self._tasks.get_nowait()) is not None:
                    task.promise.cancel()
                    task.promise.set_running_or_notify_cancel()
                    task.over.set()
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.promise.set_running_or_notify_cancel()  # nobody else can cancel it now
            try:
                task.promise.set_result(self._alone(task.work))
            except BaseException as error:
                task.promise.set_exception(error)
            task.over.set()
            del task  # and with it the tensors of the run

    def _alone(self, work: Callable[[], T]) -> T:
        with self._one:
            self._holder = threading.get_ident()
            try:
                return work()
            finally:
                self._holder = None
