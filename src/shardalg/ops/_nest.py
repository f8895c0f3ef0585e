"""Shards cut again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Space
from ..maps._map import known, rebox, remember, require_map
from ..maps._space import by_key, by_position, describe_key
from ..maps._table import build, concatenate
from ._compose import compose


def nest(
    outer: AffineMap,
    inner_by_rank: Mapping[int, AffineMap] | Sequence[AffineMap],
    ranks: Mapping[tuple[int, int], int] | None = None,
    *,
    limits: Limits = Limits(),
) -> AffineMap:
    """The shards of ``outer`` laid out by inner maps: FSDP over TP, ZeRO over EP.

    ``inner_by_rank[r]`` lays out rank r's shard as if it were a logical tensor. The result
    is ``compose(outer, inner)``. Rank i of the inner map of rank r becomes ``ranks[r, i]``, by
    default ``r * Q + i`` with Q = 1 + the largest inner rank. Associative and unital.

    Raises ``InvalidMapError`` where a rank has no inner map, or one that lays out another shape.

    Cost: that of ``compose``.

    >>> from shardalg import layout, Split
    >>> two = layout((8,), Split(0), ranks=2)
    >>> four = nest(two, {r: layout((4,), Split(0), ranks=2) for r in (0, 1)})
    >>> four == layout((8,), Split(0), ranks=4)
    True
    """
    require_map(outer, "nest: outer")
    inner = by_position(inner_by_rank, "the inner maps of nest")
    missing = [r for r in outer.ranks if r not in inner]
    if missing:
        raise InvalidMapError(f"nest has no inner map for ranks {missing[:8]} of the outer map")
    inner = {r: inner[r] for r in outer.ranks}
    for r, m in inner.items():
        require_map(m, f"nest: the inner map of rank {r}")
    ranks = None if ranks is None else by_key(ranks, "nest: ranks")
    width = 1 + max((i for m in inner.values() for i in m.ranks), default=0)
    label = {
        (r, i): r * width + i if ranks is None else _label(ranks, r, i)
        for r, m in inner.items()
        for i in m.ranks
    }
    return compose(outer, _side_by_side(outer, inner, label), limits=limits)


def _label(ranks: Mapping[tuple[int, int], int], r: int, i: int) -> int:
    try:
        return ranks[r, i]
    except KeyError:
        raise InvalidMapError(f"nest: ranks= has no entry for outer rank {r}, inner rank {i}") from None


def _side_by_side(
    outer: AffineMap, inner: Mapping[int, AffineMap], label: Mapping[tuple[int, int], int]
) -> AffineMap:
    """The inner maps as one map into the storage of ``outer``."""
    boxes = [
        Box(b.shape, label[r, b.rank], b.name)
        for r, m in inner.items()
        for b in m.domain.boxes
        if b.rank is not None
    ]
    storage = Space(tuple(boxes))
    tables = []
    for r, m in inner.items():
        for b in m.codomain.boxes:
            want = outer.domain.box(r, b.name)
            if b.rank is not None or b.shape != want.shape:
                raise InvalidMapError(
                    f"the inner map of rank {r} lays out {describe_key(b.key)} of shape {b.shape},"
                    f" but that rank's shard of the outer map has shape {want.shape}"
                )
        dom = [storage.index(label[r, b.rank], b.name) for b in m.domain.boxes if b.rank is not None]
        cod = [outer.domain.index(r, b.name) for b in m.codomain.boxes]
        tables.append(build(rebox(m.table, np.array(dom, np.int64), np.array(cod, np.int64))))
    joined = AffineMap(storage, outer.domain, concatenate(tables))
    return remember(joined, single_valued=all(known(m, "single_valued") for m in inner.values()))
