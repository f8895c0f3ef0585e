"""A named layout is equivalent to a probe of the real partition function, and refuses what that refuses."""

import inspect
import types
from pathlib import Path

import oracle
import peers
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardalg as sa
from shardalg import (
    NAMED,
    Attention,
    InvalidMapError,
    UnsupportedError,
    compose,
    equivalent,
    explain,
    extract,
    grouped_query,
    head_sizes,
    is_surjective,
    layout,
    named_qkv,
    plan,
    probe,
    qkv_codegen,
    rebuild,
    shared_qk_value,
)
from shardalg.ops import _named_qkv as named_module

CODEGEN = [((24, 8), 8, 2), ((48, 16), 8, 2), ((96, 32), 8, 2), ((96, 8), 16, 4), ((192, 8), 32, 8)]

CASES = [
    *(("CodeGenBlock", shape, Attention(kv_heads=heads), ranks) for shape, heads, ranks in CODEGEN),
    ("BloomBlock", (24, 4), Attention(kv_heads=8), 4),
    ("BloomBlock", (40,), Attention(kv_heads=5), 2),
    ("FalconDecoderLayer", (40, 2), Attention(grain=16), 2),
    ("NewBlock", (40, 2), Attention(kv_heads=8, grain=16), 3),
    ("GLMBlock", (24, 4), Attention(kv_heads=4), 2),
    ("GLMBlock", (16, 4), Attention(kv_heads=2, hidden=8), 2),
    ("GLMBlock", (16,), Attention(kv_heads=2, hidden=8), 3),
    ("MPTBlock", (36, 2), Attention(grain=4), 3),
    ("BaichuanLayer", (36, 2), Attention(kv_heads=3), 2),
    ("DecoderLayer", (36, 2), Attention(kv_heads=12), 4),
    ("QWenBlock", (24, 4), Attention(kv_heads=8), 4),
    ("GPTBigCodeBlock", (12, 8), Attention(heads=8, kv_heads=1, hidden=8), 2),
    ("GPTBigCodeBlock", (48, 8), Attention(kv_heads=8, hidden=32), 4),
    ("Phi3DecoderLayer", (16, 8), Attention(heads=4, kv_heads=2), 2),
    ("Phi3DecoderLayer", (40, 16), Attention(heads=8, kv_heads=4), 3),
]  # fmt: skip


def derived(block, shape, attention, ranks):
    return named_qkv(block)(shape, attention, ranks)


def probed(block, shape, attention, ranks):
    return probe(peers.fused_qkv(block, attention, ranks), shape, ranks)


@pytest.mark.parametrize("block, shape, attention, ranks", CASES)
def test_derived_equals_probed(block, shape, attention, ranks):
    ours, theirs = derived(block, shape, attention, ranks), probed(block, shape, attention, ranks)
    assert explain(ours, theirs) is None or equivalent(ours, theirs), explain(ours, theirs)


