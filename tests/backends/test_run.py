"""A run gives what extraction from the whole tensor gives, counts what it moves, and changes nothing else."""

import itertools
import logging
import math
import threading
from fractions import Fraction

import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, WHOLE, columns, full, move, own, require, rows

import shardalg as sa

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTEGERS = ("bool", "uint8", "int8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
OTHERS = ("complex64", "complex128", "float8_e4m3fn", "float8_e5m2")
BYTES = tuple(getattr(torch, name) for name in INTEGERS + OTHERS)
STRATEGIES = ("fused", "p2p", "shared")


def random_bytes(shape, dtype):
    """A tensor of any dtype with arbitrary (for bool, valid) contents."""
    size = torch.empty(0, dtype=dtype).element_size()
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def same_bytes(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and a.contiguous().flatten().view(torch.uint8).equal(
        b.contiguous().flatten().view(torch.uint8)
    )  # fmt: skip


# --- values -------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("max_bytes", [None, 64])
def test_processes_equal_extraction(world, strategy, max_bytes):
    program = sa.schedule(sa.plan(ROWS, COLUMNS), max_bytes=max_bytes)

    def rank(ctx):
        bound = sa.bind(ctx, program)
        for k in range(3):
            x = full(ROWS) + k
            require(
                sa.run(ctx, bound, own(ctx, sa.extract(ROWS, x)), tag=k), own(ctx, sa.extract(COLUMNS, x))
            )

    world(4, rank, strategy=strategy).good()


@pytest.mark.parametrize("dtype", [*FLOATS, *BYTES], ids=str)
def test_every_dtype_moves_its_bytes(world, dtype):
    torch.manual_seed(0)
    x = random_bytes((8, 8), dtype)
    plan = sa.plan(rows(4, (8, 8)), columns(4, (8, 8)))
    shards, wanted = cut(x, 0), cut(x, 1)

    def rank(ctx):
        bound = sa.bind(ctx, plan)
        out = sa.run(ctx, bound, own(ctx, shards), verify=True)
        assert all(same_bytes(out[r], wanted[r]) for r in ctx.ranks)

    world(4, rank).good()
    with sa.backends.simulate(4) as ctx:
        out = sa.run(ctx, sa.bind(ctx, plan), shards)
        assert all(same_bytes(out[r], wanted[r]) for r in ctx.ranks)


def cut(x, axis):
    """Shards by torch's own cutting, whatever the dtype."""
    raw = x.contiguous().view(torch.uint8).reshape(*x.shape, x.element_size())
    parts = raw.chunk(4, axis)
    return {r: p.contiguous().view(x.dtype).reshape(p.shape[:2]) for r, p in enumerate(parts)}


ODD = {
    "transposed": lambda x: x.t().contiguous().t(),
    "every other element": lambda x: torch.stack([x, x * 0], -1)[..., 0],
    "end of a storage": lambda x: torch.cat([torch.zeros(6), x.flatten()])[6:].view(x.shape),
    "middle of a pool": lambda x: torch.cat([torch.zeros(3), x.flatten(), torch.ones(5)])[3:-5].view(x.shape),
    "requires grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
}  # fmt: skip


@pytest.mark.parametrize("what", ODD)
def test_views_of_any_kind_equal_their_copies(what):
    """Also as ``out``: a view into a larger storage is written where it lies and nowhere else."""
    x = full(ROWS)
    odd = {r: ODD[what](s) for r, s in sa.extract(ROWS, x).items()}
    before = {r: s.detach().clone() for r, s in odd.items()}
    with sa.backends.simulate(4) as ctx, torch.no_grad():
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        require(sa.run(ctx, bound, odd), sa.extract(COLUMNS, x))
        require({r: s.detach() for r, s in odd.items()}, before)
        out = {r: ODD[what](torch.zeros_like(s)) for r, s in sa.extract(COLUMNS, x).items()}
        given = sa.run(ctx, bound, odd, out)
        assert given is out
        require({r: s.detach() for r, s in out.items()}, sa.extract(COLUMNS, x))


def test_expanded_sources_and_conjugates():
    one = torch.tensor(3.0).expand(2, 6)
    with sa.backends.simulate(4) as ctx:
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), dict.fromkeys(range(4), one))
        assert all(x.eq(3).all() and x.is_contiguous() for x in out.values())
        z = torch.complex(full(ROWS), -full(ROWS))
        shards = {r: s.conj() for r, s in sa.extract(ROWS, z).items()}
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), shards)
        require(out, sa.extract(COLUMNS, z.conj().resolve_conj()))
        with pytest.raises(sa.InvalidMapError, match="share memory"):
            sa.run(
                ctx,
                sa.bind(ctx, sa.plan(ROWS, ROWS)),
                sa.extract(ROWS, full(ROWS)),
                dict.fromkeys(range(4), one),
            )


