"""Placements against slow versions of themselves that cut an array of element numbers."""

from __future__ import annotations

import itertools
import math
import re
import time
from functools import singledispatch
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from laws import many, raises
from oracle import meaning

from shardalg import (
    AffineMap,
    BlockGather,
    Custom,
    Cyclic,
    Experts,
    Flat,
    InvalidMapError,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    StridedSplit,
    check_layout,
    layout,
)
from shardalg.testing import layouts, placements, shapes

Array = np.ndarray


# --- the slow versions: shards of an array, -1 where a slot holds nothing ---------------------


@singledispatch
def shards(placement, full: Array, ranks: int) -> list[Array]:
    raise NotImplementedError(placement)


@shards.register
def _(placement: Replicate, full: Array, ranks: int) -> list[Array]:
    return [full] * ranks


def up(n: int, d: int) -> int:
    """n / d, rounded up."""
    return -(-n // d)


def chunks(full: Array, axis: int, parts: int, unit: int = 1) -> list[Array]:
    """ceil(units / parts) units each until none is left."""
    each = up(up(full.shape[axis], unit), parts) * unit
    return [
        full.take(range(*slice(k * each, (k + 1) * each).indices(full.shape[axis])), axis)
        for k in range(parts)
    ]


@shards.register
def _(placement: Split, full: Array, ranks: int) -> list[Array]:
    n, axis, unit = full.shape[placement.axis], placement.axis, placement.unit
    if placement.sizes is not None:
        ends = np.cumsum(placement.sizes)
        return [full.take(range(end - size, end), axis) for end, size in zip(ends, placement.sizes)]
    if placement.rule == "balanced":
        grains = [range(k, min(k + unit, n)) for k in range(0, n, unit)]
        return [
            full.take([i for g in some for i in grains[g]], axis)
            for some in np.array_split(range(len(grains)), ranks)
        ]
    found = chunks(full, axis, ranks, unit)
    if placement.rule == "pad":
        longest = up(up(n, unit), ranks) * unit
        found = [np.pad(x, [(0, longest - x.shape[axis] if k == axis else 0) for k in range(x.ndim)],
                        constant_values=-1) for x in found]  # fmt: skip
    return found


@shards.register
def _(placement: Segments, full: Array, ranks: int) -> list[Array]:
    ends = np.cumsum([size for size, _ in placement.parts])
    parts = [
        shards(inner, full.take(range(end - size, end), placement.axis), ranks)
        for end, (size, inner) in zip(ends, placement.parts)
    ]
    return [np.concatenate(its, placement.axis) for its in zip(*parts)]


@shards.register
def _(placement: BlockGather, full: Array, ranks: int) -> list[Array]:
    n, size = full.shape[placement.axis], placement.size
    ids = dict(placement.by_rank)
    rows = [
        [i for b in ids.get(r, ()) for i in range(b * size, min(n, (b + 1) * size))] for r in range(ranks)
    ]
    return [full.take(its, placement.axis) for its in rows]


@shards.register
def _(placement: Experts, full: Array, ranks: int) -> list[Array]:
    ids = dict(placement.by_rank)
    return [full[list(ids.get(r, ()))] for r in range(ranks)]


@shards.register
def _(placement: Cyclic, full: Array, ranks: int) -> list[Array]:
    owner = (np.arange(full.shape[placement.axis]) // placement.block + placement.first) % ranks
    return [full.take(np.flatnonzero(owner == r), placement.axis) for r in range(ranks)]


@shards.register
def _(placement: StridedSplit, full: Array, ranks: int) -> list[Array]:
    outer = chunks(full, placement.axis, placement.split_factor)
    return [
        np.concatenate([chunks(part, placement.axis, ranks)[r] for part in outer], placement.axis)
        for r in range(ranks)
    ]


@shards.register
def _(placement: Flat, full: Array, ranks: int) -> list[Array]:
    whole = math.lcm(placement.align, ranks)
    padded = np.pad(full.reshape(-1), (0, -full.size % whole), constant_values=-1)
    return np.split(padded, ranks)


@shards.register
def _(placement: Custom, full: Array, ranks: int) -> list[Array]:
    held = {slot: e for slot, (_, e), _ in meaning(placement.map).triples}
    return [
        np.array([held.get((b.key, k), -1) for k in range(b.size)]).reshape(b.shape)
        for b in placement.map.domain.boxes
    ]


def numbers(shape) -> Array:
    return np.arange(math.prod(shape)).reshape(shape)


def held(m, rank: int) -> Array:
    """The element number in each slot of a rank's shard."""
    shape = m.shard_shape(rank)
    return m(numbers(shape), rank=rank)


@st.composite
def cases(draw):
    shape = draw(shapes(max_axes=3, max_size=12))
    ranks = draw(st.integers(1, 4))
    return shape, draw(placements(shape, ranks)), ranks


@many
@given(cases())
def test_each_shard_is_cut_as_the_slow_version_cuts(case):
    shape, placement, ranks = case
    m = layout(shape, placement, ranks=ranks)
    for r, expected in enumerate(shards(placement, numbers(shape), ranks)):
        assert m.shard_shape(r) == expected.shape
        assert held(m, r).tolist() == expected.tolist()


def test_sizes_may_end_within_the_last_unit_and_not_before():
    """As the rules do it: the sizes that an error proposes are taken."""
    with pytest.raises(InvalidMapError, match=re.escape("or sizes=(2,2,1,0)")):
        layout((5,), Split(0, rule="exact", unit=2), ranks=4)
    proposed = layout((5,), Split(0, sizes=(2, 2, 1, 0), unit=2), ranks=4)
    assert proposed == layout((5,), Split(0, rule="balanced", unit=2), ranks=4)
    with pytest.raises(InvalidMapError, match="at 3: that cuts a unit of 2"):
        layout((5,), Split(0, sizes=(3, 2, 0, 0), unit=2), ranks=4)


@pytest.mark.parametrize("rule", ["chunk", "balanced", "pad"])
@pytest.mark.parametrize("unit", [1, 2, 3])
def test_units_stay_whole_whatever_the_extent(rule, unit):
    for n, ranks in itertools.product(range(9), (1, 2, 3)):
        m = layout((n,), Split(0, rule=rule, unit=unit), ranks=ranks)
        expected = shards(Split(0, rule=rule, unit=unit), numbers((n,)), ranks)
        assert rows(m) == [x.tolist() for x in expected]
        assert all(its[0] % unit == 0 for its in rows(m) if its and its[0] >= 0)


@given(layouts())
def test_every_layout_is_one(m):
    assert check_layout(m) is m


@given(cases())
def test_rank_ids_only_name_the_positions(case):
    shape, placement, ranks = case
    ids = [7 * r + 3 for r in reversed(range(ranks))]
    if not isinstance(placement, (BlockGather, Experts, Custom, Segments)):
        named, plain = layout(shape, placement, ranks=ids), layout(shape, placement, ranks=ranks)
        assert [held(named, i).tolist() for i in ids] == [held(plain, r).tolist() for r in range(ranks)]


EVEN = [Replicate(), Split(0), Split(1), Split(0, rule="balanced"), StridedSplit(1, 2), Cyclic(0, 2), Flat(2)]


@pytest.mark.parametrize("second", EVEN)
@pytest.mark.parametrize("first", EVEN[:-1])
def test_a_mesh_cuts_one_axis_after_the_other(first, second):
    shape, full = (5, 6), numbers((5, 6))
    for order in (("x", "y"), ("y", "x")):
        if isinstance(second, Flat) and order[0] == "y":
            continue
        cuts = {"x": (first, 2), "y": (second, 3)}
        m = layout(shape, [first, second], mesh={"x": 2, "y": 3}, order=order)
        outer, inner = (cuts[name] for name in order)
        for i, part in enumerate(shards(*outer[:1], full, outer[1])):
            for j, expected in enumerate(_again(inner, part)):
                rank = i * 3 + j if order == ("x", "y") else j * 3 + i
                assert held(m, rank).tolist() == expected.tolist()


def _again(cut, part: Array) -> list[Array]:
    """A part cut again: its slots are cut as if they were elements, and padding stays padding."""
    placement, ranks = cut
    flat = np.append(part.reshape(-1), -1)
    return [flat[its] for its in shards(placement, numbers(part.shape), ranks)]


# --- numbers from others ------------------------------------------------------------------------


def extents(m) -> list[int]:
    return [m.shard_shape(r)[0] for r in m.ranks]


def rows(m) -> list[list[int]]:
    return [held(m, r).tolist() for r in m.ranks]


def mesh(n: int, placements_, *sizes: int):
    return layout((n,), placements_, mesh=sizes)


@pytest.mark.parametrize(
    ("n", "block", "ranks", "first", "counts"), [(9, 2, 2, 0, [5, 4]), (23, 3, 3, 1, [6, 9, 8])]
)
def test_block_cyclic_counts_are_numroc(n, block, ranks, first, counts):
    assert extents(layout((n,), Cyclic(0, block, first), ranks=ranks)) == counts


def test_chunks_are_torch_chunks():
    assert extents(mesh(13, [Split(0)] * 2, 4, 2)) == [2, 2, 2, 2, 2, 2, 1, 0]
    assert extents(mesh(5, [Split(0)] * 2, 2, 2)) == [2, 1, 1, 1]
    assert extents(layout((7,), Split(0), ranks=3)) == [3, 3, 1]
    counts = extents(layout((512,), Split(0), ranks=30))
    assert counts == [18] * 28 + [8, 0]


def test_strided_shards_are_torch_strided_shards():
    assert rows(layout((8,), StridedSplit(0, 2), ranks=4)) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert rows(layout((9,), StridedSplit(0, 2), ranks=4)) == [[0, 1, 5], [2, 3, 6], [4, 7], [8]]
    m = mesh(15, [StridedSplit(0, 2), Split(0)], 4, 2)
    assert extents(m) == [2, 2, 2, 2, 2, 2, 2, 1]
    assert [its[0] for its in rows(m)] == [0, 8, 2, 10, 4, 12, 6, 14]
    m = mesh(39, [StridedSplit(0, 3), StridedSplit(0, 4)], 4, 2)
    assert held(m, 0).tolist() == [0, 1, 3, 13, 15, 16, 27, 28]
    assert m.shard_shape(7) == (0,)


def test_the_order_says_who_cuts_first():
    for n, expected in ((5, [[0, 1], [3], [2], [4]]), (6, [[0, 1], [3, 4], [2], [5]])):
        m = layout((n,), [Split(0), Split(0)], mesh={"dp": 2, "tp": 2}, order=("tp", "dp"))
        assert rows(m) == expected


def test_a_small_axis_leaves_ranks_empty():
    m = mesh(2, [Split(0), Split(0)], 2, 4)
    assert rows(m) == [[0], [], [], [], [1], [], [], []]


def test_a_tensor_cut_by_two_axes():
    m = layout((4, 100, 64), [Split(1, sizes=(70, 30)), Split(2)], ranks=[[0, 1], [2, 3]])
    assert m.shard_shape(0) == (4, 70, 32)


def test_flat_shards_are_padded_at_the_end():
    def real(n: int, ranks: int, align: int) -> list[int]:
        m = layout((n,), Flat(align), ranks=ranks)
        return [sum(p.size for p in m.pieces_of(r)) for r in m.ranks]

    assert real(10, 8, 16) == [2, 2, 2, 2, 2, 0, 0, 0]
    counts = real(266240, 768, 1536)
    assert (counts[0], counts[765:]) == (348, [20, 0, 0])
    assert real(57, 2, 4) == [30, 27]


def test_a_pair_of_tensors_cut_twice():
    pair = Segments(0, ((8, Split(0)), (8, Split(0))))
    assert rows(layout((16,), [pair, Split(0)], mesh=(2, 2))) == [
        [0, 1, 2, 3], [8, 9, 10, 11], [4, 5, 6, 7], [12, 13, 14, 15]
    ]  # fmt: skip
    pair = Segments(0, ((6, Split(0)), (6, Split(0))))
    assert rows(layout((12,), [pair, Split(0)], mesh=(2, 4)))[:4] == [[0, 1], [2, 6], [7, 8], []]


def test_replicated_and_reordered_experts():
    m = layout((6, 2), Experts([[0, 3], [3, 1, 5], [], [2, 4]]))
    assert m.shard_shape(2) == (0, 2)
    assert [held(m, r)[:, 0].tolist() for r in m.ranks] == [[0, 6], [6, 2, 10], [], [4, 8]]
    assert Experts({1: [1], 0: [0]}) == Experts([[0], [1]]) != Experts([[1], [0]])


# --- what cannot be placed ------------------------------------------------------------------------

REFUSED = {
    "equal parts that do not exist": (
        (10, 4), Split(0, rule="exact"), 4,
        "cannot split axis 0 of shape (10, 4) into 4 equal parts: 10 = 4*2 + 2;"
        ' use rule="chunk" (3,3,3,1) or sizes=(3,3,2,2)',
    ),
    "sizes that do not add up": ((10,), Split(0, sizes=(4, 4)), 2, "add up to 8, not 10; raise one by 2"),
    "sizes for other ranks": ((8,), Split(0, sizes=(4, 4)), 3, "over 3 ranks"),
    "a cut through a unit": ((8,), Split(0, sizes=(3, 5), unit=4), 2, "at 3: that cuts a unit of 4"),
    "an axis that is not there": ((8,), Split(1), 2, "names axis 1 of a tensor of shape (8,)"),
    "segments that do not add up": ((8,), Segments(0, ((5, Split(0)),)), 2, "add up to 5"),
    "a block that is not there": ((8,), BlockGather(0, 4, [[2]]), 1, "lists block 2"),
    "an expert that is not there": ((4,), Experts([[4]]), 1, "lists expert 4"),
    "experts of a scalar": ((), Experts([[]]), 1, "0-d"),
    "experts of ranks that a segment lacks": (
        (4,), Segments(0, ((4, Experts([[0], [1], [2, 3]])),)), 2, "for ranks [2], but only ranks (0, 1)",
    ),
    "no ranks": ((4,), Split(0), [], "names no rank"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED)
def test_it_refuses(kind):
    shape, placement, ranks, message = REFUSED[kind]
    assert message in raises(InvalidMapError, lambda: layout(shape, placement, ranks=ranks))


def test_a_mesh_axis_shorter_than_its_experts_is_refused():
    placements = [Experts([[0, 1], [2, 3]]), Split(1)]
    found = raises(InvalidMapError, lambda: layout((4, 2), placements, mesh={"ep": 1, "tp": 2}))
    assert "for ranks [1], but only ranks (0,)" in found


def test_the_order_takes_names_and_positions():
    mesh, twice = {"dp": 2, "tp": 2}, [Split(0), Split(0)]
    by_name = layout((5,), twice, mesh=mesh, order=("tp", "dp"))
    assert layout((5,), twice, mesh=mesh, order=(1, 0)) == by_name != layout((5,), twice, mesh=mesh)
    assert layout((5,), twice, mesh=(2, 2), order=np.array([1, 0])) == by_name


@pytest.mark.parametrize("order", [(1, 1), (0,), (0, "dp"), (False, True), (1, 2), ("tp", "pp"), (1.0, 0.0)])
def test_an_order_that_is_none_is_refused(order):
    mesh, twice = {"dp": 2, "tp": 2}, [Split(0), Split(0)]
    found = raises(InvalidMapError, lambda: layout((5,), twice, mesh=mesh, order=order))
    assert "by name or by position" in found


def test_ranks_have_the_shape_of_the_mesh():
    cut = [Split(0), Split(1)]
    found = raises(
        InvalidMapError,
        lambda: layout((6, 6), cut, ranks=np.arange(6).reshape(3, 2), mesh={"a": 2, "b": 3}),
    )
    assert "ranks= of shape (3, 2) for a mesh of 2x3" in found


def test_more_strides_than_elements_cost_nothing():
    assert layout((5,), StridedSplit(0, 2**60), ranks=3) == layout((5,), StridedSplit(0, 5), ranks=3)


def test_pending_sums_are_refused_by_name():
    class PartialSum:
        pass

    assert "reduce first" in raises(InvalidMapError, lambda: layout((4,), PartialSum(), ranks=2))


# --- cost -----------------------------------------------------------------------------------


def random_gather(n: int, random: Random) -> AffineMap:
    ids = random.sample(range(n), n)
    return layout((n * 4,), BlockGather(0, 4, [ids[r::16] for r in range(16)]))


def random_segments(n: int, random: Random) -> AffineMap:
    sizes = [random.randint(1, 9) for _ in range(n)]
    return layout((sum(sizes),), Segments(0, [(size, Split(0)) for size in sizes]), ranks=4)


def random_tiles(n: int, random: Random) -> AffineMap:
    """A tensor cut into tiles of random sizes, which 16 ranks hold one after the other in any order."""
    side = math.isqrt(n)
    rows, columns = ([random.randint(1, 9) for _ in range(side)] for _ in range(2))
    width, ends = sum(columns), [0] * 16
    tiles = []
    for k, cell in enumerate(random.sample(range(side * side), side * side)):
        i, j = divmod(cell, side)
        start = sum(rows[:i]) * width + sum(columns[:j])
        here = Side(ends[k % 16], (columns[j], 1), k % 16)
        tiles.append(Piece((rows[i], columns[j]), here, Side(start, (width, 1))))
        ends[k % 16] += rows[i] * columns[j]
    storage = Space.shards([(end,) for end in ends])
    logical = Space.logical((sum(rows), width))
    return layout(logical.shape(), Custom(AffineMap.from_pieces(storage, logical, tiles)))


@pytest.mark.parametrize(
    "made, n, most", [(random_gather, 20_000, 2), (random_segments, 5_000, 3), (random_tiles, 10_000, 2)]
)
def test_thousands_of_random_blocks_are_laid_out_in_a_moment(made, n, most):
    """Process time, at several times what it takes; a step per pair of blocks would take minutes."""
    start = time.process_time()
    m = made(n, Random(3))
    took = time.process_time() - start
    assert took < most, f"{took:.1f} s for {n} blocks"
    assert check_layout(m) and m.size == math.prod(m.logical_shape)
