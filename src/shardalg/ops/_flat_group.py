"""The ZeRO buffer of many parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from .._errors import InvalidMapError
from ..maps import AffineMap, Piece, Side, Space
from ..maps._map import remember
from ..maps._space import as_int, as_shape, by_key
from ._layout import rank_ids


def flat_group(shapes: Mapping[str, Any], ranks: int | Sequence[int], align: int = 1) -> AffineMap:
    """Many tensors flattened one after the other, padded to a multiple of lcm(align, ranks)
    elements, and cut evenly: one flat box per rank, the end of the buffer is padding.

    ``shapes`` is ``{name: shape}`` in the order of the buffer; sizes and ``align`` are in elements.

    Cost: a piece per tensor and rank it falls to.

    >>> m = flat_group({"w": (5, 3), "b": (4,)}, 2, align=4)
    >>> m.shard_shape(0), [(p.codomain.name, p.size) for p in m.pieces]
    ((10,), [('w', 10), ('w', 5), ('b', 4)])
    """
    labels, align = rank_ids(ranks), as_int(align, "align")
    if align < 1:
        raise InvalidMapError(f"align must be at least 1, got {align}")
    shapes = by_key(shapes, "the shapes of a flat group")
    logical = Space.logical({name: as_shape(s) for name, s in shapes.items()})
    whole = math.lcm(align, len(labels))
    each = -(-logical.size // whole) * whole // len(labels)
    pieces: list[Piece] = []
    start = 0
    for name in shapes:
        pieces += _spread(name, start, logical.box(name=name).size, each, labels)
        start += logical.box(name=name).size
    m = AffineMap.from_pieces(Space.shards(dict.fromkeys(labels, (each,))), logical, pieces)
    return remember(m, single_valued=True, injective=True)


def _spread(name: str, start: int, size: int, each: int, labels: tuple[int, ...]) -> list[Piece]:
    """The parts of one tensor, which begins at ``start`` of the buffer, on the ranks it falls to."""
    pieces = []
    at = start
    while at < start + size:
        place, slot = divmod(at, each)
        n = min(each - slot, start + size - at)
        pieces.append(Piece((n,), Side(slot, (1,), labels[place]), Side(at - start, (1,), name=name)))
        at += n
    return pieces
