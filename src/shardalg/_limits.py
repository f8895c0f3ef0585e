"""Bounds on work and output, as a value."""

from __future__ import annotations

from dataclasses import fields

from ._errors import InvalidMapError, LimitError
from ._struct import struct

# Every address, extent product and stride product stays within +-BOUND, so that
# one more addition cannot wrap an int64.
BOUND = 2**62 - 2


@struct
class Limits:
    """How much an operator may produce or try before it raises ``LimitError``.

    ``pieces`` of one map, candidate ``pairs`` of pieces, solver ``steps`` (digits looked at in the
    branches of the exact integer solver, a few seconds per million), ``copies`` of one plan and
    ``plan_bytes`` (bytes the plan keeps, or that the marked data of a probe takes). Exceeding one
    raises; nothing is ever truncated.

    >>> Limits(), Limits(copies=1000).copies, Limits(steps=10)
    (Limits(), 1000, Limits(steps=10))
    """

    pieces: int = 1 << 23
    pairs: int = 1 << 26
    steps: int = 1_000_000
    copies: int = 1 << 23
    plan_bytes: int = 1 << 32

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise InvalidMapError(f"Limits.{name} must be a non-negative int, got {value!r}")

    def __repr__(self) -> str:
        """The bounds that are not the usual ones."""
        changed = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        return f"Limits({', '.join(f'{name}={bound}' for name, bound in changed.items())})"

    def hold(self, name: str, found: int) -> None:
        """Raise ``LimitError`` if ``found`` exceeds the bound called ``name``."""
        bound = getattr(self, name)
        if found > bound:
            raise LimitError(
                f"{found} {name} would exceed Limits({name}={bound}); pass limits=Limits({name}=...)"
                " with a larger bound, or ask for a smaller result"
            )


def require_limits(limits: object) -> None:
    """Raise for what is no ``Limits``, with the way to one."""
    if not isinstance(limits, Limits):
        raise InvalidMapError(f"limits must be Limits(...), got {limits!r}; as in limits=Limits(copies=1000)")


class Budget:
    """Counts solver steps against ``Limits.steps``; one per call of an operator."""

    __slots__ = ("bound", "left")

    def __init__(self, limits: Limits) -> None:
        require_limits(limits)
        self.bound = self.left = limits.steps

    def spend(self, steps: int = 1) -> None:
        self.left -= steps
        if self.left < 0:
            raise LimitError(
                f"more than Limits(steps={self.bound}) solver steps: overlapping strides make this"
                " a subset-sum problem; raise the bound or describe the map with nested strides"
            )
