"""Maps that are no layouts, drawn as relations: slots across, elements down."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..maps import AffineMap, Space
from ..maps._space import IntArray, describe_key
from . import _svg as svg
from ._drawing import WIDTH, Drawing, heading, many, moved, stacked, swatches
from ._layout_text import notation
from ._notation import short
from ._picture import Picture

SIDE = 48  # cells along each side of the relation
POINTS = 1 << 16  # pairs looked at


class Line(NamedTuple):
    """The boxes of a space laid end to end: where each starts, and how slots fall into cells."""

    starts: IntArray
    each: int
    cells: int

    @classmethod
    def of(cls, space: Space) -> Line:
        starts = np.concatenate([[0], np.cumsum(space.sizes)]).astype(np.int64)
        each = max(1, -(-int(starts[-1]) // SIDE))
        return cls(starts, each, -(-int(starts[-1]) // each))


def show_relation(m: AffineMap) -> Picture:
    """A dot wherever a slot (across) is paired with an element (down)."""
    line = short(m)
    across, down = Line.of(m.domain), Line.of(m.codomain)
    held = dots(m, across, down)
    text = "\n".join([notation(m, line), "", _caption(m, across, down), *_text_rows(m, held, across, down)])
    title = f"relation of {many(len(m), 'piece')}, {many(m.size, 'pair')}"
    top = heading(title, _caption(m, across, down), notation=notation(m, line))
    shapes, height = stacked([top, _drawing(m, held, across, down), _legend(held)])
    document = svg.document(
        WIDTH, height, [svg.definitions([], []), *shapes], title=line, about=notation(m, line)
    )
    return Picture(document, text)


def dots(m: AffineMap, across: Line, down: Line) -> IntArray:
    """For each cell 0 for no pair, 1 for pairs at scale 1, 2 where some pair is scaled."""
    held = np.zeros((down.cells, across.cells), np.int64)
    table = m.table
    if len(table) > POINTS // 4:
        table = table.take(np.linspace(0, len(table) - 1, POINTS // 4).astype(np.int64))
    c = table.columns
    most = POINTS if m.size <= POINTS else max(4, POINTS // max(len(table), 1))
    for k in range(len(table)):
        slots, elements = _samples(c.shape[:, k], c.dom_strides[:, k], c.cod_strides[:, k], most)
        x = (across.starts[c.dom_box[k]] + c.dom_offset[k] + slots) // across.each
        y = (down.starts[c.cod_box[k]] + c.cod_offset[k] + elements) // down.each
        held[y, x] = np.maximum(held[y, x], 1 + int(c.numerator[k] != c.denominator[k]))
    return held


def _samples(extents: IntArray, left: IntArray, right: IntArray, most: int) -> tuple[IntArray, IntArray]:
    """Addresses of all points of a piece, or of an even choice along each axis."""
    live = np.flatnonzero(extents > 1)
    room = (
        max(2, int(most ** (1 / max(len(live), 1)))) if int(np.prod(extents.astype(float))) > most else None
    )
    slots = elements = np.zeros(1, np.int64)
    for k in live:
        n = int(extents[k])
        index = (
            np.arange(n)
            if room is None or n <= room
            else np.unique(np.linspace(0, n - 1, room).astype(np.int64))
        )
        slots = (slots[:, None] + index * left[k]).reshape(-1)
        elements = (elements[:, None] + index * right[k]).reshape(-1)
    return slots, elements


def _caption(m: AffineMap, across: Line, down: Line) -> str:
    if across.each == down.each == 1:
        return "slots across, elements down: one cell per pair"
    sampled = ", sampled" if m.size > POINTS else ""
    return f"slots across, elements down: one cell per {across.each} slots and {down.each} elements" + sampled


def _box_rows(space: Space, line: Line) -> list[tuple[int, str]]:
    """The cell in which each box starts, and its name."""
    return [(int(s) // line.each, describe_key(b.key)) for s, b in zip(line.starts, space.boxes) if b.size]


def _text_rows(m: AffineMap, held: IntArray, across: Line, down: Line) -> list[str]:
    names = dict(reversed(_box_rows(m.codomain, down)))
    width = max(map(len, names.values()), default=0)
    cut = {at for at, _ in _box_rows(m.domain, across)} - {0}
    rows = [
        "  " + names.get(y, "").ljust(width) + " " + _row(row, cut) for y, row in enumerate(held.tolist())
    ]
    heads = ", ".join(name for _, name in _box_rows(m.domain, across)[:8])
    return [f"  across: {heads}" + (", ..." if len(m.domain) > 8 else ""), *rows]


def _row(row: Sequence[int], cut: set[int]) -> str:
    return "".join(("|" if x in cut else "") + ".#x"[v] for x, v in enumerate(row))


def _drawing(m: AffineMap, held: IntArray, across: Line, down: Line) -> Drawing:
    """The dots in their frame, boxes of both sides marked off and named."""
    each = min(14.0, 480 / max(across.cells, 1), 400 / max(down.cells, 1))
    w, h = across.cells * each, down.cells * each
    rows = _named(_box_rows(m.codomain, down), each, 13)
    left = max((svg.wide(name, 10) for _, name in rows), default=0) + 8
    shapes = [svg.dim(left - 6, 16 + y + 9, name, size=10, anchor="end") for y, name in rows]
    columns = _box_rows(m.domain, across)
    room = (
        min((b - a for (a, _), (b, _) in itertools.pairwise([*columns, (across.cells, "")])), default=0)
        * each
    )
    if all(svg.wide(name, 10) < room for _, name in columns):
        shapes += [svg.dim(left + x * each + 2, 10, name, size=10) for x, name in columns]
    else:
        ends = f"{columns[0][1]} .. {columns[-1][1]}"
        shapes.append(svg.dim(left, 10, ends, size=10))
    inner = [svg.rect(0, 0, w, h, svg.themed("void"))]
    for y, row in enumerate(held.tolist()):
        x = 0
        for value, some in itertools.groupby(row):
            n = len(list(some))
            if value:
                inner.append(svg.rect(x * each, y * each, n * each, each, _look(value)))
            x += n
    d = "".join(f"M{svg.number(x)} 0V{svg.number(h)}" for x in _between(columns, each))
    d += "".join(f"M0 {svg.number(y)}H{svg.number(w)}" for y in _between(_box_rows(m.codomain, down), each))
    inner += [svg.path(d, f'{svg.themed("line")} stroke-width="0.8"')] if d else []
    inner.append(svg.rect(0, 0, w, h, f'fill="none" {svg.themed("line")}'))
    return Drawing([*shapes, moved(Drawing(inner, 0, 0), left, 16)], left + w, h + 18)


def _named(rows: list[tuple[int, str]], each: float, room: float) -> list[tuple[float, str]]:
    """Positions in pixels of the names that fit under each other."""
    found: list[tuple[float, str]] = []
    for at, name in rows:
        if not found or at * each >= found[-1][0] + room:
            found.append((at * each, name))
    return found


def _between(rows: list[tuple[int, str]], each: float) -> list[float]:
    """Positions in pixels of the lines between boxes; none where most would touch."""
    if len(rows) > SIDE // 2:
        return []
    return [at * each for at, _ in rows[1:]]


def _look(value: int) -> str:
    """The fill of a pair: as it is, or scaled."""
    return svg.themed("dot") if value == 1 else f'fill="{svg.HUES[1]}"'


def _legend(held: IntArray) -> Drawing:
    entries = [(_look(1), "a slot that holds the element")] if (held == 1).any() else []
    entries += [(_look(2), "holds it times a scale")] if (held == 2).any() else []
    return swatches(entries)
