"""Spaces, pieces and maps as values: what they refuse, and that they survive every road."""

from __future__ import annotations

import copy
import json
import pickle
import time
from fractions import Fraction

import numpy as np
import optree
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import line, means, placed, raises, some
from oracle import Relation, meaning, triples_of

import shardalg as sa
from shardalg import (
    AffineMap,
    Box,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    Side,
    Space,
    equivalent,
)
from shardalg.testing import pieces, spaces

# --- round trips ---------------------------------------------------------------------------------


@given(some() | placed())
def test_json_and_back(m):
    """K8."""
    again = AffineMap.from_dict(json.loads(json.dumps(m.to_dict())))
    assert again == m
    assert hash(again) == hash(m)
    assert Space.from_dict(json.loads(json.dumps(m.domain.to_dict()))) == m.domain


@given(some() | placed())
def test_pickle_copy_and_deepcopy(m):
    """K8."""
    for again in (pickle.loads(pickle.dumps(m)), copy.copy(m), copy.deepcopy(m)):
        assert again == m
        assert hash(again) == hash(m)
        assert not again.table.rows.flags.writeable


def test_what_a_space_has_counted_cannot_be_written_on():
    m = sa.layout((8,), sa.Split(0), ranks=2)
    assert sa.is_total(m) and m.domain.box_ranks.tolist() == [0, 1]
    for again in (m, pickle.loads(pickle.dumps(m)), copy.copy(m), copy.deepcopy(m)):
        for numbers in (again.domain.sizes, again.domain.box_ranks):
            with pytest.raises(ValueError, match="read-only"):
                numbers[0] = 9


@given(some() | placed())
def test_its_repr_is_the_expression_that_makes_it(m):
    """K8."""
    names = {**vars(sa), "Fraction": Fraction}
    assert eval(repr(m), names) == m
    assert all(eval(repr(p), names) == p for p in m.pieces)
    assert eval(repr(m.domain), names) == m.domain


@given(some())
def test_flatten_and_unflatten(m):
    """K8."""
    leaves, tree = optree.tree_flatten(m, namespace="shardalg")
    assert leaves == []
    assert optree.tree_unflatten(tree, leaves) == m
    assert hash(tree) == hash(optree.tree_structure(AffineMap.from_dict(m.to_dict()), namespace="shardalg"))


def test_a_tree_of_layouts_pairs_with_one_of_tensors():
    layouts = {"a": sa.layout((4,), sa.Split(0), ranks=2), "b": sa.layout((6,), sa.Split(0), ranks=2)}
    found = optree.tree_map(lambda m, x: (m.logical_shape, x), layouts, {"a": 1, "b": 2})
    assert found == {"a": ((4,), 1), "b": ((6,), 2)}


def test_plain_data_of_another_kind_or_version_is_refused():
    data = sa.layout((4,), sa.Split(0), ranks=2).to_dict()
    changes = [
        {"format": "other"},
        {"version": 2},
        {"pieces": [[0, 0, 0]]},
        {"pieces": [[9, 0, 0, 0, 1, 1, 2, 1, 1]]},
    ]
    words = [
        "format 'shardalg.map', got 'other'",
        "version 2 cannot be read",
        "6 + 3 * axes",
        "names boxes 9",
    ]
    for change, message in zip(changes, words):
        assert message in raises(InvalidMapError, lambda: AffineMap.from_dict({**data, **change}))  # noqa: B023
    assert "NoneType" in raises(InvalidMapError, lambda: AffineMap.from_dict(None))
    with pytest.raises(LimitError, match="pieces"):
        AffineMap.from_dict(data, limits=Limits(pieces=1))


# --- from pieces -----------------------------------------------------------------------------------


@given(st.data(), spaces(), spaces())
def test_pieces_may_overlap_and_repeat(data, a, b):
    found = data.draw(st.lists(pieces(a, b), max_size=3))
    listed = frozenset(t for p in found for t in triples_of(p))
    assert means(AffineMap.from_pieces(a, b, [*found, *found[:1]]), Relation(a, b, listed))


def test_overlapping_pieces_are_made_disjoint():
    run = [Piece((3,), Side(k, (1,)), Side(k, (1,))) for k in (0, 1, 0)]
    m = AffineMap.from_pieces(line(4), line(4), run)
    assert means(m, Relation(line(4), line(4), frozenset(t for p in run for t in triples_of(p))))
    assert m.size == 4


