"""What the layout of an attention layer depends on."""

from __future__ import annotations

from .._errors import InvalidMapError
from .._struct import struct
from ..maps._space import as_int


@struct
class Attention:
    """The facts about a model's attention that its tensor-parallel partition reads.

    ``heads`` and ``kv_heads`` count query and key/value heads, ``hidden`` is the model width in
    elements, ``grain`` the multiple that widths without a head count are rounded to. None: the model does
    not say, and a layout that needs it refuses.

    >>> Attention(heads=32, kv_heads=8)
    Attention(heads=32, kv_heads=8, hidden=None, grain=1)
    """

    heads: int | None = None
    kv_heads: int | None = None
    hidden: int | None = None
    grain: int = 1

    def __post_init__(self) -> None:
        for name in ("heads", "kv_heads", "hidden", "grain"):
            value = getattr(self, name)
            if value is not None and as_int(value, f"Attention.{name}") < 1:
                raise InvalidMapError(f"Attention.{name} must be at least 1, got {value}")
        if self.grain is None:
            raise InvalidMapError("Attention.grain must be at least 1, got None")
