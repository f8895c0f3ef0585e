"""The ZeRO buffer: parameters flattened one after the other, padded at the end, cut evenly."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardalg import (
    AffineMap,
    Experts,
    Flat,
    InvalidMapError,
    Space,
    Split,
    check_layout,
    equivalent,
    extract,
    flat_group,
    layout,
    nest,
    padding,
    predivided_bias,
    probe,
    rebuild,
    relabel,
)
from shardalg.testing import shapes

NAMES = ("w", "a", "bias", "scale")


def buffer(tensors, ranks, align):
    """What ZeRO does: flatten, concatenate, pad to lcm(align, ranks), chunk."""
    flat = torch.cat([t.reshape(-1) for t in tensors.values()] or [torch.zeros(0)])
    whole = math.lcm(align, ranks)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % whole))
    return dict(enumerate(flat.reshape(ranks, -1)))


@given(st.lists(shapes(), max_size=4), st.integers(1, 5), st.sampled_from([1, 2, 3, 4, 6, 16]))
def test_flat_group_is_the_zero_buffer(given_shapes, ranks, align):
    named = dict(zip(NAMES, given_shapes))
    made = check_layout(flat_group(named, ranks, align))
    assert made.codomain == Space.logical(named)
    count = iter(range(1, 10**6))
    tensors = {
        n: torch.tensor([next(count) for _ in range(math.prod(s))]).reshape(s) for n, s in named.items()
    }
    if not tensors:
        return
    wanted = buffer(tensors, ranks, align)
    shards = extract(made, tensors if list(tensors) != [""] else tensors[""])
    assert all(torch.equal(shards[r], x.to(shards[r].dtype)) for r, x in wanted.items())
    assert padding(made).size == sum(int((x == 0).sum()) for x in wanted.values())
    back = rebuild(made, shards)
    assert all(torch.equal(back[n], t) for n, t in tensors.items())


@given(shapes(), st.integers(1, 5), st.sampled_from([1, 3, 4]))
def test_a_group_of_one_is_flat(shape, ranks, align):
    one = flat_group({"": shape}, ranks, align)
    assert equivalent(one, layout(shape, Flat(align), ranks=ranks))


def test_the_order_of_the_buffer_is_the_order_given():
    one, other = flat_group({"a": 2, "b": 2}, 2), flat_group({"b": 2, "a": 2}, 2)
    assert one.codomain == other.codomain and not equivalent(one, other)
    assert [p.codomain.name for p in other.pieces] == ["b", "a"]


def test_many_parameters_cost_a_piece_each_and_one_more_per_cut():
    many = flat_group({f"layer.{k}": (17, 3) for k in range(1000)}, 64, align=128)
    assert len(many) <= 1000 + 64


def test_a_group_refuses():
    with pytest.raises(InvalidMapError, match="align must be at least 1, got 0"):
        flat_group({"w": 3}, 2, align=0)
    with pytest.raises(InvalidMapError, match="ranks must be at least 1"):
        flat_group({"w": 3}, 0)


# --- ZeRO on top of tensor and expert parallelism -----------------------------------------


def zero_over(outer, degree, align):
    """Each shard of ``outer`` flattened and cut over ``degree`` data-parallel ranks."""
    return nest(outer, {r: layout(outer.shard_shape(r), Flat(align), ranks=degree) for r in outer.ranks})


OUTERS = {
    "columns": layout((6, 10), Split(1), ranks=3),
    "uneven rows": layout((7, 3), Split(0), ranks=2),
    "experts": layout((4, 3, 2), Experts([[3, 0], [], [1, 2, 0]])),
}


@pytest.mark.parametrize("name", OUTERS)
@pytest.mark.parametrize("degree, align", [(1, 1), (2, 4), (3, 1), (4, 6)])
def test_zero_over_an_outer_layout(name, degree, align):
    outer = OUTERS[name]

    def partition(full, rank):
        tp, dp = divmod(rank, degree)
        return buffer({"": extract(outer, full, tp)}, degree, align)[dp]

    made = zero_over(outer, degree, align)
    assert equivalent(made, probe(partition, outer.logical_shape, len(outer.ranks) * degree))


def beside(named):
    """Layouts of several tensors on the same ranks as one map with a box per rank and name."""
    moved = {n: relabel(m, domain=lambda key, n=n: (key[0], n), codomain={"": n}) for n, m in named.items()}
    boxes = [[b for m in moved.values() for b in side(m).boxes] for side in (of_domain, of_codomain)]
    pieces = [p for m in moved.values() for p in m.pieces]
    return AffineMap.from_pieces(Space(tuple(boxes[0])), Space(tuple(boxes[1])), pieces)


def of_domain(m):
    return m.domain


def of_codomain(m):
    return m.codomain


PARALLEL = {
    "tensor parallel": {"w": layout((6, 4), Split(0), ranks=2), "b": layout((6,), Split(0), ranks=2)},
    "row parallel": {"w": layout((5, 6), Split(1), ranks=2), "b": predivided_bias((5,), 2)},
    "expert parallel": {
        "w1": layout((4, 3, 2), Experts([[3, 0], [1, 2]])),
        "w2": layout((4, 2, 3), Experts([[3, 0], [1, 2]])),
    },
}


@pytest.mark.parametrize("name", PARALLEL)
@pytest.mark.parametrize("degree, align", [(1, 1), (2, 4), (3, 6)])
def test_a_zero_buffer_of_the_shards_of_many_parameters(name, degree, align):
    """Each rank's shards flattened together and cut over its data-parallel group."""
    named = PARALLEL[name]
    outer = beside(named)
    inner = {
        r: flat_group({n: m.shard_shape(r) for n, m in named.items()}, degree, align) for r in outer.ranks
    }
    made = check_layout(nest(outer, inner))
    generator = torch.Generator().manual_seed(0)
    full = {n: torch.randn(m.logical_shape, generator=generator) for n, m in named.items()}
    shards = extract(made, full)
    for r in outer.ranks:
        wanted = buffer({n: extract(m, full[n], r) for n, m in named.items()}, degree, align)
        assert all(torch.equal(shards[r * degree + k], x) for k, x in wanted.items())
    back = rebuild(made, shards)
    assert all(torch.allclose(back[n], x) for n, x in full.items())
