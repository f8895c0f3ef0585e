"""What some ranks hold of a map."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from .._errors import InvalidMapError
from ..maps import AffineMap, Space
from ..maps._map import inherit, rebox, require_map
from ..maps._reading import as_int, scalar
from ..maps._table import build


def part(m: AffineMap, ranks: int | Iterable[int]) -> AffineMap:
    """The boxes and pieces of some ranks alone: what one process knows of a layout.

    ``restrict`` keeps all boxes; this keeps only theirs. The parts of all ranks, gathered
    (``gather_layouts``), are the whole again.

    Raises ``InvalidMapError`` for ranks that the map lacks.

    Cost: one pass over the pieces.

    >>> from shardalg import layout, Split
    >>> part(layout((8,), Split(0), ranks=4), 2).domain
    Space.shards({2: (2,)})
    """
    require_map(m, "part: m")
    several: Any = (ranks,) if scalar(ranks) else ranks
    wanted = {as_int(r, "a rank") for r in several}
    missing = sorted(wanted - set(m.ranks))
    if missing:
        raise InvalidMapError(f"the map has ranks {m.ranks}, not {missing}")
    boxes = tuple(b for b in m.domain.boxes if b.rank in wanted)
    space = Space(boxes)
    place = np.full(len(m.domain), -1, np.int64)
    place[[m.domain.index(*b.key) for b in boxes]] = np.arange(len(boxes))
    kept = m.table.take(place[m.table.columns.dom_box] >= 0)
    return inherit(AffineMap(space, m.codomain, build(rebox(kept, place, None))), m)