@pytest.mark.parametrize("shape", [(), (0, 4), (1,), (3, 0)])
def test_zero_dimensions_and_zero_elements(world, shape):
    source, target = (sa.layout(shape, sa.Replicate(), ranks=r) for r in ([0], [0, 1, 2]))

    def rank(ctx):
        x = torch.arange(math.prod(shape)).reshape(shape) + 5
        out = sa.run(ctx, sa.bind(ctx, sa.plan(source, target)), {0: x} if ctx.ranks == (0,) else {})
        require(out, {ctx.ranks[0]: x})

    world(3, rank).good()


def test_scaled_copies_keep_the_exact_ratio(world):
    a, b = (sa.layout((7,), sa.Replicate(Fraction(1, n)), ranks=n) for n in (2, 3))
    x = torch.arange(7.0) * 6

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(a, b))
        out = sa.run(ctx, bound, own(ctx, dict.fromkeys(range(2), x / 2)))
        require(out, own(ctx, dict.fromkeys(range(3), x / 2 * 2 / 3)))
        with pytest.raises(sa.UnsupportedError if ctx.ranks[0] < 2 else sa.ShardalgError):
            sa.run(ctx, sa.bind(ctx, sa.plan(a, b)), own(ctx, {r: x.long() for r in range(2)}))

    world(3, rank).good()


def test_padding_is_zero_when_fresh_and_left_alone_when_given():
    source = sa.layout((13,), sa.Split(0, rule="pad"), ranks=4)
    target = sa.layout((13,), sa.Split(0, rule="pad"), ranks=2)
    x = torch.arange(13.0) + 1
    shards = sa.extract(source, x)
    shards[3][1:] = float("nan")  # padding is never read
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(source, target))
        out = sa.run(ctx, bound, shards)
        assert out[1].tolist() == [*range(8, 14), 0]
        given = {r: torch.full((7,), -1.0) for r in range(2)}
        sa.run(ctx, bound, shards, given)
        assert given[1].tolist() == [*range(8, 14), -1]


def test_a_result_never_aliases_an_input():
    x = full(ROWS)
    with sa.backends.simulate(4) as ctx:
        shards = sa.extract(ROWS, x)
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, ROWS)), shards)
        for r in range(4):
            out[r].zero_()
        require(shards, sa.extract(ROWS, x))


def test_trees_views_and_ties(world):
    q, k = rows(2, (8, 4)), rows(2, (2, 4))
    fused = sa.layout((10, 4), sa.Split(1), ranks=2)
    tree = sa.plan_tree(
        {"q": q, "k": k}, {"qk": fused, "tied": fused}, views={"qk": sa.join(["q", "k"])}, tied={"tied": "qk"}
    )
    x = full(sa.layout((10, 4), sa.Replicate(), ranks=1))
    wanted = sa.extract(fused, x)
    shards = {"q": sa.extract(q, x[:8]), "k": sa.extract(k, x[8:])}

    def rank(ctx):
        bound = sa.bind(ctx, sa.schedule(tree, max_bytes=64))
        out = sa.run(ctx, bound, {name: own(ctx, its) for name, its in shards.items()})
        require(out["qk"], own(ctx, wanted))
        assert all(out["tied"][r] is out["qk"][r] for r in ctx.ranks)
        (r,) = ctx.ranks
        bare = sa.run(ctx, bound, {name: its[r] for name, its in shards.items()})  # no {rank: ...} needed
        require(bare["qk"], own(ctx, wanted))

    world(2, rank).good()


# --- counts -------------------------------------------------------------------------------


