"""Layouts in characters: the text twin of their picture."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from ..maps import AffineMap, Box
from ..maps._space import IntArray, describe_key, index_of
from ._grid import MIXED, MOST_SHARDS, PANELS, Cuts, Grid, Holders, ShardRows, Stored, plane_cuts, planes
from ._legend import Legend, counted, named, rank_word, together, unshown
from ._notation import patterns, space_text


def notation(m: AffineMap, line: str) -> str:
    """The short form ``line``, over several lines where one is too long."""
    if len(line) <= 100:
        return line
    head = f"[{space_text(m.domain)} -> {space_text(m.codomain)}]"
    lines = patterns(m) if len(m) <= 1024 else [f"{len(m)} pieces"]
    return "\n  ".join([head, *lines[:MOST_SHARDS], *unshown(len(lines), MOST_SHARDS, "patterns")])


def grid_text(m: AffineMap, box: int, grid: Grid, legend: Legend) -> str:
    """The grid of one tensor in characters, with its legend."""
    b = m.codomain.boxes[box]
    title = f"who holds {box_text(b)}: {cells_text(grid)}"
    if not grid.held.size:
        return f"{title}\n  no elements"
    panels = list(_panels(grid, legend))
    lines = [line for p in panels[:PANELS] for line in p]
    return "\n".join(
        [title, *lines, *unshown(len(panels), PANELS, "panels"), *_legend_lines(m, grid, legend)]
    )


def box_text(b: Box) -> str:
    return f"{b.name!r} {b.shape}" if b.name else f"{b.shape}"


def cells_text(grid: Grid) -> str:
    """What a cell of the grid stands for."""
    if any(c.partial for c in grid.cuts):
        sizes = " x ".join(str(c.edges[-1]) for c in grid.cuts)
        return f"the first {sizes} elements; owners change too finely to draw all"
    if all(c.unit for c in grid.cuts):
        return "one cell per element"
    if all(c.whole for c in grid.cuts):
        return "one cell per block, cut where the owner changes"
    size = " x ".join(str(max(b - a for a, b in itertools.pairwise(c.edges))) for c in grid.cuts)
    return f"one cell per block of up to {size} elements"


def _symbol(grid: Grid, holders: Holders, legend: Legend) -> str:
    if holders == MIXED:
        return "+"
    if not holders:
        return "."
    if len(holders) > 1:
        return legend.letters[named(grid, holders)]
    ranks = grid.groups[holders[0]]
    return str(ranks[0]) if len(ranks) == 1 else str(holders[0])


def _panels(grid: Grid, legend: Legend) -> Iterator[list[str]]:
    """Every two-axis panel as lines, under the indices of the axes above; equal neighbours of
    long axes are written once, under their joint range."""
    marks = [_symbol(grid, h, legend) for h in grid.classes]
    for at, held in planes(grid):
        rows, columns = plane_cuts(grid)
        if len(grid.cuts) > 1:
            held, rows = _joined(held, rows, 16)
        turned, columns = _joined(held.T, columns, 24)
        heads, sides = _heads(columns), _heads(rows) if len(grid.cuts) > 1 else [""]
        width, left = max([*map(len, marks), *map(len, heads)]), max(map(len, sides))
        if (width + 1) * len(heads) > 100:
            heads, width = [], max(map(len, marks))
        gap = " " if heads or width > 1 else ""
        lead = "  " + " " * left + " " * bool(left)
        yield [
            *([f"  [{at_text(grid, at)}]"] if at else []),
            *([lead + gap.join(h.rjust(width) for h in heads)] if heads else []),
            *(
                f"  {side.rjust(left)}{' ' * bool(left)}" + gap.join(marks[k].rjust(width) for k in row)
                for side, row in zip(sides, turned.T.tolist())
            ),
        ]


def _joined(held: IntArray, c: Cuts, most: int) -> tuple[IntArray, Cuts]:
    """Runs of equal rows as one row each, on an axis of more than ``most`` cells."""
    if c.cells <= most:
        return held, c
    new = np.concatenate([[True], (held[1:] != held[:-1]).any(axis=1)])
    starts = np.flatnonzero(new).tolist()
    return held[new], c._replace(edges=(*(c.edges[i] for i in starts), c.edges[-1]))


def _heads(c: Cuts) -> list[str]:
    """A label per cell: its index, or its range."""
    return [str(a) if b == a + 1 else f"{a}:{b}" for a, b in itertools.pairwise(c.edges)]


def at_text(grid: Grid, at: tuple[int, ...]) -> str:
    return ", ".join([_heads(c)[i] for c, i in zip(grid.cuts, at)] + [":", ":"])


def _legend_lines(m: AffineMap, grid: Grid, legend: Legend) -> list[str]:
    lines: list[tuple[str, str]] = []
    used = {k for h in grid.classes if h != MIXED for k in h}
    single = {h[0] for h in grid.classes if len(h) == 1 and h != MIXED}
    for k in sorted(used & single):
        ranks = grid.groups[k]
        lines.append((_symbol(grid, (k,), legend), rank_word(ranks) + counted(m, ranks, legend)))
    for h in grid.classes:
        if len(h) > 1:
            ranks = together(named(grid, h))
            lines.append((_symbol(grid, h, legend), f"{len(ranks)} replicas: {rank_word(ranks)}"))
    lines += [(".", "nobody")] if () in grid.classes else []
    lines += [("+", "several owners within one cell")] if MIXED in grid.classes else []
    width = max((len(symbol) for symbol, _ in lines), default=0)
    return _columns([f"{symbol.ljust(width)}  {said}" for symbol, said in lines])


def _columns(lines: list[str], most: int = 8) -> list[str]:
    """Many short lines side by side."""
    if len(lines) <= most:
        return lines
    rows = -(-len(lines) // max(1, min(3, 96 // (max(map(len, lines)) + 3))))
    wide = max(map(len, lines)) + 3
    return ["".join(line.ljust(wide) for line in lines[i::rows]).rstrip() for i in range(rows)]


def storage_text(m: AffineMap, rows: ShardRows) -> str:
    """Each shard's elements in slot order, ``.`` for padding."""
    padded = m.domain.size - m.size if m.single_valued else 0
    title = "storage: the elements of each shard" + (f" (. is padding, {padded} slots)" if padded else "")
    heads = [describe_key(b.key) for b, _ in rows.shown]
    width = max(map(len, heads), default=0)
    lines = [
        f"  {head.ljust(width)}  {_slots_text(m, cells, rows.alone)}{scale_text(m, b)}"
        for head, (b, cells) in zip(heads, rows.shown)
    ]
    return "\n".join([title, *lines[:-1], *_left(rows), *lines[-1:]])


