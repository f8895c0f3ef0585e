"""``CommPlan``: the routing of one microbatch on one rank, frozen, with a private owner."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import optree
import torch

from .._errors import InvalidMapError, ProvenanceError, UnsupportedError
from .._struct import NAMESPACE, leaf
from ..backends._torch_pytree import register_in_torch
from ._geometry import Geometry
from ._index import End, Table, table
from ._policy import Array


class Owner:
    """A buffer's token. Compared by identity, held by its plans, so never reused while one lives."""

    __slots__ = ("__weakref__",)


@dataclass(frozen=True, eq=False)
class CommPlan:
    """Where every route of one rank's microbatch goes, and what this rank receives.

    Made by ``plan_dispatch``; used by ``dispatch``, ``combine``, ``prefetch`` and ``reduce_grad`` of
    the ``Buffer`` that made it, and by no other. All tensors are int32. ``dst`` [S_r*K] holds
    ``rank*NvS + slot``; a token's further routes to a rank hold ``-value-1``, dropped routes -2**31.

    The owner is private: not compared, not printed, no leaf. ``clone()`` keeps it; construction,
    ``replace``, copy, pickle and any unflatten with other tensors lose it, and a plan without its
    owner is refused. Equality compares geometry, then tensors; plans are unhashable.
    """

    N: int
    R: int
    E: int
    B: int
    NvS: int
    K: int
    pad: int
    S_r: int
    H: int
    layout: str
    rank: int
    dtype: torch.dtype
    dst: torch.Tensor = leaf()
    experts_to_copy: torch.Tensor = leaf()
    cu_seqlens: torch.Tensor = leaf()
    group_experts: torch.Tensor = leaf()
    zero_fill_ranges: torch.Tensor = leaf()
    remote_stats: torch.Tensor = leaf()
    dup_groups: torch.Tensor = leaf()
    dup_loffs: torch.Tensor = leaf()
    dup_counts: torch.Tensor = leaf()
    recv_slots: torch.Tensor = leaf()
    send_routes: torch.Tensor = leaf()
    recv_routes: torch.Tensor = leaf()
    send_rows: torch.Tensor = leaf()
    recv_rows: torch.Tensor = leaf()
    counts: torch.Tensor = leaf()
    alloc: torch.Tensor = leaf()
    _seal: Seal | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def epn(self) -> int:
        return self.E // self.R

    @property
    def device(self) -> torch.device:
        return self.dst.device

    def clone(self) -> CommPlan:
        """An equal plan with tensors of its own, owned by the same buffer (if it still is)."""
        copy = dataclasses.replace(self, **{name: getattr(self, name).clone() for name in LEAVES})
        if self._seal is not None and self._seal.broken(self) is None:
            object.__setattr__(copy, "_seal", seal(copy, self._seal.owner, self._seal.host, self._seal.order))
        return copy

    def to(self, device: torch.device | str) -> CommPlan:
        """A clone where the plan already lives; elsewhere only a buffer there can plan."""
        if torch.empty(0, device=device).device != self.device:
            raise UnsupportedError(
                f"this plan lives on {self.device} with its buffer; plan with a buffer on {device} instead"
            )
        return self.clone()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CommPlan):
            return NotImplemented
        return scalars(self) == scalars(other) and all(
            a.device == b.device and torch.equal(a, b) for a, b in zip(leaves(self), leaves(other))
        )

    __hash__ = None  # type: ignore[assignment]

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_seal"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _seal=None)


LEAVES = tuple(f.name for f in dataclasses.fields(CommPlan) if f.metadata.get("leaf"))
HOST = ("dst", "recv_slots", "send_routes", "recv_routes", "experts_to_copy")
SCALARS = tuple(f.name for f in dataclasses.fields(CommPlan) if f.init and f.name not in LEAVES)


def leaves(plan: CommPlan) -> tuple[Any, ...]:
    """The plan's tensors in the order of its fields."""
    return tuple(getattr(plan, name) for name in LEAVES)


def scalars(plan: CommPlan) -> tuple[Any, ...]:
    """The plan's geometry in the order of its fields."""
    return tuple(getattr(plan, name) for name in SCALARS)


