"""The one way from placements to maps: one over its ranks, or one for each axis of a mesh."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .._errors import InvalidMapError
from .._limits import Limits, require_limits
from ..maps import AffineMap, Space
from ..maps._map import full, known, remember
from ..maps._space import IntArray, Shape, as_int, as_shape, listed
from ..placements import BlockGather, Custom, Experts, Placement
from ..placements._placements import as_placement
from ._lower import lower
from ._nest import nest
from ._questions import is_single_valued
from ._relabel import relabel
from ._simplify import simplify

MOST_RANKS = 1 << 23  # of one layout: as many as the pieces that Limits allows
Ranks = Any  # a count, a sequence of rank ids, or an array of the mesh's shape


def layout(
    shape: int | Sequence[int],
    placement: Placement | Sequence[Placement],
    ranks: int | Sequence[Any] | IntArray | None = None,
    *,
    mesh: Mapping[str, int] | Sequence[int] | None = None,
    order: Sequence[str | int] | None = None,
    limits: Limits = Limits(),
) -> AffineMap:
    """The layout of a tensor of ``shape`` under a placement, or one placement per mesh axis.

    ``ranks`` is a count, a sequence of rank ids, or an array of ids of the mesh's shape; ranks
    are row-major in the mesh by default. ``order`` says which mesh axis cuts first (names or
    positions), by default left to right. The result is simplified and single-valued.

    Raises ``InvalidMapError`` with the arithmetic where a placement cannot apply.

    Cost: near-linear in the blocks that the placement lists, or in those of its result.

    >>> from shardalg import Split
    >>> m = layout((5,), [Split(0), Split(0)], mesh={"dp": 2, "tp": 2}, order=("tp", "dp"))
    >>> [m.shard_shape(r) for r in m.ranks]
    [(2,), (1,), (1,), (1,)]
    """
    shape = as_shape(shape)
    if isinstance(placement, (list, tuple)):
        return _on_mesh(shape, placement, ranks, mesh, order, limits)
    one = as_placement(placement)
    require_limits(limits)
    if mesh is not None or order is not None:
        raise InvalidMapError("mesh= and order= need one placement per axis: pass a list of placements")
    return _finished(lower(one, shape, _labels(one, ranks), limits), limits)


def _finished(m: AffineMap, limits: Limits) -> AffineMap:
    m = simplify(m)
    limits.hold("pieces", len(m))
    if not known(m, "single_valued"):
        answer = is_single_valued(m)
        if not answer:
            raise InvalidMapError(f"the placement is no layout: {answer.reason}")
    return m


def _labels(placement: Placement, ranks: Ranks) -> tuple[int, ...]:
    """The rank ids of one mesh axis."""
    named = _named_ranks(placement)
    if ranks is None:
        if named is None:
            raise InvalidMapError(f"layout needs ranks= (a count or rank ids) for {placement!r}")
        return named
    labels = rank_ids(ranks)
    unknown = sorted(set(named or ()) - set(labels))
    if unknown:
        raise InvalidMapError(f"{placement!r} names ranks {unknown}, which are not among ranks={labels}")
    return labels


def rank_ids(ranks: Ranks) -> tuple[int, ...]:
    """The rank ids that a count, a sequence or an array of ids names."""
    return tuple(range(_count(ranks))) if np.ndim(ranks) == 0 else tuple(_ids(ranks))


def _count(ranks: Any) -> int:
    count = as_int(ranks, "the number of ranks")
    if not 1 <= count <= MOST_RANKS:
        raise InvalidMapError(f"the number of ranks must be at least 1 and at most {MOST_RANKS}, got {count}")
    return count


def _ids(ranks: Any) -> list[int]:
    ids = [as_int(r, "a rank") for r in np.asarray(ranks).reshape(-1).tolist()]
    if not ids:
        raise InvalidMapError(f"ranks={ranks!r} names no rank; give a count or at least one rank id")
    if len(set(ids)) < len(ids):
        raise InvalidMapError(f"ranks={ids} repeats a rank")
    return ids


def _named_ranks(placement: Placement) -> tuple[int, ...] | None:
    if isinstance(placement, (Experts, BlockGather)):
        return tuple(rank for rank, _ in placement.by_rank)
    if isinstance(placement, Custom):
        return placement.map.ranks
    return None


def _on_mesh(
    shape: Shape,
    placements: Sequence[Placement],
    ranks: Ranks,
    mesh: Mapping[str, int] | Sequence[int] | None,
    order: Sequence[str | int] | None,
    limits: Limits,
) -> AffineMap:
    """Cut axis after axis, with ranks numbered in that order; renamed in the end."""
    placements = [as_placement(p) for p in placements]
    names, sizes = _mesh(placements, ranks, mesh)
    grid = _grid(sizes, ranks)
    cut_first = _order(names, order)
    current = _whole(shape)
    for axis in cut_first:
        current = _cut_again(current, placements[axis], sizes[axis], limits)
    in_cut_order = grid.transpose(cut_first).reshape(-1).tolist()
    return _finished(relabel(current, domain=dict(enumerate(in_cut_order))), limits)


def _whole(shape: Shape) -> AffineMap:
    """Rank 0 holds all."""
    logical = Space.logical(shape)
    m = AffineMap(Space.shards({0: shape}), logical, full(logical).table)
    return remember(m, single_valued=True, injective=True)


def _cut_again(outer: AffineMap, placement: Placement, count: int, limits: Limits) -> AffineMap:
    """Each shard cut over ``count`` ranks; part i of rank r is rank ``r * count + i``. Shards of one shape
    are cut once."""
    labels = tuple(range(count))
    inner: dict[Shape, AffineMap] = {}
    for r in outer.ranks:
        shape = outer.shard_shape(r)
        if shape not in inner:
            inner[shape] = lower(placement, shape, labels, limits)
    by_rank = {r: inner[outer.shard_shape(r)] for r in outer.ranks}
    ranks = {(r, i): r * count + i for r in outer.ranks for i in labels}
    return nest(outer, by_rank, ranks, limits=limits)


def _mesh(
    placements: Sequence[Placement], ranks: Ranks, mesh: Mapping[str, int] | Sequence[int] | None
) -> tuple[list[str | int], list[int]]:
    names: list[str | int]
    if mesh is None and ranks is not None and np.ndim(ranks) == len(placements):
        sizes = list(np.shape(ranks))
        names = list(range(len(sizes)))
    elif isinstance(mesh, Mapping):
        names, sizes = list(mesh), [_count(n) for n in mesh.values()]
    elif mesh is not None:
        sizes = [_count(n) for n in listed(mesh, "mesh")]
        names = list(range(len(sizes)))
    else:
        raise InvalidMapError(
            "a list of placements needs mesh={name: size} or an array of ranks of its shape"
        )
    if len(placements) != len(sizes):
        raise InvalidMapError(f"{len(placements)} placements for a mesh of {len(sizes)} axes {names}")
    return names, sizes


def _grid(sizes: list[int], ranks: Ranks) -> IntArray:
    """The rank ids, an array of the mesh's shape."""
    total = _count(math.prod(sizes))
    if ranks is None:
        return np.arange(total).reshape(sizes)
    ids = list(range(_count(ranks))) if np.ndim(ranks) == 0 else _ids(ranks)
    if np.ndim(ranks) > 1 and np.shape(ranks) != tuple(sizes):
        raise InvalidMapError(
            f"ranks= of shape {np.shape(ranks)} for a mesh of {'x'.join(map(str, sizes))}:"
            " give an array of the mesh's shape"
        )
    if len(ids) != total:
        raise InvalidMapError(f"a mesh of {'x'.join(map(str, sizes))} = {total} ranks got {len(ids)} ranks")
    return np.array(ids).reshape(sizes)


def _order(names: list[str | int], order: Sequence[str | int] | None) -> list[int]:
    if order is None:
        return list(range(len(names)))
    axes = listed(order, "order")
    found = [names.index(axis) if axis in names else axis for axis in axes]
    if sorted(map(str, found)) != sorted(map(str, range(len(names)))):
        raise InvalidMapError(
            f"order={tuple(axes)} must list each mesh axis of {names} once, by name or by position"
        )
    return [int(k) for k in found]
