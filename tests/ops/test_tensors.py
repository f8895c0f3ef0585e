"""extract and rebuild: the meaning of a layout on tensors, against the oracle."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.utils._pytree as torch_pytree
from hypothesis import assume, given
from laws import recut
from oracle import meaning

import shardalg as sa
from shardalg import (
    AffineMap,
    InvalidMapError,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    UnsupportedError,
    extract,
    layout,
    rebuild,
    sharded,
)
from shardalg.testing import layouts

QKV = Segments(0, ((32, Split(0)), (16, Replicate())))
DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8,
    torch.int16, torch.uint16, torch.int32, torch.int64, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def numbered(shape: tuple[int, ...]) -> np.ndarray:
    """36 times 1, 2, 3, ...: every scale of the strategies keeps them apart and exact."""
    return (36.0 * np.arange(1, 1 + int(np.prod(shape)))).reshape(shape)


@given(one=recut(layouts()))
def test_a_shard_holds_what_the_layout_says(one):
    """Slot s of rank r is ``element * scale``; padding is 0."""
    full = numbered(one.logical_shape)
    shards = extract(one, full)
    assert list(shards) == list(one.ranks)
    want = {r: np.zeros(one.shard_shape(r)).reshape(-1) for r in one.ranks}
    for (key, slot), (_, element), scale in meaning(one).triples:
        want[key[0]][slot] = full.reshape(-1)[element] * scale.numerator / scale.denominator
    for r in one.ranks:
        assert shards[r].shape == one.shard_shape(r)
        np.testing.assert_allclose(shards[r].reshape(-1), want[r])
        np.testing.assert_array_equal(extract(one, full, rank=r), shards[r])


@given(one=recut(layouts(scaled=False)))
def test_numpy_and_torch_agree(one):
    full = numbered(one.logical_shape)
    mine, theirs = extract(one, full), extract(one, torch.from_numpy(full))
    assert all(np.array_equal(mine[r], theirs[r].numpy()) for r in one.ranks)
    assert np.array_equal(rebuild(one, mine), rebuild(one, theirs).numpy())


@given(one=recut(layouts()))
def test_rebuild_undoes_extract(one):
    """``rebuild(L, extract(L, x)) = x`` where L is onto; elsewhere the rest is 0."""
    full = numbered(one.logical_shape)
    again = rebuild(one, extract(one, full))
    held = np.zeros(full.size, bool)
    held[[e for _, (_, e), _ in meaning(one).triples]] = True
    np.testing.assert_allclose(again.reshape(-1), np.where(held, full.reshape(-1), 0))


@given(one=recut(layouts(scaled=False)))
def test_extract_undoes_rebuild_on_slots_that_hold_something(one):
    """``extract(L, rebuild(L, s)) = s`` on non-padding slots when replicas agree."""
    shards = extract(one, numbered(one.logical_shape))
    noisy = {r: x.copy() for r, x in shards.items()}
    for (key, slot), *_ in meaning(sa.padding(one)).triples:
        noisy[key[0]].reshape(-1)[slot] = -1
    again = extract(one, rebuild(one, noisy))
    assert all(np.array_equal(again[r], shards[r]) for r in shards)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_moves_bit_for_bit(dtype):
    one = layout((48, 8), QKV, ranks=4)
    raw = torch.randint(0, 256, (48 * 8 * torch.empty((), dtype=dtype).element_size(),), dtype=torch.uint8)
    raw = raw % 2 if dtype == torch.bool else raw
    full = raw.view(dtype).reshape(48, 8)
    again = rebuild(one, extract(one, full))
    assert again.view(torch.uint8).equal(full.view(torch.uint8))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0, 2), (1, 5, 1)])
def test_small_and_empty_tensors_are_ordinary(shape):
    full = torch.arange(int(np.prod(shape))).reshape(shape)
    one = layout(shape, Replicate(), ranks=2)
    assert rebuild(one, extract(one, full)).equal(full)


def test_views_and_strides_of_the_input_do_not_matter():
    """Case 4: a shard in the middle of a larger storage; a transposed, an expanded input."""
    full = torch.randn(8, 6)
    one = layout((8, 6), Split(0), ranks=2)
    inside = torch.zeros(100).as_strided((8, 6), (6, 1), 13).copy_(full)
    flipped = full.t().contiguous().t()
    want = extract(one, full)
    for same in (inside, flipped):
        assert all(extract(one, same)[r].equal(want[r]) for r in want)
        assert rebuild(one, {r: same[4 * r : 4 * r + 4] for r in (0, 1)}).equal(full)
    row = torch.randn(6).expand(8, 6)
    assert rebuild(one, extract(one, row)).equal(row)


def test_shards_are_fresh():
    full = torch.randn(4)
    shards = extract(layout((4,), Replicate(), ranks=2), full)
    shards[0].zero_()
    assert full.abs().sum() > 0 and shards[1].equal(full)


def test_scales_are_exact_on_powers_of_two_and_refused_on_integers():
    half = layout((3,), Replicate(Fraction(1, 2)), ranks=2)
    full = torch.tensor([3.0, 5.0, 7.0])
    assert extract(half, full)[1].equal(full / 2) and rebuild(half, extract(half, full)).equal(full)
    with pytest.raises(UnsupportedError, match="int64 cannot be scaled"):
        extract(half, torch.arange(3))


# --- replicas -------------------------------------------------------------------------------


def test_replicas_that_differ_are_named_and_none_is_picked():
    """Case 3."""
    both = layout((4,), Replicate(), ranks=2)
    shards = {0: torch.tensor([0, 1, 2, 3]), 1: torch.tensor([0, 1, 9, 3])}
    with pytest.raises(InvalidMapError, match=r"ranks \(0, 1\) hold element 2 .* rank 1 stores other bytes"):
        rebuild(both, shards)


def test_replicas_are_compared_as_bytes():
    both = layout((2,), Replicate(), ranks=2)
    nan = torch.tensor([float("nan"), 1.0])
    assert rebuild(both, {0: nan, 1: nan.clone()}).isnan()[0]
    with pytest.raises(InvalidMapError, match="replicas differ"):
        rebuild(both, {0: torch.tensor([0.0, 1.0]), 1: torch.tensor([-0.0, 1.0])})


def twice_in_one_block() -> AffineMap:
    """Rank 0 holds the two elements one after the other, three times over."""
    piece = Piece((3, 2), Side(0, (2, 1), 0), Side(0, (0, 1)))
    return AffineMap.from_pieces(Space.shards({0: (3, 2)}), Space.logical((2,)), [piece])


def test_replicas_within_one_block_are_compared_too():
    m = twice_in_one_block()
    shard = torch.tensor([[1, 2], [1, 2], [1, 2]])
    assert rebuild(m, {0: shard}).tolist() == rebuild(m, {0: shard.numpy()}).tolist() == [1, 2]
    shard[2, 1] = 3
    for given_shard in (shard, shard.numpy()):
        with pytest.raises(InvalidMapError, match=r"ranks \(0,\) hold element 1 "):
            rebuild(m, {0: given_shard})


@given(one=recut(layouts(scaled=False)))
def test_any_replica_that_differs_is_found(one):
    """Change one slot whose element another slot holds too: rebuild must refuse."""
    slots = {}
    for (key, slot), element, _ in sorted(meaning(one).triples, key=str):
        slots.setdefault(element, []).append((key[0], slot))
    doubled = next((its for its in slots.values() if len(its) > 1), None)
    assume(doubled is not None)
    shards = {r: x.copy() for r, x in extract(one, numbered(one.logical_shape)).items()}
    rank, slot = doubled[-1]
    shards[rank].reshape(-1)[slot] += 1
    with pytest.raises(InvalidMapError, match="replicas differ"):
        rebuild(one, shards)


# --- refusals -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ({0: np.zeros(2)}, r"missing for \[1\]"),
        ({0: np.zeros(2), 1: np.zeros(2), 5: np.zeros(2)}, r"given for \[5\]"),
        ({0: np.zeros(2), 1: np.zeros(3)}, r"rank 1 has shape \(3,\), the layout says \(2,\)"),
        ({0: np.zeros(2), 1: 7}, "must be a tensor, got int"),
        ([np.zeros(2)], "given as {rank: shard}, got list"),
    ],
)
def test_shards_that_do_not_fit_are_refused(shards, words):
    with pytest.raises(InvalidMapError, match=words):
        rebuild(layout((4,), Split(0), ranks=2), shards)


def test_tensors_of_two_dtypes_are_not_mixed_in_one():
    halves = {0: torch.ones(2, dtype=torch.int32), 1: torch.full((2,), 1.5)}
    with pytest.raises(InvalidMapError, match=r"rank 1 is torch\.float32, but .* torch\.int32"):
        rebuild(layout((4,), Split(0), ranks=2), halves)
    buffer = sa.flat_group({"w": (3,), "b": (2,)}, 1)
    with pytest.raises(InvalidMapError, match="convert one first"):
        extract(buffer, {"w": torch.ones(3, dtype=torch.int32), "b": torch.full((2,), 1.5)})


def test_a_full_tensor_that_does_not_fit_is_refused():
    one = layout((4,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match=r"has shape \(5,\), the layout says \(4,\)"):
        extract(one, np.zeros(5))
    with pytest.raises(InvalidMapError, match=r"tensors \[''\], given were \['a'\]"):
        extract(one, {"a": np.zeros(4)})
    with pytest.raises(InvalidMapError, match="no box for rank 7"):
        extract(one, np.zeros(4), rank=7)


def test_several_logical_tensors_in_one_buffer():
    """A ZeRO buffer of two parameters: one flat box per rank, two named tensors."""
    space = Space.logical({"a": (2, 2), "b": (3,)})
    flat = AffineMap.from_pieces(
        Space.shards({0: (4,), 1: (4,)}),
        space,
        [
            Piece((4,), Side(0, (1,), 0), Side(0, (1,), None, "a")),
            Piece((3,), Side(0, (1,), 1), Side(0, (1,), None, "b")),
        ],
    )
    full = {"a": np.arange(4.0).reshape(2, 2), "b": np.arange(3.0) + 10}
    shards = extract(flat, full)
    assert shards[1].tolist() == [10, 11, 12, 0]
    again = rebuild(flat, shards)
    assert all(np.array_equal(again[n], full[n]) for n in full)


# --- Sharded --------------------------------------------------------------------------------


def test_sharded_maps_over_tensors_and_keeps_the_layout():
    one = layout((4,), Split(0), ranks=2)
    x = sharded(one, {r: torch.from_numpy(s) for r, s in extract(one, np.arange(4)).items()})
    assert sa.backends  # registers our values with torch's trees
    doubled = sa.tree_map(lambda t: t * 2, x)
    assert doubled.layout is one and doubled.shards[1].tolist() == [4, 6]
    assert torch_pytree.tree_map(lambda t: t * 2, x).shards[0].tolist() == [0, 2]
    assert len(sa.tree_leaves(x)) == 2 == len(torch_pytree.tree_leaves(x))
    for again in (pickle.loads(pickle.dumps(x)), copy.deepcopy(x)):
        assert again.layout == one and again.shards[1].equal(x.shards[1])
    placeholders = sa.tree_map(lambda t: None, x)
    assert placeholders.shards == {0: None, 1: None}


def test_sharded_checks_what_it_is_given():
    one = layout((4,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match=r"shape \(3,\)"):
        sharded(one, {0: np.zeros(3)})
    with pytest.raises(InvalidMapError, match=r"given for \[2\]"):
        sharded(one, {2: np.zeros(2)})


def test_one_byte_floats_are_scaled_through_float32():
    half = layout((3,), Replicate(Fraction(1, 2)), ranks=2)
    full = torch.tensor([3.0, 5.0, 7.0]).to(torch.float8_e5m2)
    shards = extract(half, full)
    assert shards[1].float().equal((full.float() / 2).to(torch.float8_e5m2).float())
    ctx = sa.backends.simulate(3)
    moved = sa.run(ctx, sa.bind(ctx, sa.plan(half, layout((3,), Split(0), ranks=3))), shards)
    assert [float(x) for x in moved.values()] == [float(x) * 2 for x in shards[0].float()]


@pytest.mark.parametrize("dtypes", [("complex64", "float32"), ("float32", "int32"), ("bfloat16", "bool")])
def test_conversions_that_lose_something_are_refused(dtypes):
    one = layout((4,), Split(0), ranks=2)
    ctx = sa.backends.simulate(2)
    bound = sa.bind(ctx, sa.plan(one, one), dtypes=dtypes)
    shards = {r: torch.zeros(2, dtype=getattr(torch, dtypes[0])) for r in (0, 1)}
    with pytest.raises(UnsupportedError, match="would lose"):
        sa.run(ctx, bound, shards)