def test_from_the_second_run_on_nothing_is_planned_agreed_or_allocated(world):
    program = sa.schedule(sa.plan(ROWS, COLUMNS), max_bytes=64)

    def rank(ctx):
        bound = sa.bind(ctx, program)
        x = full(ROWS)
        shards = own(ctx, sa.extract(ROWS, x))
        out = {r: torch.empty_like(s) for r, s in own(ctx, sa.extract(COLUMNS, x)).items()}
        sa.run(ctx, bound, shards, out)
        first = ctx.counters.gathers, ctx.counters.preparations, ctx.counters.allocations
        before = ctx.counters.exchanges
        for k in range(3):
            sa.run(ctx, bound, shards, out, tag=k)
            sa.run(ctx, bound.clone(), shards, out, tag=k)
        after = ctx.counters.gathers, ctx.counters.preparations, ctx.counters.allocations
        rounds = ctx.last_report.rounds
        return first == after, ctx.counters.exchanges - before == 6 * (rounds + 2), rounds

    for unchanged, exchanges, rounds in world(4, rank).good():
        assert unchanged and exchanges and rounds > 1


def test_payload_is_the_plans_bytes_exactly(world):
    """Equal layouts, and a replicated source, send nothing at all."""
    for source, target in ((ROWS, COLUMNS), (ROWS, WHOLE), (ROWS, ROWS), (WHOLE, COLUMNS)):
        stats = sa.plan(source, target).stats

        def rank(ctx, source=source, target=target):
            move(ctx, source, target)
            return ctx.counters.payload_bytes, ctx.counters.exchanges

        found = world(4, rank).good()
        assert sum(sent for sent, _ in found) == stats.bytes_crossing(4)
        assert all((exchanges > 0) == (stats.elements_crossing > 0) for _, exchanges in found)


def test_the_report_says_what_the_run_did(world, caplog):
    program = sa.schedule(sa.plan(ROWS, COLUMNS), max_bytes=64, dtypes="float32")

    def rank(ctx):
        seen = []
        bound = sa.bind(ctx, program)
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        sa.run(ctx, bound, shards, tag=7, progress=lambda done, total: seen.append((done, total)))
        return ctx.last_report, seen

    with caplog.at_level(logging.DEBUG, "shardalg"):
        found = world(4, rank).good()
    assert "RunReport" in caplog.text
    for report, seen in found:
        assert (report.run, report.tag, report.rounds) == (0, 7, len(program.rounds))
        assert report.wire_bytes == report.lower_bound == program.wire_bytes
        assert report.peak_staging == program.peak_staging <= 64
        assert seen == [(k + 1, report.rounds) for k in range(report.rounds)]
        assert report.total_seconds > 0 and dict(report.seconds)["exchange"] > 0
    assert sum(report.sent for report, _ in found) == program.wire_bytes
    assert sum(report.received for report, _ in found) == program.wire_bytes


def test_simulated_runs_report_progress_too():
    with sa.backends.simulate(4) as ctx:
        seen = []
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        sa.run(
            ctx, bound, sa.extract(ROWS, full(ROWS)), progress=lambda done, total: seen.append((done, total))
        )
        assert seen == [(1, 1)] and ctx.last_report.wire_bytes == ctx.last_report.lower_bound


# --- tags, order, dtypes: what all ranks must say alike -----------------------------------