@dataclass(frozen=True, eq=False)
class Seal:
    """What a plan was when its buffer made it: the owner, and its own tensors as they were.

    ``versions``, ``places`` and ``sums`` (over ``views``, the host's view of its tensors) tell whether a
    tensor was written or given other memory since; ``host`` has the routing without asking the device again,
    ``order`` the real routes by destination.
    """

    owner: Owner
    scalars: tuple[Any, ...]
    leaves: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]
    versions: tuple[int, ...]
    places: tuple[int, ...]
    views: tuple[Array, ...]
    sums: tuple[int, ...]
    host: dict[str, Array]
    order: Array

    def broken(self, plan: CommPlan) -> str | None:
        """What differs between the plan now and the plan that was sealed, in words, or None."""
        for name, now, then in zip(SCALARS, scalars(plan), self.scalars):
            if now != then:
                return f"{name} is {now}, it was planned with {then}"
        for i, (name, now) in enumerate(zip(LEAVES, leaves(plan))):
            if now is not self.leaves[i]:
                return f"{name} is not the tensor it was planned with"
            if now.shape != self.shapes[i] or now.dtype != torch.int32:
                return (
                    f"{name} has become {now.dtype} {tuple(now.shape)}, it was int32 {tuple(self.shapes[i])}"
                )
            if now._version != self.versions[i] or now.data_ptr() != self.places[i]:
                return f"{name} was written in place"
        for name, view, then in zip(LEAVES, self.views, self.sums):
            if _xor(view) != then:
                return f"{name} was written in place"
        return None

    @cached_property
    def payload(self) -> Table:
        """Tokens to slots: one wire row per distinct (token, rank)."""
        return _routing_table(self, merged=True)

    @cached_property
    def routes(self) -> Table:
        """Routes to slots: one wire row (a weight) per route."""
        return _routing_table(self, merged=False)

    @cached_property
    def copies(self) -> Table:
        """My experts to the copy slots that hold them."""
        return _copies_table(self)

    def scalar(self, name: str) -> Any:
        return self.scalars[SCALARS.index(name)]

    @property
    def device(self) -> torch.device:
        return self.leaves[0].device


def seal(plan: CommPlan, owner: Owner, host: dict[str, Array], order: Array) -> Seal:
    """The seal for a plan as it is now."""
    own = leaves(plan)
    views = tuple(t.numpy() for t in own) if plan.device.type == "cpu" else ()
    shapes, versions = tuple(t.shape for t in own), tuple(t._version for t in own)
    places, sums = tuple(t.data_ptr() for t in own), tuple(_xor(v) for v in views)
    return Seal(owner, scalars(plan), own, shapes, versions, places, views, sums, host, order)


def make_plan(
    g: Geometry,
    owner: Owner,
    values: dict[str, Any],
    arrays: dict[str, Array],
    order: Array,
    device: torch.device,
) -> CommPlan:
    """The owned plan with these scalars and tables, shapes checked."""
    with torch.inference_mode(False):
        tensors = {
            name: torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device) for name, a in arrays.items()
        }
    plan = CommPlan(**(values | tensors))
    check_shapes(plan, g.groups)
    host = {name: np.asarray(arrays[name], np.int32) for name in HOST}
    object.__setattr__(plan, "_seal", seal(plan, owner, host, order))
    return plan


def check_shapes(plan: CommPlan, groups: int) -> None:
    """Raise where a table is not a contiguous int32 tensor of the shape its geometry asks for."""
    R, E, rows = plan.R, plan.E, plan.NvS
    wanted = {
        "dst": (plan.S_r * plan.K,), "experts_to_copy": (R, plan.B), "cu_seqlens": (groups,),
        "group_experts": (groups,), "zero_fill_ranges": (groups, 2), "remote_stats": (2,),
        "dup_groups": (rows, 3), "dup_loffs": (rows,),
        "dup_counts": (2,), "recv_slots": (plan.recv_slots.numel(),), "counts": (R, E), "alloc": (E, R),
        "send_routes": (R,), "recv_routes": (R,), "send_rows": (R,), "recv_rows": (R,),
    }  # fmt: skip
    for name, shape in wanted.items():
        found = getattr(plan, name)
        if found.dtype != torch.int32 or tuple(found.shape) != shape or not found.is_contiguous():
            raise InvalidMapError(
                f"{name} must be contiguous int32 {shape}, got {found.dtype} {tuple(found.shape)}"
            )


