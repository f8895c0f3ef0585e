"""DeepSpeed 0.19.8 is the oracle: its maps are read, ours are accepted by its planner, both run alike."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import peers  # noqa: F401  sets DeepSpeed's accelerator before it is imported
import pytest
import torch
from deepspeed.checkpoint import affine, affine_transfer, autoep_affine
from deepspeed.checkpoint.affine import AffinePiece, ParamAffineMap
from deepspeed.checkpoint.affine_transfer import PlanBudget, UnsupportedLayoutError, plan_transfer
from hypothesis import assume, given

import shardalg as sa
from shardalg import (
    AffineMap,
    Attention,
    Experts,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    SelectionError,
    Side,
    Space,
    Split,
    UnsupportedError,
    equivalent,
    extract,
    is_surjective,
    is_total,
    layout,
    plan,
    rebuild,
)
from shardalg.interop import deepspeed
from shardalg.ops import NAMED, named_qkv
from shardalg.testing import layout_pairs, layouts

THEIRS = {
    "rows": affine.contiguous_split_map((10, 4), [3, 3, 4], 0),
    "columns": affine.contiguous_split_map((10, 4), [1, 0, 3], 1),
    "qkv": affine.sub_param_map((24, 8), [8, 8, 8], [[4, 4]] * 3, 0),
    "grouped": affine.segmented_map((48, 8), [(32, False), (16, True)], 0, 4, [[8] * 4]),
    "gathered": affine.block_gather_map((16, 4), {0: [0, 3], 1: [1, 2]}, 4, 0),
    "columns gathered": affine.block_gather_map((4, 16), {0: [0, 3], 1: [1, 2]}, 4, 1),
    "bias": affine.replicated_map((7,), 3, 1 / 3),
}


def number(m):
    return torch.arange(1.0, 1 + int(np.prod(m.logical_shape))).reshape(m.logical_shape)


@pytest.mark.parametrize("name", THEIRS)
@pytest.mark.parametrize("form", ["object", "dict", "json"])
def test_their_maps_mean_the_same_here(name, form):
    theirs = THEIRS[name]
    entry = {"object": theirs, "dict": theirs.to_dict(), "json": json.loads(json.dumps(theirs.to_dict()))}[
        form
    ]
    ours = deepspeed.from_map(entry)
    full = number(theirs)
    for rank, shard in extract(ours, full).items():
        torch.testing.assert_close(shard, theirs.extract(full, rank))
    torch.testing.assert_close(rebuild(ours, {r: theirs.extract(full, r) for r in theirs.shard_shapes}), full)


@pytest.mark.parametrize("name", THEIRS)
def test_a_round_trip_gives_their_own_pieces(name):
    theirs = THEIRS[name].to_dict()
    again = deepspeed.to_map(deepspeed.from_map(theirs))
    full = {r: [p for p in its["pieces"] if 0 not in p["shape"]] for r, its in theirs["ranks"].items()}
    assert {r: its["pieces"] for r, its in again["ranks"].items()} == full


@given(one=layouts(scaled=False, max_size=12))
def test_what_we_export_they_accept_and_read_alike(one):
    assume(bool(is_surjective(one)) and bool(is_total(one)))
    try:
        entry = deepspeed.to_map(one)
    except UnsupportedError:
        return
    theirs = ParamAffineMap.from_dict(json.loads(json.dumps(entry)))
    theirs.validate_coverage()
    full = number(one)
    assert all(theirs.extract(full, r).equal(x) for r, x in extract(one, full).items())
    assert equivalent(deepspeed.from_map(theirs), one)


@given(both=layout_pairs(scaled=False, max_size=12))
def test_their_planner_and_ours_fill_targets_alike(both):
    """P7: equal results, and no more copies than theirs."""
    assume(all(bool(is_surjective(m)) and bool(is_total(m)) for m in both))
    try:
        source, target = (ParamAffineMap.from_dict(deepspeed.to_map(m)) for m in both)
        theirs = plan_transfer(target, source)
    except (UnsupportedError, UnsupportedLayoutError):  # theirs: replicas cut at different places
        return
    full = number(both[0])
    shards = extract(both[0], full)
    got = {r: torch.zeros(m).reshape(-1) for r, m in target.shard_shapes.items()}
    for s in theirs.segments:
        values = shards[s.source_rank].reshape(-1).as_strided(s.shape, s.source_strides, s.source_offset)
        got[s.target_rank].as_strided(s.shape, s.target_strides, s.target_offset).copy_(values)
    want = extract(both[1], full)
    assert all(got[r].equal(want[r].reshape(-1)) for r in want)
    assert len(plan(*both, select="lowest")) <= len(theirs.segments)


@pytest.mark.parametrize(
    ("shape", "tp", "pieces"),
    [((24, 8), 2, 11), ((48, 16), 2, 11), ((96, 32), 2, 11), ((96, 8), 4, 12), ((192, 8), 8, 12)],
)
def test_codegen_is_one_piece_here_and_eleven_or_twelve_there(shape, tp, pieces):
    """Case 43."""
    ours = deepspeed.layout_for("CodeGenBlock", SimpleNamespace(num_kv_heads=4 * tp), tp, shape=shape)
    assert all(len(ours.pieces_of(r)) == 1 for r in ours.ranks)
    theirs = deepspeed.to_map(ours)
    assert {len(its["pieces"]) for its in theirs["ranks"].values()} == {pieces}
    assert equivalent(deepspeed.from_map(theirs), ours)


# --- refusals -------------------------------------------------------------------------------


def their_plan(source, target, **options):
    return plan_transfer(ParamAffineMap.from_dict(target), ParamAffineMap.from_dict(source), **options)


def our_plan(source, target, **options):
    return plan(deepspeed.from_map(source), deepspeed.from_map(target), **options)


def without(entry, rank):
    """A map whose last block of a rank is gone."""
    its = entry["ranks"][rank]
    return {**entry, "ranks": {**entry["ranks"], rank: {**its, "pieces": its["pieces"][:-1]}}}


ROWS, COLUMNS = THEIRS["rows"].to_dict(), affine.contiguous_split_map((10, 4), [2, 2], 1).to_dict()
BIAS, WHOLE = THEIRS["bias"].to_dict(), affine.replicated_map((7,), 2, 1.0).to_dict()
BOTH = affine.replicated_map((10, 4), 2, 1.0).to_dict()
REFUSED = {  # what both refuse: their call and error, ours
    "another shape": (
        lambda: their_plan(ROWS, BIAS), affine_transfer.InvalidMapError,
        lambda: our_plan(ROWS, BIAS), InvalidMapError,
    ),
    "elements that nobody holds": (
        lambda: their_plan(without(ROWS, 1), COLUMNS), affine_transfer.InvalidMapError,
        lambda: our_plan(without(ROWS, 1), COLUMNS), InvalidMapError,
    ),
    "holders that lie": (
        lambda: their_plan({**BOTH, "ranks": {0: BOTH["ranks"][0]}}, ROWS), affine_transfer.InvalidMapError,
        lambda: our_plan({**BOTH, "ranks": {0: BOTH["ranks"][0]}}, ROWS), InvalidMapError,
    ),
    "more copies than allowed": (
        lambda: their_plan(ROWS, COLUMNS, limits=PlanBudget(max_segments=1)),
        affine_transfer.AffineTransferError,
        lambda: our_plan(ROWS, COLUMNS, limits=Limits(copies=1)), LimitError,
    ),
    "a selector that names no holder": (
        lambda: their_plan(BOTH, ROWS, replica_selector=lambda request: 7),
        affine_transfer.InvalidReplicaPolicyError,
        lambda: our_plan(BOTH, ROWS, select=lambda request: 7), SelectionError,
    ),
    "moments over a scale": (
        lambda: their_plan(BIAS, WHOLE), UnsupportedLayoutError,
        lambda: our_plan(BIAS, WHOLE, holds="moments"), UnsupportedError,
    ),
    "replicas that differ": (
        lambda: THEIRS["bias"].rebuild({r: torch.full((7,), float(r)) for r in range(3)}), ValueError,
        lambda: rebuild(deepspeed.from_map(BIAS), {r: torch.full((7,), float(r)) for r in range(3)}),
        InvalidMapError,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_their_refusals_are_ours(what):
    theirs, their_error, ours, our_error = REFUSED[what]
    with pytest.raises(their_error):
        theirs()
    with pytest.raises(our_error):
        ours()


# --- scales and locations -------------------------------------------------------------------


def test_a_float_scale_is_the_fraction_it_was():
    """Case 48."""
    entry = affine.replicated_map((4,), 3, 0.3333333333333333).to_dict()
    ours = deepspeed.from_map(entry)
    assert {p.scale for p in ours.pieces} == {Fraction(1, 3)}
    assert {p["scale"] for r in deepspeed.to_map(ours)["ranks"].values() for p in r["pieces"]} == {
        0.3333333333333333
    }


@pytest.mark.parametrize("scale", [0.0, float("nan"), float("inf"), "1/3", True])
def test_a_scale_that_is_none_is_refused(scale):
    entry = THEIRS["rows"].to_dict()
    entry["ranks"][0]["pieces"][0]["scale"] = scale
    with pytest.raises(InvalidMapError, match="rank 0, piece 0: scale"):
        deepspeed.from_map(entry)


def test_declared_holders_that_lie_are_refused():
    lying = affine.block_gather_map((16, 4), {0: [0, 3, 2], 1: [1, 2, 1]}, 4, 0)  # block 2 is on both ranks
    with pytest.raises(InvalidMapError, match=r"rank 0 declares that \[0\] hold .* held by \[0, 1\]"):
        deepspeed.from_map(lying)
    missing = THEIRS["grouped"].to_dict()
    missing["ranks"][2]["pieces"][1]["locations"] = [0, 1, 2]
    with pytest.raises(InvalidMapError, match="rank 2 declares"):
        deepspeed.from_map(missing)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: p.update(source=[2**62, [4, 1]]), r"2\*\*62"),
        (lambda p: p.update(source=[0, [2**62, 1]]), r"2\*\*62"),
        (lambda p: p.update(dest=[90, [4, 1]]), "covers domain addresses"),
        (lambda p: p.update(shape=[-3, 4]), "negative extent"),
        (lambda p: p.update(source=[0, [1]]), "1 codomain strides"),
        (lambda p: p.pop("dest"), "malformed"),
        (lambda p: p.update(locations=[]), "names no holder"),
        (lambda p: p.update(dest=[0.5, [4, 1]]), "must be an integer"),
    ],
)
def test_malformed_pieces_are_refused(change, words):
    """Case 38 among them: no wrap-around."""
    entry = THEIRS["rows"].to_dict()
    change(entry["ranks"][0]["pieces"][0])
    with pytest.raises(InvalidMapError, match=words):
        deepspeed.from_map(entry)


def test_a_slot_with_two_elements_is_refused():
    entry = THEIRS["rows"].to_dict()
    first = entry["ranks"][0]["pieces"][0]
    entry["ranks"][0]["pieces"].append({**first, "shape": [1, 4], "source": [24, [4, 1]]})
    with pytest.raises(InvalidMapError, match="not a layout: slot 0"):
        deepspeed.from_map(entry)


def test_what_their_form_cannot_say_is_refused():
    with pytest.raises(UnsupportedError, match=r"rank 3 holds 2 elements in 8 slots.*cannot say padding"):
        deepspeed.to_map(layout((13, 2), Split(0, rule="pad"), ranks=4))
    turned = AffineMap.from_pieces(
        Space.shards({0: (4, 3)}), Space.logical((3, 4)), [Piece((4, 3), Side(0, (3, 1), 0), Side(0, (1, 4)))]
    )
    assert equivalent(deepspeed.from_map(deepspeed.to_map(turned)), turned)
    with pytest.raises(LimitError, match=r"Limits\(pieces=8\)"):
        deepspeed.to_map(turned, limits=Limits(pieces=8))
    with pytest.raises(UnsupportedError, match="as many axes as the tensor"):
        deepspeed.to_map(layout((4, 2), sa.Flat(1), ranks=2))


def test_a_column_is_one_piece_of_its_own_shape():
    theirs = deepspeed.to_map(layout((8, 1), Split(0), ranks=2))
    assert [p["shape"] for p in theirs["ranks"][1]["pieces"]] == [[4, 1]]


# --- containers -----------------------------------------------------------------------------


def test_all_containers_are_read():
    entry = THEIRS["rows"].to_dict()
    want = deepspeed.from_map(entry)
    name = "layers.0.mlp.w+1"
    section = {"version": 1, "params": {re.escape(name): entry}}
    for data in (
        {"affine_map": section}, section, {"affine_maps": section}, {re.escape(name): entry},
        {"version": 1, "params": {"^" + re.escape(name) + "$": entry}},
    ):  # fmt: skip
        assert deepspeed.from_container(data) == {name: want}
    assert deepspeed.from_container({"conversion": {"affine_map": entry}}) == {"": want}
    assert deepspeed.from_container(entry) == {"": want}
    assert list(deepspeed.from_container({"params": {"layers.*": entry}})) == ["layers.*"]


@pytest.mark.parametrize("version", [2, "1", None])
def test_newer_containers_are_refused(version):
    with pytest.raises(InvalidMapError, match="affine map version"):
        deepspeed.from_container({"affine_map": {"version": version, "params": {}}})


def test_other_data_is_refused():
    with pytest.raises(InvalidMapError, match="'logical_shape' and 'ranks', got keys"):
        deepspeed.from_map({"shape": [1]})
    entry = THEIRS["rows"].to_dict()
    entry["ranks"]["0"] = entry["ranks"][0]
    with pytest.raises(InvalidMapError, match="rank 0 twice"):
        deepspeed.from_map(entry)


# --- experts --------------------------------------------------------------------------------


def test_expert_descriptors_both_ways():
    by_rank = [[0, 3], [3, 1, 5], [], [2, 4]]
    theirs = autoep_affine.make_autoep_placement_descriptor(6, by_rank)
    ours = deepspeed.from_descriptor(theirs)
    assert ours == Experts(by_rank)
    assert deepspeed.to_descriptor(ours, 6) == theirs
    listed = {**theirs, "ranks": theirs["ranks"][::-1]}
    assert deepspeed.from_descriptor(listed) == ours  # case 49
    m = autoep_affine.autoep_placement_to_affine_map(theirs, (6, 2, 3))
    assert equivalent(deepspeed.from_map(m), sa.expert_layouts(ours, {"w": (6, 2, 3)})["w"])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "version 1, got 2"),
        ({"ep_size": 3}, "ep_size 3 and lists 2 ranks"),
        ({"num_experts": 5}, "places 4 of 5 experts; nobody holds the first lost, 4"),
        ({"num_experts": 1 << 70}, "places 4 of 1180591620717411303424 experts"),
        ({"ranks": [3, 4]}, "a rank and a list of experts, got 3"),
        ({"ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 0, "experts": [2, 3]}]}, "repeated"),
        ({"ranks": [{"rank": 0, "experts": [0, 0]}, {"rank": 1, "experts": [1, 2, 3]}]}, "an expert twice"),
        (
            {"ranks": [{"rank": 0, "experts": [0, 1]}, {"rank": 1, "experts": [2, 9]}]},
            r"outside 0\.\.3: \[9\]",
        ),
    ],
)
def test_bad_descriptors_are_refused(change, words):
    theirs = autoep_affine.make_autoep_placement_descriptor(4, [[0, 1], [2, 3]])
    with pytest.raises(InvalidMapError, match=words):
        deepspeed.from_descriptor({**theirs, **change})


JUNK = [None, 3, -1, 1.5, "x", [], {}, [None], True, 1 << 70, float("nan")]


def places(tree, path=()):
    """The path of everything in nested dicts and lists."""
    yield path
    its = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in its:
        yield from places(value, (*path, key))


def spoiled(tree, path, junk):
    """A copy with one place replaced."""
    if not path:
        return junk
    copy = dict(tree) if isinstance(tree, dict) else list(tree)
    copy[path[0]] = spoiled(tree[path[0]], path[1:], junk)
    return copy


@pytest.mark.parametrize("read", ["from_map", "from_container", "from_descriptor"])
def test_whatever_is_spoiled_is_read_or_refused_as_ours(read):
    """Every place of their data replaced by what does not belong there: never another kind of error."""
    entry = json.loads(json.dumps(THEIRS["gathered"].to_dict()))
    whole = {
        "from_map": entry,
        "from_container": {"affine_map": {"version": 1, "params": {"w": entry}}},
        "from_descriptor": autoep_affine.make_autoep_placement_descriptor(4, [[0, 3], [1, 2]]),
    }[read]
    refused = 0
    for path in places(whole):
        for junk in JUNK:
            try:
                getattr(deepspeed, read)(spoiled(whole, path, junk))
            except sa.ShardalgError:
                refused += 1
    assert refused > 100


def test_a_placement_with_gaps_in_its_ranks_is_refused():
    with pytest.raises(UnsupportedError, match=r"ranks \[0, 2\]"):
        deepspeed.to_descriptor(Experts({0: [0], 2: [1]}), 2)


# --- choosing by block type -----------------------------------------------------------------

SHAPES = {"GPTBigCodeBlock": (12, 4)}
META = SimpleNamespace(num_kv_heads=8, num_attention_heads=8, n_embd=8, tp_grain_size=1)


@pytest.mark.parametrize("block", NAMED)
def test_each_block_type_is_wired(block):
    """Taking the entry out of the table changes the layout, or leaves the default it equals."""
    shape = SHAPES.get(block, (24, 8))
    chosen = deepspeed.layout_for(type(block, (), {})(), META, 2, shape=shape)
    facts = Attention(kv_heads=8, heads=8, hidden=8, grain=1)
    assert chosen == NAMED[block](shape, facts, 2)
    assert named_qkv(block) is NAMED[block]
    without = {name: f for name, f in NAMED.items() if name not in block}
    if NAMED[block].__name__ != "qkv_per_head":
        assert named_qkv(block, without) is not NAMED[block]


def test_the_modules_own_weight_gives_the_shape():
    block = type("CodeGenBlock", (), {"weight": torch.zeros(24, 8)})()
    assert deepspeed.layout_for(block, META, 2).logical_shape == (24, 8)
    with pytest.raises(InvalidMapError, match="needs shape="):
        deepspeed.layout_for("CodeGenBlock", META, 2)


def test_their_pieces_are_ours_with_the_sides_exchanged():
    theirs = AffinePiece((4,), 8, (1,), 0, (1,), [1])
    m = ParamAffineMap(
        (12,), {0: (8,), 1: (4,)}, {0: [AffinePiece((8,), 0, (1,), 0, (1,), [0])], 1: [theirs]}
    )
    piece = deepspeed.from_map(m).pieces_of(1)[0]
    assert (piece.codomain.offset, piece.domain.offset) == (theirs.source_offset, theirs.dest_offset)
