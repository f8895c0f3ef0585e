"""The test kit: strategies for property tests of your own layouts, and the laws' helpers."""

import importlib
from typing import Any

from ._resplit import resplit as resplit
from ._strategies import affine_maps as affine_maps
from ._strategies import chains as chains
from ._strategies import layout_pairs as layout_pairs
from ._strategies import layouts as layouts
from ._strategies import parallels as parallels
from ._strategies import pieces as pieces
from ._strategies import placements as placements
from ._strategies import scales as scales
from ._strategies import shapes as shapes
from ._strategies import spaces as spaces
from ._strategies import stretches as stretches

_MOE = ("comm_plans", "geometries", "moe_buffers", "routings")
_BACKEND = ("CHECKS", "backend_suite")


def __getattr__(name: str) -> Any:
    """What loads torch loads on first use: Hypothesis imports this package."""
    if name in _MOE:
        return getattr(importlib.import_module("._moe", __name__), name)
    if name in _BACKEND:
        return getattr(importlib.import_module("._backend_suite", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
