"""The tensors of one run: what the caller gave, checked, and where the copies go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import numpy as np
import torch

from .._errors import InvalidMapError, LimitError, UnsupportedError
from .._limits import Budget, Limits
from ..maps import Box
from ..maps._meet import Blocks, meet
from ..maps._space import describe_key
from ..plans import Entry, Program
from ..plans._dtypes import UNSCALABLE, dtype_name, lossy
from ._context import Context

Shards: TypeAlias = Any  # {rank: tensor}, {rank: {name: tensor}}, or a dict of those by tensor name
Key: TypeAlias = tuple[int, Box]  # entry and box


class Job:
    """The tensors of one run.

    ``shards`` are the caller's sources and ``results`` what the caller gets, given as ``out`` or fresh,
    by entry and box; ``sources`` and ``targets`` are the same, flat, as copies read and write them.
    """

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.held = set(ctx.ranks)
        self.shards: dict[Key, torch.Tensor] = {}
        self.results: dict[Key, torch.Tensor] = {}
        self.sources: dict[Key, torch.Tensor] = {}
        self.targets: dict[Key, torch.Tensor] = {}
        self.out: Shards = None

    def take(self, shards: Shards, out: Shards) -> None:
        """Check and flatten the shards this process holds."""
        self.out = out
        single, device = self.program.single, self.ctx.transport.device
        for k, e in enumerate(self.program.plan.entries):
            for b in self.boxes(e, "source"):
                x = _find(shards, e.source_name(b.name), b, single, "shards", device)
                self.shards[k, b] = x
                self.sources[k, b] = flat(x)
            if out is not None:
                for b in self.boxes(e, "target"):
                    self.results[k, b] = _find(out, e.target, b, single, "out", device)
        _check_overlap(self.shards, self.results)

    def boxes(self, e: Entry, side: str) -> Iterator[Box]:
        """The source or target boxes of an entry that this process holds."""
        m, to = (
            (e.plan.source, e.plan.global_source)
            if side == "source"
            else (e.plan.target, e.plan.global_target)
        )
        return (b for b in m.domain.boxes if b.rank is not None and to(b.rank) in self.held)

    def dtype_words(self) -> list[str]:
        """``source/target`` dtype names per entry, empty where this process holds nothing."""
        found: list[tuple[set[str], set[str]]] = [(set(), set()) for _ in self.program.plan.entries]
        for side, tensors in enumerate((self.shards, self.results)):
            for (entry, _), x in tensors.items():
                found[entry][side].add(dtype_name(x.dtype))
        for e, sides in zip(self.program.plan.entries, found):
            if max(map(len, sides)) > 1:
                raise InvalidMapError(f"{say_entry(e)}: its shards have different dtypes {sides}")
        return ["/".join(next(iter(names), "") for names in sides) for sides in found]

    def allocate(self, program: Program) -> None:
        """Results ready to write: the given ones, or fresh ones; ``program`` knows the dtypes."""
        assert program.dtypes is not None
        self._check_dtypes(program)
        for k, (e, dtypes) in enumerate(zip(program.plan.entries, program.dtypes)):
            for b in self.boxes(e, "target"):
                if (k, b) not in self.results:
                    self.results[k, b] = self._fresh(e, b, dtypes[1])
                self.targets[k, b] = flat(self.results[k, b])

    def _fresh(self, e: Entry, b: Box, dtype: str) -> torch.Tensor:
        """Zero where no copy writes; not touched before where copies write everything."""
        full = e.plan.map.size == e.plan.target.domain.size and e.plan.map.single_valued
        self.ctx.counters.allocations += 1
        make = torch.empty if full else torch.zeros
        return make(b.shape, dtype=getattr(torch, dtype), device=self.ctx.transport.device)

    def _check_dtypes(self, program: Program) -> None:
        assert program.dtypes is not None
        for e, dtypes in zip(program.plan.entries, program.dtypes):
            lost = lossy(*dtypes)
            if lost:
                raise UnsupportedError(
                    f"{say_entry(e)}: {dtypes[0]} -> {dtypes[1]} would lose {lost};"
                    " convert before or after the run"
                )
            if e.plan.map.table.scaled and UNSCALABLE & set(dtypes):
                raise UnsupportedError(
                    f"{say_entry(e)}: {dtypes[0]} -> {dtypes[1]} copies cannot be scaled; only floats can"
                )
        for side, tensors, word in ((0, self.shards, "shard"), (1, self.results, "out")):
            for (entry, b), x in tensors.items():
                want, found = program.dtypes[entry][side], dtype_name(x.dtype)
                if found != want:
                    raise InvalidMapError(
                        f"{say_entry(program.plan.entries[entry])}: the {word} of {describe_key(b.key)}"
                        f" is {found}, agreed was {want}; bind again for other dtypes"
                    )

    def store(self) -> None:
        """Copy back into given tensors that have no flat view."""
        for key, given in self.results.items():
            mine = self.targets[key]
            if mine.numel() and mine.data_ptr() != given.data_ptr():
                given.detach().copy_(mine.view(given.shape))

    def leave(self, keys: Iterable[Key]) -> None:
        """Give up sources that are read no more: the caller's tensors become empty, and their memory
        is free unless another tensor uses it."""
        going = [key for key in keys if key in self.shards]
        for key in going:
            del self.sources[key]
        mine = [self.shards.pop(key) for key in going]
        still = {id(x) for x in self.shards.values()}
        for x in mine:
            if id(x) not in still:
                x.data = x.new_empty((0,))

    def answer(self, results: Mapping[Key, torch.Tensor]) -> Shards:
        """The results in the caller's form."""
        if self.out is not None:
            return self.out
        tree: dict[str, dict[int | None, Any]] = {}
        for k, e in enumerate(self.program.plan.entries):
            its = tree[e.target] = {}
            for b in self.boxes(e, "target"):
                if b.name:
                    its.setdefault(b.rank, {})[b.name] = results[k, b]
                else:
                    its[b.rank] = results[k, b]
        for alias, name in self.program.plan.tied:
            tree[alias] = tree[name]
        return tree[""] if self.program.single else tree


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, one after the other: a view where they lie so, else a copy."""
    return x.detach().resolve_conj().resolve_neg().contiguous().view(-1)


def say_entry(entry: Entry) -> str:
    """An entry in words."""
    return repr(entry.target) if entry.target else "the tensor"


# --- checking what is given ---------------------------------------------------------------


def _find(given: Shards, name: str, b: Box, single: bool, what: str, device: torch.device) -> torch.Tensor:
    """The tensor for one box in what the caller gave; every absence is named."""
    at = given
    where = what if single else f"{what}[{name!r}]"
    if not single:
        if not isinstance(at, Mapping) or name not in at:
            raise InvalidMapError(f"{what} has no tensor {name!r}")
        at = at[name]
    if isinstance(at, Mapping):
        if b.rank not in at:
            raise InvalidMapError(f"{where} has no shard of rank {b.rank}; it has {sorted(at)}")
        at = at[b.rank]
    if isinstance(at, Mapping):
        if b.name not in at:
            raise InvalidMapError(f"{where}[{b.rank}] has no tensor {b.name!r}; it has {sorted(at)}")
        at = at[b.name]
    _check_tensor(at, b, f"{where} of rank {b.rank}", device)
    if what == "out" and at.numel() and _overlaps_itself(at):
        raise InvalidMapError(
            f"{where} of rank {b.rank} has strides {at.stride()}: its elements share memory; give a tensor"
            " of its own"
        )
    return at  # type: ignore[no-any-return]


def _check_tensor(x: Any, b: Box, where: str, device: torch.device) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidMapError(f"{where} must be a torch tensor, got {type(x).__name__}")
    if tuple(x.shape) != b.shape:
        raise InvalidMapError(f"{where} has shape {tuple(x.shape)}, the layout says {b.shape}")
    if x.layout != torch.strided:
        raise UnsupportedError(f"{where} is {x.layout}; only strided tensors can be moved")
    if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
        raise InvalidMapError(f"{where} is on {x.device}, this context moves tensors on {device}")


def _overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices of ``x`` share memory, at least in the ways that views make."""
    return _last(x) + 1 < x.numel() or any(s == 0 and n > 1 for s, n in zip(x.stride(), x.shape))


