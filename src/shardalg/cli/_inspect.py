"""Saying what a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from .._struct import struct
from ..interop._arrangements import Stored, parts_of
from ..interop._checkpoints import Checkpoint
from ..interop._outputs import nbytes
from ..maps._space import Shape
from ..show._drawing import many

UNITS = ("B", "kB", "MB", "GB", "TB", "PB")
WIDEST = 64  # characters of the column of names; a longer name moves its own line only


@struct
class Held:
    """A stored tensor: its whole shape, its shards' (none in a plain checkpoint), what it was joined from."""

    name: str
    dtype: str
    shape: Shape
    shards: tuple[tuple[int, Shape], ...] = ()
    joined: tuple[str, ...] = ()


@struct
class Description:
    """What a checkpoint holds: ranks (0 in a plain one), tensors as users count them, bytes, files."""

    path: str
    ranks: int
    tensors: int
    nbytes: int
    files: int
    metadata: tuple[tuple[str, str], ...]
    held: tuple[Held, ...]


def describe(checkpoint: Checkpoint) -> Description:
    """What a checkpoint holds; no tensor is read."""
    logical = checkpoint.logical
    held = sorted(
        _plain(checkpoint) if checkpoint.plain else stored_as(checkpoint.stored), key=lambda h: h.name
    )
    return Description(
        checkpoint.path, len(checkpoint.ranks), len(logical), sum(map(nbytes, logical.values())),
        len({h.path for h in checkpoint.homes}), checkpoint.metadata, tuple(held),
    )  # fmt: skip


def _plain(checkpoint: Checkpoint) -> list[Held]:
    return [Held(h.name, h.entry.dtype, h.entry.shape) for h in checkpoint.homes]


def stored_as(arrangement: Iterable[tuple[str, Stored]]) -> list[Held]:
    """What each stored tensor of an arrangement is, and its shards."""
    held = []
    for name, stored in arrangement:
        m = stored.layout
        joined = () if stored.joined is None else tuple(parts_of(name, stored))
        shards = tuple((r, m.shard_shape(r)) for r in m.ranks)
        held.append(Held(name, stored.dtype, m.logical_shape, shards, joined))
    return held


def lines_of(d: Description) -> Iterator[str]:
    """Lines that say it, a line per stored tensor."""
    form = f"on {d.ranks} ranks" if d.ranks else "plain"
    yield f"{d.path}: {form}, {many(d.tensors, 'tensor')}, {say_bytes(d.nbytes)} in {many(d.files, 'file')}"
    for key, value in d.metadata:
        yield f"  {shown(key)}: {shown(value)}"
    yield from held_lines(d.held)


def held_lines(held: Sequence[Held]) -> Iterator[str]:
    """A line per stored tensor; the shapes of its shards in the order of their ranks, equal ones counted."""
    wide = min(max((len(shown(h.name)) for h in held), default=0), WIDEST)
    for h in held:
        runs = [(shape, len(list(run))) for shape, run in groupby(shape for _, shape in h.shards)]
        shapes = (f"{n} x {shape}" if n > 2 else " ".join([str(shape)] * n) for shape, n in runs)
        shards = " as " + " ".join(shapes) if h.shards else ""
        yield f"  {shown(h.name):<{wide}}  {h.dtype:<8}  {h.shape}{shards}"
        if h.joined:
            yield f"  {'':<{wide}}  joined from {', '.join(map(shown, h.joined))}"


def shown(text: str) -> str:
    """A text on one line: what is no printable character is escaped as Python does.

    >>> shown("a\\nb é")
    'a\\\\nb é'
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def say_bytes(count: float) -> str:
    """A count of bytes as people write it.

    >>> say_bytes(90868376)
    '90.9 MB'
    """
    k = 0
    while count >= 1000 and k < len(UNITS) - 1:
        count, k = count / 1000, k + 1
    return f"{count:.0f} B" if k == 0 else f"{count:.1f} {UNITS[k]}"
