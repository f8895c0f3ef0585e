"""Other keys for the boxes of one side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._errors import InvalidMapError
from ..maps import AffineMap, Box, Space
from ..maps._map import inherit, rebox, require_map
from ..maps._space import IntArray, Key, as_key, describe_key, listed
from ..maps._table import build

Keys: TypeAlias = "Mapping[Any, Any] | Sequence[int] | Callable[[Key], Key]"


def relabel(m: AffineMap, *, domain: Keys | None = None, codomain: Keys | None = None) -> AffineMap:
    """``m`` with other keys on the boxes of one or both sides; elements stay where they are.

    Keys are given as ``{old: new}`` (ranks, names, or (rank, name) pairs; those not named
    stay), as a sequence of new ranks by old rank, or as a function from a (rank, name) pair.
    A group action: relabelling twice is relabelling by the product.

    Raises ``InvalidMapError`` where two boxes would share a key, or a listed rank is missing.

    Cost: one pass over the pieces.

    >>> from shardalg import layout, Split
    >>> relabel(layout((4,), Split(0), ranks=2), domain={0: 5, 1: 3}).ranks
    (3, 5)
    """
    require_map(m, "relabel: m")
    dom, dom_boxes = _relabelled(m.domain, domain)
    cod, cod_boxes = _relabelled(m.codomain, codomain)
    if dom is m.domain and cod is m.codomain:
        return m
    return inherit(AffineMap(dom, cod, build(rebox(m.table, dom_boxes, cod_boxes))), m)


def _relabelled(space: Space, keys: Keys | None) -> tuple[Space, IntArray | None]:
    if keys is None:
        return space, None
    if not callable(keys) and not isinstance(keys, Mapping):
        keys = listed(keys, "new ranks")
    boxes = [Box(b.shape, *_new_key(b.key, keys)) for b in space.boxes]
    renamed = Space(tuple(boxes))
    return renamed, np.array([renamed.index(*b.key) for b in boxes], np.int64)


def _new_key(key: Key, keys: Keys) -> Key:
    rank, name = key
    if callable(keys):
        return _renamed(key, keys(key))
    if isinstance(keys, Mapping):
        if key in keys:
            new = keys[key]
        elif rank is not None and rank in keys:
            new = keys[rank]
        else:
            new = keys.get(name, key) if rank is None or name else key
        return _renamed(key, new)
    if rank is None or not 0 <= rank < len(keys):
        raise InvalidMapError(f"no new rank is given for {describe_key(key)}: {len(keys)} ranks listed")
    return keys[rank], name


def _renamed(key: Key, new: Any) -> Key:
    """The key with another rank, another name, or both."""
    rank, name = as_key(new)
    if isinstance(new, tuple):
        return rank, name
    return (key[0], name) if isinstance(new, str) else (rank, key[1])
