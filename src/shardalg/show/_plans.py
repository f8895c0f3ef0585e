"""Plans drawn: who sends how much to whom, what nobody could avoid, and the largest copies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..plans import Stats, TransferPlan, TreePlan
from ..plans._dtypes import itemsize
from . import _svg as svg
from ._drawing import (
    WIDTH,
    Drawing,
    byte_text,
    count_text,
    heading,
    heat,
    lines_drawing,
    many,
    moved,
    stacked,
    swatches,
)
from ._grid import rank_groups
from ._legend import rank_word, ranks_text
from ._notation import piece_words
from ._picture import Picture
from ._show import show

MOST_RANKS = 24  # rows and columns of a traffic matrix
MOST_COPIES = 5  # told in words
MOST_ENTRIES = 12  # tensors of a tree plan

Flow = Mapping[tuple[int, int], int]  # (source rank, target rank) -> distinct elements


@show.register(TransferPlan)
def _show_plan(plan: TransferPlan, *, dtype: str | None = None) -> Picture:
    """The traffic matrix of a plan. With ``dtype`` totals are said in bytes too."""
    copies = copy_lines(plan)
    head = f"{len(plan.source.ranks)} -> {len(plan.target.ranks)} ranks, {many(len(plan), 'copy')}"
    flow = {(s, t): n for s, t, n in plan.traffic}
    matrix = Matrix.of(flow, *_global_ranks([plan]), plan.same_ranks)
    return traffic_picture(f"plan: {head}", plan.stats, matrix, [("largest copies", copies)], dtype)


@show.register(TreePlan)
def _show_tree(plan: TreePlan, *, dtype: str | None = None) -> Picture:
    """The traffic of all tensors together, and the tensors that move most."""
    flow: dict[tuple[int, int], int] = {}
    plans = list(plan.plans.values())
    for p in plans:
        for s, t, n in p.traffic:
            flow[s, t] = flow.get((s, t), 0) + n
    sources, targets = _global_ranks(plans)
    matrix = Matrix.of(flow, sources, targets, all(p.same_ranks for p in plans))
    head = f"plan of {many(len(plan.entries), 'tensor')}: {len(sources)} -> {len(targets)} ranks"
    head += f", {many(len(plan), 'copy')}"
    lists = [("tensors that move most", entry_lines(plan))]
    return traffic_picture(head, plan.stats, matrix, lists, dtype)


def _global_ranks(plans: Sequence[TransferPlan]) -> tuple[list[int], list[int]]:
    """The global ranks of the sources and of the targets, also those that move nothing."""
    sources = {p.global_source(r) for p in plans for r in p.source.ranks}
    targets = {p.global_target(r) for p in plans for r in p.target.ranks}
    return sorted(sources), sorted(targets)


class Matrix(NamedTuple):
    """Elements from groups of source ranks (rows) to groups of target ranks (columns).

    ``together`` says that groups have several ranks: then what a rank keeps is left out.
    """

    rows: tuple[tuple[int, ...], ...]
    columns: tuple[tuple[int, ...], ...]
    counts: list[list[int]]
    same: bool
    together: bool

    @classmethod
    def of(cls, flow: Flow, sources: list[int], targets: list[int], same: bool) -> Matrix:
        every = sorted({*sources, *targets}) if same else []
        together = max(len(sources), len(targets)) > MOST_RANKS
        if together and same:
            groups = rank_groups(every, MOST_RANKS)
            rows, columns = (tuple(g for g in groups if {*g} & {*side}) for side in (sources, targets))
        else:
            rows, columns = rank_groups(sources, MOST_RANKS), rank_groups(targets, MOST_RANKS)
        place = [{r: i for i, g in enumerate(groups) for r in g} for groups in (rows, columns)]
        counts = [[0] * len(columns) for _ in rows]
        for (s, t), n in flow.items():
            if not (together and same and s == t):
                counts[place[0][s]][place[1][t]] += n
        return cls(rows, columns, counts, same, together)

    def local(self, i: int, j: int) -> bool:
        """Whether a cell is what one rank keeps."""
        return self.same and not self.together and self.rows[i] == self.columns[j]

    @property
    def crossing(self) -> list[list[int]]:
        """The counts with 0 where a rank keeps its own."""
        return [
            [0 if self.local(i, j) else n for j, n in enumerate(row)] for i, row in enumerate(self.counts)
        ]


def traffic_picture(
    title: str, stats: Stats, matrix: Matrix, lists: Sequence[tuple[str, Sequence[str]]], dtype: str | None
) -> Picture:
    """A picture of traffic from its counts and some lists of words."""
    said = said_stats(stats, dtype)
    text = [title, *("  " + line for line in said), "", *matrix_text(matrix)]
    parts = [heading(title, *said), matrix_drawing(matrix)]
    for name, lines in lists:
        if lines:
            text += ["", f"{name}:", *("  " + line for line in lines)]
            parts.append(lines_drawing(name, lines))
    shapes, height = stacked(parts)
    return Picture(svg.document(WIDTH, height, shapes, title=title, about="; ".join(said)), "\n".join(text))


def said_stats(stats: Stats, dtype: str | None) -> list[str]:
    """The counts of a plan in words: what is written, what crosses, what nobody could avoid."""
    first = f"{many(stats.elements, 'slot')} written from {many(stats.pieces, 'piece')}"
    if stats.elements_crossing is None or stats.lower_bound is None:
        return [first, "ranks of the two sides are not known to be the same processes: no crossing counts"]
    crossing, bound = stats.elements_crossing, stats.lower_bound
    size = f" ({byte_text(crossing * itemsize(dtype))} of {dtype})" if dtype else ""
    excess = (
        "no plan could move fewer" if crossing == bound else f"{crossing - bound} more than the bound {bound}"
    )
    said = [first, f"{crossing} elements cross ranks{size}; {excess}"]
    if crossing:
        sent, received = (
            max(side or (), key=lambda rn: (rn[1], -rn[0])) for side in (stats.sent, stats.received)
        )
        said.append(f"rank {sent[0]} sends most, {sent[1]}; rank {received[0]} gets most, {received[1]}")
    return said


def copy_lines(plan: TransferPlan) -> list[str]:
    """The largest copies in words."""
    table = plan.map.table
    order = np.argsort(-table.sizes, kind="stable")[:MOST_COPIES]
    lines = [_copy_line(plan, int(k)) for k in order]
    return lines + ([f"... {len(table) - len(lines)} more"] if len(table) > len(lines) else [])


def _copy_line(plan: TransferPlan, k: int) -> str:
    piece = plan.map.pieces[k]
    target, source, tail = piece_words(plan.map, piece)
    a, b = piece.codomain.rank, piece.domain.rank
    ends = f"rank {plan.global_source(a or 0)}{source} -> rank {plan.global_target(b or 0)}{target}"
    return f"{ends}{tail}: {many(piece.size, 'element')}"


def entry_lines(plan: TreePlan) -> list[str]:
    """The tensors of a tree, those that cross most first."""
    order = sorted(plan.entries, key=lambda e: (-(e.plan.stats.elements_crossing or 0), e.target))
    width = max((len(e.target) for e in order[:MOST_ENTRIES]), default=0)
    lines = []
    for e in order[:MOST_ENTRIES]:
        origin = "" if e.sources == (e.target,) else f" from {', '.join(e.sources)}"
        cross = e.plan.stats.elements_crossing
        told = (
            f"{e.plan.stats.elements} written"
            if cross is None
            else f"{cross} of {e.plan.stats.elements} cross"
        )
        lines.append(f"{e.target.ljust(width)}  {told}, {many(len(e.plan), 'copy')}{origin}")
    lines += [f"... {len(order) - MOST_ENTRIES} more"] if len(order) > MOST_ENTRIES else []
    return lines + [f"{name} is tied to {to}" for name, to in plan.tied[:MOST_ENTRIES]]


# --- the matrix ---------------------------------------------------------------------------


def matrix_text(matrix: Matrix) -> list[str]:
    """Source ranks down, target ranks across; what a rank keeps in parentheses."""
    heads = ["to " + ranks_text(g) if i == 0 else ranks_text(g) for i, g in enumerate(matrix.columns)]
    sides = [f"from {rank_word(g)}" for g in matrix.rows]
    cells = [
        [
            f"({count_text(n)})" if matrix.local(i, j) and n else count_text(n) if n else "."
            for j, n in enumerate(row)
        ]
        for i, row in enumerate(matrix.counts)
    ]
    left = max(map(len, sides), default=0)
    widths = [max(len(h), *(len(row[j]) for row in cells)) if cells else len(h) for j, h in enumerate(heads)]
    lines = ["  " + " " * left + "  " + "  ".join(h.rjust(w) for h, w in zip(heads, widths))]
    lines += [
        f"  {side.ljust(left)}  " + "  ".join(c.rjust(w) for c, w in zip(row, widths))
        for side, row in zip(sides, cells)
    ]
    return [_matrix_caption(matrix), *lines]


def _matrix_caption(matrix: Matrix) -> str:
    what = "elements from source ranks (down) to target ranks (across)"
    if matrix.together:
        each = max(len(g) for g in (*matrix.rows, *matrix.columns))
        return f"{what}, up to {each} ranks together" + (", without what a rank keeps" if matrix.same else "")
    return what + ("; in parentheses what a rank keeps" if matrix.same else "")


def matrix_drawing(matrix: Matrix) -> Drawing:
    """The matrix with sums of what crosses at its edges."""
    crossing = matrix.crossing
    most = max((n for row in crossing for n in row), default=0)
    widest = max((svg.wide(ranks_text(g), 10) for g in matrix.columns), default=0)
    w = max(20.0, min(max(46.0, widest + 10), 520 / max(len(matrix.columns), 1)))
    h = 24 if len(matrix.rows) <= 12 else 16
    caption = _matrix_caption(matrix).replace("in parentheses", "grey is")
    shapes = [svg.dim(0, 11, caption, size=11.5)]
    sides = [rank_word(g) for g in matrix.rows]
    corner = "to rank" + "s" * matrix.together
    left, top = max(svg.wide(corner, 10), *(svg.wide(s, 10.5) for s in sides)) + 8, 38.0
    shapes += [svg.dim(left - 6, 33, corner, size=10, anchor="end")]
    shapes += _column_heads(matrix, left, w)
    for i, side in enumerate(sides):
        y = top + i * h
        shapes.append(svg.words(left - 6, y + h / 2 + 3.8, side, size=10.5, anchor="end"))
        shapes += [
            _matrix_cell(matrix, i, j, most, left + j * w, y, w, h) for j in range(len(matrix.columns))
        ]
    right, bottom = left + w * len(matrix.columns), top + h * len(matrix.rows)
    shapes.append(svg.rect(left, top, right - left, bottom - top, f'fill="none" {svg.themed("line")}'))
    shapes += _sums(crossing, left, top, right, bottom, w, h)
    legend = swatches(_matrix_legend(matrix, most))
    shapes.append(moved(legend, 0, bottom + 26))
    return Drawing(shapes, right + 60, bottom + 26 + legend.height)


def _column_heads(matrix: Matrix, left: float, w: float) -> list[str]:
    """The target ranks over their columns, as many as fit beside each other."""
    shapes, free = [], 0.0
    for j, g in enumerate(matrix.columns):
        text, middle = ranks_text(g), left + (j + 0.5) * w
        half = svg.wide(text, 10) / 2
        if middle - half >= free:
            shapes.append(svg.words(middle, 33, text, size=10, anchor="middle"))
            free = middle + half + 2
    return shapes


def _matrix_cell(matrix: Matrix, i: int, j: int, most: int, x: float, y: float, w: float, h: float) -> str:
    n = matrix.counts[i][j]
    local = matrix.local(i, j)
    fill, ink = ('fill="#b9c0c9"', 'fill="#111111"') if local else heat(n, most)
    fill = fill if n else svg.themed("void")
    ends = f"from {rank_word(matrix.rows[i])}" + ("" if local else f" to {rank_word(matrix.columns[j])}")
    shape = svg.rect(
        x, y, w, h, fill, tip=f"{n} elements {'kept by' if local else ''} {ends}".replace("  ", " ")
    )
    edge = svg.rect(x, y, w, h, f'fill="none" {svg.themed("soft")} stroke-width="0.5"')
    text = count_text(n)
    if not n or svg.wide(text, 10) > w - 2:
        return shape + edge
    return shape + edge + svg.words(x + w / 2, y + h / 2 + 3.6, text, ink, size=10, anchor="middle")


def _sums(
    crossing: list[list[int]], left: float, top: float, right: float, bottom: float, w: float, h: float
) -> list[str]:
    """What each row sends and each column gets."""
    shapes = [svg.dim(right + 8, 33, "sends", size=10)]
    for i, row in enumerate(crossing):
        y = top + (i + 0.5) * h + 3.6
        shapes.append(svg.dim(right + 8, y, count_text(sum(row)), size=10))
    shapes.append(svg.dim(left - 6, bottom + 14, "gets", size=10, anchor="end"))
    free = 0.0
    for j, column in enumerate(zip(*crossing)):
        text = count_text(sum(column))
        if left + j * w >= free:
            x = left + (j + 0.5) * w
            shapes.append(svg.dim(x, bottom + 14, text, size=10, anchor="middle"))
            free = left + j * w + max(w, svg.wide(text, 10) + 2) - 0.01
    return shapes


def _matrix_legend(matrix: Matrix, most: int) -> list[tuple[str, str]]:
    kept = any(n and matrix.local(i, j) for i, row in enumerate(matrix.counts) for j, n in enumerate(row))
    entries = [('fill="#b9c0c9"', "stays on its rank")] if kept else []
    if most:
        entries += [
            (heat(0, most)[0], "crosses: few"),
            (heat(most, most)[0], f"crosses: up to {count_text(most)}"),
        ]
    return entries
