"""``probe(lambda full, r: extract(L, full, r))`` is equivalent to L, and what is no view is refused."""

from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardalg import (
    BlockGather,
    InvalidMapError,
    LimitError,
    Limits,
    Replicate,
    Split,
    equivalent,
    extract,
    layout,
    nest,
    padding,
    probe,
    region,
    relabel,
)
from shardalg.ops._families import families_in
from shardalg.ops._probe import EXACT, digit_bits, digits_needed, markers, proofs
from shardalg.testing import layouts


def probe_again(made, **how):
    return probe(lambda full, rank: extract(made, full, rank), made.logical_shape, made.ranks, **how)


@given(layouts())
def test_probe_gives_back_the_layout_that_extracts(made):
    """probe(extract(L, ., r)) is equivalent to L, spaces and scales included."""
    assert equivalent(probe_again(made), made)
    assert equivalent(probe_again(made, like="numpy"), made)


@given(layouts(scaled=False), st.sampled_from(["bfloat16", "float16", "float64", "int64", "int32", "int16"]))
def test_probe_in_every_type(made, dtype):
    assert equivalent(probe_again(made, dtype=dtype), made)


FORMS = {
    "one shard": lambda full, rank: full[rank * 2 : rank * 2 + 2],
    "one shard, rank by name": lambda full, rank=None: full[rank * 2 : rank * 2 + 2],
    "a tuple": lambda full: full.split(2),
    "a list": lambda full: list(full.split(2)),
    "a mapping": lambda full: dict(enumerate(full.split(2))),
    "parameters": lambda full, rank: torch.nn.Parameter(full.split(2)[rank]),
}


@pytest.mark.parametrize("form", FORMS)
def test_both_forms_of_a_partition(form):
    assert probe(FORMS[form], (6, 3), 3) == layout((6, 3), Split(0), ranks=3)


def test_ranks_are_ids_and_may_be_absent():
    found = probe(lambda full, rank: None if rank == 7 else full, (4,), (2, 7, 9))
    assert found == layout((4,), Replicate(), ranks=(2, 9))
    assert probe(lambda full: {9: full[:1]}, (4,), (2, 9)).ranks == (9,)


def test_a_partition_may_write_on_its_input():
    assert probe(lambda full, rank: full.div_(2), (4,), 2) == layout((4,), Replicate(Fraction(1, 2)), ranks=2)


@pytest.mark.parametrize("fill", [0.0, -1.5, float("inf"), float("nan")])
def test_constant_padding_is_padding(fill):
    def partition(full, rank):
        shard = torch.full((3, 2), fill)
        shard[1 : 1 + len(full[rank::2])] = full[rank::2]
        return shard

    found = probe(partition, (3, 2), 2)
    assert found.size == 6
    assert equivalent(padding(found), region(found.domain, {0: slice(0, 1), 1: slice(0, 3, 2)}))


def test_replicas_inside_a_shard():
    found = probe(lambda full, rank: full.repeat(3), (4,), 1)
    assert found.size == 12 and not found.injective and len(found) == 1


@pytest.mark.parametrize(
    "scale", [Fraction(1, 3), Fraction(-2, 7), Fraction(1, 768), Fraction(5), Fraction(1, 2**20)]
)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scales_are_exact_rationals(scale, dtype):
    def divided(full, rank):
        return full * scale.numerator / scale.denominator

    def multiplied(full, rank):
        return full * float(scale)

    for partition in (divided, multiplied):
        assert probe(partition, (5,), 2, dtype=dtype) == layout((5,), Replicate(scale), ranks=2)


def test_several_scales_in_one_shard():
    found = probe(lambda full, rank: torch.cat([full / 3, full[:1] * 2]), (4,), 1)
    assert sorted(p.scale for p in found.pieces) == [Fraction(1, 3), 2]


def test_functions_that_index_get_integers():
    table = torch.arange(6)
    assert probe(lambda full, rank: table[full][rank * 3 :][:3], (6,), 2) == layout((6,), Split(0), ranks=2)
    assert probe(lambda full, rank: full & 0xFFFF, (6,), 2) == layout((6,), Replicate(), ranks=2)


def test_small_and_empty_tensors():
    assert probe(lambda full, rank: full, (), 2) == layout((), Replicate(), ranks=2)
    assert probe(lambda full: full.tensor_split(3), (2,), 3) == layout((2,), Split(0), ranks=3)
    assert probe(lambda full, rank: full, (0, 3), 2) == layout((0, 3), Replicate(), ranks=2)


