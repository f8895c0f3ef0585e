"""Folding neighbouring pieces."""

from __future__ import annotations

from hypothesis import given
from laws import agree, many, placed, randoms, some

from shardalg import BlockGather, Custom, Experts, Split, layout, simplify
from shardalg.testing import affine_maps, layouts, resplit


@many
@given(some() | some(max_size=24, max_extent=4, max_pieces=5))
def test_it_changes_nothing_but_the_pieces(m):
    assert agree(simplify(m), m)


@given(some() | placed())
def test_it_is_idempotent_and_never_adds_pieces(m):
    once = simplify(m)
    assert simplify(once) == once
    assert len(once) <= len(m)


@given(affine_maps(max_pieces=1) | layouts(), randoms())
def test_one_piece_cut_in_two_is_one_again(m, random):
    whole = simplify(m)
    if len(whole) == 1:
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
