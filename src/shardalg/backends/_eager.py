"""Functions that ``torch.compile`` must not trace: their checks compare identities of live objects."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """Makes a function, and all that it calls, run outside compiled regions (a graph break).

    The mark stops the compiler at the call; once the compiler is loaded, its own ``disable`` keeps it
    away from what is called inside. Nothing here loads it.
    """
    inner: list[Callable[..., Any]] = []

    @functools.wraps(function)
    def outside(*args: Any, **options: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **options)
        if not inner:
            inner.append(sys.modules["torch._dynamo"].disable(function))
        return inner[0](*args, **options)

    outside._torchdynamo_disable = True  # type: ignore[attr-defined]
    outside._torchdynamo_disable_msg = "who owns a plan is checked eagerly"  # type: ignore[attr-defined]
    return outside  # type: ignore[return-value]
