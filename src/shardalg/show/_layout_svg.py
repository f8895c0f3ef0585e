"""Layouts in SVG: grids of owners, a legend, and the storage view."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

from ..maps import AffineMap, Box
from ..maps._space import IntArray, describe_key
from . import _svg as svg
from ._drawing import MARGIN, WIDTH, Drawing, clipped, moved, swatches
from ._grid import MIXED, PANELS, Cuts, Grid, Holders, ShardRows, Stored, plane_cuts, planes
from ._layout_text import at_text, box_text, cells_text, scale_text, stored_text, stored_words
from ._legend import Legend, colours, counted, named, rank_word, ranks_text, together, unshown

MOST_NAMED = 4  # ranks named in a cell or striped


def grid_drawing(m: AffineMap, box: int, grid: Grid, legend: Legend, cells: str | None) -> Drawing:
    """The panels of one tensor, in rows."""
    b = m.codomain.boxes[box]
    axes = len(grid.cuts)
    names = f", axis {axes - 2} down, axis {axes - 1} across" if axes > 1 else ""
    title = clipped(f"who holds {box_text(b)}{names}", WIDTH - 2 * MARGIN, 11.5)
    shapes = [svg.dim(0, 11, title, size=11.5)]
    if not grid.held.size:
        return Drawing([*shapes, svg.words(0, 30, "no elements")], 200, 34)
    shapes.append(svg.dim(0, 27, cells_text(grid)))
    found = list(planes(grid))
    small = len(found) > 1
    x, y, tall, right = 0.0, 38.0, 0.0, 0.0
    for at, held in found[:PANELS]:
        panel = panel_drawing(m, box, grid, at, held, legend, cells, (150, 110) if small else (560, 320))
        if x and x + panel.width > WIDTH - 2 * MARGIN:
            x, y, tall = 0.0, y + tall + 10, 0.0
        shapes.append(moved(panel, x, y))
        x, tall, right = x + panel.width + 16, max(tall, panel.height), max(right, x + panel.width)
    y += tall
    for line in unshown(len(found), PANELS, "panels"):
        y += 16
        shapes.append(svg.dim(0, y, line))
    return Drawing(shapes, right, y + 2)


def pixels(c: Cuts, longest: float) -> list[float]:
    """The edges of cells in pixels: equal cells for elements, blocks in proportion but never slim."""
    if c.unit or not c.whole:
        each = min(24.0, max(longest / c.cells, 5.0))
        return [round(each * i, 2) for i in range(c.cells + 1)]
    longest = min(longest, max(56.0 * c.cells, 96.0))
    sizes = [
        max((b - a) / c.extent * longest, min(18.0, longest / c.cells))
        for a, b in itertools.pairwise(c.edges)
    ]
    whole = sum(sizes)
    return [round(x * longest / whole, 2) for x in itertools.accumulate(sizes, initial=0.0)]


def panel_drawing(
    m: AffineMap, box: int, grid: Grid, at: tuple[int, ...], held: IntArray, legend: Legend,
    cells: str | None, longest: tuple[float, float],
) -> Drawing:  # fmt: skip
    """One plane of cells with labelled edges."""
    rows, columns = plane_cuts(grid)
    xs, ys = pixels(columns, longest[0]), pixels(rows, longest[1]) if len(grid.cuts) > 1 else [0.0, 24.0]
    sides = [] if len(grid.cuts) < 2 else _edge_labels(rows, ys, vertical=True)
    left = max((svg.wide(t, 10) for _, t in sides), default=0) + (6 if sides else 0)
    top = 14.0 + (15 if at else 0)
    shapes = [svg.words(left, 10, f"[{at_text(grid, at)}]", svg.themed("ink"), size=10.5)] if at else []
    shapes += [svg.dim(left - 5, top + y + 3.5, t, size=10, anchor="end") for y, t in sides]
    heads = _edge_labels(columns, xs, vertical=False)
    shapes += [svg.dim(left + x, top - 4, t, size=10, anchor="middle") for x, t in heads]
    inner = [_cell_shape(grid, r, legend, xs, ys) for r in rectangles(held)]
    inner += [_lines(xs, ys)]
    if cells and len(held) * held.shape[1] <= 1024:
        inner += _cell_words(m, box, grid, at, held, legend, cells, xs, ys)
    else:
        inner += [w for r in rectangles(held) for w in _rect_words(grid, r, legend, xs, ys)]
    shapes.append(moved(Drawing(inner, 0, 0), left, top))
    tail = svg.wide(heads[-1][1], 10) / 2 if heads and heads[-1][0] > xs[-1] - 2 else 2
    return Drawing(shapes, left + xs[-1] + tail, top + ys[-1] + 4)


def _edge_labels(c: Cuts, px: Sequence[float], *, vertical: bool) -> list[tuple[float, str]]:
    """Where to write which coordinates: cell numbers in the middle, block edges on the lines."""
    found: list[tuple[float, str]] = []
    marks = (
        [((a + b) / 2, str(i)) for i, (a, b) in zip(c.edges, itertools.pairwise(px))]
        if c.unit
        else [(x, str(e)) for x, e in zip(px, c.edges)]
    )
    free = -math.inf
    for x, text in marks:
        half = 5.5 if vertical else svg.wide(text, 10) / 2 + 2
        if x - half >= free:
            found.append((x, text))
            free = x + half
    if marks and not c.unit and found[-1][1] != marks[-1][1]:
        found[-1] = marks[-1]
    return found


class Rectangle(NamedTuple):
    """Cells of one class: rows ``top:bottom`` and columns ``left:right``."""

    top: int
    bottom: int
    left: int
    right: int
    held: int


def rectangles(held: IntArray) -> list[Rectangle]:
    """Equal cells joined along rows, then equal runs joined down columns."""
    done: list[Rectangle] = []
    live: dict[tuple[int, int, int], int] = {}
    for i, row in enumerate(held.tolist()):
        runs = {}
        start = 0
        for value, some in itertools.groupby(row):
            stop = start + len(list(some))
            runs[start, stop, value] = live.get((start, stop, value), i)
            start = stop
        done += [Rectangle(top, i, *key) for key, top in live.items() if key not in runs]
        live = runs
    done += [Rectangle(top, len(held), *key) for key, top in live.items()]
    return sorted(done)


def _fill(grid: Grid, holders: Holders, legend: Legend) -> str:
    if holders == MIXED or len(holders) > MOST_NAMED:
        return 'fill="url(#sa-mixed)"' if holders == MIXED else 'fill="url(#sa-many)"'
    if not holders:
        return svg.themed("void")
    ks = colours(named(grid, holders), legend)
    return f'fill="{svg.swatch(ks[0]) if len(ks) == 1 else svg.stripes(ks)}"'


def _cell_shape(grid: Grid, r: Rectangle, legend: Legend, xs: Sequence[float], ys: Sequence[float]) -> str:
    holders = grid.classes[r.held]
    x, y, w, h = xs[r.left], ys[r.top], xs[r.right] - xs[r.left], ys[r.bottom] - ys[r.top]
    shape = svg.rect(x, y, w, h, _fill(grid, holders, legend), tip=_holders_words(grid, holders))
    if not holders:
        left, top, right, bottom = map(svg.number, (x, y, x + w, y + h))
        shape += svg.path(f"M{left} {top}L{right} {bottom}M{right} {top}L{left} {bottom}", svg.themed("mark"))
    return shape


def _holders_words(grid: Grid, holders: Holders) -> str:
    if holders == MIXED:
        return "several owners within one cell"
    return rank_word(together(named(grid, holders))) if holders else "nobody"


def _lines(xs: Sequence[float], ys: Sequence[float]) -> str:
    """Thin lines between cells that are not too small, and an outline."""
    w, h = xs[-1], ys[-1]
    some_x = xs[1:-1] if w / max(len(xs) - 1, 1) >= 9 else ()
    some_y = ys[1:-1] if h / max(len(ys) - 1, 1) >= 9 else ()
    d = "".join(f"M{svg.number(x)} 0V{svg.number(h)}" for x in some_x)
    d += "".join(f"M0 {svg.number(y)}H{svg.number(w)}" for y in some_y)
    inner = svg.path(d, 'stroke="#000000" stroke-opacity="0.25" stroke-width="0.7"') if d else ""
    return inner + svg.rect(0, 0, w, h, f'fill="none" {svg.themed("line")}')


def _label(grid: Grid, holders: Holders) -> str:
    if holders == MIXED:
        return "mixed"
    ranks = together(named(grid, holders))
    if not ranks:
        return "nobody"
    return ranks_text(ranks) if len(holders) <= MOST_NAMED else f"{len(ranks)} ranks"


def _text_look(grid: Grid, holders: Holders, legend: Legend) -> str:
    if not holders:
        return svg.themed("dim")
    if holders == MIXED or len(holders) > 1:
        return 'fill="#111111"' + svg.halo("#ffffff")
    return svg.on(legend.colour[grid.groups[holders[0]]])


def _rect_words(
    grid: Grid, r: Rectangle, legend: Legend, xs: Sequence[float], ys: Sequence[float]
) -> list[str]:
    """The owner written in the middle of a rectangle, where it fits."""
    holders = grid.classes[r.held]
    label = _label(grid, holders)
    w, h = xs[r.right] - xs[r.left], ys[r.bottom] - ys[r.top]
    if svg.wide(label, 10.5) + 4 > w or h < 12:
        return []
    x, y = (xs[r.left] + xs[r.right]) / 2, (ys[r.top] + ys[r.bottom]) / 2 + 3.8
    look = _text_look(grid, holders, legend)
    if not holders:
        look = svg.themed("ink")
        half = svg.wide(label, 10.5) / 2 + 2
        back = svg.rect(x - half, y - 10, 2 * half, 13, svg.themed("void"))
        return [back, svg.words(x, y, label, look, size=10.5, anchor="middle")]
    if "stroke" not in look:  # lines between cells must not run through the text
        look += svg.halo(svg.HUES[legend.colour[grid.groups[holders[0]]] % len(svg.HUES)])
    return [svg.words(x, y, label, look, size=10.5, anchor="middle")]


def _cell_words(
    m: AffineMap, box: int, grid: Grid, at: tuple[int, ...], held: IntArray, legend: Legend, cells: str,
    xs: Sequence[float], ys: Sequence[float],
) -> list[str]:  # fmt: skip
    """Text in every cell where it fits: owners, or the flat number of its first element."""
    strides = [math.prod(m.codomain.boxes[box].shape[k + 1 :]) for k in range(len(grid.cuts))]
    above = sum(c.edges[i] * s for c, i, s in zip(grid.cuts, at, strides))
    rows, columns = plane_cuts(grid)
    steps = ([0, 0, *strides])[-2:]
    found = []
    for i, row in enumerate(held.tolist()):
        for j, k in enumerate(row):
            element = above + rows.edges[i] * steps[0] + columns.edges[j] * steps[1]
            text = _label(grid, grid.classes[k]) if cells == "rank" else str(element)
            if svg.wide(text, 9) <= xs[j + 1] - xs[j] and ys[i + 1] - ys[i] >= 10:
                x, y = (xs[j] + xs[j + 1]) / 2, (ys[i] + ys[i + 1]) / 2 + 3.2
                found.append(
                    svg.words(x, y, text, _text_look(grid, grid.classes[k], legend), size=9, anchor="middle")
                )
    return found


def legend_drawing(m: AffineMap, grids: Sequence[Grid], legend: Legend) -> Drawing:
    """Swatches with their ranks, in columns."""
    entries = []
    for ranks, k in legend.groups():
        entries.append((f'fill="{svg.swatch(k)}"', rank_word(ranks) + counted(m, ranks, legend)))
    for groups in legend.letters:
        striped = len(groups) <= MOST_NAMED
        fill = svg.stripes(colours(groups, legend)) if striped else "url(#sa-many)"
        entries.append((f'fill="{fill}"', f"replicas on {rank_word(together(groups))}"))
    classes = {h for g in grids for h in g.classes}
    entries += [(svg.themed("void", "soft"), "crossed: nobody holds it")] if () in classes else []
    entries += [('fill="url(#sa-mixed)"', "several owners within one cell")] if MIXED in classes else []
    return swatches(entries)


def storage_drawing(m: AffineMap, rows: ShardRows, legend: Legend) -> Drawing:
    """One bar per shard: its slots in order, cut where elements stop following each other."""
    padded = m.domain.size - m.size
    title = "storage: the slots of each shard in order" + ("; hollow slots are padding" if padded else "")
    shapes = [svg.dim(0, 11, title, size=11.5)]
    heads = [clipped(f"{describe_key(b.key)} {b.shape}{scale_text(m, b)}", 200, 10.5) for b, _ in rows.shown]
    left = max((svg.wide(h, 10.5) for h in heads), default=0) + 8
    most = max((b.size for b, _ in rows.shown), default=0)
    room = WIDTH - 2 * MARGIN - left
    each = min(26.0, room / most) if most else 0
    y = 20.0
    for n, (head, (b, cells)) in enumerate(zip(heads, rows.shown)):
        if rows.left and n == len(rows.shown) - 1:
            shapes.append(svg.dim(0, y + 12, f"... {rows.left} more shards ...", size=10.5))
            y += 20
        shapes.append(svg.words(0, y + 13, head, size=10.5))
        shapes.append(moved(_bar(m, b, cells, legend, each, rows.alone), left, y))
        y += 22
    return Drawing(shapes, left + most * each, y)


def _bar(m: AffineMap, b: Box, cells: Sequence[Stored], legend: Legend, each: float, alone: bool) -> Drawing:
    """The slots of one shard; ranks without a colour of their own stay plain."""
    if not cells:
        return Drawing([svg.dim(0, 13, "empty", size=10.5)], 40, 18)
    k = next((k for ranks, k in legend.groups() if b.rank in ranks), None)
    size = _fitting(str(m.codomain.size - 1), each) if alone else 9.5
    shapes = [shape for c in cells for shape in _slots(m, c, k, each, size, alone)]
    ends = [c.low * each for c in cells[1:]] if min(c.high - c.low for c in cells) * each >= 3 else []
    d = "".join(f"M{svg.number(x)} 0V18" for x in ends)
    shapes += [svg.path(d, 'stroke="#000000" stroke-opacity="0.4" stroke-width="0.8"')] if d else []
    whole = svg.rect(0, 0, cells[-1].high * each, 18, f'fill="none" {svg.themed("line")}')
    return Drawing([*shapes, whole], 0, 18)


def _fitting(text: str, width: float) -> float:
    """The largest font size at which a text fits, 9.5 at most; 0 where none is readable."""
    size = min(9.5, (width - 3) / svg.wide(text, 1))
    return size if size >= 6.5 else 0.0


def _slots(m: AffineMap, c: Stored, k: int | None, each: float, size: float, alone: bool) -> list[str]:
    """One run of slots with what sits in it, where that fits."""
    x, w = c.low * each, (c.high - c.low) * each
    void = c.first is None and c.last is None
    fill = svg.themed("void") if k is None else f'fill="{svg.swatch(k)}"'
    look = f'fill="none" {svg.themed("soft")} stroke-dasharray="2 2"' if void else fill
    shape = svg.rect(x, 0, w, 18, look, tip=stored_text(m, c, alone))
    text = stored_words(m, c, alone)
    if not size or svg.wide(text, size) + 1 > w:
        return [shape]
    ink = svg.themed("dim") if void or k is None else svg.on(k)
    return [shape, svg.words(x + w / 2, 12.5, text, ink, size=size, anchor="middle")]