def test_one_step_never_meets_another(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        out = {r: torch.full_like(s, -1) for r, s in own(ctx, sa.extract(COLUMNS, full(ROWS))).items()}
        with pytest.raises(sa.TransferError, match="tag") as refused:
            sa.run(ctx, bound, shards, out, tag=8 if ctx.ranks == (3,) else 7)
        assert not refused.value.targets_touched and all(x.eq(-1).all() for x in out.values())
        sa.run(ctx, bound, shards, out, tag=8)
        return str(refused.value)

    said = world(4, rank).good()
    assert len(set(said)) == 1 and "7" in said[0] and "8" in said[0]


def test_calls_in_another_order_are_noticed(world):
    """Messages of other sizes would end a process: nothing is sent before all agree."""

    def rank(ctx):
        small, large = sa.bind(ctx, sa.plan(ROWS, COLUMNS)), sa.bind(ctx, sa.plan(ROWS, WHOLE))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        sa.run(ctx, small, shards), sa.run(ctx, large, shards)
        with pytest.raises(sa.TransferError, match="same order") as refused:
            sa.run(ctx, large if ctx.ranks == (1,) else small, shards)
        sa.run(ctx, small, shards)
        return str(refused.value)

    assert len(set(world(4, rank).good())) == 1


WRONG = {
    "shape": (lambda x: x[:, :5], sa.InvalidMapError, "shape"),
    "dtype": (lambda x: x.double(), sa.ShardalgError, "float64"),
    "device": (lambda x: x.to("meta"), sa.InvalidMapError, "meta"),
    "sparse": (lambda x: x.to_sparse(), sa.UnsupportedError, "sparse"),
    "no tensor": (lambda x: x.numpy(), sa.InvalidMapError, "ndarray"),
    "missing": (lambda x: {}, sa.InvalidMapError, "no tensor"),
}


@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("first", [True, False], ids=["first run", "later run"])
def test_one_ranks_wrong_tensor_stops_all_before_anything_is_written(world, what, first):
    spoil, kind, word = WRONG[what]

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        out = {r: torch.full_like(s, -1) for r, s in own(ctx, sa.extract(COLUMNS, full(ROWS))).items()}
        if not first:
            sa.run(ctx, bound, shards)
        wrong = {r: spoil(x) for r, x in shards.items()} if ctx.ranks == (2,) else shards
        with pytest.raises(kind if ctx.ranks == (2,) else sa.TransferError, match=word) as refused:
            sa.run(ctx, bound, wrong, out)
        assert all(x.eq(-1).all() for x in out.values())
        assert not getattr(refused.value, "targets_touched", False)
        sa.run(ctx, bound, shards, out)

    world(4, rank).good()


TALL = sa.layout((8, 6), sa.Split(1, sizes=(2, 2, 1, 1)), ranks=4)  # smaller shards than by rows


OUTS = {
    "an input's memory": lambda x, s: s.view(-1)[: x.numel()].view(x.shape),
    "the end of an input": lambda x, s: s.view(-1)[-x.numel() :].view(x.shape),
    "its own memory twice": lambda x, s: torch.zeros(1).expand(x.shape),
    "another shape": lambda x, s: x[:4],
    "another dtype": lambda x, s: x.double(),
    "another device": lambda x, s: x.to("meta"),
    "no tensor": lambda x, s: x.numpy(),
}


@pytest.mark.parametrize("what", OUTS)
@pytest.mark.parametrize("first", [True, False], ids=["first run", "later run"])
def test_one_ranks_wrong_out_stops_all_before_anything_is_written(world, what, first):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, TALL))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        wanted = own(ctx, sa.extract(TALL, full(ROWS)))
        out = {r: torch.full_like(x, -1) for r, x in wanted.items()}
        if not first:
            sa.run(ctx, bound, shards, {r: x.clone() for r, x in out.items()})
        before = {r: x.clone() for r, x in shards.items()}
        odd = ctx.ranks == (2,)
        given = {r: OUTS[what](x, shards[r]) for r, x in out.items()} if odd else out
        with pytest.raises(sa.ShardalgError) as refused:
            sa.run(ctx, bound, shards, given)
        assert all(x.eq(-1).all() for x in out.values()) and not getattr(
            refused.value, "targets_touched", False
        )
        require(shards, before)
        require(sa.run(ctx, bound, shards, out), wanted)
        return str(refused.value)

    said = world(4, rank, timeout=20).good()
    assert all("rank 2" in said[r] or "ranks [2]" in said[r] for r in (0, 1, 3))


@pytest.mark.parametrize("tag", [1.5, "7", 1 << 63, -(1 << 63)])
def test_a_tag_is_an_int_of_64_bits(tag):
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        with pytest.raises(sa.InvalidMapError, match="tag"):
            sa.run(ctx, bound, sa.extract(ROWS, full(ROWS)), tag=tag)
        sa.run(ctx, bound, sa.extract(ROWS, full(ROWS)), tag=(1 << 63) - 1)


@pytest.mark.parametrize("options", [{"tag": "7"}, {"progress": 3}, {"progress": "bar"}])
def test_one_ranks_wrong_option_stops_all(world, options):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        wrong = options if ctx.ranks == (2,) else {}
        with pytest.raises(sa.InvalidMapError if wrong else sa.TransferError, match="|".join(options)):
            sa.run(ctx, bound, shards, **wrong)
        sa.run(ctx, bound, shards)

    world(4, rank).good()


