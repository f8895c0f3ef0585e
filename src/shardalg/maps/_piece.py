"""One strided block seen from two sides."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from .._errors import InvalidMapError
from .._limits import BOUND
from .._struct import struct
from ._space import Key, Shape, as_int, as_shape, key_text


def as_scale(scale: Any) -> Fraction:
    """An exact non-zero rational within bounds; floats are refused."""
    if isinstance(scale, (bool, float)) or not isinstance(scale, (int, Fraction)):
        raise InvalidMapError(
            f"a scale is an exact rational (int or fractions.Fraction), got {scale!r};"
            ' write Fraction(1, 3), not 1/3 (in a layout file "1/3")'
        )
    exact = Fraction(scale)
    if exact == 0:
        raise InvalidMapError("a scale of 0 would lose the element; leave the slot unmapped instead")
    if max(abs(exact.numerator), exact.denominator) > BOUND:
        raise InvalidMapError(f"scale {exact} has a term beyond 2**62 - 2")
    return exact


@struct
class Side:
    """Where a block lies in one box: offset and strides in elements, and the box's key."""

    offset: int
    strides: Shape
    rank: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "offset", as_int(self.offset, "an offset"))
        if not isinstance(self.strides, (tuple, list)):
            raise InvalidMapError(f"strides must be a sequence of integers, got {self.strides!r}")
        object.__setattr__(self, "strides", tuple(as_int(s, "a stride") for s in self.strides))

    def __repr__(self) -> str:
        return f"Side({self.offset}, {self.strides}{key_text(self.key)})"

    @property
    def key(self) -> Key:
        return (self.rank, self.name)

    def span(self, shape: Shape) -> tuple[int, int]:
        """The least and greatest address of a block of ``shape`` on this side."""
        steps = [s * (n - 1) for s, n in zip(self.strides, shape)]
        low = self.offset + sum(step for step in steps if step < 0)
        return low, self.offset + sum(step for step in steps if step > 0)


@struct
class Piece:
    """A strided block: index ``x`` in ``shape`` pairs the slot ``domain.offset + domain.strides . x``
    with the element ``codomain.offset + codomain.strides . x``. The slot holds ``element * scale``.

    >>> Piece((4, 8), Side(0, (8, 1), rank=1), Side(32, (8, 1)))
    Piece((4, 8), Side(0, (8, 1), rank=1), Side(32, (8, 1)))
    """

    shape: Shape
    domain: Side
    codomain: Side
    scale: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape, "the shape of a piece"))
        object.__setattr__(self, "scale", as_scale(self.scale))
        for word, side in (("domain", self.domain), ("codomain", self.codomain)):
            if not isinstance(side, Side):
                raise InvalidMapError(f"the {word} of a piece must be a Side, got {side!r}")
            if len(side.strides) != len(self.shape):
                raise InvalidMapError(
                    f"a piece of shape {self.shape} has {len(side.strides)} {word} strides {side.strides}"
                )
            if not self.size:
                continue
            low, high = side.span(self.shape)
            reach = max([-low, high, *(abs(s) for s in side.strides)])
            if reach > BOUND:
                raise InvalidMapError(f"{self!r}: its {word} reaches {reach}, beyond 2**62 - 2 = {BOUND}")

    def __repr__(self) -> str:
        scale = "" if self.scale == 1 else f", {_scale_text(self.scale)}"
        return f"Piece({self.shape}, {self.domain!r}, {self.codomain!r}{scale})"

    @property
    def size(self) -> int:
        """Pairs in the piece."""
        return math.prod(self.shape)


def _scale_text(scale: Fraction) -> str:
    return str(scale.numerator) if scale.denominator == 1 else repr(scale)
