"""Operators as one writes them on a whiteboard, installed on maps when shardalg is imported.

``g @ f`` is f, then g; ``~f`` the converse; ``|``, ``&`` and ``-`` are set operations; and
``m(slots)`` looks up elements. ``maps`` stays free of ``ops``: this file is the one exception
that points right along the line, and ``AffineMap`` only declares the signs to type checkers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..maps import AffineMap
from ._compose import compose
from ._invert import invert
from ._points import elements_at
from ._sets import intersect, subtract, union


def _between_maps(operator: Callable[[AffineMap, AffineMap], AffineMap]) -> Callable[[AffineMap, Any], Any]:
    """The operator as a method that leaves other operands to Python."""

    def method(a: AffineMap, b: Any) -> Any:
        return operator(a, b) if isinstance(b, AffineMap) else NotImplemented

    method.__doc__ = operator.__doc__
    return method


def install() -> None:
    """Give ``AffineMap`` its signs."""
    for name, operator in (("matmul", compose), ("or", union), ("and", intersect), ("sub", subtract)):
        setattr(AffineMap, f"__{name}__", _between_maps(operator))
    AffineMap.__invert__ = invert  # type: ignore[method-assign]
    AffineMap.__call__ = elements_at  # type: ignore[method-assign,assignment]
