"""Binding: all ranks of a context agree on a plan before any of them runs it."""

from __future__ import annotations

import hashlib
import json
from itertools import zip_longest
from typing import Any, TypeAlias

from .._errors import InvalidMapError, ShardalgError, TransferError
from ..ops import schedule
from ..plans import Entry, Program, TransferPlan, TreePlan
from ..show._drawing import many
from ._bound import Bound, stamped
from ._context import Context, check_context
from ._eager import eager
from ._job import say_entry
from ._opening import as_ours

Runnable: TypeAlias = "TransferPlan | TreePlan | Program"
Said: TypeAlias = dict[str, Any]

WHAT = {
    "plan": "plans", "dtypes": "dtypes", "max_bytes": "max_bytes", "program": "programs",
    "copies": "copies of one plan",
}  # fmt: skip
COMPARED = 4096  # tensors of a tree that are compared one by one where something differs


@eager
def bind(ctx: Context, plan: Runnable, *, dtypes: Any = None) -> Bound:
    """The plan as a program that ``ctx`` will run. Collective: every rank of the context calls it.

    All ranks compare what they were given (plans by digest, copies, ``dtypes`` where given) before
    anything moves; a difference, or something that one rank cannot bind, raises the same
    ``TransferError`` on every rank. Bind once, run many times.

    >>> from shardalg import backends, layout, plan, Split
    >>> ctx = backends.simulate(2)
    >>> bind(ctx, plan(layout((4,), Split(0), ranks=2), layout((4,), Split(0), ranks=1)))
    Bound(program=<Program of 1 round, 16 bytes on the wire at 8 bytes an element>)
    """
    check_context(ctx)
    return stamped(ctx.in_turn(lambda: _agreed(ctx, plan, dtypes)), ctx._owner)


def _agreed(ctx: Context, plan: Any, dtypes: Any) -> Program:
    """The program that all ranks bring."""
    ctx.note = ""
    ctx.at("bind")
    found = _brought(ctx, plan, dtypes)
    if ctx.others:
        _agree(ctx, found)
    if isinstance(found, ShardalgError):
        raise found
    return found


def _brought(ctx: Context, plan: Any, dtypes: Any) -> Program | ShardalgError:
    """This rank's program, or why there is none: whatever it is, the others must hear of it."""
    try:
        program = _as_program(plan, dtypes)
        _check_ranks(ctx, program)
    except Exception as error:
        return as_ours(error)
    return program


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


def _agree(ctx: Context, found: Program | ShardalgError) -> None:
    """Raise the same error on every rank unless all bring the same program and no problem."""
    mine = {"problem": str(found)} if isinstance(found, ShardalgError) else _words(ctx, found)
    text = json.dumps(mine).encode()
    said = {r: json.loads(b) for r, b in ctx.gather(dict.fromkeys(ctx.ranks, text), "bind").items()}
    bad = {r: words["problem"] for r, words in said.items() if "problem" in words}
    if bad or isinstance(found, ShardalgError):
        cause = found if isinstance(found, ShardalgError) else None
        raise TransferError(f"bind: rank {min(bad)}: {bad[min(bad)]}") from cause
    for word, what in WHAT.items():
        alike: dict[Any, list[int]] = {}
        for rank, words in said.items():
            alike.setdefault(words[word], []).append(rank)
        if len(alike) > 1:
            raise TransferError(_difference(ctx, found, what, list(alike.values())))
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


# --- a difference in words ----------------------------------------------------------------


def _difference(ctx: Context, program: Program, what: str, alike: list[list[int]]) -> str:
    """How the programs of groups of ranks differ, the same text on every rank. Collective: one rank of
    each group tells what it holds."""
    leaders = [ranks[0] for ranks in alike]
    said = _told(ctx, leaders, {"all": _summary(program), "each": _entry_digests(program)})
    words = "; ".join(f"ranks {ranks[:8]} hold {said[ranks[0]]['all']}" for ranks in alike)
    a, b = (said[r]["each"] for r in leaders[:2])
    first = next((k for k, (x, y) in enumerate(zip_longest(a, b)) if x != y), None)
    more = ""
    if first is not None:
        its = _told(ctx, leaders[:2], _entry_words(program, first))
        more = f". The first tensor that differs: {' against '.join(its[r] for r in leaders[:2])}"
    return f"bind: the ranks hold different {what}: {words}{more}. Plan alike on every rank"


def _told(ctx: Context, leaders: list[int], mine: Any) -> dict[int, Any]:
    """What some ranks say, everywhere."""
    text = json.dumps(mine).encode()
    said = ctx.gather({r: text if r in leaders else b"" for r in ctx.ranks}, "bind")
    return {r: json.loads(said[r]) for r in leaders}


def _summary(program: Program) -> str:
    """One line: tensors, copies, bytes, rounds, bound."""
    known = program.dtypes is not None
    moved = program.wire_bytes if known else int(program.parcels.elements.sum())
    words = [
        many(len(program.plan.entries), "tensor"), many(len(program.plan), "copy"),
        f"{many(moved, 'byte' if known else 'element')} between ranks in"
        f" {many(len(program.rounds), 'round')}",
    ]  # fmt: skip
    words += [] if program.max_bytes is None else [f"max_bytes={program.max_bytes}"]
    return ", ".join([*words, *(["relay"] if program.relay else [])])


def _entry_digests(program: Program) -> list[str]:
    """A short digest of the first tensors' questions, dtypes and copies."""
    dtypes = program.dtypes or (None,) * len(program.plan.entries)
    return [
        _short(repr((e.target, e.sources, e.plan.digest, pair)).encode() + _copies(e))
        for e, pair in zip(program.plan.entries[:COMPARED], dtypes)
    ]


def _copies(e: Entry) -> bytes:
    """The copies of a tensor, where every rank should have the same."""
    return e.plan.map.table.rows.tobytes() if e.plan.rank is None else b""


def _short(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=4).hexdigest()


def _entry_words(program: Program, k: int) -> str:
    """One tensor of a program in words."""
    if k >= len(program.plan.entries):
        return "none"
    e = program.plan.entries[k]
    of = f" of {list(e.sources)}" if e.sources != (e.target,) else ""
    dtypes = f", {' -> '.join(program.dtypes[k])}" if program.dtypes is not None else ""
    digests = f"digest {e.plan.digest[:8]}, copies {_short(_copies(e))}"
    return f"{say_entry(e)}{of}, {e.plan.target.codomain!r}: {e.plan!r}{dtypes} ({digests})"
