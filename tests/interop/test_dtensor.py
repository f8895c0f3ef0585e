"""DTensor is the oracle: layouts equal its own local shards, and come back as placements that mean the same."""

import contextlib
import itertools
import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import shardalg as sa
from shardalg import InvalidMapError, Split, UnsupportedError, equivalent, extract, layout, plan, simplify
from shardalg.interop import dtensor
from shardalg.interop.dtensor import from_placements, to_placements

SHAPES = [
    *itertools.product((0, 1, 2, 5), (1, 3, 12)), (1, 0), (7, 7), (13, 6), (12, 12), (33, 2), (6, 0), (0, 0),
    (4,), (7,), (0,), (1,), (2, 3, 5), (3, 0, 4), (5, 1, 1), (1, 2, 7),
]  # fmt: skip
MESHES = [(2,), (3,), (2, 2), (2, 3)]


def strided(axis, factor):
    return _StridedShard(axis, split_factor=factor)


def options(axes):
    """Placements over the first and the last axis, counted from both ends."""
    last = axes - 1
    return [Replicate(), Shard(0), Shard(last), strided(0, 2), strided(last, 2), strided(last, 3)]


def cases():
    return [
        (shape, mesh, placements)
        for shape in SHAPES
        for mesh in MESHES
        for placements in itertools.product(options(len(shape)), repeat=len(mesh))
    ]


def theirs(full, mesh, placements, place):
    """The local tensor at one place of the mesh, by torch's own splitting."""
    for p, size, k in zip(placements, mesh, place):
        if not isinstance(p, Replicate):
            full = p._split_tensor(full, size, with_padding=False, contiguous=False)[0][k]
    return full


def test_layouts_are_dtensors_own_local_shards():
    """2,268 cases: every shape, mesh and choice of placements; elements, shapes and first offsets."""
    compared = 0
    for shape, mesh, placements in cases():
        m = from_placements(shape, mesh, placements)
        full = torch.arange(math.prod(shape)).reshape(shape)
        shards = extract(m, full)
        for rank, place in enumerate(np.ndindex(mesh)):
            assert shards[rank].equal(theirs(full, mesh, placements, place)), (shape, mesh, placements, place)
            sizes, first = _compute_local_shape_and_global_offset(shape, mesh, list(place), placements)
            assert m.shard_shape(rank) == tuple(sizes)
            assert 0 in sizes or int(shards[rank].reshape(-1)[0]) == int(full[tuple(first)])
        compared += 1
    assert compared == len(SHAPES) * (2 * 6 + 2 * 36)
