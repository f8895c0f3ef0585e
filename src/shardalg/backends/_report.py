"""What a run did: bytes, seconds, rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from .._struct import struct


@struct
class RunReport:
    """One run of one process. Bytes and seconds.

    ``wire_bytes`` cross ranks in all rounds, over all ranks; ``lower_bound`` is the fewest that any
    plan for the same layouts could send (None where it is unknown). ``sent`` and ``received`` are this
    process's own, ``peak_staging`` the most that send and receive buffers of one rank hold at once.
    ``seconds`` are pairs (phase, seconds): prepare, open, pack, exchange, local, unpack, close.
    """

    run: int
    tag: int | None
    rounds: int
    wire_bytes: int
    lower_bound: int | None
    sent: int
    received: int
    peak_staging: int
    seconds: tuple[tuple[str, float], ...]

    @property
    def total_seconds(self) -> float:
        """Seconds in all phases."""
        return sum(s for _, s in self.seconds)


class Clock:
    """Seconds per phase of one run."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start
