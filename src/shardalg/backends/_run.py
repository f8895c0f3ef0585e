"""Running a bound plan."""

from __future__ import annotations

import struct as packing
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from .._errors import InvalidMapError, ShardalgError, TransferError, UnsupportedError
from ..maps import Box
from ..maps._space import describe_key
from ..ops import schedule
from ..plans import Entry, Program
from ..plans._dtypes import UNSCALABLE, dtype_name
from ._context import Bound, Context, check_owner
from ._pack import copy_local, drain, fill
from ._script import Script, Turn, script
from ._transport import Exchange

Shards: TypeAlias = Any  # {rank: tensor}, {rank: {name: tensor}}, or a dict of those by tensor name
Progress: TypeAlias = Callable[[int, int], None]  # rounds done, rounds in all

HEADER = packing.Struct("<4sBxxxqqq")  # magic, refusal, (pad), tag, run number, digest prefix
MAGIC = b"shda"


def run(
    ctx: Context,
    bound: Bound,
    shards: Shards,
    out: Shards = None,
    *,
    tag: int | None = None,
    progress: Progress | None = None,
) -> Shards:
    """Move data: the target's shards from the source's.

    ``shards`` is ``{rank: tensor}`` with the ranks this process holds (ranks of the source
    layout), or ``{name: {rank: tensor}}`` for a tree; where a process holds one rank, a bare
    tensor stands for ``{rank: tensor}``. The result has the same form, with the target's ranks: fresh
    contiguous tensors, zero where no copy writes. With ``out`` (same form) those tensors are
    written instead, untouched where no copy writes, and returned. Inputs never change and no
    output shares memory with them. Collective over the context; every rank must run the same
    plans in the same order with the same ``tag``.

    The owner of ``bound`` is checked first, before anything is sent. What is wrong with one
    rank's tensors becomes an error on every rank before any target is touched.
    """
    check_owner(ctx, bound)
    job = _Job(ctx, bound.program)
    refusal: ShardalgError | None = None
    try:
        job.take(shards, out)
    except ShardalgError as error:
        refusal = error
    prepared = _prepared(ctx, bound.program, job, refusal)
    if refusal is None:
        try:
            job.allocate(prepared[0])
        except ShardalgError as error:
            refusal = error
    _rounds(ctx, *prepared, job, refusal, tag, progress)
    return job.result()


# --- preparing ----------------------------------------------------------------------------


def _prepared(
    ctx: Context, program: Program, job: _Job, refusal: ShardalgError | None
) -> tuple[Program, Script]:
    """The program with its dtypes and this process's script: made once, then reused."""
    kept = ctx._prepared.get(id(program))
    if kept is not None and kept[0] is program:
        return kept[1]  # type: ignore[no-any-return]
    final = program
    if program.dtypes is None:
        dtypes = _agreed_dtypes(ctx, program, job, refusal)
        final = schedule(program.plan, max_bytes=program.max_bytes, dtypes=dtypes)
    ctx.counters.preparations += 1
    ready = (final, script(final, ctx.ranks))
    ctx._prepared[id(program)] = (program, ready)
    return ready


def _agreed_dtypes(
    ctx: Context, program: Program, job: _Job, refusal: ShardalgError | None
) -> dict[str, tuple[str, str]]:
    """One (source, target) dtype pair per entry, from what all ranks hold."""
    mine = "!" + str(refusal) if refusal is not None else ";".join(job.dtype_words())
    said = {r: b.decode() for r, b in ctx.gather(dict.fromkeys(ctx.ranks, mine.encode())).items()}
    if refusal is not None:
        raise refusal
    for rank, words in said.items():
        if words.startswith("!"):
            raise TransferError(f"rank {rank} refused its tensors: {words[1:]}")
    found: list[tuple[set[str], set[str]]] = [(set(), set()) for _ in program.plan.entries]
    for words in said.values():
        for sides, pair in zip(found, words.split(";") if words else []):
            for seen, name in zip(sides, pair.split("/")):
                seen |= {name} - {""}
    pairs = {}
    for entry, (source, target) in zip(program.plan.entries, found):
        if len(source) > 1 or len(target) > 1:
            raise TransferError(
                f"{_say(entry)}: ranks hold different dtypes: sources {sorted(source)}, targets {sorted(target)}"
            )
        held = next(iter(source), next(iter(target), "uint8"))
        pairs[entry.target] = (held, next(iter(target), held))
    return pairs


def _say(entry: Entry) -> str:
    return repr(entry.target) if entry.target else "the tensor"


# --- one run ------------------------------------------------------------------------------


