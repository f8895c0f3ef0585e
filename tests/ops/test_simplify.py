"""Folding neighbouring pieces."""

from __future__ import annotations

import time
from random import Random

import pytest
from hypothesis import given
from laws import agree, many, placed, randoms, some

from shardalg import (
    AffineMap,
    Attention,
    BlockGather,
    Custom,
    Cyclic,
    Experts,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    compose,
    invert,
    layout,
    qkv_codegen,
    simplify,
)
from shardalg.testing import affine_maps, layouts, resplit


@many
@given(some() | some(max_size=24, max_extent=4, max_pieces=5))
def test_it_changes_nothing_but_the_pieces(m):
    assert agree(simplify(m), m)


@given(some() | placed())
def test_it_is_idempotent_and_never_adds_pieces(m):
    """K2."""
    once = simplify(m)
    assert simplify(once) == once
    assert len(once) <= len(m)


@given(affine_maps(max_pieces=1) | layouts(), randoms())
def test_one_piece_cut_in_two_is_one_again_but_for_two_blocks_in_reverse(m, random):
    whole = simplify(m)
    if len(whole) == 1 and (whole.table.columns.cod_strides >= 0).all():
        assert len(simplify(resplit(whole, random, cuts=1))) == 1


def test_stacked_blocks_become_one_piece_with_one_more_axis():
    gathered = layout((24, 2), BlockGather(0, 2, {0: (0, 3, 6, 9)}))
    assert len(gathered) == 1


def test_experts_in_order_are_one_piece_and_reversed_ones_too():
    assert [len(layout((8, 3, 2), Experts([ids]))) for ids in (range(8), range(7, -1, -1), (0, 2, 4, 6))] == [
        1,
        1,
        1,
    ]


def test_a_custom_map_is_folded_by_layout():
    points = layout((6,), BlockGather(0, 1, [range(6)]))
    assert layout((6,), Custom(points), ranks=1) == layout((6,), Split(0), ranks=1)


def test_blocks_in_no_order_stay_apart():
    assert len(layout((6, 2), BlockGather(0, 2, [(1, 0)]))) == 2
    assert len(layout((8, 2), BlockGather(0, 1, [(0, 3, 1, 6)]))) == 4


# --- holders --------------------------------------------------------------------------------


@given(placed(scaled=False), randoms())
def test_homogeneous_folding_changes_nothing_but_the_pieces_and_is_idempotent(m, random):
    once = simplify(m, homogeneous=True)
    assert agree(once, m)
    assert simplify(once, homogeneous=True) == once
    again = simplify(resplit(once, random), homogeneous=True)
    assert agree(again, m)


def test_pieces_stop_where_the_holders_change():
    """Case 7."""
    m = layout((48, 8), Segments(0, ((32, Split(0)), (16, Replicate()))), ranks=4)
    assert (len(simplify(m)), len(simplify(m, homogeneous=True))) == (7, 8)


# --- fused orders ---------------------------------------------------------------------------


def codegen(rows, columns, ranks):
    return qkv_codegen((rows, columns), Attention(kv_heads=32), ranks)


@pytest.mark.parametrize(
    "rows, columns, ranks",
    [(24, 8, 2), (48, 16, 2), (96, 32, 2), (96, 8, 4), (192, 8, 8)] + [(n, 8, 2) for n in range(72, 193, 24)],
)
def test_the_codegen_order_is_one_piece_per_rank_however_it_was_cut(rows, columns, ranks):
    m = codegen(rows, columns, ranks)
    for again in (m, *(simplify(resplit(m, Random(seed), cuts=3)) for seed in range(3))):
        assert [len(again.pieces_of(r)) for r in range(ranks)] == [1] * ranks


@pytest.mark.parametrize("before, after, copies", [(4, 8, 8), (2, 4, 4), (2, 8, 8), (8, 4, 8)])
def test_its_transfers_are_one_copy_per_pair_of_ranks(before, after, copies):
    source, target = (codegen(192, 8, ranks) for ranks in (before, after))
    assert len(compose(invert(target), source)) == copies


# --- cost -----------------------------------------------------------------------------------


def seconds(run):
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def test_thousands_of_pieces_fold_in_a_moment():
    order = list(range(4000))
    Random(5).shuffle(order)
    wild = layout((4000, 8), BlockGather(0, 1, [order]))
    assert len(wild) > 3000 and simplify(wild) is wild
    cut = resplit(layout((6000, 8), Split(1), ranks=2), Random(5), cuts=5)
    assert max(seconds(lambda m=m: simplify(m)) for m in (wild, cut)) < 1


def test_a_map_with_nothing_to_fold_comes_back_itself_at_once():
    m = layout((4096, 4096), [Split(0), Split(1)], mesh=(64, 64))
    assert simplify(m) is m and simplify(m, homogeneous=True) is m
    assert min(seconds(lambda: simplify(m)) for _ in range(3)) < 0.05


def test_blocks_dealt_in_turns_are_one_piece_per_rank():
    m = layout((4096, 8), Cyclic(0, 2), ranks=64)
    assert [len(m.pieces_of(r)) for r in range(64)] == [1] * 64


@pytest.mark.parametrize("parts", [(10_007, 20_011), (1, 10_007), (10_007, 1), (5, 1, 10_007, 3)], ids=str)
@pytest.mark.parametrize("width", [1, 3])
def test_runs_end_to_end_are_one_where_no_granule_helps(parts, width):
    """Too long to be cut to a common length or listed: only joining them end to end makes them one."""
    n = sum(parts)
    starts = [sum(parts[:k]) for k in range(len(parts))]
    m = AffineMap.from_pieces(
        Space.shards([(n * width * 2,)]),
        Space.logical((n, width * 3)),
        [
            Piece((k, width), Side(2 * width * at, (2 * width, 1), 0), Side(3 * width * at, (3 * width, 1)))
            for at, k in zip(starts, parts)
        ],
    )
    assert len(m) == len(parts) and len(simplify(m)) == 1


def test_runs_that_joined_by_accident_are_cut_again():
    """Four translates of one run, the middle two end to end: too long to be listed point by point."""
    n = 10_000
    runs = [(0, 0, n), (n, 2 * n, 2 * n), (3 * n, 5 * n, n)]
    m = AffineMap.from_pieces(
        Space.shards({0: (4 * n,)}),
        Space.logical((6 * n,)),
        [Piece((length,), Side(slot, (1,), 0), Side(element, (1,))) for slot, element, length in runs],
    )
    assert len(m) == 3
    assert simplify(m).pieces == (Piece((2, 2, n), Side(0, (2 * n, n, 1), 0), Side(0, (3 * n, 2 * n, 1))),)
