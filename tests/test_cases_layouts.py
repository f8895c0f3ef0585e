"""Cases from the field about layouts, numbered as in the list they come from. Small; sizes are elements.

``ELSEWHERE`` says where the cases about plans, tensors, runs and other formats are tested.
"""

import math
import re
from pathlib import Path

import numpy as np
import peers
import pytest
import torch

from shardalg import (
    Attention,
    Experts,
    Flat,
    Replicate,
    Segments,
    Split,
    StridedSplit,
    canonicalize,
    equivalent,
    extract,
    gate_up,
    grouped_query,
    head_sizes,
    holders,
    layout,
    nest,
    plan,
    probe,
    qkv_by_block,
    qkv_codegen,
    qkv_per_head,
    rebuild,
    scaled_by,
)


def rows(made, full=None):
    """What each rank holds of arange, or of ``full``."""
    full = np.arange(math.prod(made.logical_shape)).reshape(made.logical_shape) if full is None else full
    return {rank: shard.tolist() for rank, shard in extract(made, full).items()}


def real(made):
    """Slots of each rank that hold an element."""
    return [sum(p.size for p in made.pieces_of(rank)) for rank in made.ranks]


def test_6_sizes_are_inputs():
    """40 query rows, cut [16, 24] by their real partition."""
    attention = Attention(grain=16)
    assert head_sizes(40, attention, 2) == (16, 24)

    def partition(full, rank):
        return full.split(peers.shard_sizes(40, 2, attention))[rank]

    found = probe(partition, (40, 8), 2)
    assert equivalent(found, layout((40, 8), Split(0, sizes=(16, 24)), ranks=2))
    assert not equivalent(found, layout((40, 8), Split(0), ranks=2))


def test_7_pieces_stop_where_the_holders_change():
    made = layout((48, 8), Segments(0, ((32, Split(0)), (16, Replicate()))), ranks=4)
    assert len(canonicalize(made, homogeneous=True)) == 8
    assert len(canonicalize(made)) == 7


def test_8_three_orders_of_fused_qkv():
    """8 heads: per head, by block, in 4 blocks of q, k, v."""
    attention = Attention(kv_heads=8)
    orders = {"BloomBlock": qkv_per_head, "GLMBlock": qkv_by_block, "CodeGenBlock": qkv_codegen}
    made = {block: order((48, 4), attention, 2) for block, order in orders.items()}
    for one in orders:
        for other in orders:
            found = probe(peers.fused_qkv(other, attention, 2), (48, 4), 2)
            assert bool(equivalent(made[one], found)) == (one == other)


def test_9_replicated_and_missing_experts():
    made = layout((6, 3, 2), Experts([[0, 3], [3, 1, 5], [], [2, 4]]))
    full = np.arange(36).reshape(6, 3, 2)
    shards = extract(made, full)
    assert np.array_equal(shards[0], full[[0, 3]]) and np.array_equal(shards[1], full[[3, 1, 5]])
    assert shards[2].shape == (0, 3, 2)
    assert [holders(made, 6 * expert) for expert in range(6)] == [(0,), (1,), (3,), (0, 1), (3,), (1,)]


@pytest.mark.parametrize(
    "case, n, ranks, align, slots, held",
    [
        (10, 10, 8, 16, 2, [2, 2, 2, 2, 2, 0, 0, 0]),
        (11, 266240, 768, 1536, 348, [348] * 765 + [20, 0, 0]),
        (12, 57, 2, 4, 30, [30, 27]),
    ],
)
def test_10_11_12_flat_buffers(case, n, ranks, align, slots, held):
    made = layout((n,), Flat(align), ranks=ranks)
    assert {made.shard_shape(r) for r in made.ranks} == {(slots,)}
    assert real(made) == held


@pytest.mark.parametrize(
    "case, n, held", [(13, 5, [[0, 1], [3], [2], [4]]), (14, 6, [[0, 1], [3, 4], [2], [5]])]
)
def test_13_14_tensor_parallel_cuts_first(case, n, held):
    made = layout((n,), [Split(0), Split(0)], mesh={"dp": 2, "tp": 2}, order=("tp", "dp"))
    assert list(rows(made).values()) == held