class _Job:
    """The tensors of one run: checked, flat, by entry and box."""

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ctx, self.program = ctx, program
        self.held = set(ctx.ranks)
        self.sources: dict[tuple[int, Box], torch.Tensor] = {}
        self.targets: dict[tuple[int, Box], torch.Tensor] = {}
        self.given: dict[tuple[int, Box], torch.Tensor] = {}
        self.out: Shards = None

    def take(self, shards: Shards, out: Shards) -> None:
        """Check and flatten the shards this process holds."""
        self.out = out
        for k, e in enumerate(self.program.plan.entries):
            for b in self._boxes(e, "source"):
                x = _find(
                    shards, e.source_name(b.name), b, self.program.single, "shards", len(e.sources) == 1
                )
                self.sources[k, b] = x.detach().reshape(-1)
            if out is not None:
                for b in self._boxes(e, "target"):
                    y = _find(out, e.target, b, self.program.single, "out", True)
                    self.given[k, b] = y
        _check_overlap(self.sources, self.given)

    def _boxes(self, e: Entry, side: str) -> Iterator[Box]:
        m, to = (
            (e.plan.source, e.plan.global_source)
            if side == "source"
            else (e.plan.target, e.plan.global_target)
        )
        for b in m.domain.boxes:
            if b.rank is not None and to(b.rank) in self.held:
                yield b

    def dtype_words(self) -> list[str]:
        """``source/target`` dtype names per entry, empty where this process holds nothing."""
        words = []
        for k in range(len(self.program.plan.entries)):
            sides = []
            for side in (self.sources, self.given):
                names = {dtype_name(x.dtype) for (entry, _), x in side.items() if entry == k}
                if len(names) > 1:
                    raise InvalidMapError(f"shards of one tensor have different dtypes {sorted(names)}")
                sides.append(next(iter(names), ""))
            words.append("/".join(sides))
        return words

    def allocate(self, program: Program) -> None:
        """Targets ready to write: the given ones, or fresh ones."""
        assert program.dtypes is not None
        for k, (e, dtypes) in enumerate(zip(program.plan.entries, program.dtypes)):
            _check_scaled(e, dtypes)
            self._check_dtypes(k, e, dtypes)
            full = e.plan.map.size == e.plan.target.domain.size
            for b in self._boxes(e, "target"):
                given = self.given.get((k, b))
                if given is None:
                    make = torch.empty if full else torch.zeros
                    fresh = make(b.shape, dtype=getattr(torch, dtypes[1]), device=self.ctx.transport.device)
                    self.given[k, b] = given = fresh
                self.targets[k, b] = (
                    given.detach().view(-1) if given.is_contiguous() else given.detach().reshape(-1)
                )

    def _check_dtypes(self, k: int, e: Entry, dtypes: tuple[str, str]) -> None:
        for want, side, word in ((dtypes[0], self.sources, "shard"), (dtypes[1], self.given, "out")):
            for (entry, b), x in side.items():
                if entry == k and dtype_name(x.dtype) != want:
                    raise InvalidMapError(
                        f"{_say(e)}: the {word} of {describe_key(b.key)} is {dtype_name(x.dtype)}, agreed was {want}"
                    )

    def store(self) -> None:
        """Copy back into given targets that are not contiguous."""
        for key, given in self.given.items():
            flat = self.targets[key]
            if flat.data_ptr() != given.data_ptr() or not given.is_contiguous():
                given.detach().copy_(flat.view(given.shape))

    def result(self) -> Shards:
        if self.out is not None:
            return self.out
        tree: dict[str, dict[int | None, Any]] = {}
        for k, e in enumerate(self.program.plan.entries):
            its = tree[e.target] = {}
            for b in self._boxes(e, "target"):
                if b.name:
                    its.setdefault(b.rank, {})[b.name] = self.given[k, b]
                else:
                    its[b.rank] = self.given[k, b]
        for alias, name in self.program.plan.tied:
            tree[alias] = tree[name]
        return tree[""] if self.program.single else tree


def _find(given: Shards, name: str, b: Box, single: bool, what: str, nameless: bool) -> torch.Tensor:
    """The tensor for one box in what the caller gave; every absence is named."""
    at = given
    where = f"{what}" if single else f"{what}[{name!r}]"
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
    if not isinstance(at, torch.Tensor):
        raise InvalidMapError(f"{where} of rank {b.rank} must be a torch tensor, got {type(at).__name__}")
    if tuple(at.shape) != b.shape:
        raise InvalidMapError(
            f"{where} of rank {b.rank} has shape {tuple(at.shape)}, the layout says {b.shape}"
        )
    if at.layout != torch.strided:
        raise UnsupportedError(f"{where} of rank {b.rank} is {at.layout}; only strided tensors can be moved")
    return at


def _check_overlap(sources: Mapping[Any, torch.Tensor], targets: Mapping[Any, torch.Tensor]) -> None:
    """Refuse an out that shares memory with a source or with another out."""
    spans = sorted(
        (*_span(x), kind, key[1])
        for kind, side in ((0, sources), (1, targets))
        for key, x in side.items()
        if x.numel()
    )
    reach, last = -1, (0, None)
    for start, end, kind, box in spans:
        if start < reach and (kind or last[0]):
            raise InvalidMapError(
                f"out of {describe_key(box.key)} shares memory with {'an input' if not (kind and last[0]) else 'another out'};"
                " give separate tensors, or say tied= in plan_tree"
            )
        if end > reach:
            reach, last = end, (kind, box)