@pytest.mark.parametrize("block, shape, attention, ranks", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_shards_are_those_of_the_real_partition(block, shape, attention, ranks, dtype):
    """extract = the real function bit for bit; rebuild gives the tensor back; nothing is left out."""
    ours, theirs = derived(block, shape, attention, ranks), peers.fused_qkv(block, attention, ranks)
    full = torch.randn(shape, generator=torch.Generator().manual_seed(0)).mul(1000).to(dtype)
    shards = extract(ours, full)
    assert all(torch.equal(shards[rank], theirs(full, rank)) for rank in range(ranks))
    assert torch.equal(rebuild(ours, shards), full)
    assert is_surjective(ours)


FACTS = st.builds(
    Attention,
    heads=st.sampled_from([None, 2, 4, 8]),
    kv_heads=st.sampled_from([None, 1, 2, 3, 4, 8, 16]),
    hidden=st.sampled_from([None, 4, 8, 16]),
    grain=st.sampled_from([1, 4, 16]),
)
SHAPES = st.tuples(st.sampled_from([6, 8, 9, 12, 24, 48, 96]), st.just(8)) | st.sampled_from([(12,), (24,)])
BLOCKS = sorted({"NewBlock": None, **NAMED})


@given(st.sampled_from(BLOCKS), SHAPES, FACTS, st.integers(2, 4))
def test_ours_exactly_where_theirs_makes_sense(block, shape, attention, ranks):
    """Where we give a layout it is theirs; where they refuse, so do we."""
    try:
        theirs = probed(block, shape, attention, ranks)
    except peers.REFUSALS:
        with pytest.raises(InvalidMapError):
            derived(block, shape, attention, ranks)
        return
    try:
        ours = derived(block, shape, attention, ranks)
    except InvalidMapError:
        return  # the reasons are listed below
    assert equivalent(ours, theirs)


REFUSED = [
    ("CodeGenBlock", (24, 8), Attention(), 2, "needs the model's kv_heads"),
    ("CodeGenBlock", (24, 8), Attention(kv_heads=12), 2, r"12 = 8\*1 \+ 4"),
    ("CodeGenBlock", (25, 8), Attention(kv_heads=8), 2, r"25 = 24\*1 \+ 1; 24 or 48 would"),
    ("CodeGenBlock", (24,), Attention(kv_heads=8), 2, "is a matrix"),
    ("GLMBlock", (25, 8), Attention(kv_heads=4), 2, r"25 = 3\*8 \+ 1; 24 or 27 would"),
    ("GLMBlock", (24, 8), Attention(kv_heads=2), 2, "needs the model's hidden"),
    ("GPTBigCodeBlock", (24, 8), Attention(), 2, "needs the model's hidden"),
    ("Phi3DecoderLayer", (24, 8), Attention(kv_heads=2), 2, "needs the model's heads"),
    ("Phi3DecoderLayer", (24, 8), Attention(heads=2), 2, "needs the model's kv_heads"),
    ("Phi3DecoderLayer", (24,), Attention(heads=2, kv_heads=2), 2, "is a matrix"),
]  # fmt: skip


@pytest.mark.parametrize("block, shape, attention, ranks, reason", REFUSED)
def test_what_the_real_function_refuses_is_refused_with_its_reason(block, shape, attention, ranks, reason):
    with pytest.raises(peers.REFUSALS):
        peers.fused_qkv(block, attention, ranks)(torch.zeros(shape), 0)
    with pytest.raises(InvalidMapError, match=reason):
        derived(block, shape, attention, ranks)


STRANGE = [  # the real function answers with something that is no cut of q, k and v
    ("GLMBlock", (8, 4), Attention(kv_heads=4), 2, "8 does not divide into 3 equal blocks"),
    ("GPTBigCodeBlock", (6, 8), Attention(hidden=8), 2, "fewer rows than hidden=8"),
    ("Phi3DecoderLayer", (6, 8), Attention(heads=2, kv_heads=1), 2, r"2 \* 4 > 6"),
    ("GLMBlock", (6, 8), Attention(kv_heads=2, hidden=8), 2, "below 8 query rows in 6"),
    ("QWenBlock", (9, 4), Attention(kv_heads=3), 4, "rank 3 of 4 would hold none of 3 query rows"),
]  # fmt: skip


@pytest.mark.parametrize("block, shape, attention, ranks, reason", STRANGE)
def test_what_makes_no_sense_is_refused(block, shape, attention, ranks, reason):
    with pytest.raises(InvalidMapError, match=reason):
        derived(block, shape, attention, ranks)


def test_at_one_rank_every_fused_weight_is_whole():
    """DeepSpeed does not call the partition below two ranks; CodeGen's would permute there."""
    for block in NAMED:
        whole = derived(block, (24, 8), Attention(heads=8, kv_heads=8, hidden=8), 1)
        assert equivalent(whole, layout((24, 8), sa.Replicate(), ranks=1)), block


@given(st.integers(0, 60), st.integers(1, 6), FACTS)
def test_head_sizes_are_deepspeeds(total, ranks, attention):
    assert list(head_sizes(total, attention, ranks)) == peers.shard_sizes(total, ranks, attention)


def test_ranks_may_be_ids():
    ids = qkv_codegen((24, 8), Attention(kv_heads=8), (5, 3))
    assert ids == sa.relabel(qkv_codegen((24, 8), Attention(kv_heads=8), 2), domain=[5, 3])


# --- the table ----------------------------------------------------------------------------


def test_the_table_is_deepspeeds():
    theirs = {
        "bloomtype": "qkv_per_head", "glmtype": "qkv_by_block", "codegentype": "qkv_codegen",
        "qwentype": "qkv_qwen", "bigcodetype": "qkv_bigcode", "phi3type": "qkv_phi3",
    }  # fmt: skip
    table = {block: theirs[kind] for block, kind in peers.fusedqkv_utils.FUSED_QKV_TYPE_DICT.items()}
    assert {block: chosen.__name__ for block, chosen in NAMED.items()} == table


@pytest.mark.parametrize("text", [*NAMED, "NewBlock", "x(FalconDecoderLayer)(DecoderLayer)", ""])
def test_the_longest_name_chooses(text):
    theirs = peers.fusedqkv_utils.get_fused_qkv_type(text) or "bloomtype"
    kinds = {chosen: kind for kind, chosen in (
        ("bloomtype", "qkv_per_head"), ("glmtype", "qkv_by_block"), ("codegentype", "qkv_codegen"),
        ("qwentype", "qkv_qwen"), ("bigcodetype", "qkv_bigcode"), ("phi3type", "qkv_phi3"))}  # fmt: skip
    assert kinds[named_qkv(text).__name__] == theirs


# --- CodeGen ------------------------------------------------------------------------------


def codegen(ranks, shape=(192, 8), heads=32):
    return qkv_codegen(shape, Attention(kv_heads=heads), ranks)


@pytest.mark.parametrize("rows", range(24, 193, 24))
def test_codegen_is_one_piece_per_rank_whatever_the_rows(rows):
    assert len(codegen(2, (rows, 8), 8)) == 2


@pytest.mark.parametrize(
    "source, target, copies", [(2, 4, 4), (4, 2, 4), (2, 8, 8), (8, 2, 8), (4, 8, 8), (8, 4, 8)]
)
def test_codegen_transfers_element_for_element(source, target, copies):
    """Reading the source shards through the plan gives the target shards, slot by slot."""
    a, b = codegen(source), codegen(target)
    p = plan(a, b)
    full = torch.randn(192, 8, generator=torch.Generator().manual_seed(0))
    shards = extract(a, full)
    moved = {rank: torch.zeros(b.shard_shape(rank)) for rank in b.ranks}
    for (to, slot), (source_rank, at), scale in oracle.triples(p.map):
        assert scale == 1
        moved[to[0]].view(-1)[slot] = shards[source_rank[0]].view(-1)[at]
    assert all(torch.equal(moved[rank], shard) for rank, shard in extract(b, full).items())
    assert equivalent(compose(a, p.map), b)
    assert len(p.copies) == copies


# --- do these tests discriminate? ---------------------------------------------------------


def mutant(old, new):
    """The module of named layouts with one piece of its text exchanged."""
    text = Path(inspect.getfile(named_module)).read_text()
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    made = types.ModuleType("shardalg.ops._mutant")
    made.__package__ = "shardalg.ops"
    exec(compile(text.replace(old, new), "mutant", "exec"), made.__dict__)
    return made


PAIRS = "            for pair in range(rank * mp_blocks, (rank + 1) * mp_blocks)\n"
THIRDS = "            for third in range(3)\n"
MUTANTS = {
    "nothing": ("Ids of the blocks", "Numbers of the blocks", False),
    "the loops of q, k, v and of blocks exchanged": (PAIRS + THIRDS, THIRDS + PAIRS, True),
    "no world size in the block": ("(3 * mp_blocks * len(labels))", "(3 * mp_blocks)", True),
    "no entry in the table": ('        "CodeGenBlock": qkv_codegen,\n', "", True),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("shape, heads, ranks", CODEGEN)
def test_the_comparison_with_the_real_partition_discriminates(name, shape, heads, ranks):
    old, new, fails = MUTANTS[name]
    attention = Attention(kv_heads=heads)
    chosen = mutant(old, new).named_qkv("CodeGenBlock")
    try:
        same = equivalent(chosen(shape, attention, ranks), probed("CodeGenBlock", shape, attention, ranks))
    except InvalidMapError:
        same = False
    assert bool(same) != fails


# --- value heads --------------------------------------------------------------------------

YUAN = [(8, 2), (8, 4), (4, 1), (4, 2), (6, 2), (9, 3), (12, 3), (5, 1)]


@pytest.mark.parametrize("heads, ranks", YUAN)
@pytest.mark.parametrize("axis", [0, 1])
def test_shared_qk_values_equal_the_real_partition(heads, ranks, axis):
    shape = (heads * 2, 3) if axis == 0 else (3, heads * 2)
    attention = Attention(kv_heads=heads)
    ours = shared_qk_value(shape, attention, ranks, axis=axis)
    assert equivalent(ours, probe(peers.shared_qk(attention, ranks, axis), shape, ranks))


def test_a_bias_of_shared_qk_values_is_cut_with_its_weight():
    attention = Attention(kv_heads=8)

    def real(full, rank):
        weight = torch.zeros(16, 1)
        return peers.fusedqkv_utils.shard_value_with_share_qk(
            weight, full, rank, 2, True, peers.meta(attention)
        )[1]

    assert equivalent(shared_qk_value((16,), attention, 2), probe(real, (16,), 2))


def test_the_bias_of_yuans_o_proj_is_refused_because_its_partition_keeps_nothing_of_it():
    """DeepSpeed divides the bias, then wraps the empty list of its shards instead."""
    attention = Attention(kv_heads=8)
    with pytest.raises(AttributeError, match="'list' object"):
        peers.fusedqkv_utils.shard_value_with_share_qk(
            torch.zeros(4, 16), torch.ones(4), 0, 2, False, peers.meta(attention)
        )
    with pytest.raises(UnsupportedError, match="Yuan's o_proj bias"):
        shared_qk_value((16,), attention, 2, axis=1)


@pytest.mark.parametrize(
    "shape, attention, ranks, reason",
    [
        ((16, 2), Attention(), 2, "needs the model's kv_heads"),
        ((16, 2), Attention(kv_heads=8), 3, r"8 = 3\*2 \+ 2"),
        ((16, 2), Attention(kv_heads=8), 8, "8 ranks are more than half of 8 heads"),
    ],
)
def test_yuan_refuses_with_the_reason(shape, attention, ranks, reason):
    with pytest.raises(peers.REFUSALS):
        peers.shared_qk(attention, ranks, 0)(torch.zeros(shape), 0)
    with pytest.raises(InvalidMapError, match=reason):
        shared_qk_value(shape, attention, ranks)


def test_yuan_rows_that_are_no_whole_heads_are_refused():
    """The real partition drops the last row."""
    attention = Attention(kv_heads=8)
    assert not is_surjective(probe(peers.shared_qk(attention, 2, 0), (17, 2), 2))
    with pytest.raises(InvalidMapError, match=r"17 = 8\*2 \+ 1; 16 or 24 would"):
        shared_qk_value((17, 2), attention, 2)


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 3))
def test_grouped_query_gives_each_rank_whole_heads(heads, ranks, size):
    """More ranks than heads: rank r holds head r // (ranks / heads); otherwise heads come in order."""
    attention, shape = Attention(kv_heads=heads), (heads * size, 2)
    if ranks > heads and ranks % heads:
        with pytest.raises(InvalidMapError, match="groups of ranks"):
            grouped_query(shape, attention, ranks)
        return
    found = grouped_query(shape, attention, ranks)
    full = torch.arange(2 * heads * size).reshape(shape)
    by_head = full.reshape(heads, size, 2)
    held = [[r // (ranks // heads)] for r in range(ranks)] if ranks > heads else None
    for rank, shard in extract(found, full).items():
        if held is not None:
            assert torch.equal(shard, by_head[held[rank]].reshape(-1, 2))
        else:
            assert shard.shape[0] == head_sizes(shape[0], attention, ranks)[rank]
    assert torch.equal(rebuild(found, extract(found, full)), full)