NO_VIEWS = {
    "a sum": lambda full, rank: full[:4] + full[4:],
    "a mean": lambda full, rank: full.reshape(2, 4).mean(0),
    "a difference": lambda full, rank: full - full.flip(0),
    "a weighted sum": lambda full, rank: 2 * full - full.flip(0),
    "an offset": lambda full, rank: full + 1,
    "a square": lambda full, rank: full * full,
    "an order": lambda full, rank: full.sort().values,
    "a maximum": lambda full, rank: full.max()[None],
    "a sign": lambda full, rank: full.abs(),
    "a choice": lambda full, rank: full if full.sum() > 0 else full.flip(0),
    "a bound": lambda full, rank: full.clamp(-100, 100),
    "a wider bound": lambda full, rank: full.clamp(-1000, 1000),
    "a bound near the end": lambda full, rank: full.clamp(-1e30, 1e30),
    "a choice by a zero": lambda full, rank: full[:2] if bool((full == 0).any()) else full[2:4],
    "a choice by no zero": lambda full, rank: full[:2] if bool((full != 0).all()) else full[2:4],
    "a choice by equal neighbours": lambda full, rank: full[:2] if full[0] == full[1] else full[2:4],
    "a choice by other neighbours": lambda full, rank: full[:2] if full[1] == full[2] else full[2:4],
    "a choice by equal ends": lambda full, rank: full[:2] if full[0] == full[-1] else full[2:4],
    "a flush of small values": lambda full, rank: torch.where(full.abs() < 1e-25, 0.0, full),
    "a threshold": lambda full, rank: torch.where(full.abs() < 1e-30, 1.0, full),
    "a filter": lambda full, rank: full[full > 0],
    "a rounding": lambda full, rank: full.floor(),
    "a conversion": lambda full, rank: full.half(),
    "a conversion and back": lambda full, rank: full.bfloat16().float(),
    "a truncation": lambda full, rank: full.to(torch.int8).float(),
    "other bits": lambda full, rank: full.view(torch.int32),
    "noise": lambda full, rank: torch.rand(8),
    "a list of numbers": lambda full, rank: full.tolist(),
    "a single shard": lambda full: full,
    "too few shards": lambda full: [full],
    "a shard of another rank": lambda full: {5: full},
}


@pytest.mark.parametrize("kind", NO_VIEWS)
def test_no_view_is_refused(kind):
    with pytest.raises(InvalidMapError):
        probe(NO_VIEWS[kind], (8,), 2)


CHOICES = [kind for kind in NO_VIEWS if kind.startswith("a choice by")]


@pytest.mark.parametrize("kind", CHOICES)
@pytest.mark.parametrize("dtype", ["int64", "int8", "float16", "float64"])
def test_choices_by_values_are_refused_in_every_type(kind, dtype):
    for seed in range(20):
        with pytest.raises(InvalidMapError):
            probe(NO_VIEWS[kind], (12,), 2, dtype=dtype, seed=seed)


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("factor", [1, 3, Fraction(1, 3), 8, Fraction(1, 8)])
def test_proof_data_stays_within_its_type_after_scaling(dtype, factor):
    data = proofs(dtype, 64, (min(1.0, float(factor)), max(1.0, float(factor))), np.random.default_rng(0))
    stored = [torch.from_numpy(x).to(getattr(torch, dtype)) for x in data]
    scaled = torch.cat(stored).double() * float(factor)
    info = (torch.iinfo if dtype.startswith("int") else torch.finfo)(getattr(torch, dtype))
    assert scaled.abs().max() <= info.max
    if not dtype.startswith("int"):
        assert scaled[scaled != 0].abs().min() >= info.smallest_normal
    assert sum(bool((x == 0).any()) and bool((x != 0).any()) for x in stored) >= 1
    assert all((x[1] == x[2] and x[0] == x[-1]) or x[0] == x[1] for x in stored[2:4])


def test_a_tensor_of_few_bits_is_scaled_within_them():
    made = layout((300,), Replicate(3), ranks=1)
    assert probe(lambda full, rank: full * 3, (300,), 1, dtype="int8") == made
    with pytest.raises(InvalidMapError, match="too large for int8 once scaled"):
        probe(lambda full, rank: full * 100, (300,), 1, dtype="int8")


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_a_scale_beyond_every_ratio_is_refused(scale):
    with pytest.raises(InvalidMapError, match="a term beyond 2"):
        probe(lambda full, rank: full * scale, (8,), 1)


@pytest.mark.parametrize("convert", [
    lambda x: x.to("meta"), lambda x: x.to_sparse(), lambda x: torch.empty_like(x, device="meta"),
])  # fmt: skip
def test_shards_without_values_are_refused(convert):
    with pytest.raises(InvalidMapError, match="rank 0 returns a tensor whose values cannot be read"):
        probe(lambda full, rank: convert(full), (8,), 1)


def test_a_tensor_too_large_to_mark_is_refused_before_it_is_made():
    with pytest.raises(LimitError, match="plan_bytes"):
        probe(lambda full, rank: full, (2**40,), 1)
    with pytest.raises(LimitError, match="808 plan_bytes would exceed"):
        probe(lambda full, rank: full, (101,), 1, limits=Limits(plan_bytes=807))


@pytest.mark.parametrize("kind", ["a sum", "an order", "a sign", "a rounding", "an offset", "noise"])
def test_the_refusal_names_rank_slot_and_values(kind):
    def partition(full, rank):
        return NO_VIEWS[kind](full, rank) if rank == 1 else full

    with pytest.raises(InvalidMapError, match=r"rank 1, slot \d+ holds -?\d"):
        probe(partition, (8,), 2)


