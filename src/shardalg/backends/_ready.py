"""A program made ready once for one context, and kept for every later run."""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch

from .._errors import ShardalgError, TransferError
from ..ops import adjoint
from ..ops._schedule import with_dtypes
from ..plans import Entry, Program, TreePlan
from ..plans._program import Dtypes
from ._context import Context
from ._form import check_form, form_of
from ._job import Job, Key, Shards, say_entry
from ._opening import as_ours
from ._pack import Tensors
from ._reduce import Sum, adds, deposited
from ._stage import Stage
from ._transport import Outgoing
from ._verify import Checks, checks

Holders: TypeAlias = dict[str, list[int]]  # ranks by dtype


class Ready:
    """One process's part of a program. ``program`` is the caller's with its dtypes, ``moved`` the one
    that really moves: the same, or one with deposits where the plan adds (``sums`` by entry)."""

    def __init__(self, ctx: Context, program: Program) -> None:
        self.ranks, self.peers = ctx.ranks, ctx.peers
        self.program = program
        self.moved, self.sums = _with_deposits(program)
        self.stage = Stage(ctx, self.moved)
        self.turns, self.rounds = len(self.stage.turns), len(self.moved.rounds)
        self.partial = any(e.plan.rank is not None for e in program.plan.entries)
        if self.partial and ctx.others:
            self.turns = self.rounds = _most(ctx, self.turns)
        self.leaving = _leaving(self.moved, ctx.ranks, self.rounds)
        self.word = hashlib.sha256(program.digest.encode()).digest()[:8]
        self._forms = form_of(ctx, program, "shards"), form_of(ctx, program, "out")

    @cached_property
    def lower_bound(self) -> int | None:
        """The fewest bytes that any plan for the same layouts could put on the wire, where it is known."""
        return None if self.partial or self.sums else self.program.lower_bound

    def check_forms(self, shards: Shards, out: Shards) -> None:
        """Raise where the caller gives something that the plan does not know."""
        check_form(self._forms[0], shards)
        if out is not None:
            check_form(self._forms[1], out)

    def round_of(self, turn: int) -> int:
        """The round that a turn is part of."""
        return self.stage.turns[turn].round if turn < len(self.stage.turns) else turn

    def ends_round(self, turn: int) -> bool:
        return turn + 1 == self.turns or self.round_of(turn + 1) != self.round_of(turn)

    def messages(self, turn: int, sources: Tensors, targets: Tensors) -> dict[int, Outgoing]:
        """The packed messages of one turn; empty ones where only other ranks have something to say."""
        if turn < len(self.stage.turns):
            return self.stage.pack(turn, sources, targets)
        nothing, silent = torch.empty(0, dtype=torch.uint8), [0] * len(self.peers)
        return {r: Outgoing(nothing, [nothing] * len(self.peers), silent, {}) for r in self.ranks}

    def dtype_of(self, entry: int) -> torch.dtype:
        """The dtype of an entry's targets."""
        assert self.program.dtypes is not None
        return getattr(torch, self.program.dtypes[entry][1])  # type: ignore[no-any-return]

    @cached_property
    def checks(self) -> Checks:
        """Where each copy lies in the messages, for checksums."""
        return checks(self.moved, self.stage.fine.parcels, self.ranks)

    @cached_property
    def adjoint(self) -> Program:
        """The backward of each entry, in the same order, from target dtypes to source dtypes."""
        p = self.program
        assert p.dtypes is not None
        back = [Entry(str(k), (str(k),), adjoint(e.plan)) for k, e in enumerate(p.plan.entries)]
        dtypes = {str(k): (target, source) for k, (source, target) in enumerate(p.dtypes)}
        return with_dtypes(Program(TreePlan(tuple(back)), None, p.max_bytes, p.parcels), dtypes)


def _most(ctx: Context, turns: int) -> int:
    """The turns of the rank that has most: ranks that planned only their own part may have none."""
    said = ctx.gather(dict.fromkeys(ctx.ranks, str(turns).encode()), "run")
    return max(int(b) for b in said.values())


