"""Other people's forms: files and metadata read into maps and written from them.

``interop.dcp``, ``interop.deepspeed``, ``interop.dtensor`` and ``interop.huggingface`` load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._arrangements import Logical as Logical
from ._arrangements import Stored as Stored
from ._arrangements import transfer as transfer
from ._checkpoints import Checkpoint as Checkpoint
from ._checkpoints import load as load
from ._checkpoints import open_checkpoint as open_checkpoint
from ._layout_files import arrange as arrange
from ._layout_files import parse_layout_file as parse_layout_file
from ._layout_files import read_layout_file as read_layout_file

_MODULES = ("dcp", "deepspeed", "dtensor", "huggingface")
_INSIDE = {"Any", "annotations", "importlib"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The table of contents: what is promised, not what it is made of."""
    names = {*globals(), *_MODULES} - _INSIDE
    return sorted(name for name in names if not name.startswith("_"))
