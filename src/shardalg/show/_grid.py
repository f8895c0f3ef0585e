"""Who holds what, on a grid of a few cells: the exact grid where it is small, blocks where not.

Cells are found without walking elements. An axis is cut at every element if it is short, else
where ownership changes, else evenly. The owners of a cell are the pieces that meet its sample
points; a cell whose samples disagree is *mixed*.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import numpy as np

from .._limits import Budget, Limits
from ..maps import AffineMap, Box
from ..maps._meet import Blocks, meet
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import IntArray, Shape, row_major
from ._coordinates import along_axes, intervals

CELLS = 64  # per axis of a grid
UNITS = 32  # an axis up to this long is drawn element by element
MOST_SHARDS = 16  # rows of the storage view
RUNS = 24  # ends of runs of consecutive elements marked in a shard
PANELS = 12  # small multiples above two axes
MOST_CUT_BLOCKS = 20000  # blocks whose edges are looked for

MIXED = (-1,)
Holders: TypeAlias = tuple[int, ...]  # sorted group numbers; empty for nobody; MIXED


class Cuts(NamedTuple):
    """An axis as cells ``[edges[i], edges[i + 1])`` of ``extent`` elements.

    ``whole`` says that no cell can be mixed on account of this axis; a ``partial`` axis ends early.
    """

    edges: tuple[int, ...]
    extent: int
    whole: bool

    @property
    def cells(self) -> int:
        return len(self.edges) - 1

    @property
    def unit(self) -> bool:
        """Whether each cell is one element."""
        return self.edges[-1] == self.cells

    @property
    def partial(self) -> bool:
        return self.edges[-1] < self.extent


class Grid(NamedTuple):
    """The cells of one logical box and who holds each: ``held`` is ``[cells of each axis]`` of
    positions in ``classes``; a class lists positions in ``groups``, each some ranks."""

    cuts: tuple[Cuts, ...]
    held: IntArray
    classes: tuple[Holders, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def mixed(self) -> int:
        """Cells whose samples disagree."""
        return int((self.held == self.classes.index(MIXED)).sum()) if MIXED in self.classes else 0

    @property
    def unheld(self) -> int:
        """Elements in cells that nobody holds; mixed cells are not counted."""
        if () not in self.classes:
            return 0
        sizes = reduce(np.multiply.outer, (np.diff(c.edges) for c in self.cuts), np.ones((), np.int64))
        return int(sizes[self.held == self.classes.index(())].sum())


def rank_groups(ranks: Sequence[int], most: int) -> tuple[tuple[int, ...], ...]:
    """Ranks one by one, or in consecutive groups of a power of two where there are more than ``most``.

    >>> rank_groups(range(6), 4)
    ((0, 1), (2, 3), (4, 5))
    """
    each = 1
    while each * most < len(ranks):
        each *= 2
    return tuple(tuple(ranks[i : i + each]) for i in range(0, len(ranks), each))


def ownership(m: AffineMap, box: int, most: int) -> Grid:
    """The grid of one box of the codomain of ``m``, with ranks in at most ``most`` groups.

    Where ownership changes within most cells, the first elements of each axis are drawn one by
    one instead.
    """
    shape = m.codomain.boxes[box].shape
    groups = rank_groups(m.ranks, most)
    blocks, holders = _blocks(m, box, groups)
    grid = _grid(tuple(axis_cuts(blocks, shape)), shape, blocks, holders, groups)
    if 2 * grid.mixed <= grid.held.size:
        return grid
    corner = tuple(_corner(n) for n in shape)
    alone = rank_groups(m.ranks, len(m.ranks))
    return _grid(corner, shape, *_blocks(m, box, alone), alone)


def _corner(n: int) -> Cuts:
    """The first elements of an axis, one by one."""
    return Cuts(tuple(range(min(n, UNITS) + 1)), n, True)


def _blocks(m: AffineMap, box: int, groups: Sequence[Sequence[int]]) -> tuple[Blocks, list[Holders]]:
    """The distinct blocks of elements of a box, and the groups that hold each."""
    table = m.table.take(m.table.columns.cod_box == box)
    c = table.columns
    sides = np.concatenate([c.cod_offset[None], c.shape, c.cod_strides])
    _, first, which = np.unique(sides, axis=1, return_index=True, return_inverse=True)
    group_of = {rank: g for g, ranks in enumerate(groups) for rank in ranks}
    box_group = np.array(
        [group_of.get(b.rank if b.rank is not None else -1, 0) for b in m.domain.boxes], np.int64
    )
    pairs = np.unique(np.stack([which.reshape(-1), box_group[c.dom_box]]), axis=1)
    ends = np.searchsorted(pairs[0], np.arange(len(first) + 1)).tolist()
    held = pairs[1].tolist()
    return side_blocks(table, CODOMAIN).take(first), [tuple(held[a:b]) for a, b in itertools.pairwise(ends)]


def axis_cuts(blocks: Blocks, shape: Shape) -> list[Cuts]:
    """Where to cut each axis of a box into cells."""
    most = [PANELS] * max(len(shape) - 2, 0) + [CELLS] * 2
    edges = _edges(blocks, shape)
    return [_cuts(n, edges[k], most[k]) for k, n in enumerate(shape)]


def _cuts(n: int, edges: set[int] | None, most: int) -> Cuts:
    if n <= min(UNITS, most):
        return Cuts(tuple(range(n + 1)), n, True)
    if edges is not None and len(edges | {0, n}) <= most + 1:
        return Cuts(tuple(sorted(edges | {0, n})), n, True)
    each = -(-n // most)
    return Cuts((*range(0, n, each), n), n, each == 1)


def _edges(blocks: Blocks, shape: Shape) -> list[set[int] | None]:
    """The coordinates where some block starts or ends, per axis; None where they are too many."""
    found: list[set[int] | None] = [set() for _ in shape]
    if len(blocks.box) > MOST_CUT_BLOCKS:
        return [None for _ in shape]
    rows = zip(blocks.offset.tolist(), blocks.shape.T.tolist(), blocks.strides.T.tolist())
    for offset, extents, strides in rows:
        split = along_axes(offset, extents, strides, shape)
        for k in range(len(shape)):
            found[k] = None if split is None else _with_edges(found[k], split[0][k], split[1][k])
        if all(f is None for f in found):
            break
    return found


def _with_edges(found: set[int] | None, start: int, parts: list[tuple[int, int]]) -> set[int] | None:
    if found is None or len(found) > CELLS + 1:
        return None
    runs = intervals(start, parts, CELLS)
    return None if runs is None else found.union(*runs)


def _grid(
    cuts: tuple[Cuts, ...],
    shape: Shape,
    blocks: Blocks,
    holders: list[Holders],
    groups: tuple[tuple[int, ...], ...],
) -> Grid:
    """Holders of every cell, from sample points in it."""
    cells = tuple(c.cells for c in cuts)
    count = math.prod(cells)
    if not count:
        return Grid(cuts, np.zeros(cells, np.int64), (), groups)
    points = [_points(cuts, shape, corner) for corner in _corners(cuts)]
    held = _holders(blocks, holders, np.concatenate(points))
    samples = [held[i : i + count] for i in range(0, len(held), count)]
    agreed = [seen[0] if all(s == seen[0] for s in seen) else MIXED for seen in zip(*samples)]
    classes = tuple(sorted(set(agreed), key=lambda h: (h == MIXED, len(h) == 0, len(h), h)))
    index = {h: i for i, h in enumerate(classes)}
    return Grid(cuts, np.array([index[h] for h in agreed], np.int64).reshape(cells), classes, groups)


def _corners(cuts: tuple[Cuts, ...]) -> list[float]:
    """Where in a cell to look, as a part of its way: first, and unless the cell is whole, within and last."""
    return [0.0] if all(c.whole for c in cuts) else [0.0, 0.38, 1.0]


def _points(cuts: tuple[Cuts, ...], shape: Shape, part: float) -> IntArray:
    """The flat address of one point of every cell."""
    address = np.zeros((1,) * len(shape), np.int64)
    for k, (c, stride) in enumerate(zip(cuts, row_major(shape))):
        edges = np.array(c.edges, np.int64)
        at = edges[:-1] + ((edges[1:] - edges[:-1] - 1) * part).astype(np.int64)
        address = address + (at * stride).reshape([-1 if i == k else 1 for i in range(len(shape))])
    return address.reshape(-1)


def _holders(blocks: Blocks, holders: list[Holders], points: IntArray) -> list[Holders]:
    """Who holds each of some elements of one box."""
    hit = point_hits(blocks, points)
    out: list[Holders] = [()] * len(points)
    ends = np.searchsorted(hit.point, np.arange(len(points) + 1)).tolist()
    joined: dict[tuple[int, ...], Holders] = {}
    found = hit.block.tolist()
    for p, (a, b) in enumerate(itertools.pairwise(ends)):
        if b > a:
            key = tuple(found[a:b])
            if key not in joined:
                joined[key] = tuple(sorted({g for k in key for g in holders[k]}))
            out[p] = joined[key]
    return out


class Hits(NamedTuple):
    """Pairs of a block and a point that it covers, sorted by point, with the block's first
    payload there."""

    block: IntArray
    point: IntArray
    payload: IntArray


def point_hits(blocks: Blocks, points: IntArray) -> Hits:
    """Where blocks of one box cover some addresses."""
    n = len(points)
    if not len(blocks.box) or not n:
        return Hits(*[np.zeros(0, np.int64)] * 3)
    axes, none = np.ones((0, n), np.int64), np.zeros((0, n), np.int64)
    at = Blocks(np.full(n, blocks.box[0]), points, axes, axes, none, np.zeros((0, 0, n), np.int64))
    limits = Limits()
    met = meet(blocks, at, limits, Budget(limits))
    order = np.lexsort((met.left, met.right))
    payload = met.left_offset[0] if len(met.left_offset) else met.left
    return Hits(met.left[order], met.right[order], payload[order])


class Stored(NamedTuple):
    """Some consecutive slots of a shard and the elements in the first and last of them."""

    low: int
    high: int
    first: int | None
    last: int | None


def storage(m: AffineMap, box: int) -> list[Stored]:
    """The slots of one shard as cells: padding, or elements from ``first`` to ``last``."""
    size = m.domain.boxes[box].size
    blocks = side_blocks(m.table.take(m.table.columns.dom_box == box), DOMAIN, CODOMAIN)
    runs = _run_edges(blocks)
    edges = _cuts(size, _edges(blocks, (size,))[0] if runs is None else runs, CELLS).edges
    lows, highs = edges[:-1], edges[1:]
    hit = point_hits(blocks, np.array([*lows, *(high - 1 for high in highs)], np.int64))
    at = dict(zip(hit.point.tolist(), hit.payload.tolist()))
    return [Stored(a, b, at.get(i), at.get(i + len(lows))) for i, (a, b) in enumerate(zip(lows, highs))]


def planes(grid: Grid) -> Iterator[tuple[tuple[int, ...], IntArray]]:
    """The last two axes of the grid at every index of those above."""
    held = grid.held.reshape((1,) * max(0, 2 - grid.held.ndim) + grid.held.shape)
    for at in np.ndindex(held.shape[:-2]):
        yield at, held[at]


def plane_cuts(grid: Grid) -> tuple[Cuts, Cuts]:
    one = Cuts((0, 1), 1, True)
    rows, columns = ([one, one, *grid.cuts])[-2:]
    return rows, columns


class ShardRows(NamedTuple):
    """The shards that the storage view shows, and how many it leaves out."""

    shown: list[tuple[Box, list[Stored]]]
    left: int

    @property
    def alone(self) -> bool:
        """Whether every cell of all of them is one slot."""
        return all(_alone(cells) for _, cells in self.shown)


def _run_edges(blocks: Blocks) -> set[int] | None:
    """The slots where elements stop following each other, or None where they are too many."""
    found: set[int] = set()
    strides = zip(blocks.strides.T.tolist(), blocks.pay_strides[0].T.tolist())
    for offset, extents, (left, right) in zip(blocks.offset.tolist(), blocks.shape.T.tolist(), strides):
        steps = [(n, a, b) for n, a, b in zip(extents, left, right) if n > 1]
        width = steps.pop()[0] if steps and steps[-1][1:] == (1, 1) else 1
        if math.prod(n for n, _, _ in steps) + len(found) > RUNS:
            return None
        starts = [offset + sum(at) for at in itertools.product(*(range(0, n * a, a) for n, a, _ in steps))]
        found.update(starts, (start + width for start in starts))
    return found


def shard_rows(m: AffineMap) -> ShardRows:
    """All shards, or the first ones and the last; all by single slots, or all by runs of them."""
    count = len(m.domain)
    picked = list(range(count)) if count <= MOST_SHARDS else [*range(MOST_SHARDS - 1), count - 1]
    rows = ShardRows([(m.domain.boxes[i], storage(m, i)) for i in picked], count - len(picked))
    if rows.alone:
        return rows
    return rows._replace(shown=[(b, _runs(cells) if _alone(cells) else cells) for b, cells in rows.shown])


def _alone(cells: Sequence[Stored]) -> bool:
    return all(c.high == c.low + 1 for c in cells)


def _runs(cells: Sequence[Stored]) -> list[Stored]:
    """Single slots as runs of elements that follow each other, and of padding."""
    runs: list[Stored] = []
    for c in cells:
        wanted = None if not runs or runs[-1].last is None else runs[-1].last + 1
        if runs and c.first == wanted:
            runs[-1] = runs[-1]._replace(high=c.high, last=c.last)
        else:
            runs.append(c)
    return runs
