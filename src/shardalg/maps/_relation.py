"""Set operations on piece tables: tables as finite sets of (slot, element, scale).

``common`` finds what two tables share, ``minus`` takes one from another, ``disjoint``
re-cuts any table so that every triple is listed once. They know nothing of spaces.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ._cells import cells
from ._meet import Blocks, Met, meet
from ._solve import Digit, Vector, add, solve
from ._space import BoolArray, IntArray
from ._table import Columns, PieceTable, build, concatenate, empty_table, normal_axes

DOMAIN, CODOMAIN = 0, 1


def side_blocks(table: PieceTable, key: int, *payload: int, index: bool = False) -> Blocks:
    """The blocks of one side of a table, carrying addresses of the given sides and,
    with ``index``, the index along each axis."""
    c = table.columns
    box, offset, strides = c.side(key)
    n, d = len(table), table.axes
    offsets = [c.side(p)[1] for p in payload]
    steps = [c.side(p)[2] for p in payload]
    if index:
        offsets += [np.zeros(n, np.int64)] * d
        unit = np.broadcast_to(np.eye(d, dtype=np.int64)[:, :, None], (d, d, n))
        steps += list(unit)
    width = len(offsets)
    return Blocks(
        box,
        offset,
        c.shape,
        strides,
        np.array(offsets, np.int64).reshape(width, n),
        np.array(steps, np.int64).reshape(width, d, n),
    )


def side_region(table: PieceTable, side: int) -> PieceTable:
    """One side of a table as pieces that map it to itself; what pieces share is repeated."""
    return region_of(side_blocks(table, side))


def region_of(x: Blocks) -> PieceTable:
    """Blocks as pieces that map them to themselves; what they share is repeated."""
    one = np.ones(len(x.box), np.int64)
    return build(Columns(x.box, x.offset, x.box, x.offset, one, one, x.shape, x.strides, x.strides))


def is_region(table: PieceTable) -> bool:
    """Whether the table maps slots to themselves at scale 1."""
    c = table.columns
    same = (c.dom_box == c.cod_box).all() and (c.dom_offset == c.cod_offset).all()
    return bool(same and (c.dom_strides == c.cod_strides).all()) and not table.scaled


def exact_sizes(shape: IntArray) -> list[int]:
    """Products of the extents of each piece, exact even beyond an int64."""
    if shape.shape[1] and float(np.log2(np.maximum(shape, 1)).sum(axis=0).max()) > 61:
        return [math.prod(column) for column in shape.T.tolist()]
    sizes: list[int] = np.prod(shape, axis=0, dtype=np.int64).tolist()
    return sizes


class Families(NamedTuple):
    """Triples shared by piece ``left`` of one table and piece ``right`` of another, as families:
    ``offset`` ``[2 + P, m]`` and ``strides`` ``[2 + P, axes, m]`` give slot, element and the
    payload (indices in the left piece)."""

    left: IntArray
    right: IntArray
    shape: IntArray
    offset: IntArray
    strides: IntArray


def common(a: PieceTable, b: PieceTable, limits: Limits, budget: Budget, *, index: bool = False) -> Families:
    """Families of triples in both tables, each once if each table lists its triples once."""
    key, far = _join_sides(a, b)
    met = meet(side_blocks(a, key, DOMAIN, CODOMAIN, index=index), side_blocks(b, key, far), limits, budget)
    ca, cb = a.columns, b.columns
    same = ca.side(far)[0][met.left] == cb.side(far)[0][met.right]
    if a.scaled or b.scaled:
        same &= ca.numerator[met.left] == cb.numerator[met.right]
        same &= ca.denominator[met.left] == cb.denominator[met.right]
    gap = met.right_offset[0] - met.left_offset[far]
    slope = met.left_strides[far] - met.right_strides[0]
    slope = np.where(met.shape > 1, slope, 0)
    flat = (slope == 0).all(axis=0)
    picked = np.flatnonzero(same & flat & (gap == 0))
    found = Families(
        met.left[picked], met.right[picked], met.shape[:, picked],
        met.left_offset[:, picked], met.left_strides[:, :, picked],
    )  # fmt: skip
    tilted = np.flatnonzero(same & ~flat)
    if not len(tilted):
        return found
    rows = _level(met.shape, met.left_offset, met.left_strides, slope, gap, tilted, budget)
    return _extended(found, met.left, met.right, rows)


def _join_sides(a: PieceTable, b: PieceTable) -> tuple[int, int]:
    """The side to join on: the domain unless it repeats where the codomain does not."""
    repeats = [
        any(bool(((t.columns.side(side)[2] == 0) & (t.shape > 1)).any()) for t in (a, b))
        for side in (DOMAIN, CODOMAIN)
    ]
    return (CODOMAIN, DOMAIN) if repeats[0] and not repeats[1] else (DOMAIN, CODOMAIN)


_Row = tuple[int, Vector, tuple[tuple[int, Vector], ...]]  # family, offset, axes


def _level(
    shape: IntArray,
    offset: IntArray,
    strides: IntArray,
    slope: IntArray,
    gap: IntArray,
    picked: IntArray,
    budget: Budget,
) -> list[_Row]:
    """The sub-families on which ``slope . t == gap``."""
    rows: list[_Row] = []
    for k in picked.tolist():
        start: Vector = tuple(offset[:, k].tolist())
        digits, free, constant = [], [], int(gap[k])
        for n, tilt, step in zip(shape[:, k].tolist(), slope[:, k].tolist(), strides[:, :, k].T.tolist()):
            pay = tuple(step)
            if tilt < 0:
                start, constant = add(start, pay, n - 1), constant - tilt * (n - 1)
                pay, tilt = tuple(-v for v in pay), -tilt
            if tilt:
                digits.append(Digit(tilt, n, pay))
            elif n > 1:
                free.append((n, pay))
        for s in solve(digits, constant, len(start), budget):
            rows.append((k, add(s.offset, start), s.axes + tuple(free)))
    return rows


def _extended(found: Families, left: IntArray, right: IntArray, rows: list[_Row]) -> Families:
    """Families with scalar rows appended."""
    width = len(found.offset)
    axes = max([len(found.shape), *(len(r[2]) for r in rows)])
    n, m = len(found.left), len(rows)
    shape = np.ones((axes, n + m), np.int64)
    offset, strides = np.zeros((width, n + m), np.int64), np.zeros((width, axes, n + m), np.int64)
    d = len(found.shape)
    shape[:d, :n], offset[:, :n], strides[:, :d, :n] = found.shape, found.offset, found.strides
    for j, (_, start, parts) in enumerate(rows, n):
        offset[:, j] = start
        for i, (extent, step) in enumerate(parts):
            shape[i, j], strides[:, i, j] = extent, step
    which = np.array([r[0] for r in rows], np.int64)
    return Families(
        np.concatenate([found.left, left[which]]),
        np.concatenate([found.right, right[which]]),
        shape,
        offset,
        strides,
    )


def families_table(found: Families, a: PieceTable) -> PieceTable:
    """The families as a table, with the boxes and scales of their left pieces."""
    c = a.columns
    i = found.left
    return build(
        Columns(
            c.dom_box[i], found.offset[0], c.cod_box[i], found.offset[1], c.numerator[i], c.denominator[i],
            found.shape, found.strides[0], found.strides[1],
        )
    )  # fmt: skip


def met_table(met: Met, table: PieceTable) -> PieceTable:
    """The left points of meetings, whose blocks carry slot and element, as pieces of their table."""
    found = Families(met.left, met.right, met.shape, met.left_offset, met.left_strides)
    return families_table(found, table)


def count_common(a: PieceTable, b: PieceTable, limits: Limits, budget: Budget) -> int:
    """How many triples two tables share, if each lists its own once."""
    return sum(exact_sizes(common(a, b, limits, budget).shape))


def collides(table: PieceTable, side: int, limits: Limits = Limits()) -> bool:
    """Whether two pairs of the table share an address on one side.

    Axes merge as that side alone allows, so that a dense block is one run whatever it holds.
    """
    blocks = side_blocks(table, side)
    if ((blocks.strides == 0) & (blocks.shape > 1)).any():
        return True
    shape, strides, _, shift, _ = normal_axes(blocks.shape, blocks.strides, blocks.strides)
    blocks = blocks._replace(offset=blocks.offset + shift, shape=shape, strides=strides)
    met = meet(blocks, blocks, limits, Budget(limits))
    return sum(exact_sizes(met.shape)) != sum(exact_sizes(shape))


# --- difference ---------------------------------------------------------------------------


class Cell(NamedTuple):
    """A family of points: addresses at index 0 and ``(extent, step)`` per axis."""

    offset: Vector
    axes: tuple[tuple[int, Vector], ...]


def minus(a: PieceTable, b: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """The triples of ``a`` that are not in ``b``; ``a`` lists each once, and so does the result.

    Each round takes one shared family out of every piece that still meets ``b``: the middle
    one, so that a piece with n holes falls apart in about log2(n) rounds.
    """
    done: list[PieceTable] = []
    rest = a
    while len(rest) and len(b):
        found = common(rest, b, limits, budget, index=True)
        if not len(found.left):
            break
        hit = np.zeros(len(rest), bool)
        hit[found.left] = True
        done.append(rest.take(~hit))
        rest = _cut_rest(rest, found, budget)
        limits.hold("pieces", sum(map(len, done)) + len(rest))
    return concatenate([*done, rest])


def _cut_rest(rest: PieceTable, found: Families, budget: Budget) -> PieceTable:
    """Every hit piece without the middle one of its families."""
    order = np.argsort(found.left, kind="stable")
    lefts, first, counts = np.unique(found.left[order], return_index=True, return_counts=True)
    middle = order[first + counts // 2]
    c = rest.columns
    cells: list[tuple[int, Cell]] = []
    for piece, k in zip(lefts.tolist(), middle.tolist()):
        steps = zip(c.dom_strides[:, piece].tolist(), c.cod_strides[:, piece].tolist())
        axes = tuple((n, pair) for n, pair in zip(c.shape[:, piece].tolist(), steps))
        whole = Cell((int(c.dom_offset[piece]), int(c.cod_offset[piece])), axes)
        indices = found.offset[2:, k].tolist()
        hole = [
            (n, tuple(step))
            for n, step in zip(found.shape[:, k].tolist(), found.strides[2:, :, k].T.tolist())
            if n > 1
        ]
        cells += [(piece, cell) for cell in without(whole, Cell(tuple(indices), tuple(hole)), budget)]
    return _cells_table(cells, rest)


def _cells_table(cells: list[tuple[int, Cell]], origin: PieceTable) -> PieceTable:
    if not cells:
        return empty_table()
    axes = max(len(cell.axes) for _, cell in cells)
    shape = np.ones((axes, len(cells)), np.int64)
    strides = np.zeros((2, axes, len(cells)), np.int64)
    for j, (_, cell) in enumerate(cells):
        for i, (n, step) in enumerate(cell.axes):
            shape[i, j], strides[:, i, j] = n, step
    offset = np.array([cell.offset for _, cell in cells], np.int64).T
    c, which = origin.columns, np.array([piece for piece, _ in cells], np.int64)
    return build(
        Columns(
            c.dom_box[which], offset[0], c.cod_box[which], offset[1],
            c.numerator[which], c.denominator[which], shape, strides[0], strides[1],
        )
    )  # fmt: skip


def without(cell: Cell, hole: Cell, budget: Budget) -> list[Cell]:
    """The cell less a hole given in its index coordinates, or less a part of it, as disjoint cells.

    Where every index axis is driven by its own axes of the hole, the hole is a product of
    sets S0 x S1 x ...; what is left is (not S0) x all, S0 x (not S1) x all, and so on.
    A diagonal, where one axis of the hole drives two indices, is no product: the cell is cut
    into slices along the shorter one, and the next round takes the hole out of each.
    """
    budget.spend()
    tied = {k for _, step in hole.axes if sum(v != 0 for v in step) > 1 for k, v in enumerate(step) if v}
    if tied:
        return _slices(cell, min(tied, key=lambda k: cell.axes[k][0]), budget)
    left: list[Cell] = []
    fixed = Cell(cell.offset, ())
    for k, (extent, step) in enumerate(cell.axes):
        start, parts = _nested(hole.offset[k], [(n, s[k]) for n, s in hole.axes if s[k]])
        left += [_placed(fixed, at, gap, step, cell.axes[k + 1 :]) for at, gap in _gaps(extent, start, parts)]
        fixed = _placed(fixed, start, parts, step, ())
    return left


def _slices(cell: Cell, k: int, budget: Budget) -> list[Cell]:
    extent, step = cell.axes[k]
    budget.spend(extent)
    return [Cell(add(cell.offset, step, x), cell.axes[:k] + cell.axes[k + 1 :]) for x in range(extent)]


_Parts = list[tuple[int, int]]  # (extent, stride) of nested progressions in one index


def _placed(
    fixed: Cell, start: int, parts: _Parts, step: Vector, rest: tuple[tuple[int, Vector], ...]
) -> Cell:
    """``fixed`` with an index axis restricted to nested progressions, and further axes."""
    none = (0,) * len(step)
    here = tuple((n, add(none, step, s)) for n, s in parts if n > 1)
    return Cell(add(fixed.offset, step, start), fixed.axes + here + rest)


def _nested(start: int, parts: _Parts) -> tuple[int, _Parts]:
    """The progressions with positive strides, outermost first. One that does not clear the
    span of the inner ones is held at its first value: a smaller hole, and the rest of it is
    taken out in a later round."""
    upward = []
    for n, s in parts:
        if s < 0:
            start, s = start + s * (n - 1), -s
        upward.append((n, s))
    kept: _Parts = []
    span = 0
    for n, s in sorted(upward, key=lambda part: part[1]):
        if s > span:
            kept.insert(0, (n, s))
            span += s * (n - 1)
    return start, kept


def _gaps(extent: int, start: int, parts: _Parts) -> list[tuple[int, _Parts]]:
    """What nested progressions leave of ``[0, extent)``: before, after, and between the steps."""
    reach = start + sum(s * (n - 1) for n, s in parts)
    gaps: list[tuple[int, _Parts]] = []
    if start:
        gaps.append((0, [(start, 1)]))
    for level, (n, s) in enumerate(parts):
        inner = sum(t * (m - 1) for m, t in parts[level + 1 :])
        if s > inner + 1:
            gaps.append((start + inner + 1, [*parts[:level], (n - 1, s), (s - inner - 1, 1)]))
    if reach + 1 < extent:
        gaps.append((reach + 1, [(extent - reach - 1, 1)]))
    return gaps


# --- pieces that overlap ------------------------------------------------------------------


def disjoint(table: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """The same set of triples with each listed once: one cell of each number where the table is a
    region, else a part of the pieces and what the others have beyond it, and so each part in turn."""
    found = common(table, table, limits, budget)
    if sum(exact_sizes(found.shape)) == sum(exact_sizes(table.shape)):
        return table
    cut = cells(side_blocks(table, DOMAIN), limits, budget) if is_region(table) else None
    if cut is not None:
        return region_of(cut.blocks.take(np.unique(cut.cell, return_index=True)[1]))
    if len(table) > 1:
        part = _apart(found, table)
        if 4 * part.sum() < len(table):
            part = np.arange(len(table)) < len(table) // 2
        first, second = (disjoint(table.take(its), limits, budget) for its in (part, ~part))
        done = concatenate([first, minus(second, first, limits, budget)])
    else:
        done = empty_table()
        for one in _injective(table, limits, budget):
            done = concatenate([done, minus(one, done, limits, budget)])
    limits.hold("pieces", len(done))
    return done


def _apart(found: Families, table: PieceTable) -> BoolArray:
    """Pieces that share nothing with each other and list no triple twice, taken from the left; ``found``
    is what the pieces of the table share."""
    itself = found.left == found.right
    listed = np.zeros(len(table), object)
    np.add.at(listed, found.left[itself], np.array(exact_sizes(found.shape[:, itself]), object))
    part: BoolArray = listed == np.array(exact_sizes(table.shape), object)
    before = found.right < found.left
    order = np.argsort(found.left[before], kind="stable")
    for k, other in zip(found.left[before][order].tolist(), found.right[before][order].tolist()):
        part[k] &= not part[other]
    return part


def _injective(piece: PieceTable, limits: Limits, budget: Budget) -> list[PieceTable]:
    """One piece, sliced along its shortest axes until no slice lists a triple twice."""
    if count_common(piece, piece, limits, budget) == sum(exact_sizes(piece.shape)):
        return [piece]
    c = piece.columns
    k = int(np.argmin(np.where(c.shape[:, 0] > 1, c.shape[:, 0], np.iinfo(np.int64).max)))
    steps = zip(c.dom_strides[:, 0].tolist(), c.cod_strides[:, 0].tolist())
    whole = Cell((int(c.dom_offset[0]), int(c.cod_offset[0])), tuple(zip(c.shape[:, 0].tolist(), steps)))
    slices = [_cells_table([(0, cell)], piece) for cell in _slices(whole, k, budget)]
    return [part for one in slices for part in _injective(one, limits, budget)]
