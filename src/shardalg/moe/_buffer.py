"""``Buffer``: the live context of MoE plans, one per expert-parallel group and model shape."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch

from .._errors import InvalidMapError, ProvenanceError, UnsupportedError
from ..maps._space import as_int
from ._geometry import LAYOUTS, Geometry, geometry
from ._plan import CommPlan, Owner, Seal, owned_seal
from ._pool import Pool
from ._transport import Simulated, Transport, transport_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2)


class Buffer:
    """Plans and moves microbatches for one group; collective, all ranks construct it alike.

    ``ctx`` is a process group, a backend context, or None for one rank. Symbols as in the MoE
    guide: ``E`` experts, at most ``S`` tokens per rank with ``K`` routes, hidden size ``H`` (elements),
    ``B`` copy slots per rank (giving it selects layout "slots"; the default is "compact"), segments
    padded to ``pad`` rows, and the ``policy`` that shares out tokens. ``dtype`` is that of hidden states
    and rows, ``weight_dtype`` that of router weights. Ranks that disagree all raise the same error.
    ``device`` says where tensors live if the process group does not.

    A context that holds all ranks (``simulate``) takes and gives one value per rank, in sequences.

    >>> with Buffer(None, E=4, S=3, K=2, H=8) as buffer:
    ...     buffer.geometry
    Geometry(R=1 E=4 S=3 K=2 B=4 pad=1 NvS=6 layout='compact' policy='exact')
    """

    def __init__(
        self,
        ctx: Any,
        *,
        E: int,
        S: int,
        K: int,
        H: int,
        B: int | None = None,
        pad: int = 1,
        layout: str | None = None,
        policy: Any = "exact",
        dtype: torch.dtype = torch.float32,
        weight_dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        self.transport: Transport = transport_of(ctx, device)
        self.dtype, self.weight_dtype, self.H = dtype, weight_dtype, H
        shape = dict(E=E, S=S, K=K, B=B, pad=pad, layout=layout, policy=policy)
        self.geometry = _agreed(self.transport, dtype, weight_dtype, H, shape)
        self.closed = False
        self._owner = Owner()
        self.pool = Pool(self.transport.device)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.transport.ranks

    @property
    def device(self) -> torch.device:
        return self.transport.device

    def __repr__(self) -> str:
        return f"<{'closed ' if self.closed else ''}Buffer of {self.geometry} holding ranks {self.ranks}>"

    def close(self) -> None:
        """Frees kept memory; plans of this buffer are refused from now on. The group stays open."""
        self.closed = True
        self.pool.clear()

    def __enter__(self) -> Buffer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError("a Buffer is a live context and cannot be copied or pickled; make another one")


def simulate(ranks: int, **shape: Any) -> Buffer:
    """A ``Buffer`` of all ranks in this process, the reference for every other backend.

    Functions take and give one value per rank: ``plan_dispatch(buffer, [topk0, topk1])``.

    >>> simulate(2, E=4, S=2, K=1, H=8).ranks
    (0, 1)
    """
    if ranks < 1:
        raise InvalidMapError(f"simulate needs at least 1 rank, got {ranks}")
    return Buffer(Simulated(ranks), **shape)


def check_open(buffer: Any) -> None:
    """Raise unless ``buffer`` is a ``Buffer`` that can still talk."""
    if not isinstance(buffer, Buffer):
        raise ProvenanceError(f"expected a Buffer, got {type(buffer).__name__}")
    if buffer.closed or buffer.transport.closed:
        raise ProvenanceError("the buffer is closed; make a new one and plan again")


def admit(buffer: Any, plan: Any) -> tuple[Seal, ...]:
    """The seals of this buffer's own plans, one per held rank; raises before anything is sent.

    Checked in this order: the kind of value, the owner, the signature, that the buffer is open.
    """
    if not isinstance(buffer, Buffer):
        raise ProvenanceError(f"expected a Buffer, got {type(buffer).__name__}")
    seals = tuple(owned_seal(p, buffer._owner) for p in per_rank(buffer, plan, "plan"))
    for rank, s in zip(buffer.ranks, seals):
        _check_signature(buffer, s, rank)
    check_open(buffer)
    return seals


def per_rank(buffer: Buffer, value: Any, what: str) -> list[Any]:
    """One value per held rank: the value itself, or the sequence that a simulated buffer takes."""
    if not buffer.transport.many:
        return [value]
    one = isinstance(value, (torch.Tensor, CommPlan)) or not isinstance(value, Sequence)
    if one or len(value) != len(buffer.ranks):
        found = type(value).__name__ if one else f"{len(value)} values"
        error = ProvenanceError if what == "plan" else InvalidMapError
        raise error(
            f"this buffer holds ranks {buffer.ranks}: pass a sequence with one {what} per rank, got {found}"
        )
    return list(value)


def returned(buffer: Buffer, values: Sequence[Any]) -> Any:
    """The form in which ``per_rank`` values go back to the caller."""
    return tuple(values) if buffer.transport.many else values[0]


def _check_signature(buffer: Buffer, s: Seal, rank: int) -> None:
    g = buffer.geometry
    wanted = {
        "N": g.N, "R": g.R, "E": g.E, "B": g.B, "NvS": g.NvS, "K": g.K, "pad": g.pad, "layout": g.layout,
        "H": buffer.H, "rank": rank, "dtype": buffer.dtype,
    }  # fmt: skip
    for name, value in wanted.items():
        if s.scalar(name) != value:
            raise ProvenanceError(
                f"this plan has {name}={s.scalar(name)}, the buffer has {name}={value}; plan again"
            )
    if s.device != buffer.device:
        raise ProvenanceError(f"this plan lives on {s.device}, the buffer on {buffer.device}; plan again")


def _agreed(transport: Transport, dtype: Any, weight_dtype: Any, H: Any, shape: dict[str, Any]) -> Geometry:
    """The geometry, once every rank has said the same; a rank that cannot say it stops all."""
    try:
        found = geometry(transport.size, **shape)
        _check_values(dtype, weight_dtype, H)
    except InvalidMapError:
        transport.all_gather([[-1] * len(FIELDS)] * len(transport.ranks))
        raise
    row = _signature(found, dtype, weight_dtype, H)
    rows = transport.all_gather([row] * len(transport.ranks))
    for rank, other in enumerate(rows):
        if other[0] < 0:
            raise InvalidMapError(f"rank {rank} could not make its Buffer; its own error says why")
        for name, a, b in zip(FIELDS, rows[0], other):
            if a != b:
                raise InvalidMapError(
                    f"ranks make different Buffers: {name} is {a} on rank 0 and {b} on rank {rank}"
                )
    return found


FIELDS = ("R", "E", "S", "K", "B", "pad", "NvS", "H", "layout", "dtype", "weight_dtype", "policy")


def _signature(g: Geometry, dtype: torch.dtype, weight_dtype: torch.dtype, H: int) -> list[int]:
    words = LAYOUTS.index(g.layout), DTYPES.index(dtype), DTYPES.index(weight_dtype)
    return [g.R, g.E, g.S, g.K, g.B, g.pad, g.NvS, int(H), *words, zlib.crc32(repr(g.policy).encode())]


def _check_values(dtype: Any, weight_dtype: Any, H: Any) -> None:
    for name, value in (("dtype", dtype), ("weight_dtype", weight_dtype)):
        if value not in DTYPES:
            raise InvalidMapError(f"{name} must be one of {[str(d) for d in DTYPES]}, got {value!r}")
    if as_int(H, "H") < 1:
        raise InvalidMapError(f"H must be at least 1, got {H}")
