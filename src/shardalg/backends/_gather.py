"""The layout of a tensor that nobody knows whole: each process gives its own part, all get everything."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from .._errors import InvalidMapError, ShardalgError, TransferError
from .._limits import Limits
from ..maps import AffineMap, Box, Space
from ..maps._map import rebox
from ..maps._space import Key, describe_key
from ..maps._table import build, concatenate
from ..ops import check_layout
from ._context import Context, check_context
from ._eager import eager
from ._opening import as_ours

Layouts = TypeVar("Layouts", AffineMap, "Mapping[str, AffineMap]")


@eager
def gather_layouts(ctx: Context, mine: Layouts, *, limits: Limits = Limits()) -> Layouts:
    """The whole layout (or ``{name: layout}``) from each process's own boxes and pieces. Collective.

    ``mine`` has a box for every shard that this process holds and the pieces in it; a tensor of which it
    holds nothing may be left out of the dict, or have no box. All ranks raise the same ``TransferError``
    where two processes describe one shard, the logical tensors differ, or the whole is no layout.

    >>> from shardalg import backends, layout, Split
    >>> whole = layout((4, 2), Split(0), ranks=2)
    >>> gather_layouts(backends.simulate(2), whole) == whole
    True
    """
    check_context(ctx)
    said = ctx.in_turn(lambda: _told(ctx, mine))
    parts = {r: json.loads(b) for r, b in sorted(said.items()) if b}
    try:
        found = _whole(parts, limits)
    except ShardalgError as error:
        raise TransferError(f"gather_layouts: {error}") from error
    return found if isinstance(mine, Mapping) else found[""]  # type: ignore[return-value]


def _told(ctx: Context, mine: Any) -> dict[int, bytes]:
    """What each process says."""
    ctx.note = ""
    ctx.at("gather_layouts")
    try:
        text = json.dumps(_plain(mine))
    except Exception as error:  # whatever it is, the others must hear of it
        text = json.dumps({"problem": str(as_ours(error))})
    said = {r: text.encode() if k == 0 else b"" for k, r in enumerate(ctx.ranks)}
    return ctx.gather(said, "gather_layouts")


def _plain(mine: Any) -> dict[str, Any]:
    """What one process says, as plain data."""
    named = mine if isinstance(mine, Mapping) else {"": mine}
    for name, m in named.items():
        if not isinstance(m, AffineMap):
            raise InvalidMapError(f"a part must be an AffineMap, got {type(m).__name__} for {name!r}")
        if any(b.rank is None for b in m.domain.boxes):
            raise InvalidMapError("the boxes of a part need ranks: it is the layout of this process's shards")
    return {"single": not isinstance(mine, Mapping), "layouts": {k: m.to_dict() for k, m in named.items()}}


def _whole(parts: dict[int, dict[str, Any]], limits: Limits) -> dict[str, AffineMap]:
    for rank, said in parts.items():
        if "problem" in said:
            raise InvalidMapError(f"rank {rank}: {said['problem']}")
    if len({said["single"] for said in parts.values()}) > 1:
        raise InvalidMapError("some ranks give one layout, others layouts by name")
    by_name: dict[str, dict[int, AffineMap]] = {}
    for rank, said in parts.items():
        for name, data in said["layouts"].items():
            by_name.setdefault(name, {})[rank] = AffineMap.from_dict(data, limits=limits)
    return {name: _united(name, its) for name, its in sorted(by_name.items())}


def _united(name: str, parts: dict[int, AffineMap]) -> AffineMap:
    """The parts of one tensor side by side."""
    first_rank, first = next(iter(parts.items()))
    owners: dict[Key, int] = {}
    boxes: list[Box] = []
    for rank, m in parts.items():
        if m.codomain != first.codomain:
            raise InvalidMapError(
                f"{name!r}: rank {first_rank} lays out {first.codomain}, rank {rank} {m.codomain}"
            )
        for b in m.domain.boxes:
            if b.key in owners:
                raise InvalidMapError(
                    f"{name!r}: {describe_key(b.key)} is described by rank {owners[b.key]} and by rank {rank}"
                )
            owners[b.key] = rank
            boxes.append(b)
    storage = Space(tuple(boxes))
    tables = [
        build(rebox(m.table, np.array([storage.index(*b.key) for b in m.domain.boxes], np.int64), None))
        for m in parts.values()
    ]
    whole = AffineMap(storage, first.codomain, concatenate(tables))
    try:
        return check_layout(whole)
    except InvalidMapError as error:
        raise InvalidMapError(f"{name!r}: the parts together are {error}") from error
