"""Functions that ``torch.compile`` must not trace: their checks compare identities of live objects."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])


def eager(function: F) -> F:
    """``function`` run outside compiled regions (a graph break), whoever calls it.

    The compiler is asked only where it is loaded: loading it here would cost seconds.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        run = untraced(function) if "torch._dynamo" in sys.modules else function
        return run(*args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    call._torchdynamo_disable_msg = "ownership of plans is checked eagerly"  # type: ignore[attr-defined]
    return cast(F, call)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with tracing switched off while it runs, made once and kept on it.

    (Not by ``functools.cache``, which the compiler warns about when it meets it.)
    """
    made = getattr(function, "_untraced", None)
    if made is None:
        made = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        function._untraced = made  # type: ignore[attr-defined]
    return made  # type: ignore[no-any-return]
