"""What a rank has to say before a payload moves: nothing, or why it cannot take part.

It travels as integers in the gather that is needed anyway, so that every rank raises the same
error and none waits for a message that will not come.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from .._errors import InvalidMapError

WORDS = 40


def as_words(text: str) -> list[int]:
    """A short text as ``WORDS`` integers; all zero for none.

    >>> as_text(as_words("rank 0 holds 3 experts"))
    'rank 0 holds 3 experts'
    """
    return list(struct.unpack(f"<{WORDS}q", text.encode()[: WORDS * 8].ljust(WORDS * 8, b"\0")))


def as_text(words: Sequence[int]) -> str:
    """The text that ``as_words`` was given."""
    return struct.pack(f"<{WORDS}q", *words).rstrip(b"\0").decode(errors="replace")


def raise_first(notices: Sequence[Sequence[int]]) -> None:
    """Raise the first rank's problem, in the same words wherever it is called."""
    for rank, words in enumerate(notices):
        if any(words):
            raise InvalidMapError(f"rank {rank}: {as_text(words)}")