def test_dtypes_that_differ_are_named_with_their_ranks(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        x = full(ROWS, torch.float64 if ctx.ranks == (2,) else torch.float32)
        with pytest.raises(sa.TransferError) as refused:
            sa.run(ctx, bound, own(ctx, sa.extract(ROWS, x)))
        return str(refused.value)

    said = "the tensor: its shards have different dtypes: float32 on ranks [0, 1, 3], float64 on ranks [2]"
    assert world(4, rank).good() == [said] * 4


@pytest.mark.parametrize("side", ["shards", "out"])
def test_dtypes_that_differ_in_one_process_are_named(side):
    with sa.backends.simulate(4) as ctx:
        given = {"shards": sa.extract(ROWS, full(ROWS)), "out": sa.extract(COLUMNS, full(ROWS))}
        given[side][2] = given[side][2].double()
        with pytest.raises(sa.InvalidMapError) as refused:
            sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), **given)
        assert str(refused.value) == f"the tensor: its {side} have different dtypes ['float32', 'float64']"


def test_sources_cast_on_the_sender_where_that_is_smaller(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS), dtypes=("float32", "bfloat16"))
        x = full(ROWS) / 3
        out = sa.run(ctx, bound, own(ctx, sa.extract(ROWS, x)))
        require(out, own(ctx, sa.extract(COLUMNS, x.bfloat16())))
        return ctx.counters.payload_bytes

    assert sum(world(4, rank).good()) == 2 * sa.plan(ROWS, COLUMNS).stats.elements_crossing


# --- out ----------------------------------------------------------------------------------


def test_out_must_not_share_memory():
    x = full(ROWS)
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(ROWS, ROWS))
        shards = sa.extract(ROWS, x)
        for other, word in (
            (shards, "an input"),
            (dict.fromkeys(range(4), torch.zeros(2, 6)), "another out"),
        ):
            with pytest.raises(sa.InvalidMapError, match=word):
                sa.run(ctx, bound, shards, other)
        late = {r: s[:] for r, s in shards.items()}
        with pytest.raises(sa.InvalidMapError, match="an input"):
            sa.run(ctx, bound, shards, late)
        big = torch.zeros(8, 12)  # columns of one tensor interleave, but share nothing
        woven = {r: big[2 * r : 2 * r + 2, ::2] for r in range(4)}
        require(sa.run(ctx, bound, shards, woven), sa.extract(ROWS, x))
        assert big[:, 1::2].eq(0).all()
        with pytest.raises(sa.InvalidMapError, match="another out"):
            sa.run(ctx, bound, shards, {r: big.view(-1)[6 * r : 6 * r + 12].view(2, 6) for r in range(4)})


# --- donate -------------------------------------------------------------------------------


@pytest.mark.parametrize("max_bytes", [None, 64])
def test_a_donated_tensor_is_empty_once_its_last_copy_has_left(world, max_bytes):
    tree = sa.plan_tree({"a": ROWS, "b": ROWS}, {"a": COLUMNS, "b": COLUMNS})
    program = sa.schedule(tree, max_bytes=max_bytes)

    def rank(ctx):
        (r,) = ctx.ranks
        bound = sa.bind(ctx, program)
        x = full(ROWS)
        shards = {name: own(ctx, sa.extract(ROWS, x)) for name in ("a", "b")}
        left = []
        out = sa.run(
            ctx, bound, shards, donate=True,
            progress=lambda done, total: left.append(sum(s[r].numel() for s in shards.values())),
        )  # fmt: skip
        for name in ("a", "b"):
            require(out[name], own(ctx, sa.extract(COLUMNS, x)))
            assert shards[name][r].shape == (0,)
        return left

    for left in world(4, rank).good():
        assert left[-1] == 0 and left == sorted(left, reverse=True)
        assert max_bytes is None or left[0] > 0


def test_donating_frees_memory_but_not_what_others_use():
    x = full(ROWS)
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = sa.extract(ROWS, x)
        view = shards[0][1]
        kept = {r: s.untyped_storage() for r, s in shards.items() if r}
        require(sa.run(ctx, bound, shards, donate=True), sa.extract(COLUMNS, x))
        assert view.equal(x[1])  # another tensor still uses this memory
        assert all(s.numel() == 0 for s in shards.values())
        assert all(s.data_ptr() not in {k.data_ptr() for k in kept.values()} for s in shards.values())


def test_a_source_that_several_targets_read_leaves_after_the_last():
    tree = sa.plan_tree({"a": ROWS}, {"a": COLUMNS, "b": WHOLE}, views={"b": sa.join(["a"])})
    x = full(ROWS)
    with sa.backends.simulate(4, messages=True) as ctx:
        shards = {"a": sa.extract(ROWS, x)}
        out = sa.run(ctx, sa.bind(ctx, sa.schedule(tree, max_bytes=64)), shards, donate=True)
        require(out["a"], sa.extract(COLUMNS, x))
        require(out["b"], sa.extract(WHOLE, x))
        assert all(s.numel() == 0 for s in shards["a"].values())