def _left(rows: ShardRows) -> list[str]:
    return [f"  ... {rows.left} more shards ..."] if rows.left else []


def scale_text(m: AffineMap, b: Box) -> str:
    """The scales at which a box holds its elements, three at most, or nothing where all are 1."""
    c = m.table.columns
    mine = c.dom_box == m.domain.index(*b.key)
    scales = sorted(
        {(p, q) for p, q in zip(c.numerator[mine].tolist(), c.denominator[mine].tolist())} - {(1, 1)}
    )
    said = [f"{p}/{q}" if q != 1 else f"{p}" for p, q in scales[:3]]
    return f"  x {', '.join(said)}" if said else ""


def _slots_text(m: AffineMap, cells: Sequence[Stored], alone: bool) -> str:
    if not cells:
        return "empty"
    if alone:
        return " ".join("." if c.first is None else str(c.first) for c in cells)
    said = [stored_text(m, c, alone) for c in cells]
    return "  ".join(said[:6]) + (f"  ... {len(said) - 6} more" if len(said) > 6 else "")


def stored_text(m: AffineMap, c: Stored, alone: bool) -> str:
    """A run of slots in words: its slots and its first and last element."""
    slots = f"[{c.low}:{c.high}]"
    return f"{slots} {stored_words(m, c, alone)}"


def stored_words(m: AffineMap, c: Stored, alone: bool) -> str:
    """What sits in a run of slots: first and last index; flat numbers where all cells are ``alone``."""
    if alone and c.first is not None:
        return str(c.first)
    if c.first is None and c.last is None:
        return "padding"
    ends = [_element(m, e) for e in (c.first, c.last)]
    return ends[0] if c.first == c.last else f"{ends[0]}..{ends[1]}"


def _element(m: AffineMap, element: int | None) -> str:
    """An element of a tensor by its index; named tensors are told apart by the grids."""
    if element is None:
        return "padding"
    if len(m.codomain) != 1 or len(m.logical_shape) < 2:
        return str(element)
    return f"({','.join(map(str, index_of(element, m.logical_shape)))})"
