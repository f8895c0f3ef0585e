"""Side-by-side timing: every method once per round, order rotated, median of per-round ratios."""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # of mallopt


@dataclass(frozen=True)
class Ratio:
    """How many times faster ``ours`` is than ``theirs``: median over rounds, with its spread."""

    median: float
    low: float
    high: float
    ours: float
    theirs: float


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """Mean seconds of one call over ``repeat`` calls."""
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def memory(kind: str) -> None:
    """From now on large results lie in memory that the system has just given ("fresh"), or in memory that
    the process had before ("warm"): glibc does either, by chance, unless told."""
    libc = ctypes.CDLL(None)
    threshold = {"fresh": 128 << 10, "warm": 1 << 30}[kind]
    if not (libc.mallopt(MMAP_THRESHOLD, threshold) and libc.mallopt(TRIM_THRESHOLD, 1 << 30)):
        raise SystemExit("this malloc has no thresholds")


def ratio(
    ours: Callable[[], Any], theirs: Callable[[], Any], *, rounds: int = 9, budget: float = 1.0
) -> Ratio:
    """Both methods alternate; each is repeated within a round until its time is measurable."""
    methods = (theirs, ours)
    repeats = [max(1, min(200, int(budget / 50 / max(seconds(m, 1), 1e-7)))) for m in methods]
    found: list[tuple[float, float]] = []
    enabled = gc.isenabled()
    gc.disable()
    try:
        for k in range(rounds):
            order = (0, 1) if k % 2 else (1, 0)
            took = {m: seconds(methods[m], repeats[m]) for m in order}
            found.append((took[0], took[1]))
            gc.collect()
    finally:
        if enabled:
            gc.enable()
    ratios = sorted(a / b for a, b in found)
    theirs_s, ours_s = (statistics.median(x) for x in zip(*found))
    return Ratio(statistics.median(ratios), ratios[0], ratios[-1], ours_s, theirs_s)


def exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The slope of log time over log size."""
    return float(np.polyfit(np.log(sizes), np.log(times), 1)[0])


def arguments(description: str) -> argparse.Namespace:
    """``--quick`` for a short run, ``--json`` for machines."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="fewer rounds and sizes")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    return parser.parse_args()


def report(title: str, rows: Sequence[dict[str, Any]], as_json: bool) -> bool:
    """Print a table (or JSON); True if every row that has a goal reaches it."""
    good = all(row.get("ok", True) for row in rows)
    if as_json:
        print(json.dumps({"title": title, "machine": machine(), "rows": list(rows)}))
        return good
    print(f"\n{title}  ({machine()})")
    names = list(dict.fromkeys(name for row in rows for name in row if name != "ok"))
    table = [[_cell(row.get(name)) for name in names] for row in rows]
    marks = ["" if "ok" not in row else "ok" if row["ok"] else "MISSED" for row in rows]
    widths = [max(len(str(n)), *(len(r[i]) for r in table)) for i, n in enumerate(names)]
    print("  ".join(str(n).ljust(w) for n, w in zip(names, widths)))
    for cells, mark in zip(table, marks):
        print("  ".join(c.ljust(w) for c, w in zip(cells, widths)), mark)
    return good


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    return str(value)


def machine() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}, NumPy {np.__version__}"
