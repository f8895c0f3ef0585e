"""Layouts of placements on a mesh are those of torch's DTensor, uneven sizes and strided shards included."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardalg import Replicate, Split, StridedSplit, equivalent, layout, probe


def theirs(placement):
    """Our placement in torch's words."""
    if isinstance(placement, StridedSplit):
        return _StridedShard(placement.axis, split_factor=placement.split_factor)
    return TorchReplicate() if isinstance(placement, Replicate) else Shard(placement.axis)


def local(full, placements, mesh, place):
    """The shard at one place of the mesh by torch's own splitting, left to right."""
    for p, n, k in zip(placements, mesh, place):
        if not isinstance(p, TorchReplicate):
            full = p._split_tensor(full, n, with_padding=False, contiguous=False)[0][k]
    return full


@st.composite
def meshes(draw):
    """A shape, a mesh of 1 to 3 axes and a placement for each."""
    shape = tuple(draw(st.lists(st.integers(1, 40), min_size=1, max_size=2)))
    mesh = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    axes = st.integers(0, len(shape) - 1)
    one = st.one_of(
        st.builds(Split, axes), st.builds(StridedSplit, axes, st.integers(1, 4)), st.just(Replicate())
    )
    return shape, mesh, [draw(one) for _ in mesh]


def places(mesh):
    return list(itertools.product(*map(range, mesh)))


@given(meshes())
def test_a_layout_on_a_mesh_is_a_dtensors(case):
    shape, mesh, placements = case
    ours = layout(shape, placements, mesh=mesh)
    torchs, at = [theirs(p) for p in placements], places(mesh)
    found = probe(lambda full, rank: local(full, torchs, mesh, at[rank]), shape, math.prod(mesh))
    assert equivalent(ours, found)
    for rank, place in enumerate(at):
        sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(place), torchs)
        assert ours.shard_shape(rank) == tuple(sizes)
        if math.prod(sizes):
            first = min(p.codomain.offset for p in ours.pieces_of(rank) if p.domain.offset == 0)
            assert first == sum(o * math.prod(shape[k + 1 :]) for k, o in enumerate(offsets))


def test_the_comparison_sees_another_split_factor():
    found = probe(lambda full, r: local(full, [_StridedShard(0, split_factor=3)], (2,), (r,)), (13,), 2)
    assert equivalent(found, layout((13,), StridedSplit(0, 3), ranks=2))
    assert not equivalent(found, layout((13,), StridedSplit(0, 2), ranks=2))