# --- inference mode -----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_inference_mode_leaves_nothing_that_later_runs_cannot_use(world, strategy):
    """What a context keeps is written by all of its runs, in whatever mode each is."""

    def rank(ctx):
        bound = sa.bind(ctx, sa.schedule(sa.plan(ROWS, COLUMNS), max_bytes=256, dtypes="float32"))
        wanted = own(ctx, sa.extract(COLUMNS, full(ROWS)))
        out = {r: torch.zeros_like(x) for r, x in wanted.items()}
        for inference in (True, False, True, False):
            with torch.inference_mode(inference):
                for given in (None, out):
                    shards = own(ctx, sa.extract(ROWS, full(ROWS)))
                    require(sa.run(ctx, bound, shards, given, verify=given is None), wanted)
                    require(sa.run_async(ctx, bound, shards, given).wait(), wanted)

    world(4, rank, strategy=strategy).good()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_context_made_in_inference_mode(world, strategy):
    def rank(ctx):
        store = dist.PrefixStore("inner", ctx.transport.store)
        with torch.inference_mode():
            inner = sa.backends.cpu(store=store, rank=ctx.ranks[0], size=4, strategy=strategy)
        with inner:
            move(inner, ROWS, COLUMNS)

    world(4, rank).good()


# --- verify -------------------------------------------------------------------------------


def spoiling(rank, turn):
    """Make one byte of the message from rank 0 arrive changed on ``rank`` in the n-th turn."""

    def before(ctx):
        if ctx.ranks != (rank,):
            return
        strategy, count = ctx.transport.strategy, itertools.count()
        real = strategy.swap

        def spoiled(*given):
            messages = real(*given)
            if next(count) == turn:
                messages[rank][0][5] ^= 4
            return messages

        strategy.swap = spoiled

    return before


def test_verify_names_the_copy_that_differs(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        with pytest.raises(sa.TransferError) as refused:
            sa.run(ctx, bound, shards, verify=True)
        require(sa.run(ctx, bound, shards, verify=True), own(ctx, sa.extract(COLUMNS, full(ROWS))))
        return str(refused.value)

    said = world(4, rank, before=spoiling(2, 0)).good()
    assert len(set(said)) == 1
    assert "rank 2 received other bytes" in said[0] and "from rank 0 to rank 2" in said[0]


def test_without_verify_the_same_byte_goes_unnoticed(world):
    """The twin that shows the check above can fail."""

    def rank(ctx):
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), own(ctx, sa.extract(ROWS, full(ROWS))))
        return out[ctx.ranks[0]].equal(sa.extract(COLUMNS, full(ROWS), ctx.ranks[0]))

    assert world(4, rank, before=spoiling(2, 0)).good() == [True, True, False, True]


