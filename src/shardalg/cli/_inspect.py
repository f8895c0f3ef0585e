"""Saying what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator

from ..interop._arrangements import parts_of
from ..interop._checkpoints import Checkpoint
from ..interop._outputs import nbytes

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")


def say_bytes(count: float) -> str:
    """A count of bytes as people write it.

    >>> say_bytes(90868376)
    '90.9 MB'
    """
    k = 0
    while count >= 1000 and k < len(UNITS) - 1:
        count, k = count / 1000, k + 1
    return f"{count:.0f} B" if k == 0 else f"{count:.1f} {UNITS[k]}"


def inspect(checkpoint: Checkpoint) -> Iterator[str]:
    """Lines that say what a checkpoint holds, a line per stored tensor."""
    logical = checkpoint.logical
    files = len({h.path for h in checkpoint.homes})
    form = "plain" if checkpoint.plain else f"on {len(checkpoint.ranks)} ranks"
    total = say_bytes(sum(map(nbytes, logical.values())))
    yield f"{checkpoint.path}: {form}, {len(logical)} tensors, {total} in {files} files"
    for key, value in checkpoint.metadata:
        yield f"  {key}: {value}"
    yield from _plain_lines(checkpoint) if checkpoint.plain else _rank_lines(checkpoint)


def _plain_lines(checkpoint: Checkpoint) -> Iterator[str]:
    wide = max((len(h.name) for h in checkpoint.homes), default=0)
    for h in sorted(checkpoint.homes, key=lambda h: h.name):
        yield f"  {h.name:<{wide}}  {h.entry.dtype:<8}  {h.entry.shape}"


def _rank_lines(checkpoint: Checkpoint) -> Iterator[str]:
    wide = max((len(name) for name, _ in checkpoint.stored), default=0)
    for name, stored in sorted(checkpoint.stored):
        m = stored.layout
        shards = " ".join(str(m.shard_shape(r)) for r in m.ranks)
        yield f"  {name:<{wide}}  {stored.dtype:<8}  {m.logical_shape} as {shards}"
        if stored.joined is not None:
            yield f"  {'':<{wide}}  joined from {', '.join(parts_of(name, stored))}"