def owned_seal(plan: Any, owner: Owner) -> Seal:
    """The seal of a plan that belongs to ``owner`` and is unchanged; ``ProvenanceError`` otherwise."""
    if not isinstance(plan, CommPlan):
        raise ProvenanceError(
            f"expected a CommPlan from plan_dispatch(buffer, topk), got {type(plan).__name__}"
        )
    if plan._seal is None:
        raise ProvenanceError(
            "this plan has no owner: it was constructed, replaced, copied, unpickled, read back or mapped"
            " over; use the plan that plan_dispatch returned, or its clone()"
        )
    if plan._seal.owner is not owner:
        raise ProvenanceError(
            "this plan belongs to another Buffer; plan again with plan_dispatch(buffer, topk)"
        )
    broken = plan._seal.broken(plan)
    if broken is not None:
        raise ProvenanceError(f"this plan is no longer what its buffer planned: {broken}; plan again")
    return plan._seal


def _xor(view: Array) -> int:
    """A sum over the bits of a host tensor: finds writes that no version counter sees."""
    flat = view.reshape(-1)
    wide = flat[: len(flat) // 2 * 2].view(np.int64)
    return int(np.bitwise_xor.reduce(wide, initial=0)) ^ int(flat[-1] if len(flat) else 0)


def _routing_table(s: Seal, *, merged: bool) -> Table:
    K, rank = s.scalar("K"), s.scalar("rank")
    dst, slots = s.host["dst"], s.host["recv_slots"]
    items = s.scalar("S_r") if merged else len(dst)
    item = np.repeat(np.arange(items, dtype=np.int32), K if merged else 1)
    out = End(s.host["send_routes"], (dst[s.order] < 0) & merged)
    into = End(s.host["recv_routes"], (slots < 0) & merged)
    slot = slots ^ -(slots < 0).astype(np.int32)
    return table(rank, (items, s.scalar("NvS")), item, s.order, out, slot, into, s.device)


def _copies_table(s: Seal) -> Table:
    """Copies numbered by (expert, rank, slot); received ones by home."""
    rank, R = s.scalar("rank"), s.scalar("R")
    epn, copies = s.scalar("E") // R, s.host["experts_to_copy"].astype(np.int64)
    home = np.where(copies >= 0, copies // epn, -1)
    to, slot = np.nonzero(home == rank)
    expert = copies[to, slot] - rank * epn
    number = np.argsort(expert, kind="stable")
    order = np.empty_like(number)
    order[number] = np.arange(len(number))
    mine = np.flatnonzero(home[rank] >= 0)
    mine = mine[np.argsort(home[rank, mine], kind="stable")]
    out = End(np.bincount(to, minlength=R), np.zeros(len(to), bool))
    into = End(np.bincount(home[rank, mine], minlength=R), np.zeros(len(mine), bool))
    return table(rank, (epn, s.scalar("B")), expert[number], order, out, mine, into, s.device)


class _Keep:
    """Carries a seal through a flattened plan without being part of the tree's structure.

    Equal to every other, so trees of equal geometry have equal structure whoever owns them; pickles empty.
    """

    __slots__ = ("seal",)

    def __init__(self, seal: Seal | None = None) -> None:
        self.seal = seal

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Keep)

    def __hash__(self) -> int:
        return 0

    def __repr__(self) -> str:
        return "_"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Keep, ())


def _flatten(plan: CommPlan) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
    return leaves(plan), (scalars(plan), _Keep(plan._seal)), LEAVES


def _unflatten(context: tuple[Any, ...], children: Any) -> CommPlan:
    """The owner survives only where every leaf is the sealed plan's own tensor."""
    values, keep = context
    plan = object.__new__(CommPlan)
    plan.__dict__.update(zip(SCALARS, values), _seal=None)
    plan.__dict__.update(zip(LEAVES, children))
    if keep.seal is not None and all(a is b for a, b in zip(leaves(plan), keep.seal.leaves)):
        plan.__dict__["_seal"] = keep.seal
    return plan


optree.register_pytree_node(CommPlan, _flatten, _unflatten, namespace=NAMESPACE)  # type: ignore[arg-type]
register_in_torch(CommPlan, _flatten, _unflatten)  # type: ignore[arg-type]