def test_verify_is_asked_by_all_or_none(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        with pytest.raises(sa.TransferError, match="verify"):
            sa.run(ctx, bound, own(ctx, sa.extract(ROWS, full(ROWS))), verify=ctx.ranks == (0,))

    world(4, rank).good()


# --- in the background --------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_programs_in_flight_on_one_context(world, strategy):
    def rank(ctx):
        there, whole = sa.bind(ctx, sa.plan(ROWS, COLUMNS)), sa.bind(ctx, sa.plan(ROWS, WHOLE))
        handles, wanted = [], []
        for k in range(4):
            x = full(ROWS) * (k + 1)
            shards = own(ctx, sa.extract(ROWS, x))
            handles += [sa.run_async(ctx, there, shards, tag=k), sa.run_async(ctx, whole, shards, tag=k)]
            wanted += [own(ctx, sa.extract(COLUMNS, x)), own(ctx, sa.extract(WHOLE, x))]
        last = sa.run(ctx, there, own(ctx, sa.extract(ROWS, full(ROWS))))  # waits for its turn
        assert all(h.done() for h in handles)
        require(last, own(ctx, sa.extract(COLUMNS, full(ROWS))))
        for handle, its in zip(handles, wanted):
            require(handle.wait(), its)
            assert handle.wait() is handle.wait()

    world(4, rank, strategy=strategy).good()


def test_a_background_run_raises_where_it_is_waited_for(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        shards = own(ctx, sa.extract(ROWS, full(ROWS)))
        wrong = sa.run_async(
            ctx, bound, {r: x[:1] for r, x in shards.items()} if ctx.ranks == (1,) else shards
        )
        right = sa.run_async(ctx, bound, shards)
        require(right.wait(), own(ctx, sa.extract(COLUMNS, full(ROWS))))
        with pytest.raises(sa.InvalidMapError if ctx.ranks == (1,) else sa.TransferError, match="shape"):
            wrong.wait()

    world(4, rank).good()


def test_waiting_may_time_out_and_closing_ends_what_is_in_flight(world):
    gate = threading.Barrier(2)

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(rows(2), columns(2)))
        shards = own(ctx, sa.extract(rows(2), full(rows(2))))
        if ctx.ranks == (1,):
            gate.wait(10)
            return None
        first, second = (sa.run_async(ctx, bound, shards) for _ in range(2))
        with pytest.raises(TimeoutError):
            first.wait(0.05)
        assert not first.done() and "going on" in repr(first)
        gate.wait(10)
        for handle in (first, second):
            with pytest.raises(sa.TransferError):
                handle.wait(10)

    world(2, rank, timeout=20).good()


def test_threads_of_one_process_take_turns(world):
    """Calls from several threads do not mix; here all ranks make equal ones."""

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        x = full(ROWS)
        results = []
        threads = [
            threading.Thread(target=lambda: results.append(sa.run(ctx, bound, own(ctx, sa.extract(ROWS, x)))))
            for _ in range(3)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join(20)
        for out in results:
            require(out, own(ctx, sa.extract(COLUMNS, x)))
        return len(results)

    assert world(4, rank).good() == [3] * 4


@pytest.mark.parametrize(
    "shards, said",
    [
        ([torch.zeros(2, 2)], "must be a torch tensor, got list; give {rank: tensor}"),
        ({0: None, 1: None}, "must be a torch tensor, got NoneType"),
        (
            {0: torch.zeros(4, 4), 1: torch.zeros(2, 4)},
            r"that is the full tensor, extract\(layout, full\) cuts it",
        ),
        ({0: torch.zeros(2, 4)}, r"no shard of rank 1 in shards, which has \[0\]"),
    ],
)
def test_what_is_no_shard_is_refused_at_the_first_run(shards, said):
    """Before dtypes are agreed on."""
    a, b = (sa.layout((4, 4), sa.Split(axis), ranks=2) for axis in (0, 1))
    ctx = sa.backends.simulate(2)
    bound = sa.bind(ctx, sa.plan(a, b))
    with pytest.raises(sa.InvalidMapError, match=said):
        sa.run(ctx, bound, shards)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_element_of_a_wider_stride(world, strategy):
    """torch calls it contiguous whatever its stride is."""
    a, b = (sa.layout((1,), sa.Split(0, sizes=sizes), ranks=2) for sizes in ([1, 0], [0, 1]))

    def rank(ctx):
        lone = torch.arange(3.0)[1::2][:1]
        empty = torch.empty(0)
        given, out = (lone, empty) if ctx.ranks == (0,) else (empty, torch.zeros(3)[1::2][:1])
        return sa.run(ctx, sa.bind(ctx, sa.plan(a, b)), {ctx.ranks[0]: given}, {ctx.ranks[0]: out})

    assert world(2, rank, strategy=strategy).good()[1][1].item() == 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "uint16", "uint32", "float32"])
def test_blocks_that_run_backwards_in_any_dtype(dtype):
    kind = getattr(torch, dtype)
    x = torch.arange(4 * kind.itemsize, dtype=torch.uint8).view(kind)
    back = sa.layout((4,), sa.BlockGather(0, 1, ((3, 2, 1, 0),)))
    shards = sa.extract(back, x)
    assert [shards[0].view(torch.uint8)[0].item(), shards[0].numel()] == [3 * kind.itemsize, 4]
    assert sa.rebuild(back, shards).view(torch.uint8).equal(x.view(torch.uint8))
    ctx = sa.backends.simulate(1)
    forward = sa.layout((4,), sa.Replicate(), ranks=1)
    for wanted, dtypes in ((dtype, None), ("float64", (dtype, "float64"))):
        bound = sa.bind(ctx, sa.schedule(sa.plan(back, forward), dtypes=dtypes))
        assert sa.run(ctx, bound, shards)[0].double().equal(x.double()), wanted
