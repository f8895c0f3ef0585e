"""Layouts drawn: who holds which elements, and what sits in each shard."""

from __future__ import annotations

from collections.abc import Sequence

from .._errors import InvalidMapError
from ..maps import AffineMap
from . import _svg as svg
from ._drawing import WIDTH, heading, many, note, stacked
from ._grid import MIXED, Grid, ShardRows, ownership, shard_rows
from ._layout_svg import MOST_NAMED, grid_drawing, legend_drawing, storage_drawing
from ._layout_text import box_text, grid_text, notation, storage_text
from ._legend import Legend, colours, named, unshown
from ._notation import short
from ._picture import Picture

MOST_BOXES = 8  # logical tensors drawn


def show_layout(m: AffineMap, *, cells: str | None = None) -> Picture:
    """Grids of owners over a storage view. ``cells`` writes ``"rank"`` or ``"element"`` into cells."""
    if cells not in (None, "rank", "element"):
        raise InvalidMapError(f'cells must be None, "rank" or "element", got {cells!r}')
    grids = [ownership(m, box, svg.COLOURS) for box in range(min(len(m.codomain), MOST_BOXES))]
    legend, shards = Legend.of(m, grids), shard_rows(m)
    line = short(m)
    text = [notation(m, line), *(grid_text(m, box, g, legend) for box, g in enumerate(grids))]
    text += [*unshown(len(m.codomain), MOST_BOXES, "tensors"), storage_text(m, shards)]
    body, height = _body(m, text[0], grids, legend, shards, cells)
    return Picture(svg.document(WIDTH, height, body, title=line, about=text[0]), "\n\n".join(text))


def _body(
    m: AffineMap, said: str, grids: Sequence[Grid], legend: Legend, shards: ShardRows, cells: str | None
) -> tuple[list[str], float]:
    parts = [heading(_title(m), _facts(m, sum(g.unheld for g in grids)), notation=said)]
    parts += [grid_drawing(m, box, grid, legend, cells) for box, grid in enumerate(grids)]
    parts += [note(line) for line in unshown(len(m.codomain), MOST_BOXES, "tensors")]
    parts += [legend_drawing(m, grids, legend), storage_drawing(m, shards, legend)]
    shapes, height = stacked(parts)
    several = [named(g, h) for g in grids for h in g.classes if h != MIXED and 1 < len(h) <= MOST_NAMED]
    striped = [colours(groups, legend) for groups in several]
    return [svg.definitions(legend.colour.values(), striped), *shapes], height


def _title(m: AffineMap) -> str:
    tensors = ", ".join(box_text(b) for b in m.codomain.boxes[:4]) + ", ..." * (len(m.codomain) > 4)
    return f"{tensors} on {many(len(m.ranks), 'rank')}"


def _facts(m: AffineMap, unheld: int) -> str:
    padded = m.domain.size - m.size
    facts = f"{many(m.codomain.size, 'element')} in {many(m.domain.size, 'slot')}"
    facts += f", {padded} of them padding" if padded else ""
    return facts + (f"; nobody holds {many(unheld, 'element')}" if unheld else "")
