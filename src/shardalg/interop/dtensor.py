"""torch's ``(mesh, placements)``, in and out, and DTensors moved by our plans.

A mesh is a ``DeviceMesh``, an array of ranks, or the tuple of its sizes (ranks row-major). Placements
cut from left to right, ``_StridedShard`` as in torch 2.13: the axis in ``split_factor`` chunks, each
chunk over the mesh axis. torch's own redistribution moves some of those wrongly; ``redistribute`` does not.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from .._errors import InvalidMapError, UnsupportedError
from ..backends import bind, run
from ..maps import AffineMap
from ..maps._space import IntArray, Shape, as_shape, row_major
from ..ops import check_layout, equivalent, layout, plan, sharded
from ..placements import Placement, Split, StridedSplit
from ..placements import Replicate as Whole
from ..placements._placements import as_placement

Mesh: TypeAlias = Any  # a DeviceMesh, an array of ranks, or a tuple of sizes
_Lists: TypeAlias = tuple[IntArray, ...] | None  # indices along each axis; None where there are no elements

# --- in -------------------------------------------------------------------------------------


def from_placements(shape: Any, mesh: Mesh, placements: Sequence[Any]) -> AffineMap:
    """The layout of a tensor of ``shape`` under one placement per mesh axis.

    ``Shard``, ``Replicate`` and ``_StridedShard`` are read; negative dims count from the end. ``Partial``
    is a pending sum and no layout: ``InvalidMapError``.

    >>> from torch.distributed.tensor import Replicate, Shard
    >>> m = from_placements((5, 2), (2, 2), [Replicate(), Shard(0)])
    >>> [m.shard_shape(rank) for rank in m.ranks]
    [(3, 2), (2, 2), (3, 2), (2, 2)]
    """
    grid = ranks_of(mesh)
    return layout(as_shape(shape), [_ours(p) for p in placements], grid, mesh=grid.shape)


def ranks_of(mesh: Mesh) -> IntArray:
    """The ranks of a mesh, an array of its shape.

    >>> ranks_of((2, 2)).tolist()
    [[0, 1], [2, 3]]
    """
    if hasattr(mesh, "mesh"):
        return np.asarray(mesh.mesh.cpu().numpy(), np.int64)
    if isinstance(mesh, tuple):
        sizes = as_shape(mesh, "the mesh")
        return np.arange(math.prod(sizes)).reshape(sizes)
    return np.asarray(mesh, np.int64)


def _ours(p: Any) -> Placement:
    """A placement of torch in our words."""
    if isinstance(p, _StridedShard):
        return StridedSplit(p.dim, int(p.split_factor))
    if isinstance(p, Shard):
        return Split(p.dim)
    if isinstance(p, Replicate):
        return Whole()
    as_placement(p)  # names pending sums and whatever else it is
    raise InvalidMapError(f"expected a placement of torch (Shard, Replicate, _StridedShard), got {p!r}")


def from_dtensor(tensor: DTensor) -> tuple[AffineMap, dict[int, torch.Tensor]]:
    """A DTensor's layout and this process's shard of it, ``{}`` outside its mesh. Nothing is sent.

    Raises ``InvalidMapError`` where the local tensor has another shape than the placements say, as
    ``DTensor.from_local`` makes them when it is given no ``shape=``.
    """
    m = _layout_of(tensor)
    rank = dist.get_rank()
    shards = {rank: tensor.to_local()} if rank in m.ranks else {}
    sharded(m, shards)
    return m, shards


def _layout_of(tensor: DTensor) -> AffineMap:
    """The layout of a DTensor, read in the order in which its mesh axes cut."""
    order = [axis for its in getattr(tensor._spec, "shard_order", None) or () for axis in its.mesh_dims]
    if order == sorted(order):
        return from_placements(tensor.shape, tensor.device_mesh, tensor.placements)
    grid = ranks_of(tensor.device_mesh)
    rest = [axis for axis in range(grid.ndim) if axis not in order]
    ours = [_ours(p) for p in tensor.placements]
    return layout(tuple(tensor.shape), ours, grid, mesh=grid.shape, order=[*order, *rest])


# --- out ------------------------------------------------------------------------------------


def to_placements(m: AffineMap, mesh: Mesh) -> tuple[Any, ...]:
    """The placements that give a layout on a mesh; what none do raises ``UnsupportedError``.

    ``from_placements(shape, mesh, to_placements(m, mesh))`` is equivalent to ``m``. Of several answers
    the first is given, in the order replicated, cut, cut in strides, from left to right. A strided cut of a
    tensor without elements is found only where its factor is a product of mesh sizes.

    >>> to_placements(layout((6, 4), [Split(1), Whole()], mesh=(2, 2)), (2, 2))
    (Shard(dim=1), Replicate())
    """
    grid = ranks_of(mesh)
    check_layout(m)
    if len(m.codomain) != 1 or any(b.name for b in m.domain.boxes):
        raise UnsupportedError("a DTensor is one tensor with one shard per rank; take the tensors one by one")
    if sorted(m.ranks) != sorted(grid.reshape(-1).tolist()):
        raise UnsupportedError(
            f"the layout has ranks {m.ranks}, the mesh {sorted(grid.reshape(-1).tolist())}"
        )
    lists = {rank: _index_lists(m, rank) for rank in m.ranks}
    for cut in _searched(m.logical_shape, grid, lists):
        shapes = {int(grid[place]): tuple(map(len, its)) for place, its in cut.held.items()}
        if all(m.shard_shape(rank) == shape for rank, shape in shapes.items()) and equivalent(
            from_placements(m.logical_shape, grid, cut.placements), m
        ):
            return cut.placements
    raise UnsupportedError(
        f"no placements on a mesh of {'x'.join(map(str, grid.shape))} give this layout of shape"
        f" {m.logical_shape}: {_why_not(m, lists)}; move its shards with plan and run instead"
    )


def _index_lists(m: AffineMap, rank: int) -> _Lists:
    """The indices that a shard holds along each axis, read along its edges; -1 for padding."""
    shape, whole = m.shard_shape(rank), m.logical_shape
    if len(shape) != len(whole):
        raise UnsupportedError(f"rank {rank} stores shape {shape} of a tensor of shape {whole}, other axes")
    if not math.prod(shape):
        return None
    found = []
    for axis, stride in enumerate(row_major(shape)):
        elements = m(np.arange(shape[axis]) * stride, rank=rank)
        found.append(np.where(elements < 0, -1, elements // row_major(whole)[axis] % max(whole[axis], 1)))
    return tuple(found)


def _why_not(m: AffineMap, lists: Mapping[int, _Lists]) -> str:
    """The first rank whose shard no cut of axes could give, or what all cuts have in common."""
    for rank, its in lists.items():
        for axis, indices in enumerate(its or ()):
            if (indices < 0).any():
                return f"rank {rank} has padding along axis {axis}, and placements pad nothing"
            turns = np.flatnonzero(np.diff(indices) <= 0)
            if len(turns):
                first, second = indices[turns[0] : turns[0] + 2].tolist()
                return (
                    f"rank {rank} holds {first} and then {second} along axis {axis}, and placements keep the"
                    " order"
                )
    scales = sorted({p.scale for p in m.pieces} - {1})
    if scales:
        return f"it holds elements times {scales[0]}"
    return "placements cut axes into the chunks of torch.chunk, all ranks alike"


class _Cut(NamedTuple):
    """Placements of the first mesh axes, and the indices that each place of those axes then holds."""

    placements: tuple[Any, ...]
    held: dict[tuple[int, ...], tuple[IntArray, ...]]


def _searched(shape: Shape, grid: IntArray, lists: Mapping[int, _Lists]) -> Iterator[_Cut]:
    """Placements of all mesh axes that agree with the index lists, depth first."""
    waiting = [_Cut((), {(): tuple(np.arange(n) for n in shape)})]
    while waiting:
        cut = waiting.pop()
        if len(cut.placements) == grid.ndim:
            yield cut
            continue
        here = _unions(grid, lists, len(cut.placements) + 1)
        size = grid.shape[len(cut.placements)]
        options = [_extended(cut, p, size, here) for p in _candidates(cut, grid, here)]
        waiting += [o for o in reversed(options) if o is not None]


def _unions(grid: IntArray, lists: Mapping[int, _Lists], axes: int) -> dict[tuple[int, ...], _Lists]:
    """What all ranks at a place of the first mesh axes hold together."""
    found: dict[tuple[int, ...], _Lists] = {}
    for place in np.ndindex(grid.shape[:axes]):
        known = [its for rank in np.ravel(grid[place]).tolist() if (its := lists[rank]) is not None]
        found[place] = tuple(np.unique(np.concatenate(parts)) for parts in zip(*known)) if known else None
    return found


def _candidates(cut: _Cut, grid: IntArray, here: Mapping[tuple[int, ...], _Lists]) -> Iterator[Any]:
    """Placements to try on the next mesh axis, the plainest first."""
    yield Replicate()
    axes = range(len(cut.held[next(iter(cut.held))]))
    yield from (Shard(axis) for axis in axes)
    for axis in axes:
        extents = sorted({len(its[axis]) for its in cut.held.values()})
        yield from (
            _StridedShard(axis, split_factor=factor)
            for factor in _factors(extents, grid.shape, any(its is not None for its in here.values()))
        )


def _factors(extents: Sequence[int], mesh: Shape, known: bool) -> list[int]:
    """Split factors that cut axes of these extents in different ways, products of mesh sizes first."""
    products = {1}
    for size in mesh:
        products |= {p * size for p in products}
    tried = [*sorted(products), *(range(2, max(extents) + 1) if known else ())]
    ways: dict[tuple[int, ...], int] = {}
    for factor in tried:
        ways.setdefault(tuple(-(-n // factor) for n in extents), factor)
    return [factor for factor in ways.values() if factor > 1]


def _extended(cut: _Cut, placement: Any, size: int, here: Mapping[tuple[int, ...], _Lists]) -> _Cut | None:
    """A cut with one more placement, if that agrees with what is held."""
    held: dict[tuple[int, ...], tuple[IntArray, ...]] = {}
    for place, its in cut.held.items():
        for k, part in enumerate(_parts(its, placement, size)):
            known = here[(*place, k)]
            if known is not None and not all(map(np.array_equal, part, known)):
                return None
            held[(*place, k)] = part
    return _Cut((*cut.placements, placement), held)


def _parts(its: tuple[IntArray, ...], placement: Any, size: int) -> list[tuple[IntArray, ...]]:
    """What each place of a mesh axis gets of index lists."""
    if isinstance(placement, Replicate):
        return [its] * size
    axis = placement.dim
    factor = int(placement.split_factor) if isinstance(placement, _StridedShard) else 1
    got: list[list[IntArray]] = [[] for _ in range(size)]
    for chunk in _chunked(its[axis], factor):
        for mine, part in zip(got, _chunked(chunk, size)):
            mine.append(part)
    return [(*its[:axis], np.concatenate(mine), *its[axis + 1 :]) for mine in got]


def _chunked(indices: IntArray, parts: int) -> list[IntArray]:
    """The ``parts`` chunks of ``torch.chunk``, empty ones included."""
    each = -(-len(indices) // parts)
    return [indices[k * each : (k + 1) * each] for k in range(parts)]


def to_dtensor(m: AffineMap, shards: Mapping[int, torch.Tensor], mesh: Any) -> DTensor:
    """The DTensor of this process's shard on a ``DeviceMesh``. Nothing is sent.

    Raises ``UnsupportedError`` where no placements give the layout.
    """
    return _dtensor(m, shards, mesh, to_placements(m, mesh))


def _dtensor(
    m: AffineMap, shards: Mapping[int, torch.Tensor], mesh: Any, placements: Sequence[Any]
) -> DTensor:
    """The DTensor of this process's shard under placements that are known to give the layout."""
    sharded(m, shards)
    rank = dist.get_rank()
    if rank in m.ranks and rank not in shards:
        raise InvalidMapError(f"this process is rank {rank} of the layout and gives no shard for it")
    local = shards[rank] if rank in m.ranks else torch.empty(0, device=mesh.device_type)
    shape = m.logical_shape
    return DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=row_major(shape)
    )


# --- moving ---------------------------------------------------------------------------------


def redistribute(ctx: Any, tensor: DTensor, mesh: Any, placements: Sequence[Any]) -> DTensor:
    """The same tensor under other placements, on the same mesh or another of processes of ``ctx``.

    Collective over ``ctx``. Every element crosses at most once and no rank ever holds more than its two
    shards. To move many tensors, or one many times, plan once and ``bind`` once instead.
    """
    source, shards = from_dtensor(tensor)
    target = from_placements(tensor.shape, mesh, placements)
    moved = run(ctx, bind(ctx, plan(source, target)), shards)
    return _dtensor(target, moved, mesh, placements)
