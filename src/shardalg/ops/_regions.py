"""Regions: sets of slots, written as partial identity maps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from .._errors import InvalidMapError
from .._limits import Budget, Limits, require_limits
from ..maps import AffineMap, Box, Space
from ..maps._map import full, known, remember, require_map
from ..maps._relation import CODOMAIN, DOMAIN, disjoint, minus, side_region
from ..maps._space import as_int, as_key, as_range, describe_key, row_major
from ..maps._table import Columns, PieceTable, build
from ._compose import compose
from ._folding import simplified

Range: TypeAlias = "slice | int | tuple[int, int]"
RegionLike: TypeAlias = Any  # a region map, or ranges per axis, or {key: ranges}


def region(space: Space, where: RegionLike) -> AffineMap:
    """A set of slots of ``space`` as a partial identity map.

    ``where`` is a region already, one range per axis (slices, ints or (start, stop) pairs) for
    a space of one box, or a mapping from box keys (rank, name or (rank, name)) to ranges.

    Raises ``InvalidMapError`` for keys without a box, pairs and ints outside an axis, other maps.

    Cost: a piece per box that ``where`` names.

    >>> len(region(Space.logical((4, 4)), (slice(0, 2), slice(1, 3))))
    1
    """
    if not isinstance(space, Space):
        raise InvalidMapError(f"a region lies in a Space, got {space!r}")
    if isinstance(where, AffineMap):
        _require_region(where, space)
        return where
    if not isinstance(where, Mapping):
        if len(space) != 1:
            raise InvalidMapError(
                f"ranges need a space of one box; this one has {len(space)}: give {{key: ranges}}"
            )
        where = {space.boxes[0].key: where}
    columns = [_box_region(space, key, ranges) for key, ranges in where.items()]
    if len({c[0] for c in columns}) < len(columns):
        raise InvalidMapError(f"two keys of a region name one box: {list(where)}; unite two regions instead")
    axes = max((len(c[1]) for c in columns), default=0)
    shape, strides = np.ones((axes, len(columns)), np.int64), np.zeros((axes, len(columns)), np.int64)
    for j, (_, extents, steps, _) in enumerate(columns):
        shape[: len(extents), j], strides[: len(steps), j] = extents, steps
    box = np.array([c[0] for c in columns], np.int64)
    offset = np.array([c[3] for c in columns], np.int64)
    one = np.ones(len(columns), np.int64)
    return _identity(space, build(Columns(box, offset, box, offset, one, one, shape, strides, strides)))


def _require_region(d: AffineMap, space: Space) -> None:
    c = d.table.columns
    same = (c.dom_box == c.cod_box).all() and (c.dom_offset == c.cod_offset).all()
    if d.domain != space or d.codomain != space:
        raise InvalidMapError(f"a region of {space} is needed; this map goes from {d.domain} to {d.codomain}")
    if not same or (c.dom_strides != c.cod_strides).any() or d.table.scaled:
        raise InvalidMapError("a region is a partial identity map at scale 1; this map moves or scales slots")


def _box_region(space: Space, key: Any, ranges: Any) -> tuple[int, list[int], list[int], int]:
    at = space.index(*as_key(key))
    box = space.boxes[at]
    ranges = ranges if isinstance(ranges, Sequence) else (ranges,)
    if len(ranges) > len(box.shape):
        raise InvalidMapError(f"{len(ranges)} ranges for {describe_key(box.key)} of shape {box.shape}")
    ranges = [*ranges, *[slice(None)] * (len(box.shape) - len(ranges))]
    offset, extents, strides = 0, [], []
    for axis, (r, n, stride) in enumerate(zip(ranges, box.shape, row_major(box.shape))):
        start, step, extent = _range(r, n, axis, box)
        offset += start * stride
        extents.append(extent)
        strides.append(step * stride)
    return at, extents, strides, offset if all(extents) else 0


def _range(r: Range, n: int, axis: int, box: Box) -> tuple[int, int, int]:
    """Start, step and extent of a range of an axis of n elements; slices clip, pairs do not."""
    if isinstance(r, slice):
        found = as_range(r, n)
        return found.start, found.step, len(found)
    if isinstance(r, tuple) and len(r) == 2:
        start, stop = (as_int(end, "an end of a range") for end in r)
    else:
        start = as_int(r, "an index")
        stop = start + 1
    if not 0 <= start <= stop <= n:
        raise InvalidMapError(
            f"range {start}:{stop} does not fit axis {axis} of {describe_key(box.key)} of shape {box.shape}"
        )
    return start, 1, stop - start


def _identity(space: Space, table: PieceTable) -> AffineMap:
    return remember(AffineMap(space, space, simplified(table)), single_valued=True, injective=True)


def restrict(m: AffineMap, where: RegionLike, *, limits: Limits = Limits()) -> AffineMap:
    """``m`` on the slots of a region: ``m @ D``.

    ``restrict(restrict(f, D), E)`` is the restriction to both; restriction to a region commutes
    with composition: ``restrict(compose(g, f), D) = compose(g, restrict(f, D))``.

    Cost: that of ``compose``.

    >>> from shardalg import Split, layout
    >>> restrict(layout((4, 4), Split(0), ranks=2), {1: slice(0, 1)}).pieces
    (Piece((4,), Side(0, (1,), rank=1), Side(8, (1,))),)
    """
    require_map(m, "restrict: m")
    return compose(m, region(m.domain, where), limits=limits)


def corestrict(m: AffineMap, where: RegionLike, *, limits: Limits = Limits()) -> AffineMap:
    """``m`` where it arrives in a region: ``D @ m``.

    Cost: that of ``compose``.

    >>> from shardalg import Split, layout
    >>> corestrict(layout((4, 4), Split(0), ranks=2), (2, slice(0, 3))).pieces
    (Piece((3,), Side(0, (1,), rank=1), Side(8, (1,))),)
    """
    require_map(m, "corestrict: m")
    return compose(region(m.codomain, where), m, limits=limits)


def domain(m: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The slots that ``m`` maps, as a region.

    Cost: one pass where ``m`` is known to be single-valued, else near-linear.

    >>> from shardalg import Split, layout
    >>> m = layout((5,), Split(0, rule="pad"), ranks=2)
    >>> domain(m).size, m.domain.size
    (5, 6)
    """
    require_map(m, "domain: m")
    return _side_region(m, DOMAIN, known(m, "single_valued"), limits)


