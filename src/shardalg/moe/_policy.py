"""The one choice of a plan: how many tokens of each expert every rank computes.

A policy turns counts and capacities into ``alloc [E, R]``. Everything else in a plan is a
function of (alloc, routing, geometry), so a policy can be replaced without touching the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, TypeAlias

import numpy as np

from .._errors import InvalidMapError, SelectionError
from .._struct import struct

Array: TypeAlias = np.ndarray[Any, Any]
Allocate: TypeAlias = Callable[[Array, Array], Any]


@struct
class Policy:
    """A named ``allocate(counts [E], capacity [R]) -> alloc [E, R]`` with the bounds it declares.

    ``L`` is the largest load it gives a rank, ``M`` the most experts of other homes: they size the
    buffer. None stands for what any policy keeps: all routes, and as many as there are slots.
    ``allocate`` must be a pure function: every rank calls it on its own.
    """

    name: str
    allocate: Allocate = field(compare=False, repr=False)
    L: int | None = None
    M: int | None = None
    balanced: bool = False

    def declared(self, ranks: int, experts: int, routes: int, slots: int) -> tuple[int, int]:
        """``(L, M)`` for a group; ``routes`` is S*K."""
        load = routes if self.balanced else ranks * routes if self.L is None else self.L
        remote = experts // ranks if self.balanced else slots if self.M is None else self.M
        return load, remote


def allocate_exact(counts: Array, capacity: Array) -> Array:
    """Every rank computes exactly its capacity; each rank receives from at most one other home.

    Exact whenever capacities differ by at most 1 and add up to the tokens.

    >>> allocate_exact(np.array([1, 0, 0, 3]), np.array([2, 2])).tolist()
    [[1, 0], [0, 0], [0, 0], [1, 2]]
    """
    return _allocate(counts, capacity, len(counts))


def allocate_home(counts: Array, capacity: Array) -> Array:
    """Every expert is computed at its home: no copies, loads as the router made them."""
    experts, ranks = len(counts), len(capacity)
    alloc = np.zeros((experts, ranks), np.int64)
    alloc[np.arange(experts), np.arange(experts) // (experts // ranks)] = counts
    return alloc


EXACT = Policy("exact", allocate_exact, balanced=True)
HOME = Policy("home", allocate_home, M=0)


def max_copies(B: int) -> Policy:
    """As "exact", but no rank takes more than ``B`` experts of another home; the rest stays there.

    >>> max_copies(1).allocate(np.array([0, 0, 3, 3]), np.array([3, 3])).tolist()
    [[0, 0], [0, 0], [3, 0], [0, 3]]
    """

    def allocate(counts: Array, capacity: Array) -> Array:
        return _allocate(counts, capacity, B)

    return Policy(f"max_copies({B})", allocate, M=B)


def named_policy(policy: Any, slots: int) -> Policy:
    """The policy meant by a name, a ``Policy`` or a callable (which may carry ``L`` and ``M``)."""
    named = {"exact": EXACT, "home": HOME, "max_copies": max_copies(slots)}
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and policy in named:
        return named[policy]
    if callable(policy):
        name = getattr(policy, "__name__", type(policy).__name__)
        return Policy(name, policy, getattr(policy, "L", None), getattr(policy, "M", None))
    raise InvalidMapError(
        f"policy must be one of {tuple(named)}, max_copies(B) or a callable, got {policy!r}"
    )


def checked_alloc(policy: Policy, counts: Array, capacity: Array, load: int, remote: int) -> Array:
    """The policy's ``alloc`` as int64, or ``SelectionError`` naming the broken part of the contract."""
    alloc = np.asarray(policy.allocate(counts, capacity))
    experts, ranks = len(counts), len(capacity)
    if alloc.shape != (experts, ranks) or alloc.dtype.kind not in "iu":
        _broken(policy, f"must return integers of shape {(experts, ranks)}, got {alloc.dtype} {alloc.shape}")
    alloc = alloc.astype(np.int64, copy=False)
    if alloc.min(initial=0) < 0:
        e, d = np.argwhere(alloc < 0)[0]
        _broken(policy, f"gives expert {e} on rank {d} the negative count {alloc[e, d]}")
    if (alloc.sum(1) != counts).any():
        e = int(np.flatnonzero(alloc.sum(1) != counts)[0])
        _broken(policy, f"places {alloc[e].sum()} tokens of expert {e}, which has {counts[e]}")
    _check_declared(policy, alloc.sum(0), load, "tokens", "L")
    _check_declared(policy, remote_experts(alloc).sum(0), remote, "remote experts", "M")
    return alloc


def remote_experts(alloc: Array) -> Array:
    """``[E, R]``: whether a rank that is not the expert's home computes tokens of it."""
    experts, ranks = alloc.shape
    at_home = np.arange(experts)[:, None] // (experts // ranks) == np.arange(ranks)
    return np.asarray((alloc > 0) & ~at_home)


def _check_declared(policy: Policy, found: Array, bound: int, what: str, name: str) -> None:
    if found.max(initial=0) > bound:
        rank = int(found.argmax())
        _broken(policy, f"gives rank {rank} {found[rank]} {what}, it declares {name}={bound}")


def _broken(policy: Policy, what: str) -> None:
    raise SelectionError(f"policy {policy.name!r} {what}")


def _allocate(counts: Array, capacity: Array, most: int) -> Array:
    """Receivers from ``_moves``; the donor's fullest expert goes first, ``most`` experts per receiver."""
    alloc = allocate_home(counts, capacity)
    each = len(counts) // len(capacity)
    group = counts.reshape(len(capacity), each).sum(1)
    for home, wanted in _moves(group, capacity).items():
        rest = counts[home * each : (home + 1) * each].tolist()
        for i, d, tokens in _pick(rest, wanted, most):
            alloc[home * each + i, d] += tokens
            alloc[home * each + i, home] -= tokens
    return alloc


def _moves(group: Array, capacity: Array) -> dict[int, dict[int, int]]:
    """Tokens each home gives to each receiver: the fullest fills the emptiest at once."""
    balance = (group - capacity).tolist()
    moves: dict[int, dict[int, int]] = {}
    while (excess := max(balance)) > 0:
        home, lack = balance.index(excess), min(balance)
        receiver = balance.index(lack)
        moves.setdefault(home, {})[receiver] = -lack
        balance[home] += lack
        balance[receiver] = 0
    return moves


def _pick(rest: list[int], wanted: dict[int, int], most: int) -> list[tuple[int, int, int]]:
    """Triples (expert of the home, receiver, tokens); ties go to the lowest number."""
    picks: list[tuple[int, int, int]] = []
    taken = dict.fromkeys(wanted, 0)
    wanted = dict(sorted(wanted.items()))
    while wanted and (want := max(wanted.values())) > 0:
        d = next(rank for rank, n in wanted.items() if n == want)
        tokens = min(max(rest), want) if taken[d] < most else 0
        if tokens == 0:
            del wanted[d]
            continue
        i = rest.index(max(rest))
        rest[i] -= tokens
        wanted[d] -= tokens
        taken[d] += 1
        picks.append((i, d, tokens))
    return picks
