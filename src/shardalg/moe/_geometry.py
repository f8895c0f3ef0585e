"""The sizes every rank of one expert-parallel group agrees on."""

from __future__ import annotations

from typing import Any

import numpy as np

from .._errors import InvalidMapError
from .._struct import struct
from ..maps._space import as_int
from ._policy import Array, Policy, named_policy

INT32_MAX = 2**31 - 1
INT32_MIN = -(2**31)
LAYOUTS = ("slots", "compact")


@struct
class Geometry:
    """Ranks, experts, capacities and the layout of a dispatched buffer; all counts.

    ``R`` ranks, ``E`` experts (``epn`` live at each home), ``S`` tokens per rank at most, ``K``
    routes per token, ``B`` copy slots per rank, ``pad`` the multiple a segment is rounded up to,
    ``L`` and ``M`` the largest load and the most remote experts the policy declares for a rank.
    ``NvS`` is the number of rows of one rank's dispatched buffer.

    >>> geometry(1, E=8, S=128, K=8, pad=128).NvS
    3072
    >>> geometry(1, E=8, S=128, K=8, pad=128, B=8).NvS
    3056
    """

    R: int
    E: int
    S: int
    K: int
    B: int
    pad: int
    layout: str
    policy: Policy
    L: int
    M: int

    @property
    def epn(self) -> int:
        return self.E // self.R

    @property
    def N(self) -> int:
        return self.S * self.K

    @property
    def NvS(self) -> int:
        rows = self.L + (self.pad - 1) * (self.epn + self.M)
        return rows if self.layout == "slots" else int(round_up(rows, self.pad))

    @property
    def groups(self) -> int:
        """Segments of one rank's buffer: experts and copy slots that may have rows there."""
        return (self.E if self.layout == "slots" else self.epn) + self.B

    def home(self, expert: int) -> int:
        return expert // self.epn

    def __repr__(self) -> str:
        sizes = " ".join(f"{name}={getattr(self, name)}" for name in ("R", "E", "S", "K", "B", "pad", "NvS"))
        return f"Geometry({sizes} layout={self.layout!r} policy={self.policy.name!r})"


def geometry(
    R: int,
    *,
    E: int,
    S: int,
    K: int,
    B: int | None = None,
    pad: int = 1,
    layout: str | None = None,
    policy: Any = "exact",
) -> Geometry:
    """The checked ``Geometry``; giving ``B`` selects layout "slots", giving neither "compact".

    Raises ``InvalidMapError`` with the numbers where experts do not divide over the ranks or the
    slots of all ranks do not fit int32.
    """
    R, E, S, K, pad = (_count(v, n, 1) for v, n in ((R, "R"), (E, "E"), (S, "S"), (K, "K"), (pad, "pad")))
    if E % R:
        raise InvalidMapError(f"E={E} experts do not divide over R={R} ranks: {E} = {R}*{E // R} + {E % R}")
    layout = _layout(layout, B)
    copies = E // R if B is None else _count(B, "B", 0)
    if layout == "compact" and copies != E // R:
        raise InvalidMapError(
            f'layout "compact" has B = E // R = {E // R} copy slots, got B={B}; use layout="slots"'
        )
    chosen = named_policy(policy, copies)
    load, remote = chosen.declared(R, E, S * K, copies)
    if layout == "compact" and remote > copies:
        raise InvalidMapError(
            f'policy {chosen.name!r} declares M={remote} remote experts, layout "compact" has {copies} slots'
        )
    return _fits(Geometry(R, E, S, K, copies, pad, layout, chosen, load, remote))


def round_up(n: Any, multiple: int) -> Any:
    """The smallest multiple of ``multiple`` that is at least ``n``; also elementwise on arrays."""
    return -(-n // multiple) * multiple


def capacities(tokens: int, ranks: int) -> Array:
    """Rows each rank should compute: equal, the remainder to the first ranks.

    >>> capacities(5, 2).tolist()
    [3, 2]
    """
    return np.full(ranks, tokens // ranks) + (np.arange(ranks) < tokens % ranks)


def _layout(layout: str | None, copies: int | None) -> str:
    if layout is None:
        return "compact" if copies is None else "slots"
    if layout not in LAYOUTS:
        raise InvalidMapError(f"layout must be one of {LAYOUTS}, got {layout!r}")
    return layout


def _fits(g: Geometry) -> Geometry:
    slots = g.R * g.NvS
    if slots > INT32_MAX:
        raise InvalidMapError(
            f"R*NvS = {g.R}*{g.NvS} = {slots} slots do not fit int32 (at most {INT32_MAX});"
            f" NvS = L + (pad-1)*(epn+M) = {g.L} + {g.pad - 1}*{g.epn + g.M}:"
            ' lower S, K or pad, or use policy="exact"'
        )
    return g


def _count(value: Any, name: str, least: int) -> int:
    number = as_int(value, name)
    if number < least:
        raise InvalidMapError(f"{name} must be at least {least}, got {number}")
    return number