def image(m: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The elements that ``m`` reaches, as a region.

    Cost: one pass where ``m`` is known to be injective, else near-linear.

    >>> from shardalg import Replicate, layout
    >>> image(layout((4,), Replicate(), ranks=3)).size
    4
    """
    require_map(m, "image: m")
    return _side_region(m, CODOMAIN, known(m, "injective"), limits)


def _side_region(m: AffineMap, side: int, distinct: bool, limits: Limits) -> AffineMap:
    require_limits(limits)
    table = side_region(m.table, side)
    if not distinct:
        table = disjoint(_unrepeated(table), limits, Budget(limits))
    found = _identity(m.domain if side == DOMAIN else m.codomain, table)
    limits.hold("pieces", len(found))
    return found


def _unrepeated(table: PieceTable) -> PieceTable:
    """The table without exact repeats of a piece (replicas give many)."""
    rows = table.rows
    if rows.shape[1] < 2:
        return table
    fresh = np.ones(rows.shape[1], bool)
    fresh[1:] = (rows[:, 1:] != rows[:, :-1]).any(axis=0)
    return table if fresh.all() else table.take(fresh)


def complement(d: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The slots of the space that a region leaves out.

    A region and its complement are disjoint and together everything.

    Cost: near-linear in the pieces of the region and of the answer.

    >>> complement(region(Space.logical((6,)), slice(1, 3))).pieces[1].domain
    Side(3, (1,))
    """
    require_map(d, "the region of complement")
    _require_region(d, d.domain)
    everything = full(d.domain)
    return _identity(d.domain, minus(everything.table, d.table, limits, Budget(limits)))


def uncovered(layout: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The elements that no rank holds, as a region of the logical space.

    Cost: that of ``image`` and ``complement``.

    >>> from shardalg import Experts, layout
    >>> uncovered(layout((4, 2), Experts([[0], [3]]))).pieces[0]
    Piece((4,), Side(2, (1,)), Side(2, (1,)))
    """
    return complement(image(layout, limits=limits), limits=limits)


def padding(layout: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The slots that hold no element, as a region of the storage space.

    Cost: that of ``domain`` and ``complement``.

    >>> from shardalg import Split, layout
    >>> m = layout((5,), Split(0, rule="pad"), ranks=2)
    >>> padding(m).pieces
    (Piece((), Side(2, (), rank=1), Side(2, (), rank=1)),)
    """
    return complement(domain(layout, limits=limits), limits=limits)


def identity(space: Space) -> AffineMap:
    """The map from a space to itself that moves nothing.

    Cost: a piece per box.

    >>> identity(Space.logical((2, 3))).pieces
    (Piece((6,), Side(0, (1,)), Side(0, (1,))),)
    """
    if not isinstance(space, Space):
        raise InvalidMapError(f"identity takes a Space, got {space!r}")
    return remember(full(space), single_valued=True, injective=True)
