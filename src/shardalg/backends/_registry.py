"""Which backends there are: ours by name, and those of other packages by entry point."""

from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from .._errors import InvalidMapError
from ._context import Context
from ._cpu import cpu
from ._cuda import cuda
from ._simulate import simulate
from ._xpu import xpu

Backend: TypeAlias = Callable[..., Context]

ENTRY_POINTS = "shardalg.backends"
BACKENDS: dict[str, Backend] = {"simulate": simulate, "cpu": cpu, "cuda": cuda, "xpu": xpu}


def backend(name: str) -> Backend:
    """The backend of that name: one of ours, or one that an installed package offers under the entry-point
    group ``shardalg.backends``. A backend of that group is named for its device type.

    >>> backend("simulate")(2).ranks
    (0, 1)
    """
    if name in BACKENDS:
        return BACKENDS[name]
    offered = {point.name: point for point in entry_points(group=ENTRY_POINTS)}
    if name not in offered:
        raise InvalidMapError(
            f"no backend {name!r}; there are {sorted([*BACKENDS, *offered])}. Install a package that"
            f" offers it under the entry-point group {ENTRY_POINTS!r}"
        )
    return offered[name].load()  # type: ignore[no-any-return]


def auto(group: Any = None, *, device: str | None = None, **options: Any) -> Context:
    """A context by kind of device: the one that ``group`` (by default the world) talks for, or ``device``.

    A group for several kinds, like ``"cpu:gloo,cuda:nccl"``, is taken for its accelerator where this process
    sees one. Without a group, the accelerator of this machine, else its CPUs. ``options`` are those of
    the backend.
    """
    return backend(device or device_type(group))(group, **options)


def device_type(group: Any = None) -> str:
    """The kind of device that a group talks for."""
    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    present = {"cpu"} if here is None else {"cpu", here.type}
    if group is None and not dist.is_initialized():
        return "cpu" if here is None else here.type
    served = _served(dist.get_backend_config(group))
    usable = [kind for kind in served if kind in present] or served
    return next((kind for kind in usable if kind != "cpu"), "cpu")


def _served(config: str) -> list[str]:
    """The kinds of devices in a backend configuration such as ``"cpu:gloo,cuda:nccl"``."""
    return [pair.partition(":")[0] for pair in str(config).split(",")]
