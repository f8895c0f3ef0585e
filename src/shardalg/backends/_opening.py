"""The opening and closing words of a run: what all ranks must say alike before, and how it went after."""

from __future__ import annotations

import struct as packing
from typing import NamedTuple

from .._errors import InvalidMapError, ShardalgError, TransferError
from ._context import Context

OPENING = packing.Struct("<4sBBBBq8s")
CLOSING = packing.Struct("<4sBq")
MAGIC = b"shda"
NO_TAG = -(1 << 63)


class Opening(NamedTuple):
    """One rank's opening word. ``refused``: its tensors do not fit; ``gradients``: an input of its
    requires them; ``back``: this is the backward of an earlier run, whose number is the tag."""

    refused: bool
    gradients: bool
    verify: bool
    back: bool
    tag: int | None
    program: bytes

    def pack(self) -> bytes:
        flags = (self.refused, self.gradients, self.verify, self.back)
        return OPENING.pack(MAGIC, *flags, NO_TAG if self.tag is None else self.tag, self.program)

    @classmethod
    def unpack(cls, word: bytes) -> Opening | None:
        magic, refused, gradients, verify, back, tag, program = OPENING.unpack(word)
        if magic != MAGIC:
            return None
        known = None if tag == NO_TAG else tag
        return cls(bool(refused), bool(gradients), bool(verify), bool(back), known, program)


def check_tag(tag: object) -> None:
    """Raise unless ``tag`` is None or fits a word."""
    if tag is not None and (not isinstance(tag, int) or not NO_TAG < tag < 1 << 63):
        raise InvalidMapError(f"tag must be None or an int of 64 bits, got {tag!r}")


def opened(ctx: Context, mine: Opening, refusal: ShardalgError | None) -> bool:
    """Exchange opening words; whether any rank wants gradients. What differs or was refused is an
    error on every rank: nothing has moved yet, and the context stays usable."""
    if not ctx.others:
        if refusal is not None:
            raise refusal
        return mine.gradients
    words = {r: Opening.unpack(w) for r, w in sorted(ctx.swap(mine.pack()).items())}
    _same(words)
    if any(w is not None and w.refused for w in words.values()):
        _raise_refusals(ctx, refusal)
    return any(w is not None and w.gradients for w in words.values())


def _same(words: dict[int, Opening | None]) -> None:
    """Raise the same error on every rank unless all run the same program with the same tag."""
    first_rank, first = next(iter(words.items()))
    for rank, word in words.items():
        if word is None or first is None or (word.program, word.back) != (first.program, first.back):
            raise TransferError(
                f"rank {first_rank} and rank {rank} run different plans: call run in the same order on every"
                " rank; nothing was written"
            )
        if word.tag != first.tag:
            what = "goes back through run" if word.back else "has tag"
            raise TransferError(
                f"rank {first_rank} {what} {first.tag}, rank {rank} {word.tag}; nothing was written"
            )
        if word.verify != first.verify:
            raise TransferError(
                f"verify= is {first.verify} on rank {first_rank} and {word.verify} on rank {rank};"
                " nothing was written"
            )


def _raise_refusals(ctx: Context, refusal: ShardalgError | None) -> None:
    """Every rank hears the first refusal in words; the refusing rank raises its own."""
    text = "" if refusal is None else str(refusal)
    said = ctx.gather(dict.fromkeys(ctx.ranks, text.encode()))
    if refusal is not None:
        raise refusal
    rank, why = min((r, why) for r, why in said.items() if why)
    raise TransferError(f"rank {rank} refused the run: {why.decode()}; nothing was written")


def closed(ctx: Context, wrong: int | None) -> dict[int, int]:
    """Tell how it went: this process's first wrong copy, if any; everybody's wrong copies by rank."""
    words = ctx.swap(CLOSING.pack(MAGIC, wrong is not None, wrong or 0))
    found = {}
    for rank, word in sorted(words.items()):
        magic, bad, number = CLOSING.unpack(word)
        if magic != MAGIC:
            raise TransferError(f"rank {rank} sent something else than its closing word")
        if bad:
            found[rank] = number
    return found
