"""The opening and closing words of a run: what all ranks must say alike before, and how it went after."""

from __future__ import annotations

import struct as packing
from typing import NamedTuple

from .._errors import InvalidMapError, ShardalgError, TransferError, UnsupportedError
from ._context import Context

OPENING = packing.Struct("<4sBBBBBq8s")
CLOSING = packing.Struct("<4sBq")
MAGIC = b"shda"
NO_TAG = -(1 << 63)


class Opening(NamedTuple):
    """One rank's opening word. ``refused``: its tensors do not fit; ``gradients``: an input of its requires
    them; ``records``: it can take part in a backward; ``back``: this is the backward of an earlier run,
    whose number is the tag."""

    refused: bool
    gradients: bool
    records: bool
    verify: bool
    back: bool
    tag: int | None
    program: bytes

    def pack(self) -> bytes:
        flags = (self.refused, self.gradients, self.records, self.verify, self.back)
        return OPENING.pack(MAGIC, *flags, NO_TAG if self.tag is None else self.tag, self.program)

    @classmethod
    def unpack(cls, word: bytes) -> Opening | None:
        magic, *flags, tag, program = OPENING.unpack(word)
        if magic != MAGIC:
            return None
        refused, gradients, records, verify, back = map(bool, flags)
        return cls(refused, gradients, records, verify, back, None if tag == NO_TAG else tag, program)

    def __str__(self) -> str:
        return f"the backward of run {self.tag}" if self.back else "a run"


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
    said = {r: Opening.unpack(w) for r, w in sorted(ctx.swap(mine.pack()).items())}
    words = {r: w for r, w in said.items() if w is not None}
    if len(words) < len(said):
        raise TransferError(
            f"ranks {[r for r in said if r not in words][:8]} sent something else than a word"
        )
    _same(words)
    if any(w.refused for w in words.values()):
        _raise_refusals(ctx, refusal)
    _all_record(words)
    return any(w.gradients for w in words.values())


def _same(words: dict[int, Opening]) -> None:
    """Raise the same error on every rank unless all run the same program with the same tag."""
    first_rank, first = next(iter(words.items()))
    for rank, word in words.items():
        if word.back != first.back:
            raise TransferError(
                f"rank {first_rank} is in {first}, rank {rank} in {word}: run, and go back, in the same"
                " order on every rank; nothing was written"
            )
        if word.program != first.program:
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


def _all_record(words: dict[int, Opening]) -> None:
    """Raise the same error on every rank where one wants gradients and one would not take part in the
    backward: it would wait for that one."""
    wants = [r for r, w in words.items() if w.gradients]
    cannot = [r for r, w in words.items() if not w.records]
    if wants and cannot and words[wants[0]].back:
        raise UnsupportedError(
            f"ranks {wants[:8]} go back with create_graph=True, ranks {cannot[:8]} without: do alike on every"
            " rank; nothing was written"
        )
    if wants and cannot:
        raise UnsupportedError(
            f"inputs of ranks {wants[:8]} require gradients, but ranks {cannot[:8]} gave out= or run under"
            " torch.no_grad(), so their part of the backward would never run: detach the inputs, or run"
            " under torch.no_grad() on every rank; nothing was written"
        )


def _raise_refusals(ctx: Context, refusal: ShardalgError | None) -> None:
    """Every rank hears the first refusal in words; the refusing rank raises its own."""
    text = "" if refusal is None else str(refusal)
    said = ctx.gather(dict.fromkeys(ctx.ranks, text.encode()), "run")
    if refusal is not None:
        raise refusal
    rank, why = min((r, why) for r, why in said.items() if why)
    raise TransferError(f"rank {rank} refused the run: {why.decode()}; nothing was written")


def as_ours(error: Exception) -> ShardalgError:
    """An error that every rank hears of, as one of ours."""
    if isinstance(error, ShardalgError):
        return error
    ours = TransferError(f"{type(error).__name__}: {error}")
    ours.__cause__ = error
    return ours


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
