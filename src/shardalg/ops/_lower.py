"""Placements lowered to maps, one function for each over one row of ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import singledispatch
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Piece, Side, Space
from ..maps._map import from_columns, remember
from ..maps._space import IntArray, Shape, row_major
from ..maps._table import Columns
from ..placements import (
    BlockGather,
    Custom,
    Cyclic,
    Experts,
    Flat,
    Placement,
    Replicate,
    Segments,
    Split,
    StridedSplit,
)
from ..placements._placements import ByRank
from ._concat import concat
from ._questions import is_single_valued


@singledispatch
def lower(placement: Placement, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    """The map of one placement over ranks ``labels``, in position order."""
    raise InvalidMapError(f"no lowering is registered for {placement!r}")


class Run(NamedTuple):
    """``blocks`` of ``size`` elements of an axis each, ``step`` apart, ``start`` the first; stored one
    after the other from position ``at``."""

    at: int
    start: int
    size: int
    blocks: int = 1
    step: int = 0


def along_axis(
    shape: Shape, axis: int, labels: tuple[int, ...], extents: Sequence[int], runs: Sequence[Sequence[Run]]
) -> AffineMap:
    """The layout whose rank ``labels[k]`` holds ``runs[k]`` of one axis in a shard of extent
    ``extents[k]``, and all of the other axes."""
    shards = {r: (*shape[:axis], n, *shape[axis + 1 :]) for r, n in zip(labels, extents)}
    storage, logical = Space.shards(shards), Space.logical(shape)
    rows = [[_row(run) for run in its if run.size and run.blocks] for its in runs]
    lengths = [len(its) for its in rows]
    table = np.array([row for its in rows for row in its], np.int64).reshape(-1, len(Run._fields))
    at, start, size, blocks, step = table.T
    box = np.repeat(np.array([storage.index(r) for r in labels], np.int64), lengths)
    local = np.repeat(np.array([row_major(shards[r]) for r in labels], np.int64).T, lengths, axis=1)
    whole = np.repeat(np.array([row_major(shape)], np.int64).T, len(table), axis=1)
    extent = np.repeat(np.array([shape], np.int64).T, len(table), axis=1)
    none, one = np.zeros(len(table), np.int64), np.ones(len(table), np.int64)
    columns = Columns(
        box, at * local[axis], none, start * whole[axis], one, one,
        _blocked(extent, axis, blocks, size),
        _blocked(local, axis, local[axis] * size, local[axis]),
        _blocked(whole, axis, whole[axis] * step, whole[axis]),
    )  # fmt: skip
    return remember(from_columns(storage, logical, columns), single_valued=True)  # each slot is in one run


def _row(run: Run) -> tuple[int, ...]:
    """A run as numbers that fit: the step of a single block means nothing and may be huge."""
    return run if run.blocks > 1 else (*run[:4], 0)


def _blocked(x: IntArray, axis: int, outer: IntArray, inner: IntArray) -> IntArray:
    """Rows per axis with those of blocks, and of elements within one, in the place of ``axis``."""
    return np.concatenate([x[:axis], [outer, inner], x[axis + 1 :]])


def check_axis(shape: Shape, axis: int, placement: Placement) -> int:
    """``axis`` counted from the front, or an error."""
    if not -len(shape) <= axis < len(shape):
        raise InvalidMapError(f"{placement!r} names axis {axis} of a tensor of shape {shape}")
    return axis % len(shape)


@lower.register
def _replicate(placement: Replicate, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    strides = row_major(shape)
    pieces = [Piece(shape, Side(0, strides, r), Side(0, strides), placement.scale) for r in labels]
    m = AffineMap.from_pieces(Space.shards(dict.fromkeys(labels, shape)), Space.logical(shape), pieces)
    return remember(m, single_valued=True)


@lower.register
def _split(placement: Split, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    axis = check_axis(shape, placement.axis, placement)
    sizes, allocated = _split_sizes(placement, shape, axis, len(labels))
    starts = np.cumsum([0, *sizes]).tolist()
    runs = [[Run(0, start, size)] for start, size in zip(starts, sizes)]
    return along_axis(shape, axis, labels, allocated, runs)


def _split_sizes(p: Split, shape: Shape, axis: int, ranks: int) -> tuple[Sequence[int], Sequence[int]]:
    """Elements and allocated extent of each rank along the split axis."""
    n = shape[axis]
    what = f"axis {axis} of shape {shape}"
    if p.sizes is not None:
        _check_sizes(p.sizes, p.unit, n, ranks, what)
        return p.sizes, p.sizes
    units = -(-n // p.unit)
    chunks, even = (-(-units // ranks),) * ranks, even_shares(units, ranks)
    if p.rule == "exact" and n % (ranks * p.unit):
        by_unit = "" if p.unit == 1 else f" of whole units of {p.unit}"
        raise InvalidMapError(
            f"cannot split {what} into {ranks} equal parts{by_unit}:"
            f" {n} = {ranks * p.unit}*{n // (ranks * p.unit)} + {n % (ranks * p.unit)};"
            f' use rule="chunk" ({_list(_elements(chunks, p.unit, n))})'
            f" or sizes=({_list(_elements(even, p.unit, n))})"
        )
    sizes = _elements(even if p.rule == "balanced" else chunks, p.unit, n)
    return sizes, [count * p.unit for count in chunks] if p.rule == "pad" else sizes


def _check_sizes(sizes: Sequence[int], unit: int, n: int, ranks: int, what: str) -> None:
    """Raise unless sizes, one for each rank, cut an axis of ``n`` elements between its units."""
    total = sum(sizes)
    if len(sizes) != ranks:
        raise InvalidMapError(f"cannot split {what} over {ranks} ranks: sizes={sizes} has {len(sizes)}")
    if total != n:
        raise InvalidMapError(
            f"cannot split {what}: sizes={sizes} add up to {total}, not {n};"
            f" {'lower' if total > n else 'raise'} one by {abs(total - n)}"
        )
    torn = [end for end in np.cumsum(sizes).tolist() if end % unit and end < n]
    if torn:
        raise InvalidMapError(f"cannot split {what} at {torn[0]}: that cuts a unit of {unit} elements")


def even_shares(count: int, ranks: int) -> tuple[int, ...]:
    """``count`` in ``ranks`` shares that differ by at most one, larger ones first."""
    each, rest = divmod(count, ranks)
    return tuple(each + (rank < rest) for rank in range(ranks))


def _elements(counts: Sequence[int], unit: int, n: int) -> list[int]:
    """Elements of each share of so many units, taken in turn until none of ``n`` is left."""
    ends = [min(units * unit, n) for units in accumulate(counts)]
    return [end - start for start, end in zip([0, *ends], ends)]


def _list(sizes: Sequence[int]) -> str:
    shown = ",".join(map(str, sizes[:8]))
    return shown + (",..." if len(sizes) > 8 else "," if len(sizes) == 1 else "")


@lower.register
def _block_gather(placement: BlockGather, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    axis = check_axis(shape, placement.axis, placement)
    return _gather(shape, axis, placement.size, placement.by_rank, labels, "block")


@lower.register
def _experts(placement: Experts, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    if not shape:
        raise InvalidMapError("Experts needs a tensor [experts, ...], got a 0-d tensor")
    return _gather(shape, 0, 1, placement.by_rank, labels, "expert")


def _gather(
    shape: Shape, axis: int, size: int, by_rank: ByRank, labels: tuple[int, ...], what: str
) -> AffineMap:
    n = shape[axis]
    count = -(-n // size)
    ids = dict(by_rank)
    unknown = sorted(set(ids) - set(labels))
    if unknown:
        raise InvalidMapError(f"{what}s are listed for ranks {unknown}, but only ranks {labels} are there")
    extents, runs = [], []
    for rank in labels:
        at, its = 0, []
        for block in ids.get(rank, ()):
            if block >= count:
                raise InvalidMapError(
                    f"rank {rank} lists {what} {block}, but axis {axis} of shape {shape} has {count} {what}s"
                    f" of {size}, 0..{count - 1}"
                )
            extent = min(size, n - block * size)
            its.append(Run(at, block * size, extent))
            at += extent
        extents.append(at)
        runs.append(its)
    return along_axis(shape, axis, labels, extents, runs)


@lower.register
def _cyclic(placement: Cyclic, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    axis = check_axis(shape, placement.axis, placement)
    n, block, ranks = shape[axis], placement.block, len(labels)
    whole, tail = divmod(n, block)
    extents, runs = [], []
    for position in range(ranks):
        first = (position - placement.first) % ranks
        count = max(0, -(-(whole - first) // ranks))
        its = [Run(0, first * block, block, count, ranks * block)]
        at = count * block
        if tail and whole % ranks == first:
            its.append(Run(at, whole * block, tail))
            at += tail
        extents.append(at)
        runs.append(its)
    return along_axis(shape, axis, labels, extents, runs)


@lower.register
def _strided(placement: StridedSplit, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    axis = check_axis(shape, placement.axis, placement)
    runs: list[list[Run]] = [[] for _ in labels]
    at = [0] * len(labels)
    for start, size in _chunks(0, shape[axis], min(placement.split_factor, max(shape[axis], 1))):
        for k, (begin, extent) in enumerate(_chunks(start, size, len(labels))):
            runs[k].append(Run(at[k], begin, extent))
            at[k] += extent
    return along_axis(shape, axis, labels, at, runs)


def _chunks(start: int, n: int, parts: int) -> list[tuple[int, int]]:
    """(start, size) of each part of ``torch.chunk``, empty ones included."""
    each = -(-n // parts)
    ends = [min(n, (k + 1) * each) for k in range(parts)]
    return [(start + a, b - a) for a, b in zip([0, *ends], ends)]


@lower.register
def _flat(placement: Flat, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    n, ranks = math.prod(shape), len(labels)
    whole = math.lcm(placement.align, ranks)
    each = -(-n // whole) * whole // ranks
    pieces = [
        Piece((max(0, min(each, n - k * each)),), Side(0, (1,), rank), Side(k * each, (1,)))
        for k, rank in enumerate(labels)
    ]
    m = AffineMap.from_pieces(Space.shards(dict.fromkeys(labels, (each,))), Space.logical(shape), pieces)
    return remember(m, single_valued=True)


@lower.register
def _custom(placement: Custom, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    m = placement.map
    if m.codomain != Space.logical(shape):
        raise InvalidMapError(f"a Custom map onto {m.codomain} was given a tensor of shape {shape}")
    unknown = [r for r in m.ranks if r not in labels]
    if unknown:
        raise InvalidMapError(f"a Custom map has ranks {m.ranks}, but only {labels} are there")
    answer = is_single_valued(m)
    if not answer:
        raise InvalidMapError(f"a Custom map is no layout: {answer.reason}")
    absent = [r for r in labels if r not in m.ranks]
    return m if not absent else _with_empty(m, absent)


def _with_empty(m: AffineMap, ranks: Sequence[int]) -> AffineMap:
    """``m`` with further ranks that hold nothing, their shards empty along axis 0."""
    if m.logical_shape == ():
        raise InvalidMapError(f"a 0-d tensor has no empty shard to give to ranks {list(ranks)}")
    shapes = {b.rank: b.shape for b in m.domain.boxes if b.rank is not None}
    empty = (0, *m.logical_shape[1:])
    storage = Space.shards({**shapes, **dict.fromkeys(ranks, empty)})
    old = [storage.index(b.rank, b.name) for b in m.domain.boxes]
    c = m.table.columns
    from_old = c._replace(dom_box=np.array(old, np.int64)[c.dom_box])
    return remember(from_columns(storage, m.codomain, from_old), single_valued=True)


@lower.register
def _segments(placement: Segments, shape: Shape, labels: tuple[int, ...], limits: Limits) -> AffineMap:
    axis = check_axis(shape, placement.axis, placement)
    total = sum(size for size, _ in placement.parts)
    if total != shape[axis]:
        raise InvalidMapError(
            f"segments {[size for size, _ in placement.parts]} add up to {total},"
            f" but axis {axis} of shape {shape} has {shape[axis]}"
        )
    if not placement.parts:
        return along_axis(shape, axis, labels, [0] * len(labels), [[]] * len(labels))
    known = {part: _segment(part, shape, axis, labels, limits) for part in dict.fromkeys(placement.parts)}
    return concat([known[part] for part in placement.parts], axis, limits=limits)


def _segment(
    part: tuple[int, Placement], shape: Shape, axis: int, labels: tuple[int, ...], limits: Limits
) -> AffineMap:
    size, placement = part
    return lower(placement, (*shape[:axis], size, *shape[axis + 1 :]), labels, limits)
