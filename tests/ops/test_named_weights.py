"""Experts, gate-up pairs, vocabularies, contexts and matrices against the functions that cut them."""

from fractions import Fraction

import numpy as np
import peers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardalg import (
    Attention,
    Cyclic,
    Experts,
    InvalidMapError,
    Split,
    block_cyclic,
    compose,
    context_parallel,
    equivalent,
    expert_part,
    extract,
    gate_up,
    is_surjective,
    layout,
    nest,
    packed_experts,
    padded_vocabulary,
    plan,
    predivided_bias,
    probe,
    rebuild,
)

# --- packed experts -----------------------------------------------------------------------

E, F, H = 4, 3, 5
SOURCES = {"gate_up_first": ((E, 2 * F, H), (E, H, F)), "hidden_first": ((E, H, 2 * F), (E, F, H))}


def source_shape(order, part):
    return SOURCES[order][part == "down"]


@pytest.mark.parametrize("order", SOURCES)
@pytest.mark.parametrize("part", ["gate", "up", "down"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_packed_experts_equal_deepspeeds_repacking(order, part, ranks):
    """A probe of the repacking of one source tensor, the other one held constant."""
    fused, down = (torch.ones(s) for s in SOURCES[order])

    def partition(full, rank):
        given = (fused, full) if part == "down" else (full, down)
        return peers.repacked(*given, rank, ranks)[part]

    shape = source_shape(order, part)
    ours = packed_experts(shape, Experts.uniform(E, ranks), part, order=order)
    assert equivalent(ours, probe(partition, shape, ranks))


@given(
    st.sampled_from(sorted(SOURCES)),
    st.lists(st.lists(st.integers(0, E - 1), unique=True), min_size=1, max_size=4),
)
def test_any_placement_of_experts_against_repacking_at_one_rank(order, by_rank):
    """Reordered, empty, replicated: each rank holds the listed experts of the weights packed whole."""
    fused, down = (torch.randn(s, generator=torch.Generator().manual_seed(0)) for s in SOURCES[order])
    whole = peers.repacked(fused, down, 0, 1)
    for part, packed in whole.items():
        full = down if part == "down" else fused
        shards = extract(packed_experts(full.shape, Experts(by_rank), part, order=order), full)
        again = extract(layout(packed.shape, Experts(by_rank)), packed)
        for rank, ids in enumerate(by_rank):
            assert torch.equal(shards[rank], packed[ids]) and torch.equal(again[rank], packed[ids])


def test_packed_experts_are_the_part_after_the_placement():
    experts = Experts([[2, 0], [1, 3]])
    part = expert_part((E, 2 * F, H), "up")
    assert equivalent(packed_experts((E, 2 * F, H), experts, "up"), compose(part, layout((E, F, H), experts)))


@pytest.mark.parametrize(
    "shape, part, order, reason",
    [
        ((4, 5, 3), "up", "gate_up_first", r"5 = 2\*2 \+ 1"),
        ((4, 6), "up", "gate_up_first", "rows, columns"),
        ((4, 6, 3), "left", "gate_up_first", "part must be one of"),
        ((4, 6, 3), "up", "up_first", "order must be"),
    ],
)
def test_experts_that_cannot_be_packed_are_refused(shape, part, order, reason):
    with pytest.raises(InvalidMapError, match=reason):
        expert_part(shape, part, order)


# --- gate and up --------------------------------------------------------------------------


@pytest.mark.parametrize("rows, ranks, grain", [(16, 2, 1), (20, 3, 1), (40, 3, 4), (44, 2, 4), (6, 4, 1)])
def test_gate_and_up_cut_before_fusing(rows, ranks, grain):
    """DeepSpeed's GateUpPack: the widths of each half, under the name "mlp"."""
    sizes = peers.shard_sizes(rows // 2, ranks, Attention(kv_heads=2, grain=grain), "mlp")

    def partition(full, rank):
        return torch.cat([half.split(sizes)[rank] for half in full.split(rows // 2)])

    assert equivalent(gate_up((rows, 3), ranks, grain=grain), probe(partition, (rows, 3), ranks))


@pytest.mark.parametrize("rows, ranks", [(16, 2), (20, 3), (6, 4)])
def test_gate_and_up_cut_after_fusing(rows, ranks):
    found = probe(lambda full, rank: full.tensor_split(ranks)[rank], (rows, 3), ranks)
    assert equivalent(gate_up((rows, 3), ranks, cut="after"), found)
    assert not equivalent(gate_up((rows, 3), ranks), found)


def test_gate_and_up_along_another_axis():
    found = probe(lambda full, rank: torch.cat([h.chunk(2, 1)[rank] for h in full.chunk(2, 1)], 1), (3, 8), 2)
    assert equivalent(gate_up((3, 8), 2, axis=1), found)
    assert equivalent(gate_up((3, 8), 2, axis=-1), found)


def test_gate_and_up_refuse():
    with pytest.raises(InvalidMapError, match="7 does not divide into 2 equal halves"):
        gate_up((7,), 2)
    with pytest.raises(InvalidMapError, match="before"):
        gate_up((8,), 2, cut="during")
    with pytest.raises(InvalidMapError, match="axis 1 does not exist"):
        gate_up((8,), 2, axis=1)


# --- vocabulary, bias, context, matrices --------------------------------------------------


@given(st.integers(1, 40), st.integers(1, 6), st.integers(0, 3), st.booleans())
def test_padded_vocabulary(rows, ranks, extra, across):
    """Pad, then cut evenly."""
    height = (-(-rows // ranks) + extra) * ranks
    axis = 1 if across else 0
    shape = (2, rows) if across else (rows, 2)

    def partition(full, rank):
        pad = (0, height - rows) if across else (0, 0, 0, height - rows)
        return torch.nn.functional.pad(full, pad).chunk(ranks, axis)[rank]

    found = padded_vocabulary(shape, ranks, height=height, axis=axis)
    assert equivalent(found, probe(partition, shape, ranks))
    assert is_surjective(found)


@pytest.mark.parametrize("rows", [13, 32, 100, 50257])
@pytest.mark.parametrize("source", [1, 2, 4, 8])
@pytest.mark.parametrize("target", [1, 2, 4, 8])
def test_vocabularies_of_different_heights_move_in_few_copies(rows, source, target):
    a, b = (padded_vocabulary((rows, 4), n, height=-(-rows // n) * n) for n in (source, target))
    p = plan(a, b)
    assert p.stats.elements == rows * 4 and len(p) <= source + target


def test_padded_vocabulary_refuses():
    with pytest.raises(InvalidMapError, match="13 rows cannot be padded to 12"):
        padded_vocabulary((13, 2), 4, height=12)
    with pytest.raises(InvalidMapError, match=r"14 does not divide into 4 .*; 12 or 16 would"):
        padded_vocabulary((13, 2), 4, height=14)


@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 768])
def test_predivided_bias(ranks):
    found = predivided_bias((5,), ranks)
    assert equivalent(found, probe(lambda full, rank: full / float(ranks), (5,), ranks))
    assert {p.scale for p in found.pieces} == {Fraction(1, ranks)}


@given(st.integers(1, 5), st.integers(0, 3), st.integers(0, 1))
def test_context_parallel(ranks, size, axis):
    """Rank r holds chunks r and 2P-1-r, so that causal attention costs every rank the same."""
    n = 2 * ranks * size
    shape = (n, 2) if axis == 0 else (2, n)

    def partition(full, rank):
        chunks = full.tensor_split(2 * ranks, axis)
        return torch.cat([chunks[rank], chunks[2 * ranks - 1 - rank]], axis)

    found = context_parallel(shape, ranks, axis=axis)
    assert equivalent(found, probe(partition, shape, ranks))
    work = [sum(e // 2 for p in found.pieces_of(r) for _, e in points(p)) for r in range(ranks)]
    assert axis == 1 or len(set(work)) == 1


def points(piece):
    index = np.indices(piece.shape).reshape(len(piece.shape), -1)
    ends = [side.offset + np.array(side.strides, int) @ index for side in (piece.domain, piece.codomain)]
    return zip(*(e.tolist() for e in ends))


def test_context_parallel_refuses():
    with pytest.raises(InvalidMapError, match=r"10 does not divide into 4 equal chunks"):
        context_parallel((10,), 2)


@given(
    st.tuples(st.integers(0, 9), st.integers(0, 9)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(1, 3), st.integers(1, 3)),
    st.tuples(st.integers(0, 2), st.integers(0, 2)),
)
def test_block_cyclic_matrices(shape, grid, blocks, first):
    """Element (i, j) lies on the rank of its blocks, in order."""

    def partition(full, rank):
        place = divmod(rank, grid[1])
        for axis in (0, 1):
            owner = (np.arange(shape[axis]) // blocks[axis] + first[axis]) % grid[axis]
            full = full.take(np.flatnonzero(owner == place[axis]), axis)
        return full

    found = block_cyclic(shape, grid, blocks, first=first)
    assert equivalent(found, probe(partition, shape, grid[0] * grid[1], like="numpy"))


def test_block_cyclic_of_one_axis_is_cyclic():
    assert block_cyclic((23,), (3,), (3,), first=(1,)) == layout((23,), Cyclic(0, 3, 1), ranks=3)
    with pytest.raises(InvalidMapError, match="per axis"):
        block_cyclic((9, 4), (2,), (2, 1))


# --- named layouts go through everything else ---------------------------------------------

EXAMPLES = [
    gate_up((16, 3), 2),
    gate_up((16, 3), (4, 1), cut="after"),
    packed_experts((4, 5, 6), Experts([[3, 0], [], [1, 2]]), "up", order="hidden_first"),
    padded_vocabulary((13, 2), 4, height=16),
    context_parallel((8, 2), 2),
    block_cyclic((9, 4), (2, 2), (2, 1)),
]


@pytest.mark.parametrize("made", EXAMPLES)
def test_extract_rebuild_and_cut_again(made):
    full = torch.randn(made.logical_shape, generator=torch.Generator().manual_seed(0))
    held = rebuild(made, extract(made, full))
    assert torch.equal(held, full if is_surjective(made) else torch.where(held == 0, 0, full))
    shards = {r: made.shard_shape(r) for r in made.ranks}
    again = nest(made, {r: layout(s, Split(0), ranks=2) for r, s in shards.items()})
    for rank, shard in extract(made, full).items():
        two = [extract(again, full, 2 * rank + k) for k in (0, 1)]
        assert torch.equal(torch.cat(two), shard)