def _with_deposits(program: Program) -> tuple[Program, dict[int, tuple[Sum, ...]]]:
    entries, sums = [], {}
    for k, e in enumerate(program.plan.entries):
        if adds(e.plan):
            plan, sums[k] = deposited(e.plan)
            e = Entry(e.target, e.sources, plan)
        entries.append(e)
    if not sums:
        return program, {}
    assert program.dtypes is not None
    dtypes = {e.target: pair for e, pair in zip(entries, program.dtypes)}
    moved = Program(TreePlan(tuple(entries)), None, program.max_bytes, program.parcels)
    return with_dtypes(moved, dtypes), sums


def _leaving(program: Program, ranks: tuple[int, ...], rounds: int) -> tuple[tuple[Key, ...], ...]:
    """The sources that are read for the last time in each round; local copies belong to the first."""
    last: dict[Key, int] = {}
    rows = program.parcels.rows
    for k, e in enumerate(program.plan.entries):
        boxes = [b for b in e.plan.source.domain.boxes if b.rank is not None]
        last |= {(k, b): 0 for b in boxes if e.plan.global_source(b.rank) in ranks}  # type: ignore[arg-type]
    own = np.flatnonzero(np.isin(rows[1], ranks) & (rows[6] == 0))
    for number, entry, box in np.unique(rows[[0, 3, 4]][:, own], axis=1).T.tolist():
        last[entry, program.plan.entries[entry].plan.source.domain.boxes[box]] = number  # rounds ascend
    found: list[list[Key]] = [[] for _ in range(max(1, rounds))]
    for key, number in last.items():
        found[number].append(key)
    return tuple(map(tuple, found))


# --- once per context and program ---------------------------------------------------------


def ready_for(ctx: Context, program: Program, job: Job, refusal: ShardalgError | None) -> Ready:
    """What ``ctx`` keeps for a program; the first run of a program without dtypes agrees on them. What
    goes wrong on one rank here ends the context, since the others cannot know."""

    def prepared() -> Ready:
        final = program
        if program.dtypes is None:
            final = with_dtypes(program, _agreed_dtypes(ctx, program, job, refusal))
        ctx.counters.preparations += 1
        try:
            return Ready(ctx, final)
        except ShardalgError as error:
            raise ctx.broken(error) from error

    return ctx.kept("ready", program, prepared)


def _agreed_dtypes(
    ctx: Context, program: Program, job: Job, refusal: ShardalgError | None
) -> dict[str, tuple[str, str]]:
    """One (source, target) dtype pair per entry, from what all ranks hold."""
    words = ""
    try:
        words = ";".join(job.dtype_words())
    except Exception as error:
        refusal = refusal or as_ours(error)
    mine = (words if refusal is None else f"!{refusal}").encode()
    said = {r: b.decode() for r, b in ctx.gather(dict.fromkeys(ctx.ranks, mine), "run").items()}
    if refusal is not None:
        raise refusal
    for rank, word in sorted(said.items()):
        if word.startswith("!"):
            raise TransferError(f"rank {rank} refused the run: {word[1:]}; nothing was written")
    return {e.target: pair for e, pair in zip(program.plan.entries, _pairs(program, said))}


def _pairs(program: Program, said: dict[int, str]) -> Dtypes:
    """The dtypes of each entry, from what each rank says."""
    found: list[tuple[Holders, Holders]] = [({}, {}) for _ in program.plan.entries]
    for rank, words in sorted(said.items()):
        for sides, pair in zip(found, words.split(";")):
            for holders, name in zip(sides, pair.split("/")):
                if name:
                    holders.setdefault(name, []).append(rank)
    return tuple(_pair(e, *sides) for e, sides in zip(program.plan.entries, found))


def _pair(entry: Entry, sources: Holders, targets: Holders) -> tuple[str, str]:
    for what, holders in (("shards", sources), ("out", targets)):
        if len(holders) > 1:
            words = ", ".join(f"{name} on ranks {ranks[:8]}" for name, ranks in holders.items())
            raise TransferError(f"{say_entry(entry)}: its {what} have different dtypes: {words}")
    held = next(iter(sources), next(iter(targets), "uint8"))
    return held, next(iter(targets), held)