def test_15_strided_rows_to_columns():
    source = layout((9, 4), StridedSplit(0, 2), ranks=4)
    held = [np.array(its)[:, 0] // 4 for its in rows(source).values()]
    assert [h.tolist() for h in held] == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    p = plan(source, layout((9, 4), Split(1), ranks=4))
    assert max(n for _, n in (*p.stats.sent, *p.stats.received)) < 36
    assert p.stats.elements == 36


def test_16_chunks_that_leave_a_rank_empty():
    made = layout((512,), Split(0), ranks=30)
    assert [made.shard_shape(r)[0] for r in made.ranks] == [18] * 28 + [8, 0]
    back = plan(layout((512,), Replicate(), ranks=1), made)
    assert 29 not in {c.target.rank for c in back.copies}


def test_17_two_elements_on_eight_ranks():
    made = layout((2,), [Split(0), Split(0)], mesh={"a": 2, "b": 4})
    assert list(rows(made).values()) == [[0], [], [], [], [1], [], [], []]


def test_18_seven_over_three():
    made = layout((7,), Split(0), ranks=3)
    assert [(p.shape, p.codomain.offset) for p in made.pieces] == [((3,), 0), ((3,), 3), ((), 6)]


def test_19_gathered_rows_are_five_not_eight():
    source = layout((5, 10), Split(0), ranks=4)
    target = layout((5, 10), Replicate(), ranks=4)
    assert {target.shard_shape(r) for r in target.ranks} == {(5, 10)}
    full = torch.arange(50).reshape(5, 10)
    assert torch.equal(rebuild(source, extract(source, full)), full)
    assert plan(source, target).stats.elements == 4 * 50


def test_20_sizes_as_given():
    made = layout((10,), Split(0, sizes=(1, 4, 0, 5)), ranks=4)
    assert list(rows(made).values()) == [[0], [1, 2, 3, 4], [], [5, 6, 7, 8, 9]]


def test_21_uneven_then_halved():
    made = layout((4, 100, 64), [Split(1, sizes=(70, 30)), Split(2)], mesh=(2, 2))
    assert [made.shard_shape(r) for r in made.ranks] == [(4, 70, 32)] * 2 + [(4, 30, 32)] * 2


def pair_cut_twice(half, data_parallel):
    """[W;V] cut by tensor parallelism before fusing, then the pair of each rank by data parallelism."""
    pairs = gate_up((2 * half,), 2)
    return nest(pairs, {r: layout(pairs.shard_shape(r), Split(0), ranks=data_parallel) for r in (0, 1)})


def test_22_a_pair_cut_by_two():
    assert list(rows(pair_cut_twice(8, 2)).values()) == [
        [0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15],
    ]  # fmt: skip


def test_23_a_pair_cut_by_four():
    w, v = range(6), range(6, 12)
    first = list(rows(pair_cut_twice(6, 4)).values())[:4]
    assert first == [[w[0], w[1]], [w[2], v[0]], [v[1], v[2]], []]


def test_24_a_raw_row_cut_splits_heads():
    """64 query and 2 kv heads of dim 2: per kv head 64 query rows, 2 K and 2 V rows."""
    made = layout((136,), Split(0), ranks=8)
    assert [made.shard_shape(r) for r in made.ranks] == [(17,)] * 8
    held = rows(made)
    for part in ({64, 65}, {66, 67}):
        assert [r for r in made.ranks if part & {row % 68 for row in held[r]}] == [3, 7]
    assert held[1][0] == 17 and held[0][-1] // 2 == held[1][0] // 2  # rows 16 and 17 are one head


def test_25_whole_heads_on_three_ranks():
    attention = Attention(heads=16, kv_heads=8)
    query = layout((2048,), Split(0, sizes=head_sizes(2048, attention, 3)), ranks=3)
    key = grouped_query((1024,), attention, 3)
    assert [query.shard_shape(r)[0] for r in range(3)] == [768, 768, 512]
    assert [key.shard_shape(r)[0] for r in range(3)] == [384, 384, 256]


def test_26_more_ranks_than_kv_heads():
    made = grouped_query((4 * 128,), Attention(kv_heads=4), 8)
    assert all(rows(made)[r] == list(range(r // 2 * 128, (r // 2 + 1) * 128)) for r in range(8))


def test_27_two_ranks_share_a_scale():
    scales = scaled_by(layout((512, 16), Split(0), ranks=8), (128, 16))
    assert list(rows(scales).values()) == [[[r // 2]] for r in range(8)]


def test_42_packed_experts_flat_over_their_group():
    """Rank-local packed (2,3,4), flat with align 6, over 2, then over 3 replicas of the expert group."""
    outer = layout((4, 3, 4), Experts.uniform(4, 2))

    def over(replicas):
        return nest(outer, {r: layout((2, 3, 4), Flat(6), ranks=replicas) for r in outer.ranks})

    two, three = over(2), over(3)
    assert [real(m) for m in (two, three)] == [[12] * 4, [8] * 6]
    copies = plan(two, three).copies
    assert {(c.source.rank // 2, c.target.rank // 3) for c in copies} == {(0, 0), (1, 1)}


@pytest.mark.parametrize(
    "shape, heads, ranks",
    [((24, 8), 8, 2), ((48, 16), 8, 2), ((96, 32), 8, 2), ((96, 8), 16, 4), ((192, 8), 32, 8)],
)
def test_43_codegen_is_its_real_partition_in_one_piece_per_rank(shape, heads, ranks):
    attention = Attention(kv_heads=heads)
    made = qkv_codegen(shape, attention, ranks)
    assert equivalent(made, probe(peers.fused_qkv("CodeGenBlock", attention, ranks), shape, ranks))
    assert len(made) == ranks


@pytest.mark.parametrize("height", range(24, 193, 24))
def test_43_one_piece_whatever_the_rows(height):
    assert len(qkv_codegen((height, 8), Attention(kv_heads=8), 2)) == 2


# --- cases in other files -----------------------------------------------------------------------

ELSEWHERE = {
    1: "ops/test_plan.py::test_padded_vocabularies_need_few_copies",
    2: "ops/test_plan.py::test_padded_vocabularies_need_few_copies",
    3: "ops/test_tensors.py::test_replicas_that_differ_are_named_and_none_is_picked",
    4: "ops/test_tensors.py::test_views_and_strides_of_the_input_do_not_matter",
    5: "ops/test_plan.py::test_a_bias_moves_with_its_ratio_and_its_moments_do_not",
    28: "ops/test_plan.py::test_limits_refuse_before_building",
    29: "ops/test_plan.py::test_a_stored_plan_that_does_not_do_its_job_is_refused",
    30: "backends/test_schedule.py::test_the_smaller_dtype_travels",
    31: "ops/test_plan_experts.py::test_a_doubled_expert_crosses_once",
    32: "backends/test_schedule.py::test_a_rank_with_nothing_to_do_has_the_same_rounds",
    33: "backends/test_bind.py::test_a_rank_that_differs_stops_all_alike",
    34: "backends/test_run.py::test_every_dtype_moves_its_bytes",
    35: "backends/test_schedule.py::test_messages_stay_below_31_bits",
    36: "backends/test_strategies.py::test_disjoint_processes",
    37: "interop/test_dtensor.py::test_dtensors_move_between_processes",
    38: "interop/test_deepspeed.py::test_malformed_pieces_are_refused",
    39: "moe/test_moe_operations.py::test_dropped_routes_contribute_nothing",
    40: "moe/test_moe_operations.py::test_a_row_travels_once_per_token_and_rank",
    41: "ops/test_plan_experts.py::test_five_copies_of_one_expert_each",
    44: "ops/test_plan_tree.py::test_q_k_v_become_one_tensor_in_six_copies",
    45: "ops/test_plan_tree.py::test_experts_become_one_tensor_in_four_copies",
    46: "ops/test_plan_tree.py::test_tied_targets_are_written_once",
    47: "ops/test_plan.py::test_equal_numbers_may_be_other_processes",
    48: "interop/test_deepspeed.py::test_a_float_scale_is_the_fraction_it_was",
    49: "interop/test_deepspeed.py::test_expert_descriptors_both_ways",
    50: "ops/test_plan.py::test_absent_ranks_are_no_error",
}


def test_every_case_has_a_test_where_it_is_said_to_be():
    here = Path(__file__)
    numbered = re.findall(r"^def test_([\d_]+)_", here.read_text(), re.MULTILINE)
    cases = {int(n) for numbers in numbered for n in numbers.split("_")}
    assert not cases & ELSEWHERE.keys() and cases | ELSEWHERE.keys() == set(range(1, 51))
    for place in ELSEWHERE.values():
        file, name = place.split("::")
        assert f"def {name}(" in (here.parent / file).read_text(), place
