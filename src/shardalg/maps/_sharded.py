"""Shards together with the layout that says what they hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .._struct import leaf, struct
from ._map import AffineMap


@struct
class Sharded:
    """Shards ``{rank: tensor}`` (the ranks at hand) and their layout.

    The tensors are leaves and the layout is static: ``sa.tree_map`` maps over the shards and keeps
    the layout. Made by ``sharded``, which checks; transforms may put anything where tensors were.
    """

    shards: Mapping[int, Any] = leaf()
    layout: AffineMap