def _span(x: torch.Tensor) -> tuple[int, int]:
    """First and past-the-last byte address that a tensor touches."""
    last = sum(s * (n - 1) for s, n in zip(x.stride(), x.shape))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _check_scaled(e: Entry, dtypes: tuple[str, str]) -> None:
    if e.plan.map.table.scaled and UNSCALABLE & set(dtypes):
        raise UnsupportedError(
            f"{_say(e)}: {dtypes[0]} -> {dtypes[1]} copies cannot be scaled; only floats can"
        )


# --- rounds -------------------------------------------------------------------------------


def _rounds(
    ctx: Context,
    program: Program,
    steps: Script,
    job: _Job,
    refusal: ShardalgError | None,
    tag: int | None,
    progress: Progress | None,
) -> None:
    header = _header(program, refusal, tag)
    touched = False
    for number, turn in enumerate(steps.turns):
        first = number == 0
        parts, starts = _stage(ctx, program, job, turn, header if first else b"", refusal)
        ctx.counters.exchanges += 1
        ctx.counters.payload_bytes += sum(sum(t.send_bytes.values()) for t in turn.values())
        try:
            ctx.transport.exchange(parts)
        except TransferError as error:
            raise TransferError(
                f"round {number} of {len(steps.turns)}: {error}", targets_touched=touched
            ) from error
        if first:
            if refusal is not None:
                raise refusal
            _check_headers(ctx, parts, starts, header)
            copy_local(program, job.sources, job.targets, steps.local)
        touched = True
        for rank, its in turn.items():
            drain(program, job.targets, its.unpack, parts[rank].receive, starts[rank][1])
        if progress is not None:
            progress(number + 1, len(steps.turns))
    if not steps.turns:
        if refusal is not None:
            raise refusal
        copy_local(program, job.sources, job.targets, steps.local)
    job.store()


def _header(program: Program, refusal: ShardalgError | None, tag: int | None) -> bytes:
    prefix = int(program.plan.digest[:15], 16)
    return HEADER.pack(MAGIC, refusal is not None, -1 if tag is None else tag, 0, prefix)


_Starts = tuple[dict[int, int], dict[int, int]]  # first payload byte by peer: sending, receiving


def _stage(
    ctx: Context,
    program: Program,
    job: _Job,
    turn: dict[int, Turn],
    header: bytes,
    refusal: ShardalgError | None,
) -> tuple[dict[int, Exchange], dict[int, _Starts]]:
    """Fill the send buffers of one round."""
    parts, starts = {}, {}
    for rank, its in turn.items():
        extra = [len(header) if p != rank else 0 for p in ctx.peers]
        sizes = [
            [h + part.get(p, 0) for p, h in zip(ctx.peers, extra)]
            for part in (its.send_bytes, its.receive_bytes)
        ]
        send = ctx.buffer(rank, "send", sum(sizes[0]))
        receive = ctx.buffer(rank, "receive", sum(sizes[1]))
        at = (_payload_starts(ctx.peers, sizes[0], extra), _payload_starts(ctx.peers, sizes[1], extra))
        if header:
            mark = torch.frombuffer(bytearray(header), dtype=torch.uint8)
            for p, start in at[0].items():
                if p != rank:
                    send[start - len(header) : start].copy_(mark)
        if refusal is None:
            for peer, move in its.pack:
                fill(program, job.sources, move, send, at[0][peer])
        parts[rank] = Exchange(send, sizes[0], receive, sizes[1])
        starts[rank] = at
    return parts, starts


def _payload_starts(peers: tuple[int, ...], sizes: list[int], extra: list[int]) -> dict[int, int]:
    starts, before = {}, 0
    for p, size, h in zip(peers, sizes, extra):
        starts[p] = before + h
        before += size
    return starts


def _check_headers(
    ctx: Context, parts: dict[int, Exchange], starts: dict[int, _Starts], header: bytes
) -> None:
    """Raise where a peer refused its tensors or runs something else."""
    mine = HEADER.unpack(header)
    for rank, part in parts.items():
        for peer, start in starts[rank][1].items():
            if peer == rank:
                continue
            theirs = HEADER.unpack(bytes(part.receive[start - HEADER.size : start].cpu().numpy()))
            if theirs[0] != MAGIC or theirs[4] != mine[4]:
                raise TransferError(f"rank {rank}: rank {peer} runs another plan; nothing was written")
            if theirs[1]:
                raise TransferError(f"rank {rank}: rank {peer} refused its tensors; nothing was written")
            if theirs[2] != mine[2]:
                raise TransferError(
                    f"rank {rank} runs tag {mine[2]}, rank {peer} tag {theirs[2]}; nothing was written"
                )