def test_errors_of_the_function_pass_through():
    def refuses(full, rank):
        raise RuntimeError(f"8 heads do not divide over {rank}")

    with pytest.raises(RuntimeError, match="8 heads"):
        probe(refuses, (8,), 2)


def test_a_conversion_says_which_type_to_probe_with():
    with pytest.raises(InvalidMapError, match='dtype="float16"'):
        probe(NO_VIEWS["a conversion"], (8,), 2)
    assert probe(NO_VIEWS["a conversion"], (8,), 2, dtype="float16") == layout((8,), Replicate(), ranks=2)


# --- markers never overflow ---------------------------------------------------------------


@pytest.mark.parametrize("dtype", EXACT)
def test_marks_stay_exact_whatever_the_size(dtype):
    """The digits of an index, each exact in the type, give the index back: by arithmetic, no tensor."""
    edges = np.array([2**k + d for k in (0, 8, 24, 31, 53, 61) for d in (-1, 0, 1, 2)])
    places = range(digits_needed(2**62, dtype))
    marks = [markers(edges, place, dtype) for place in places]
    for mark in marks:
        stored = torch.from_numpy(mark).to(getattr(torch, dtype))
        assert (stored.to(torch.int64).numpy() == mark).all()
    least = 0 if dtype.startswith("int") else 1
    back = sum((mark - least) << (place * digit_bits(dtype)) for place, mark in zip(places, marks))
    assert (back == edges).all()


@pytest.mark.parametrize("size, dtype", [(2**24 + 2, "float32"), (2**53 + 2, "float64")])
def test_whole_indices_as_marks_would_collide(size, dtype):
    """The twin: one index per mark is not exact past the precision of the type."""
    whole = torch.tensor([size - 1, size - 2]).to(getattr(torch, dtype)).to(torch.int64)
    assert whole.tolist() != [size - 1, size - 2] and digits_needed(size, dtype) > 1


# --- arrays of elements to families -------------------------------------------------------


def points(families):
    found = []
    for (slot, element), axes in families:
        ends = np.array([[slot, element]])
        for extent, *steps in axes:
            ends = (ends[:, None] + np.arange(extent)[None, :, None] * np.array(steps)).reshape(-1, 2)
        found += map(tuple, ends.tolist())
    return sorted(found)


def array_of(made, rank):
    """The element of each slot of one rank, -1 for padding, by extracting the indices."""
    marks = np.arange(1, 1 + np.prod(made.logical_shape, dtype=int)).reshape(made.logical_shape)
    return extract(made, marks, rank) - 1


@given(layouts(scaled=False))
def test_families_hold_each_slot_once(made):
    for rank in made.ranks:
        elements = array_of(made, rank)
        flat = elements.reshape(-1)
        assert points(families_in(elements)) == [(s, e) for s, e in enumerate(flat.tolist()) if e >= 0]


LARGE = {
    "rows": (lambda e: e[256:512], 1),
    "columns": (lambda e: e[:, 16:32], 1),
    "transposed": (lambda e: e.T, 1),
    "flat": (lambda e: e.reshape(-1)[1000:9000], 1),
    "cyclic": (lambda e: e.reshape(-1)[3::7], 1),
    "blocks": (lambda e: e.reshape(64, 16, 64)[:, :4].reshape(-1, 64), 1),
    "flat blocks": (lambda e: e.reshape(64, 16, 64)[:, :4].reshape(-1), 1),
    "padded": (lambda e: np.pad(e[:, :8], ((0, 3), (0, 2)), constant_values=-1), 1),
    "two bands": (lambda e: np.concatenate([e[:300], e[700:]]), 2),
    "shuffled": (lambda e: e[np.random.default_rng(0).permutation(1024)], 1024),
    "shuffled flat": (lambda e: np.random.default_rng(0).permutation(e.reshape(-1)[:2000]), 2000),
    "skewed": (lambda e: np.stack([np.roll(row, k) for k, row in enumerate(e)]), 4096),
}


@pytest.mark.parametrize("name", LARGE)
def test_large_arrays_come_to_few_families(name):
    cut, most = LARGE[name]
    elements = np.ascontiguousarray(cut(np.arange(1024 * 64).reshape(1024, 64)))
    families = families_in(elements)
    flat = elements.reshape(-1)
    assert points(families) == [(s, e) for s, e in enumerate(flat.tolist()) if e >= 0]
    assert len(families) <= most


def test_probing_a_large_matrix_gives_one_piece_per_rank():
    assert probe(lambda full, rank: full.chunk(4, 1)[rank], (1024, 1024), 4) == layout(
        (1024, 1024), Split(1), ranks=4
    )


def test_a_probe_of_a_nested_layout():
    outer = layout((12, 4), BlockGather(0, 2, {0: (5, 0, 2), 1: (1, 3, 4)}))
    made = relabel(nest(outer, {r: layout((6, 4), Split(1), ranks=2) for r in (0, 1)}), domain=[3, 1, 0, 2])
    assert equivalent(probe_again(made), made)


def test_a_function_that_forgot_to_return_is_told_so():
    with pytest.raises(InvalidMapError, match="did it forget to return"):
        probe(lambda full, rank: None, (4, 2), ranks=2)