def _last(x: torch.Tensor) -> int:
    return sum(s * (n - 1) for s, n in zip(x.stride(), x.shape))


def _check_overlap(sources: Mapping[Key, torch.Tensor], targets: Mapping[Key, torch.Tensor]) -> None:
    """Refuse an out that shares memory with a source or with another out."""
    sides = ((kind, key[1], x) for kind, its in enumerate((sources, targets)) for key, x in its.items())
    spans = sorted(((*_span(x), kind, b, x) for kind, b, x in sides if x.numel()), key=lambda s: s[:3])
    open_: list[Any] = []
    for span in spans:
        open_ = [o for o in open_ if o[1] > span[0]]
        for other in open_:
            if (span[2] or other[2]) and _share(span[4], other[4]):
                raise _sharing(span, other)
        open_.append(span)


def _sharing(a: Any, b: Any) -> InvalidMapError:
    out, other = (a, b) if a[2] else (b, a)
    return InvalidMapError(
        f"out of {describe_key(out[3].key)} shares memory with"
        f" {'another out' if other[2] else 'an input'} of {describe_key(other[3].key)};"
        " give separate tensors, or say tied= in plan_tree"
    )


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last byte address that a tensor touches."""
    return x.data_ptr(), x.data_ptr() + (_last(x) + 1) * x.element_size()


def _share(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors whose spans overlap really have a byte in common (or nobody can tell)."""
    base = min(a.data_ptr(), b.data_ptr())
    limits = Limits()
    try:
        return len(meet(_bytes(a, base), _bytes(b, base), limits, Budget(limits)).left) > 0
    except LimitError:
        return True


def _bytes(x: torch.Tensor, base: int) -> Blocks:
    """The bytes of a tensor as one strided block."""
    size = x.element_size()
    axes = [(n, s * size) for n, s in zip(x.shape, x.stride()) if n > 1 and s] + [(size, 1)]
    shape, strides = (np.array(column, np.int64)[:, None] for column in zip(*axes))
    zero = np.zeros((1, 1), np.int64)
    at = np.array([x.data_ptr() - base], np.int64)
    return Blocks(np.zeros(1, np.int64), at, shape, strides, zero, np.zeros((1, *shape.shape), np.int64))
