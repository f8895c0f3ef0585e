"""Binding: all ranks of a context agree on a plan before any of them runs it."""

from __future__ import annotations

import hashlib
import json
from typing import Any, TypeAlias

from .._errors import InvalidMapError, ShardalgError, TransferError
from ..ops import schedule
from ..plans import Program, TransferPlan, TreePlan
from ._bound import Bound, stamped
from ._context import Context, check_context
from ._eager import eager

Runnable: TypeAlias = "TransferPlan | TreePlan | Program"
Said: TypeAlias = dict[str, Any]

WHAT = {
    "plan": "plans", "dtypes": "dtypes", "max_bytes": "max_bytes", "program": "programs",
    "copies": "copies of one plan",
}  # fmt: skip


@eager
def bind(ctx: Context, plan: Runnable, *, dtypes: Any = None) -> Bound:
    """The plan as a program that ``ctx`` will run. Collective: every rank of the context calls it.

    All ranks compare what they were given (plans by digest, copies, ``dtypes`` where given) before
    anything moves; a difference, or something that one rank cannot bind, raises the same
    ``TransferError`` on every rank. Bind once, run many times.

    >>> from shardalg import backends, layout, plan, Split
    >>> ctx = backends.simulate(2)
    >>> bind(ctx, plan(layout((4,), Split(0), ranks=2), layout((4,), Split(0), ranks=1)))
    Bound(program=<Program of 1 rounds, 16 bytes on the wire>)
    """
    check_context(ctx)
    ctx.at("bind")
    program, problem = None, None
    try:
        program = _as_program(plan, dtypes)
        _check_ranks(ctx, program)
    except ShardalgError as error:
        problem = error
    _agree(ctx, program, problem)
    assert program is not None
    return stamped(program, ctx._owner)


def _as_program(plan: Any, dtypes: Any) -> Program:
    if isinstance(plan, Program):
        if dtypes is not None:
            raise InvalidMapError("dtypes= belongs to schedule() when a program is bound")
        return plan
    if not isinstance(plan, (TransferPlan, TreePlan)):
        raise InvalidMapError(f"bind takes a plan or a program, got {type(plan).__name__}")
    return schedule(plan, dtypes=dtypes)


def _check_ranks(ctx: Context, program: Program) -> None:
    missing = sorted(ranks_of(program) - set(ctx.peers))
    if missing:
        raise InvalidMapError(
            f"the plan uses ranks {missing[:8]}, but the context has {len(ctx.peers)}: {ctx.peers[:8]}"
        )


def ranks_of(program: Program) -> set[int]:
    """Global ranks that send, receive or keep something."""
    found: set[int] = set()
    for plan in {id(e.plan): e.plan for e in program.plan.entries}.values():
        for s, t, _ in plan.traffic:
            found |= {s, t}
    return found


# --- the handshake ------------------------------------------------------------------------


def _agree(ctx: Context, program: Program | None, problem: ShardalgError | None) -> None:
    """Raise the same error on every rank unless all bring the same program and no problem."""
    if not ctx.others:
        if problem is not None:
            raise problem
        return
    mine = {"problem": str(problem)} if program is None or problem is not None else _words(ctx, program)
    text = json.dumps(mine).encode()
    said = {r: json.loads(b) for r, b in ctx.gather(dict.fromkeys(ctx.ranks, text)).items()}
    bad = {r: words["problem"] for r, words in said.items() if "problem" in words}
    if bad:
        raise TransferError(f"bind: rank {min(bad)}: {bad[min(bad)]}") from problem
    for word, what in WHAT.items():
        _same({r: words[word] for r, words in said.items()}, what)
    _sizes_match({r: words["sizes"] for r, words in said.items()})


def _words(ctx: Context, program: Program) -> Said:
    """What every rank must say alike, and the bytes it means to send and receive where it planned
    only its own part."""
    local = any(e.plan.rank is not None for e in program.plan.entries)
    return {
        "plan": program.plan.digest, "dtypes": str(program.dtypes), "max_bytes": program.max_bytes,
        "program": program.digest, "copies": None if local else _fingerprint(program),
        "sizes": _own_sizes(ctx, program) if local else [],
    }  # fmt: skip


def _fingerprint(program: Program) -> str:
    """A digest of the blocks and copies themselves: the plan's digest names only the question."""
    found = hashlib.blake2b(program.parcels.rows.tobytes(), digest_size=16)
    for plan in {id(e.plan): e.plan for e in program.plan.entries}.values():
        found.update(plan.map.table.rows.tobytes())
    return found.hexdigest()


def _own_sizes(ctx: Context, program: Program) -> list[list[int]]:
    """(round, source, target, bytes) of the messages that this process sends or receives."""
    mine = set(ctx.ranks)
    return [
        [k, m.source, m.target, m.size]
        for k, its in enumerate(program.rounds)
        for m in its.messages
        if mine & {m.source, m.target}
    ]


def _same(said: dict[int, Any], what: str) -> None:
    groups: dict[Any, list[int]] = {}
    for rank, word in said.items():
        groups.setdefault(word, []).append(rank)
    if len(groups) > 1:
        words = "; ".join(f"ranks {its[:8]} hold {str(word)[:64]}" for word, its in groups.items())
        raise TransferError(f"bind: the ranks hold different {what}: {words}. Plan alike on every rank")


def _sizes_match(said: dict[int, list[list[int]]]) -> None:
    """Sender and receiver of every message mean the same bytes."""
    by_rank = {r: {tuple(m[:3]): m[3] for m in messages} for r, messages in said.items()}
    for rank, messages in sorted(by_rank.items()):
        for (k, s, t), size in sorted(messages.items()):
            peer = t if rank == s else s
            theirs = by_rank.get(peer, {}).get((k, s, t), 0)
            if theirs != size:
                raise TransferError(
                    f"bind: rank {rank} plans {size} bytes from rank {s} to rank {t} in round {k},"
                    f" rank {peer} plans {theirs}. Plan from the same layouts everywhere"
                )
