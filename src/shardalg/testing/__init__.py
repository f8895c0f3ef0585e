"""The test kit: strategies for property tests of your own layouts, the laws as ready-made checks, and a
machine that re-shards at random."""

import importlib
from typing import Any

import hypothesis  # noqa: F401  first: it loads _register, which needs our other modules whole

from ._plans import plans as plans
from ._plans import programs as programs
from ._plans import tree_plans as tree_plans
from ._resplit import resplit as resplit
from ._strategies import affine_maps as affine_maps
from ._strategies import chains as chains
from ._strategies import expert_placements as expert_placements
from ._strategies import layout_pairs as layout_pairs
from ._strategies import layouts as layouts
from ._strategies import parallels as parallels
from ._strategies import pieces as pieces
from ._strategies import placements as placements
from ._strategies import scales as scales
from ._strategies import shapes as shapes
from ._strategies import sharded as sharded
from ._strategies import spaces as spaces
from ._strategies import stretches as stretches

_MODULES = ("laws",)
_MOE = ("comm_plans", "geometries", "moe_buffers", "routings")
_BACKEND = ("CHECKS", "backend_suite")
_NAMES = dict.fromkeys(_MOE, "_moe") | dict.fromkeys(_BACKEND, "_backend_suite")
_NAMES |= {"ReshardMachine": "_machine"}


def __getattr__(name: str) -> Any:
    """What loads torch loads on first use: Hypothesis imports this package."""
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _NAMES:
        return getattr(importlib.import_module(f".{_NAMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    here = {name for name in globals() if name[0] != "_"}
    return sorted(here - {"Any", "hypothesis", "importlib"} | {*_MODULES, *_NAMES})
