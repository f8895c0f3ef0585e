"""A bar on the standard error stream."""

from __future__ import annotations

import sys

BAR = 24  # characters


def draw(wanted: bool, done: int, total: int, what: str) -> None:
    """Show how far a run is, where that is wanted."""
    if wanted:
        print(bar(done, total, what), end="", file=sys.stderr, flush=True)


def bar(done: int, total: int, what: str) -> str:
    """A bar that is drawn over the one before it; the last ends its line.

    >>> bar(1, 4, "steps"), bar(4, 4, "steps")
    ('\\r[######                  ] 1/4 steps', '\\r[########################] 4/4 steps\\n')
    """
    full = BAR * done // total
    return f"\r[{'#' * full}{' ' * (BAR - full)}] {done}/{total} {what}" + ("\n" if done == total else "")
