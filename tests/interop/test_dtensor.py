"""DTensor is the oracle: layouts equal its local shards, and come back as placements that mean the same."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch_groups
from hypothesis import given
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from shardalg import (
    Cyclic,
    Experts,
    Flat,
    InvalidMapError,
    Split,
    UnsupportedError,
    equivalent,
    extract,
    layout,
)
from shardalg import Replicate as Whole
from shardalg.interop.dtensor import from_placements, to_placements
from shardalg.testing import layouts

SHAPES = [
    *itertools.product((0, 1, 2, 5), (1, 3, 12)), (1, 0), (7, 7), (13, 6), (12, 12), (33, 2), (6, 0), (0, 0),
    (4,), (7,), (0,), (1,), (2, 3, 5), (3, 0, 4), (5, 1, 1), (1, 2, 7), (9, 4), (4, 8, 3), (24,),
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
    """2,520 cases: every shape, mesh and choice of placements; elements, shapes and first offsets."""
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
    assert compared == 2520


def test_the_comparison_sees_another_factor():
    full = torch.arange(13)
    m = from_placements((13,), (2,), [strided(0, 3)])
    assert not extract(m, full)[0].equal(theirs(full, (2,), [strided(0, 2)], (0,)))


def test_dims_count_from_both_ends():
    plain, back = (from_placements((5, 3), (2, 2), [Shard(a), strided(b, 2)]) for a, b in ((1, 0), (-1, -2)))
    assert plain == back


@pytest.mark.parametrize("shape, mesh, placements", cases()[::19])
def test_placements_come_back(shape, mesh, placements):
    """Perhaps in other words: the layout is the same."""
    m = from_placements(shape, mesh, placements)
    assert equivalent(from_placements(shape, mesh, to_placements(m, mesh)), m)


def test_what_was_written_comes_back_where_it_is_the_plainest_way_to_say_it():
    for placements in ((strided(0, 2), Shard(0)), (Shard(1), strided(1, 2)), (Replicate(), Shard(0))):
        m = from_placements((24, 24), (2, 2), placements)
        assert to_placements(m, (2, 2)) == placements
    fsdp_over_tp = layout((16, 4), [Split(0), Split(0)], mesh={"dp": 2, "tp": 4}, order=("tp", "dp"))
    assert to_placements(fsdp_over_tp, (2, 4)) == (strided(0, 4), Shard(0))


def test_a_factor_that_is_no_product_of_mesh_sizes_is_found():
    m = from_placements((60, 2), (2, 3), [strided(0, 7), strided(0, 5)])
    assert equivalent(from_placements((60, 2), (2, 3), to_placements(m, (2, 3))), m)


def test_a_mesh_of_other_ranks():
    m = from_placements((6,), np.array([[5, 1], [0, 9]]), [Shard(0), Shard(0)])
    assert [m.shard_shape(r) for r in (5, 1, 0, 9)] == [(2,), (1,), (2,), (1,)]
    assert to_placements(m, np.array([[5, 1], [0, 9]])) == (Shard(0), Shard(0))
    with pytest.raises(
        UnsupportedError, match=r"the layout has ranks \(0, 1, 5, 9\), the mesh \[0, 1, 2, 3\]"
    ):
        to_placements(m, (2, 2))


@given(m=layouts(max_size=12))
def test_every_layout_is_said_or_refused(m):
    """Whatever is said means the layout; a layout that cuts no axis is never said."""
    try:
        found = to_placements(m, np.array(m.ranks))
    except UnsupportedError:
        return
    assert equivalent(from_placements(m.logical_shape, np.array(m.ranks), found), m)


@pytest.mark.parametrize(
    "placement, words",
    [
        (Cyclic(0, 1, first=1), "torch.chunk"),
        (Experts([[1, 0], [3, 2]]), "rank 0 holds 1 and then 0 along axis 0"),
        (Split(0, sizes=(1, 3)), "torch.chunk"),
        (Split(0, rule="pad", unit=3), "rank 1 has padding along axis 0"),
        (Whole(Fraction(1, 2)), "it holds elements times 1/2"),
        (Flat(1), r"rank 0 stores shape \(4,\) of a tensor of shape \(4, 2\), other axes"),
    ],
)
def test_what_placements_cannot_say_is_refused(placement, words):
    with pytest.raises(UnsupportedError, match=words):
        to_placements(layout((4, 2), placement, ranks=2), (2,))


def test_pending_sums_are_refused_by_name():
    with pytest.raises(InvalidMapError, match=r"Partial\(sum\) is a pending sum, not a layout: reduce first"):
        from_placements((4,), (2, 2), [Shard(0), Partial()])
    with pytest.raises(InvalidMapError, match="expected a placement of torch"):
        from_placements((4,), (2,), [Split(0)])


# --- real processes -------------------------------------------------------------------------


def test_dtensors_move_between_processes(team):
    """Case 37 among them: torch itself moves it wrongly, which the same comparison sees."""
    said = team.run(torch_groups.move_dtensors).good()
    for its in said:
        assert "the layout says" in its["wrong_local"]
        assert all(right is True for name, right in its.items() if name not in ("wrong_local", "hard_torchs"))
    assert not all(its["hard_torchs"] for its in said)
