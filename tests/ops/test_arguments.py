"""Arguments that are none: each is refused with words, never with an error of Python's own."""

from __future__ import annotations

import contextlib
import inspect
import math

import numpy as np
import pytest
from laws import raises

import shardalg as sa
from shardalg import (
    AffineMap,
    BlockGather,
    Experts,
    InvalidMapError,
    Piece,
    Replicate,
    Segments,
    Side,
    Space,
    Split,
    layout,
)

ROWS = layout((8, 4), Split(0), ranks=2)
CUTS = [Split(0), Split(1)]
NAMED = {"a": 2, "b": 2}


def cost_without_a_target():
    return sa.plan(
        layout((4,), Replicate(), ranks=4), layout((4,), Split(0), ranks=4), select=sa.cheapest([[1]])
    )


REFUSED = {
    "a mesh that is a number": (lambda: layout((8, 4), CUTS, mesh=3), "mesh must be a sequence, got 3"),
    "a mesh that is a set": (
        lambda: layout((8, 4), CUTS, mesh={2, 3}),
        "mesh must be a sequence, got {2, 3}",
    ),
    "an order that is a number": (
        lambda: layout((8, 4), CUTS, mesh=NAMED, order=3),
        "order must be a sequence",
    ),
    "an order without order": (
        lambda: layout((8, 4), CUTS, mesh=NAMED, order={"a", "b"}),
        "order must be a seq",
    ),
    "an order of one placement": (
        lambda: layout((8, 4), Split(0), ranks=2, order=("a",)),
        "mesh= and order= need one placement per axis",
    ),
    "a shape without order": (
        lambda: layout({8, 4}, Split(0), ranks=2),
        "shape must be a sequence, got {8, 4}",
    ),
    "a shape that is a mapping": (lambda: layout({"w": 8}, Split(0), ranks=2), "shape must be a sequence"),
    "ranks without order": (
        lambda: layout((8, 4), Split(0), ranks={0, 1}),
        "ranks must be an integer, got {0, 1}",
    ),
    "ranks beyond any machine": (
        lambda: layout((8,), Split(0), ranks=2**70),
        "and at most 8388608, got 11805916",
    ),
    "a mesh beyond any machine": (
        lambda: layout((8, 4), CUTS, mesh=(2**13, 2**13)),
        "at most 8388608, got 6710",
    ),
    "sizes without order": (lambda: Split(0, sizes={3, 5}), "Split.sizes must be a sequence, got {3, 5}"),
    "sizes that are one number": (lambda: Split(0, sizes=np.array(8)), "Split.sizes must be a sequence"),
    "blocks without order": (lambda: BlockGather(0, 2, [{0, 1}]), "the blocks of rank 0 must be a sequence"),
    "experts without order": (lambda: Experts([[0], {2, 1}]), "the experts of rank 1 must be a sequence"),
    "a segment without its placement": (
        lambda: Segments(0, (4, Split(0))),
        "pairs, as in Segments(0, ((4, Split(0)),)), got (4,",
    ),
    "segments without order": (lambda: Segments(0, {(2, Split(0))}), "Segments.parts must be a sequence"),
    "limits that are a number": (
        lambda: layout((8, 4), Split(0), ranks=2, limits=3),
        "limits must be Limits(...)",
    ),
    "limits of plan": (lambda: sa.plan(ROWS, ROWS, limits=3), "limits must be Limits(...), got 3"),
    "limits of union": (lambda: sa.union(ROWS, ROWS, limits=3), "limits must be Limits(...), got 3"),
    "rank maps that are a number": (
        lambda: sa.plan(ROWS, ROWS, source_ranks=3),
        "source_ranks must be a sequence",
    ),
    "rank maps without order": (
        lambda: sa.plan(ROWS, ROWS, target_ranks={4, 5}),
        "target_ranks must be a sequence",
    ),
    "views that are a number": (
        lambda: sa.plan_tree({"w": ROWS}, {"w": ROWS}, views=3),
        "views must be a mapping",
    ),
    "tied names without order": (
        lambda: sa.plan_tree({"w": ROWS}, {"w": ROWS}, tied={"v"}),
        "tied must be a mapping, got {'v'}",
    ),
    "a cost that is a number": (lambda: sa.cheapest(3), "cost must be a sequence, got 3"),
    "a cost of one row": (lambda: sa.cheapest([1, 2]), "a row of cost must be a sequence, got 1"),
    "a cost that is no number": (lambda: sa.cheapest([["x"]]), "a cost must be a number, got 'x'"),
    "a cost of nan": (lambda: sa.cheapest([[float("nan")]]), "a cost must be a number, got nan"),
    "a cost with holes": (cost_without_a_target, "cost has no entry for source rank 1 and target rank 0"),
    "a partition that is a number": (lambda: sa.probe(3, (4,), 2), "probe takes a function of (full, rank)"),
    "a seed that is none": (lambda: sa.probe(len, (4,), 2, seed=-1), "seed must be at least 0, got -1"),
    "a type that is none": (lambda: sa.probe(len, (4,), 2, dtype=[]), "dtype must be one of"),
    "shapes that are a number": (lambda: sa.flat_group(3, 2), "the shapes of a flat group must be a mapping"),
    "expert shapes in a list": (lambda: sa.expert_layouts(Experts([[0]]), [(1, 2)]), "must be a mapping"),
    "a packing that is a list": (
        lambda: sa.plan_experts(Experts([[0]]), Experts([[0]]), {"w": (1,)}, packed=[[0]]),
        "packed must be Experts(...), got [[0]]",
    ),
    "maps that are a number": (lambda: sa.concat(3, 0), "the maps of concat must be a sequence, got 3"),
    "inner maps that are a number": (lambda: sa.nest(ROWS, 3), "the inner maps of nest must be a sequence"),
    "parts that are a word": (lambda: sa.join("qk"), "the parts of join must be a sequence, got 'qk'"),
    "parts without names": (lambda: sa.join([1, 2]), "parts are named by strings, got [1, 2]"),
    "axes that are a number": (lambda: sa.permute(ROWS, domain=3), "axes must be a sequence, got 3"),
    "new ranks without order": (lambda: sa.relabel(ROWS, domain={4, 5}), "new ranks must be a sequence"),
    "an element that is a word": (lambda: sa.holders(ROWS, "x"), "an element must be an integer, got 'x'"),
    "a rank that is a list": (
        lambda: sa.extract(ROWS, np.zeros((8, 4)), []),
        "rank must be an integer, got []",
    ),
    "shards in a list": (lambda: sa.sharded(ROWS, [1, 2]), "shards by rank must be a mapping, got [1, 2]"),
    "a plan that is a map": (
        lambda: sa.schedule(ROWS),
        "a TransferPlan or a TreePlan is needed, got AffineMap",
    ),
    "boxes that are shapes": (lambda: Space(((2,),)), "a space is made of boxes, got (2,)"),
    "shards that are a number": (lambda: Space.shards(3), "the shapes of shards must be a sequence, got 3"),
    "a side that is a number": (
        lambda: Piece((2,), 3, Side(0, (1,))),
        "the domain of a piece must be a Side, got 3",
    ),
    "a map of numbers": (lambda: AffineMap.from_pieces(Space(()), Space(()), [3]), "made of pieces, got 3"),
    "a map between numbers": (
        lambda: AffineMap.from_pieces(3, Space(()), []),
        "domain of a map must be a Space",
    ),
    "attention that is a number": (
        lambda: sa.qkv_per_head((24, 2), 8, 2),
        "qkv_per_head takes Attention(kv_heads=, ...), got 8",
    ),
    "heads that are a number": (lambda: sa.head_sizes(24, 8, 2), "head_sizes takes Attention"),
    "an axis that is a word": (lambda: sa.context_parallel((8,), 2, axis="rows"), "axis must be an integer"),
    "blocks of no parts": (
        lambda: sa.qkv_codegen((24, 8), sa.Attention(kv_heads=8), 2, mp_blocks=0),
        "mp_blocks must be at least 1, got 0",
    ),
    "a block type that is a class": (lambda: sa.named_qkv(dict), "named_qkv takes the name of a block type"),
    "a grid that is a number": (lambda: sa.block_cyclic((8, 8), 3, (2, 2)), "grid must be a sequence, got 3"),
    "a key that is a list": (lambda: ROWS.shard_shape([0]), "the space has no box for rank [0]"),
    "a region of a shape": (lambda: sa.region((4,), (0,)), "a region lies in a Space, got (4,)"),
    "a range of three ends": (
        lambda: sa.region(Space.logical((4,)), ((0, 1, 2),)),
        "an index must be an integer",
    ),
    "the identity of a shape": (lambda: sa.identity((4,)), "identity takes a Space, got (4,)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_argument_is_refused_in_words(case):
    call, words = REFUSED[case]
    assert words in raises(InvalidMapError, call)


OF_ONE = (
    "invert", "simplify", "canonicalize", "fingerprint", "domain", "image", "complement", "uncovered",
    "padding", "is_single_valued", "is_injective", "is_total", "is_surjective", "check", "check_layout",
    "holders", "reshape", "permute", "translate", "relabel",
)  # fmt: skip
OF_TWO = (
    "compose", "union", "intersect", "subtract", "merge", "product", "divide", "equivalent", "explain",
    "match", "plan",
)  # fmt: skip
WITH_MORE = {
    "restrict": (0,), "corestrict": (0,), "part": (0,), "scaled_by": ((2, 2),), "multiplicity": (0,),
    "nest": ([ROWS],), "extract": (0,), "rebuild": ({},), "sharded": ({},),
}  # fmt: skip


@pytest.mark.parametrize("name", [*OF_ONE, *WITH_MORE])
def test_a_placement_where_a_map_is_needed_is_told_how_to_be_one(name):
    call = getattr(sa, name)
    assert "lower a placement with layout(" in raises(
        InvalidMapError, lambda: call(Split(0), *WITH_MORE.get(name, ()))
    )


@pytest.mark.parametrize("name", OF_TWO)
@pytest.mark.parametrize("at", [0, 1])
def test_so_is_one_of_two(name, at):
    given = [ROWS, ROWS]
    given[at] = Split(0)
    assert "got Split: lower a placement with layout(" in raises(
        InvalidMapError, lambda: getattr(sa, name)(*given)
    )


def test_what_comes_in_order_is_taken_in_that_order():
    by_name = layout((8, 4), CUTS, mesh=NAMED, order=("b", "a"))
    assert layout((8, 4), CUTS, mesh=NAMED, order=(axis for axis in "ba")) == by_name
    assert layout(np.array([8, 4]), Split(0, sizes=(n for n in (3, 5))), ranks=2).shard_shape(1) == (5, 4)


def test_no_segments_of_an_empty_axis_leave_every_rank_an_empty_shard():
    m = layout((0, 3), Segments(0, ()), ranks=2)
    assert m == layout((0, 3), Split(0), ranks=2)
    assert "add up to 0, but axis 0 of shape (2, 3) has 2" in raises(
        InvalidMapError, lambda: layout((2, 3), Segments(0, ()), ranks=2)
    )


@pytest.mark.parametrize("make", [
    lambda: Split(0, sizes=3), lambda: Segments(0, 3), lambda: Segments(0, [4]), lambda: Experts(3),
    lambda: Experts([3]), lambda: Segments(0, [(1, Split(0), 2)]), lambda: Experts("01"),
])  # fmt: skip
def test_arguments_that_are_no_sequences_are_refused(make):
    with pytest.raises(InvalidMapError, match=r"sequence|pairs"):
        make()


# --- placements of torch ------------------------------------------------------------------------


def test_a_placement_of_torch_is_told_what_it_is_called_here():
    tensor = pytest.importorskip("torch.distributed.tensor")
    strided = pytest.importorskip("torch.distributed.tensor.placement_types")._StridedShard
    for theirs, ours in (
        (tensor.Shard(1), "Split(1)"),
        (tensor.Replicate(), "Replicate()"),
        (strided(1, split_factor=2), "StridedSplit(1, 2)"),
    ):
        for given in (theirs, [theirs]):
            found = raises(InvalidMapError, lambda given=given: layout((8, 4), given, ranks=2))
            assert f"is a placement of torch: write shardalg.{ours}, or read" in found
            assert "shardalg.interop.dtensor.from_placements(" in found
    assert "reduce first" in raises(InvalidMapError, lambda: layout((8, 4), tensor.Partial(), ranks=2))


# --- any argument may be anything ---------------------------------------------------------------


class Chooser:
    """A selector that answers with a list of what it was told to."""

    key = "odd"

    def __init__(self, *answers):
        self.answers = answers

    def choose(self, requests):
        return list(self.answers)


ODD = (
    None, True, -1, 0, 1, 7, 2**40, 2**70, 0.5, math.nan, "", "x", b"x", [], [0], (0,), (1, 2, 3), [[0]], {},
    {0: 1}, {(1, 2, 3): 1}, {None: 1}, {"x": 1}, {0: None}, {0: (1, 2, 3)}, {(0, ""): 3}, {0.5: (0,)},
    {0: {"x": 2}}, slice(0, 2, 0), slice("a"), {0: slice("a")}, {0: (slice(0, 2, 0),)}, {1, 2}, np.array(3),
    np.array([1, 2]), np.array(["a", "b"]), np.zeros((2, 2)), ROWS, Split(0), Space(()), object(),
    lambda *a: 3, lambda *a: None, lambda *a: math.nan, lambda *a: np.array([1, 2]),
    Chooser(), Chooser(0, 1), Chooser("x", "x"), Chooser([0]),
)  # fmt: skip
COLUMNS, BOTH = layout((8, 4), Split(1), ranks=4), layout((8, 4), Replicate(), ranks=2)
HALF = sa.region(ROWS.domain, {0: (slice(0, 2),)})
HEADS = sa.Attention(kv_heads=2)
SHARDS = {0: np.zeros((4, 4)), 1: np.zeros((4, 4))}
TWO = Experts([[0], [1]])
SAMPLES = {
    "AffineMap": (ROWS.domain, ROWS.codomain, ROWS.table),
    "Attention": (2,), "BlockGather": (0, 2, {0: (0, 1)}), "Box": ((2,),), "Cyclic": (0, 2),
    "Experts": ([[0]],),
    "Piece": ((2,), Side(0, (1,)), Side(0, (1,))), "Replicate": (), "Segments": (0, ((4, Split(0)),)),
    "Side": (0, (1,)), "Space": ((sa.Box((2,)),),), "Split": (0,), "StridedSplit": (0, 2),
    "block_cyclic": ((8, 8), (2, 2), (2, 2)), "canonicalize": (ROWS,), "cheapest": ([[1]],), "check": (ROWS,),
    "check_layout": (ROWS,), "complement": (HALF,), "compose": (sa.identity(ROWS.codomain), ROWS),
    "concat": ([ROWS, ROWS], 0), "context_parallel": ((8,), 2), "corestrict": (ROWS, (0,)),
    "divide": (ROWS, ROWS),
    "domain": (ROWS,), "equivalent": (ROWS, ROWS), "expert_layouts": (TWO, {"w": (2, 3)}),
    "expert_part": ((2, 4, 2), "gate"), "explain": (ROWS, BOTH), "extract": (ROWS, np.zeros((8, 4))),
    "fingerprint": (ROWS,), "flat_group": ({"w": (4,)}, 2), "from_text": (sa.to_text(ROWS),),
    "gate_up": ((8, 4), 2), "grouped_query": ((24, 2), HEADS, 2), "head_sizes": (24, HEADS, 2),
    "holders": (ROWS, 3), "identity": (ROWS.domain,), "image": (ROWS,), "intersect": (ROWS, ROWS),
    "invert": (ROWS,), "is_injective": (ROWS,), "is_single_valued": (ROWS,), "is_surjective": (ROWS,),
    "is_total": (ROWS,), "join": ({"a": (2, 3), "b": (2, 3)},), "layout": ((8, 4), Split(0), 2),
    "match": (ROWS, ROWS), "merge": (ROWS, ROWS), "multiplicity": (ROWS, 3), "named_qkv": ("BloomBlock",),
    "nest": (ROWS, [layout((4, 4), Split(0), ranks=2)] * 2), "packed_experts": ((4, 4, 2), TWO, "gate"),
    "padding": (ROWS,), "part": (ROWS, [0]), "permute": (ROWS, {"domain": {0: (1, 0)}}), "plan": (BOTH,
    COLUMNS),
    "plan_experts": (TWO, Experts([[1], [0]]), {"w": (2,)}), "plan_tree": ({"w": ROWS}, {"w": COLUMNS}),
    "predivided_bias": ((8,), 2), "probe": (lambda full, rank: full, (4,), 2), "product": (ROWS, ROWS),
    "qkv_per_head": ((24, 2), HEADS, 2), "rebuild": (ROWS, SHARDS), "region": (ROWS.domain, {0: (0,)}),
    "relabel": (ROWS, {"domain": {0: 5}}), "reshape": (ROWS, {"domain": (2, 8)}), "restrict": (ROWS,
    {0: (0,)}),
    "scaled_by": (ROWS, (2, 2)), "schedule": (sa.plan(ROWS, ROWS),), "section": ((4, 2), slice(0, 2)),
    "sharded": (ROWS, SHARDS), "simplify": (ROWS,), "subtract": (ROWS, ROWS), "to_text": (ROWS,),
    "translate": (HALF, {"domain": {0: (1, 0)}}), "uncovered": (ROWS,), "union": (ROWS, ROWS),
}  # fmt: skip
NAMED_ONLY = ("permute", "relabel", "reshape", "translate")  # whose last sample names an argument


def sample(name):
    """The arguments of a call that is fine, by name where the function has names for them."""
    given = SAMPLES[name]
    places = given[:-1] if name in NAMED_ONLY else given
    bound = inspect.signature(getattr(sa, name)).bind_partial(*places)
    bound.apply_defaults()
    return bound.arguments | (given[-1] if name in NAMED_ONLY else {})


@pytest.mark.filterwarnings("ignore:elementwise comparison", "ignore:Conversion of an array")
@pytest.mark.parametrize("name", SAMPLES)
def test_whatever_is_given_it_is_refused_in_our_words(name):
    """One argument after another is replaced by things that it may not be."""
    call = getattr(sa, name)
    fine = sample(name)
    call(**fine)
    for argument in fine:
        for odd in ODD:
            with contextlib.suppress(sa.ShardalgError):
                call(**{**fine, argument: odd})


RENUMBERED = sa.plan(ROWS, ROWS, source_ranks=[1, 2], target_ranks=[2, 1])
METHODS = {
    "from_pieces": (AffineMap.from_pieces, (ROWS.domain, ROWS.codomain, list(ROWS.pieces))),
    "shards": (Space.shards, ({0: (2,)},)), "logical": (Space.logical, ((2,),)),
    "uniform": (Experts.uniform, (4, 2)),
    "m(slots)": (ROWS, ([0, 1], 0, "")), "pieces_of": (ROWS.pieces_of, (0, "")),
    "shard_shape": (ROWS.shard_shape, (0, "")), "index": (ROWS.domain.index, (0, "")),
    "box": (ROWS.domain.box, (0, "")), "boxes_of": (ROWS.domain.boxes_of, (0,)),
    "Limits": (sa.Limits, (1, 2)),
    "global_source": (RENUMBERED.global_source, (0,)), "global_target": (RENUMBERED.global_target, (1,)),
    "bytes_crossing": (RENUMBERED.stats.bytes_crossing, (4,)),
}  # fmt: skip


@pytest.mark.parametrize("name", METHODS)
def test_so_it_is_by_methods(name):
    call, fine = METHODS[name]
    call(*fine)
    for k in range(len(fine)):
        for odd in ODD:
            with contextlib.suppress(sa.ShardalgError):
                call(*fine[:k], odd, *fine[k + 1 :])


LIMITED = [name for name in SAMPLES if "limits" in inspect.signature(getattr(sa, name)).parameters]


@pytest.mark.parametrize("name", LIMITED)
def test_no_more_pieces_are_returned_than_limits_allow(name):
    call, fine = getattr(sa, name), sample(name)
    found = call(**fine)
    if isinstance(found, AffineMap) and len(found):
        with pytest.raises(sa.LimitError, match="pieces would exceed"):
            call(**{**fine, "limits": sa.Limits(pieces=len(found) - 1)})
