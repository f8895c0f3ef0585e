"""The one lazy loader of torch before the backends: ``import shardalg`` loads no torch."""

from __future__ import annotations

import importlib
from typing import Any


def torch() -> Any:
    """The torch module, loaded on first use."""
    return importlib.import_module("torch")