@pytest.mark.parametrize("shift", [0, 1])
def test_thousands_of_pieces_that_overlap_are_made_disjoint_at_once(shift):
    """A line cut in 4000 parts and in 3999, whether its slots are its elements or the next ones."""
    size = 256_000
    ends = [(size * k // n, size * (k + 1) // n) for n in (4000, 3999) for k in range(n)]
    its = [Piece((b - a,), Side(a + shift, (1,)), Side(a, (1,))) for a, b in ends]
    start = time.perf_counter()
    m = AffineMap.from_pieces(line(size + shift), line(size), its)
    assert m.size == size and len(m) < 8000
    assert time.perf_counter() - start < 4


def test_a_piece_that_lists_pairs_twice_is_made_disjoint():
    twice = Piece((2, 3), Side(0, (1, 1)), Side(0, (1, 1)))
    m = AffineMap.from_pieces(line(4), line(4), [twice])
    assert means(m, Relation(line(4), line(4), frozenset(triples_of(twice))))
    still = Piece((5,), Side(2, (0,)), Side(1, (0,)))
    assert AffineMap.from_pieces(line(4), line(4), [still]).size == 1


REFUSED = {
    "past the end": (
        Piece((3,), Side(2, (1,)), Side(0, (1,))),
        r"covers domain addresses 2..4, but the tensor of shape \(4,\)",
    ),
    "before the start": (Piece((3,), Side(0, (1,)), Side(1, (-1,))), "covers codomain addresses -1..1"),
    "a box that is not there": (
        Piece((1,), Side(0, (1,), rank=2), Side(0, (1,))),
        "no box for rank 2; it has the tensor",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_refuses_a_piece(kind):
    piece, message = REFUSED[kind]
    with pytest.raises(InvalidMapError, match=message):
        AffineMap.from_pieces(line(4), line(4), [piece])


def test_empty_pieces_are_not_bounds_checked_but_need_their_boxes():
    void = Piece((2, 0), Side(77, (5, 5)), Side(-3, (1, 1)))
    assert len(AffineMap.from_pieces(line(4), line(4), [void])) == 0
    with pytest.raises(InvalidMapError, match="no box"):
        AffineMap.from_pieces(line(4), line(4), [Piece((0,), Side(0, (1,), 3), Side(0, (1,)))])


# --- values that are refused -------------------------------------------------------------------------

FLAT = Side(0, (1,))
VALUES = {
    "a float scale": (lambda: Piece((2,), FLAT, FLAT, 0.5), "exact rational .* Fraction"),
    "a scale of zero": (lambda: Piece((2,), FLAT, FLAT, 0), "a scale of 0 would lose"),
    "a scale without end": (lambda: Piece((2,), FLAT, FLAT, Fraction(1, 2**62)), "beyond 2"),
    "too few strides": (lambda: Piece((2, 2), FLAT, FLAT), "1 domain strides"),
    "a stride too far": (lambda: Piece((2,), Side(0, (2**62,)), FLAT), "its domain reaches"),
    "an offset too far": (lambda: Piece((2,), FLAT, Side(2**62 - 2, (1,))), "its codomain reaches"),
    "steps that add up too far": (lambda: Piece((5,), Side(0, (2**60,)), FLAT), "its domain reaches"),
    "a negative extent": (lambda: Piece((-1,), FLAT, FLAT), "negative extent"),
    "a bool": (lambda: Box((True,)), "must be an integer"),
    "a box too large": (lambda: Box((2**31, 2**31)), "more than 2"),
    "an empty box too large": (lambda: Box((0, 2**62)), "more than 2"),
    "a negative rank": (lambda: Box((2,), -1), "at least 0"),
    "a rank too large for keys": (lambda: Box((2,), 2**31), "below 2"),
    "a name that is none": (lambda: Box((2,), 0, 7), "must be a str"),
    "two boxes of one key": (lambda: Space((Box((2,)), Box((3,)))), "share the key the tensor"),
    "a shard of nobody": (lambda: Space.shards({None: (2,)}), "Space.logical"),
    "limits that are none": (lambda: Limits(steps=-1), "non-negative"),
}


@pytest.mark.parametrize("kind", VALUES)
def test_it_refuses(kind):
    make, message = VALUES[kind]
    with pytest.raises(InvalidMapError, match=message):
        make()


def test_boxes_are_sorted_and_found_by_key():
    space = Space((Box((2,), 3), Box((4,), 1, "b"), Box((1,), 1, "a"), Box((), None)))
    assert [b.key for b in space.boxes] == [(None, ""), (1, "a"), (1, "b"), (3, "")]
    assert (space.ranks, space.names, space.size) == ((1, 3), ("", "a", "b"), 8)
    assert space.shape(1, "b") == (4,)
    assert (1, "a") in space and (1, "") not in space
    assert [b.name for b in space.boxes_of(1)] == ["a", "b"]
    with pytest.raises(InvalidMapError, match="no box for rank 2; it has the tensor, rank 1, 'a'"):
        space.index(2)


def test_numpy_integers_are_integers():
    assert Piece((np.int64(2),), Side(np.int32(0), (np.int8(1),)), FLAT) == Piece((2,), FLAT, FLAT)
    assert Space.logical(np.array([2, 3])) == Space.logical((2, 3))


# --- reading ---------------------------------------------------------------------------------------------


@given(some())
def test_pieces_are_a_sequence_of_the_truth(m):
    listed = [m.pieces[k] for k in range(len(m.pieces))]
    assert m.pieces == listed == list(m.pieces)
    assert AffineMap.from_pieces(m.domain, m.codomain, listed) == m
    assert m.size == len(meaning(m).triples)
    assert m.pieces[:1] == tuple(listed[:1])


@given(some())
def test_pieces_of_a_rank_are_those_of_its_boxes(m):
    for b in m.domain.boxes:
        assert list(m.pieces_of(b.rank, b.name)) == [p for p in m.pieces if p.domain.key == b.key]
        assert list(m.pieces_of(b.rank)) == [p for p in m.pieces if p.domain.rank == b.rank]


def test_a_rank_that_is_not_there_is_an_error_not_nothing():
    m = sa.layout((4,), sa.Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match="no box for rank 2"):
        m.pieces_of(2)
    with pytest.raises(InvalidMapError, match="one logical tensor"):
        _ = AffineMap.from_pieces(line(2), Space.logical({"a": 1, "b": 1}), []).logical_shape


def test_scales_are_exact_through_thirds():
    third = AffineMap.from_pieces(line(2), line(2), [Piece((2,), FLAT, FLAT, Fraction(1, 3))])
    assert equivalent(sa.compose(sa.invert(third), third), sa.identity(line(2)))
