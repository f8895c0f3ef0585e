"""Which picture a map gets: a layout's, or a relation's."""

from __future__ import annotations

from typing import Any

from ..maps import AffineMap
from ._layouts import show_layout
from ._picture import Picture
from ._relations import show_relation
from ._show import show


def is_layout(m: AffineMap) -> bool:
    """Whether a map goes from shards of ranks to logical tensors, one element per slot."""
    return m.domain.ranked and not m.codomain.ranks and m.single_valued


@show.register(AffineMap)
def _show_map(m: AffineMap, **options: Any) -> Picture:
    return show_layout(m, **options) if is_layout(m) else show_relation(m, **options)
