"""Functions that ``torch.compile`` must not trace: their checks compare identities of live objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Marks a function to run outside compiled regions (a graph break), without importing the compiler."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = "who owns a plan is checked eagerly"  # type: ignore[attr-defined]
    return function
