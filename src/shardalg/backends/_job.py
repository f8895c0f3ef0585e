"""The tensors of one run: what the caller gave, checked, and where the copies go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from .._errors import InvalidMapError, LimitError, UnsupportedError
from .._limits import Budget, Limits
from ..maps import Box
from ..maps._meet import Blocks, meet
from ..maps._space import Shape, describe_key
from ..plans import Entry, Program
from ..plans._dtypes import UNSCALABLE, dtype_name, lossy
from ._context import Context
from ._form import place

Shards: TypeAlias = Any  # {rank: tensor}, {rank: {name: tensor}}, or a dict of those by tensor name
Key: TypeAlias = tuple[int, Box]  # entry and box


class Seat(NamedTuple):
    """Where one tensor of a program is in what the caller gives: under ``name``, for ``key``'s box, which
    its own layout calls ``inner``."""

    key: Key
    name: str
    inner: str
    box: Box


class Seats:
    """The tensors of a program that one process brings and gets, found once per context; ``passed``
    describes the last that were checked, so that a replay with the same memory checks nothing anew."""

    def __init__(self, ctx: Context, program: Program) -> None:
        self.sources, self.targets = [], []
        self.passed: list[Any] | None = None
        held = set(ctx.ranks)
        for k, e in enumerate(program.plan.entries):
            its = e.plan
            for b in its.source.domain.boxes:
                if b.rank is not None and its.global_source(b.rank) in held:
                    self.sources.append(Seat((k, b), e.source_name(b.name), e.inner_name(b.name), b))
            for b in its.target.domain.boxes:
                if b.rank is not None and its.global_target(b.rank) in held:
                    self.targets.append(Seat((k, b), e.target, b.name, b))


class Job:
    """The tensors of one run.

    ``shards`` are the caller's sources and ``results`` what the caller gets, given as ``out`` or fresh,
    by entry and box; ``sources`` and ``targets`` are the same, flat, as copies read and write them.
    """

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.seats = ctx.kept("seats", program, lambda: Seats(ctx, program))
        self.shards: dict[Key, torch.Tensor] = {}
        self.results: dict[Key, torch.Tensor] = {}
        self.sources: dict[Key, torch.Tensor] = {}
        self.targets: dict[Key, torch.Tensor] = {}
        self.out: Shards = None
        self._signature: list[Any] | None = None

    def take(self, shards: Shards, out: Shards) -> None:
        """Find, check and flatten the shards this process holds."""
        self.out = out
        single, seats = self.program.single, self.seats
        self.shards = {s.key: _find(shards, s, single, "shards") for s in seats.sources}
        if out is not None:
            self.results = {s.key: _find(out, s, single, "out") for s in seats.targets}
        self._signature = _signature((*self.shards.values(), *self.results.values()))
        if self._signature is None or self._signature != seats.passed:
            seats.passed = None
            self._check()
        self.sources = {key: flat(x) for key, x in self.shards.items()}

    def _check(self) -> None:
        device = self.ctx.transport.device
        for what, seats, given in (
            ("shards", self.seats.sources, self.shards), ("out", self.seats.targets, self.results)
        ):  # fmt: skip
            for s in seats if given else ():
                where = f"{place(what, s.name)} of rank {s.box.rank}"
                entry = self.program.plan.entries[s.key[0]].plan
                whole = (entry.source if what == "shards" else entry.target).codomain.boxes
                _check_tensor(given[s.key], s.box, where, device, [b.shape for b in whole])
                if what == "out":
                    _check_own_memory(given[s.key], where)
        _check_overlap(self.shards, self.results)

    def dtype_words(self) -> list[str]:
        """``source/target`` dtype names per entry, empty where this process holds nothing."""
        found: list[tuple[set[str], set[str]]] = [(set(), set()) for _ in self.program.plan.entries]
        for side, tensors in enumerate((self.shards, self.results)):
            for (entry, _), x in tensors.items():
                found[entry][side].add(dtype_name(x.dtype))
        for e, sides in zip(self.program.plan.entries, found):
            for what, names in zip(("shards", "out"), sides):
                if len(names) > 1:
                    raise InvalidMapError(f"{say_entry(e)}: its {what} have different dtypes {sorted(names)}")
        return ["/".join(next(iter(names), "") for names in sides) for sides in found]

    def allocate(self, program: Program) -> None:
        """Results ready to write: the given ones, or fresh ones; ``program`` knows the dtypes."""
        assert program.dtypes is not None
        if self.seats.passed is None or self.seats.passed != self._signature:
            self._check_dtypes(program)
            self.seats.passed = self._signature
        if self.out is None:
            entries, dtypes = program.plan.entries, program.dtypes
            for s in self.seats.targets:
                k = s.key[0]
                self.results[s.key] = self._fresh(entries[k], s.box, dtypes[k][1])
        self.targets = {key: flat(x) for key, x in self.results.items()}

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
        """Copy back into given tensors that have no flat view; autograd hears that the given were written."""
        for key, given in self.results.items():
            mine = self.targets[key]
            if mine.numel() and mine.data_ptr() != given.data_ptr():
                given.detach().copy_(mine.view(given.shape))
        if self.out is not None:
            versioned = [x for x in self.results.values() if not x.is_inference()]
            torch.autograd.graph.increment_version(versioned)

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
        tree: dict[str, dict[int | None, Any]] = {e.target: {} for e in self.program.plan.entries}
        for s in self.seats.targets:
            tree[s.name].setdefault(s.box.rank, {})[s.inner] = results[s.key]
        tree = {name: bare(its) for name, its in tree.items()}
        for alias, name in self.program.plan.tied:
            tree[alias] = tree[name]
        return tree[""] if self.program.single else tree


def bare(shards: Mapping[int | None, Mapping[str, Any]]) -> dict[int | None, Any]:
    """Shards by rank: the tensor itself where a rank has one without a name."""
    return {rank: its[""] if its.keys() == {""} else its for rank, its in shards.items()}


def flat(x: torch.Tensor) -> torch.Tensor:
    """The elements in row-major order, one after the other: a view where they lie so, else a copy."""
    if x.is_conj() or x.is_neg() or not x.is_contiguous():
        x = x.detach().resolve_conj().resolve_neg().contiguous()
    if x.numel() == 1:  # contiguous whatever its strides say
        return x.detach().as_strided((1,), (1,))
    return x.detach().view(-1)


def say_entry(entry: Entry) -> str:
    """An entry in words."""
    return repr(entry.target) if entry.target else "the tensor"


# --- checking what is given ---------------------------------------------------------------


def _find(given: Shards, seat: Seat, single: bool, what: str) -> torch.Tensor:
    """The tensor for one seat in what the caller gave; every absence is named."""
    at, b = given, seat.box
    if not single:
        if not isinstance(at, Mapping) or seat.name not in at:
            raise InvalidMapError(f"no tensor {seat.name!r} in {what}")
        at = at[seat.name]
    if isinstance(at, Mapping):
        if b.rank not in at:
            raise InvalidMapError(
                f"no shard of rank {b.rank} in {place(what, seat.name)}, which has {sorted(at)}"
            )
        at = at[b.rank]
    if isinstance(at, Mapping):
        if seat.inner not in at:
            where = f"{place(what, seat.name)}[{b.rank}]"
            raise InvalidMapError(f"{where} has no tensor {seat.inner!r}; it has {sorted(at)}")
        at = at[seat.inner]
    return at  # type: ignore[no-any-return]


def _signature(tensors: Iterable[Any]) -> list[Any] | None:
    """All that the checks of strided tensors depend on; None where one is not such a tensor."""
    try:
        return [(x.data_ptr(), x.shape, x.stride(), x.dtype, x.device) for x in tensors]
    except (AttributeError, RuntimeError, TypeError):
        return None


def _check_tensor(x: Any, b: Box, where: str, device: torch.device, whole: Sequence[Shape]) -> None:
    if not isinstance(x, torch.Tensor):
        raise InvalidMapError(
            f"{where} must be a torch tensor, got {type(x).__name__}; give {{rank: tensor}}, for a"
            " tree {name: {rank: tensor}}"
        )
    if tuple(x.shape) != b.shape:
        full = "; that is the full tensor, extract(layout, full) cuts it" if tuple(x.shape) in whole else ""
        raise InvalidMapError(f"{where} has shape {tuple(x.shape)}, the layout says {b.shape}{full}")
    if x.layout != torch.strided:
        raise UnsupportedError(f"{where} is {x.layout}; only strided tensors can be moved")
    if x.device.type != device.type or (device.index is not None and x.device.index != device.index):
        raise InvalidMapError(f"{where} is on {x.device}, this context moves tensors on {device}")


def _check_own_memory(x: torch.Tensor, where: str) -> None:
    if x.numel() and _overlaps_itself(x):
        raise InvalidMapError(
            f"{where} has strides {x.stride()}: its elements share memory; give a tensor of its own"
        )


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
