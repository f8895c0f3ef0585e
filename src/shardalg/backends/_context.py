"""Live contexts and the plans bound to them."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeAlias

import torch

from .._errors import InvalidMapError, ProvenanceError, TransferError
from .._struct import struct
from ..ops import schedule
from ..plans import Program, TransferPlan, TreePlan
from ._transport import Transport

Runnable: TypeAlias = "TransferPlan | TreePlan | Program"


class Owner:
    """The private token of one live context, compared by ``is``.

    An instance of our own class and never a bare ``object()`` or an ``id()``: compiled code drops
    the check for the one, and the other is used again after a context is gone.
    """

    __slots__ = ()


@dataclasses.dataclass
class Counters:
    """What a context has done: exchanges, payload bytes sent by its ranks, and preparations."""

    gathers: int = 0
    exchanges: int = 0
    payload_bytes: int = 0
    preparations: int = 0


class Context:
    """A live set of processes that can run plans. Made by a backend, never by hand.

    ``ranks`` are the global ranks this process holds, ``peers`` everybody's. Buffers and prepared
    programs are kept and reused between runs, and freed by ``close``.
    """

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self.counters = Counters()
        self.closed = False
        self._owner = Owner()
        self._prepared: dict[int, tuple[Program, Any]] = {}
        self._pool: dict[tuple[int, str], torch.Tensor] = {}

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.transport.ranks

    @property
    def peers(self) -> tuple[int, ...]:
        return self.transport.peers

    def __repr__(self) -> str:
        state = "closed " if self.closed else ""
        return f"<{state}Context of {len(self.peers)} ranks, holding {self.ranks}>"

    def close(self) -> None:
        """Free buffers and what the context made; bound plans are refused from now on."""
        if not self.closed:
            self.closed = True
            self._prepared.clear()
            self._pool.clear()
            self.transport.close()

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gather(self, mine: dict[int, bytes]) -> dict[int, bytes]:
        """Small byte strings of all ranks."""
        self.counters.gathers += 1
        return self.transport.gather(mine)

    def buffer(self, rank: int, use: str, size: int) -> torch.Tensor:
        """A pooled ``uint8`` buffer of at least ``size`` bytes, cut to size."""
        held = self._pool.get((rank, use))
        if held is None or held.numel() < size:
            held = torch.empty(size, dtype=torch.uint8, device=self.transport.device)
            self._pool[rank, use] = held
        return held[:size]


@struct
class Bound:
    """A program stamped with the context that may run it. Equality ignores the stamp."""

    program: Program
    _owner: Owner | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def clone(self) -> Bound:
        """An equal bound plan that the same context accepts."""
        return _stamped(self.program, self._owner)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Bound, (self.program,))

    def __copy__(self) -> Bound:
        return Bound(self.program)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return Bound(self.program)


def _stamped(program: Program, owner: Owner | None) -> Bound:
    bound = Bound(program)
    object.__setattr__(bound, "_owner", owner)
    return bound


def bind(ctx: Context, plan: Runnable, *, dtypes: Any = None) -> Bound:
    """The plan as a program that ``ctx`` will run. Collective: every rank of the context calls it.

    All ranks compare digests (and dtypes, where given) before anything is sent; a difference
    raises the same ``TransferError`` on every rank. Bind once, run many times.
    """
    if ctx.closed:
        raise ProvenanceError("the context is closed; make a new one and bind again")
    program = plan if isinstance(plan, Program) else None
    problem = ""
    if program is None:
        if not isinstance(plan, (TransferPlan, TreePlan)):
            raise InvalidMapError(f"bind takes a plan or a program, got {type(plan).__name__}")
        program = schedule(plan, dtypes=dtypes)
    elif dtypes is not None:
        raise InvalidMapError("dtypes= belongs to schedule() when a program is bound")
    missing = sorted(ranks_of(program) - set(ctx.peers))
    if missing:
        problem = f"the plan uses ranks {missing[:8]}, but the context has {len(ctx.peers)}: {ctx.peers[:8]}"
    _agree(ctx, program.digest, problem)
    return _stamped(program, ctx._owner)


def ranks_of(program: Program) -> set[int]:
    """Global ranks that send, receive or keep something."""
    found: set[int] = set()
    for plan in {id(e.plan): e.plan for e in program.plan.entries}.values():
        for s, t, _ in plan.traffic:
            found |= {s, t}
    return found


def _agree(ctx: Context, digest: str, problem: str) -> None:
    """Raise the same error on every rank unless all bring the same digest and no problem."""
    mine = f"{digest}\n{problem}".encode()
    said = {r: b.decode().split("\n", 1) for r, b in ctx.gather(dict.fromkeys(ctx.ranks, mine)).items()}
    bad = {r: why for r, (_, why) in said.items() if why}
    if bad:
        rank = min(bad)
        raise TransferError(f"bind: rank {rank}: {bad[rank]}")
    groups: dict[str, list[int]] = {}
    for rank, (its, _) in said.items():
        groups.setdefault(its, []).append(rank)
    if len(groups) > 1:
        words = "; ".join(f"ranks {its[:8]} hold {d[:12]}" for d, its in groups.items())
        raise TransferError(
            f"bind: the ranks hold different plans: {words}. Plan from the same layouts everywhere"
        )


def check_owner(ctx: Context, bound: Any) -> None:
    """Raise unless ``bound`` was stamped by this very context and it is open. Local and silent."""
    if not isinstance(bound, Bound):
        raise ProvenanceError(
            f"run takes what bind returned, got {type(bound).__name__}: bind the plan first"
        )
    if bound._owner is None:
        raise ProvenanceError(
            "this bound plan has no owner: it was built by hand, replaced, copied, unpickled or unflattened;"
            " bind the plan to this context, or use clone()"
        )
    if bound._owner is not ctx._owner:
        raise ProvenanceError("this plan was bound to another context; bind it to this one")
    if ctx.closed:
        raise ProvenanceError("the context is closed; make a new one and bind again")
