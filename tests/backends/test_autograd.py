"""The adjoint: ``<run(p, x), y> = <x, run(adjoint(p), y)>``, exact in integers; runs differentiate by it."""

import itertools
import threading
import time
from fractions import Fraction

import hypothesis
import pytest
import torch
from cases import COLUMNS, ROWS, WHOLE, columns, full, own, require, rows
from hypothesis import strategies as st

import shardalg as sa
from shardalg.testing import layout_pairs


def shards_of(space, seed, dtype=torch.int64):
    """Small random shards for every box of a storage."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for b in space.boxes:
        x = torch.randint(-9, 10, b.shape, generator=generator).to(dtype)
        if b.name:
            found.setdefault(b.rank, {})[b.name] = x
        else:
            found[b.rank] = x
    return found


def flat(shards):
    return torch.cat([x.flatten() for r in sorted(shards) for x in leaves(shards[r])] or [torch.zeros(0)])


def leaves(x):
    return [x[name] for name in sorted(x)] if isinstance(x, dict) else [x]


def size(plan):
    """How many ranks a simulation needs."""
    return 1 + max([*plan.source.ranks, *plan.target.ranks], default=0)


def slow_adjoint(plan, y, dtype):
    """Every copy element by element, in the order of (source rank, slot)."""
    x = {b.key: torch.zeros(b.size, dtype=dtype) for b in plan.source.domain.boxes}
    order = []
    for c in plan.copies:
        for index in itertools.product(*map(range, c.shape)):
            t, s = (
                side.offset + sum(i * k for i, k in zip(index, side.strides)) for side in (c.target, c.source)
            )
            order.append((c.target.rank, c.target.name, t, c.source.key, s, c.scale))
    for rank, name, t, key, s, scale in sorted(order, key=lambda o: o[:3]):
        value = y[rank][name] if name else y[rank]
        x[key][s] += (
            value.flatten()[t] * scale.numerator / scale.denominator if scale != 1 else value.flatten()[t]
        )
    return torch.cat([x[b.key] for b in plan.source.domain.boxes] or [torch.zeros(0, dtype=dtype)])


@hypothesis.given(
    pair=layout_pairs(scaled=False), select=st.sampled_from(["stay", "lowest"]), seed=st.integers(0, 99)
)
def test_adjoint_law_in_integers(pair, select, seed):
    """T13, also against the sum written out, on any layouts: padding, replicas, several slots per element."""
    p = sa.plan(*pair, select=select, missing="leave")
    x, y = shards_of(p.source.domain, seed), shards_of(p.target.domain, seed + 1)
    with sa.backends.simulate(size(p), messages=seed % 2 == 1) as ctx:
        there = sa.run(ctx, sa.bind(ctx, p, dtypes="int64"), x)
        back = sa.run(ctx, sa.bind(ctx, sa.adjoint(p), dtypes="int64"), y)
    assert (flat(there) * flat(y)).sum() == (flat(x) * flat(back)).sum()
    assert flat(back).equal(slow_adjoint(p, y, torch.int64))


@hypothesis.given(pair=layout_pairs(), seed=st.integers(0, 99))
def test_adjoint_law_with_scales(pair, seed):
    p = sa.plan(*pair, missing="leave")
    x, y = (shards_of(m.domain, seed, torch.float64) for m in pair)
    with sa.backends.simulate(size(p)) as ctx:
        there = sa.run(ctx, sa.bind(ctx, p, dtypes="float64"), x)
        back = sa.run(ctx, sa.bind(ctx, sa.adjoint(p), dtypes="float64"), y)
    torch.testing.assert_close((flat(there) * flat(y)).sum(), (flat(x) * flat(back)).sum())


@hypothesis.given(pair=layout_pairs(scaled=False), seed=st.integers(0, 99))
def test_the_adjoint_of_the_adjoint_moves_the_same(pair, seed):
    p = sa.plan(*pair, missing="leave")
    x = shards_of(p.source.domain, seed)
    twice = sa.adjoint(sa.adjoint(p))
    with sa.backends.simulate(size(p)) as ctx:
        once, again = (sa.run(ctx, sa.bind(ctx, q, dtypes="int64"), x) for q in (p, twice))
    assert flat(once).equal(flat(again))
    assert twice.select == p.select and sa.adjoint(p).digest != p.digest


def test_duplicates_are_added_in_rank_order():
    """In float32 the order shows: ranks 0, 1, 2 give ((0 + 1e8) + 1) - 1e8 = 0, another order 1."""
    p = sa.plan(sa.layout((1,), sa.Replicate(), ranks=1), sa.layout((1,), sa.Replicate(), ranks=3))
    with sa.backends.simulate(3, messages=True) as ctx:
        for values, total in (((1e8, 1, -1e8), 0), ((1e8, -1e8, 1), 1), ((1, 1e8, -1e8), 0)):
            y = {r: torch.tensor([v], dtype=torch.float32) for r, v in enumerate(values)}
            assert sa.run(ctx, sa.bind(ctx, sa.adjoint(p)), y)[0].item() == total


def test_duplicates_within_one_rank_are_added_in_slot_order():
    """One rank holds the element in three slots that two pieces weave."""
    storage, logical = sa.Space.shards({0: (6,)}), sa.Space.logical((2,))
    pieces = [
        ((0, 2), (0, 1)),
        ((1, 2), (1, -1)),
        ((4, 1), (0, 1)),
    ]  # (first slot, step), (first element, step)
    woven = sa.AffineMap.from_pieces(
        storage, logical,
        [sa.Piece((2,), sa.Side(a, (i,), 0), sa.Side(b, (j,))) for (a, i), (b, j) in pieces],
    )  # fmt: skip
    p = sa.plan(sa.layout((2,), sa.Replicate(), ranks=1), woven)
    with sa.backends.simulate(1) as ctx:
        y = {0: torch.tensor([1e8, 5, 6, 1, -1e8, 7])}  # element 0 in slots 0, 3, 4
        assert sa.run(ctx, sa.bind(ctx, sa.adjoint(p)), y)[0].tolist() == [0, 18]


@pytest.mark.parametrize("max_bytes", [None, 48])
def test_rounds_do_not_change_the_sum(max_bytes):
    p = sa.plan(ROWS, WHOLE)
    torch.manual_seed(1)
    y = {r: torch.randn(8, 6) for r in range(4)}
    with sa.backends.simulate(4, messages=True) as ctx:
        found = sa.run(
            ctx, sa.bind(ctx, sa.schedule(sa.adjoint(p), max_bytes=max_bytes, dtypes="float32")), y
        )
    assert flat(found).equal(slow_adjoint(p, y, torch.float32))


def test_given_targets_are_overwritten_where_something_arrives_and_nowhere_else():
    source = sa.layout((3,), sa.Split(0, rule="pad"), ranks=2)  # slot 1 of rank 1 is padding
    p = sa.plan(source, sa.layout((3,), sa.Replicate(), ranks=2))
    with sa.backends.simulate(2) as ctx:
        out = {r: torch.full((2,), 50) for r in range(2)}
        sa.run(
            ctx, sa.bind(ctx, sa.adjoint(p)), {0: torch.tensor([1, 2, 3]), 1: torch.tensor([10, 20, 30])}, out
        )
    assert out[0].tolist() == [11, 22] and out[1].tolist() == [33, 50]


@pytest.mark.parametrize("dtype", [torch.uint16, torch.float8_e4m3fn, torch.bfloat16, torch.bool], ids=str)
def test_dtypes_that_torch_cannot_add_are_added_in_wider_ones(dtype):
    p = sa.plan(sa.layout((4,), sa.Replicate(), ranks=1), sa.layout((4,), sa.Replicate(), ranks=2))
    y = torch.tensor([0, 1, 1, 0]).to(dtype)
    with sa.backends.simulate(2) as ctx:
        (found,) = sa.run(ctx, sa.bind(ctx, sa.adjoint(p)), {0: y, 1: y}).values()
    two = 1 if dtype == torch.bool else 2
    assert found.dtype == dtype and found.to(torch.int32).tolist() == [0, two, two, 0]


def test_the_adjoint_of_a_tree_gives_each_source_what_all_targets_send_back():
    q, k = rows(2, (8, 4)), rows(2, (2, 4))
    fused = sa.layout((10, 4), sa.Split(1), ranks=2)
    views = {"qk": sa.join(["q", "k"]), "again": sa.join(["q"])}
    tree = sa.plan_tree({"q": q, "k": k}, {"qk": fused, "again": columns(2, (8, 4))}, views=views)
    x = {"q": shards_of(q.domain, 1), "k": shards_of(k.domain, 2)}
    y = {"qk": shards_of(fused.domain, 3), "again": shards_of(columns(2, (8, 4)).domain, 4)}
    with sa.backends.simulate(2) as ctx:
        there = sa.run(ctx, sa.bind(ctx, tree), x)
        back = sa.run(ctx, sa.bind(ctx, sa.adjoint(tree)), y)
    assert set(back) == {"q", "k"}
    forward = sum((flat(there[name]) * flat(y[name])).sum() for name in y)
    assert forward == sum((flat(x[name]) * flat(back[name])).sum() for name in x)


def test_adjoint_takes_plans_only():
    with pytest.raises(sa.InvalidMapError, match="TransferPlan"):
        sa.adjoint(ROWS)


# --- autograd -----------------------------------------------------------------------------


@pytest.mark.parametrize("target", [COLUMNS, WHOLE], ids=["columns", "whole"])
def test_gradients_are_the_adjoint(world, target):
    p = sa.plan(ROWS, target)
    y = shards_of(target.domain, 3, torch.float64)
    x = sa.extract(ROWS, full(ROWS, torch.float64))

    def rank(ctx):
        bound, back = sa.bind(ctx, p), sa.bind(ctx, sa.adjoint(p))
        mine = {r: s.requires_grad_() for r, s in own(ctx, x).items()}
        for _ in range(2):
            out = sa.run(ctx, bound, mine)
            loss = sum((out[r] * y[r]).sum() for r in ctx.ranks)
            found = torch.autograd.grad(loss, list(mine.values()))
            wanted = sa.run(ctx, back, own(ctx, y))
            require(dict(zip(mine, found)), wanted)

    world(4, rank).good()


def test_only_one_rank_requires_gradients(world):
    """All take part in its backward, also those whose inputs need none."""
    p = sa.plan(ROWS, COLUMNS)

    def rank(ctx):
        bound = sa.bind(ctx, p)
        mine = own(ctx, sa.extract(ROWS, full(ROWS)))
        if ctx.ranks == (1,):
            mine[1].requires_grad_()
        out = sa.run(ctx, bound, mine)
        (loss,) = (out[r].sum() * (r + 1) for r in ctx.ranks)
        assert loss.requires_grad
        loss.backward()
        return mine.get(1, torch.zeros(1)).grad

    found = world(4, rank).good()
    assert found[1].equal(sa.extract(COLUMNS, full(ROWS))[0].new_tensor([[1, 1, 2, 2, 3, 3]] * 2))
    assert [g is None for g in found] == [True, False, True, True]


def test_nothing_is_recorded_without_need(world):
    p = sa.plan(ROWS, COLUMNS)

    def rank(ctx):
        bound = sa.bind(ctx, p)
        mine = {r: s.requires_grad_() for r, s in own(ctx, sa.extract(ROWS, full(ROWS))).items()}
        with torch.no_grad():
            plain = sa.run(ctx, bound, mine)
        out = {r: torch.zeros_like(x) for r, x in plain.items()}
        sa.run(ctx, bound, mine, out)
        with torch.inference_mode():
            quick = sa.run(ctx, bound, mine)
        return any(x.requires_grad for its in (plain, out, quick) for x in its.values())

    assert world(4, rank).good() == [False] * 4


def test_gradients_in_the_background(world):
    p = sa.plan(ROWS, COLUMNS)

    def rank(ctx):
        mine = {r: s.requires_grad_() for r, s in own(ctx, sa.extract(ROWS, full(ROWS))).items()}
        out = sa.run_async(ctx, sa.bind(ctx, p), mine).wait()
        sum(x.sum() for x in out.values()).backward()
        assert all(x.grad.eq(1).all() for x in mine.values())

    world(4, rank).good()


def test_a_rank_without_targets_is_told(world):
    """Its part of the backward would never run."""
    p = sa.plan(rows(2), columns(2), target_ranks=[2, 3])

    def rank(ctx):
        bound = sa.bind(ctx, p)
        mine = own(ctx, sa.extract(rows(2), full(ROWS)))
        loud = {r: x.requires_grad_() for r, x in mine.items()}
        with pytest.raises(sa.UnsupportedError, match=r"\[0, 1\].*detach"):
            sa.run(ctx, bound, loud)
        with torch.no_grad():
            sa.run(ctx, bound, loud)

    world(4, rank).good()


def test_gradcheck_and_double_backward():
    a, b = rows(2, (4, 3)), sa.layout((4, 3), sa.Replicate(Fraction(1, 2)), ranks=2)
    with sa.backends.simulate(2) as ctx:
        bound = sa.bind(ctx, sa.plan(a, b))

        def moved(x0, x1):
            out = sa.run(ctx, bound, {0: x0, 1: x1})
            return out[0] * out[1], out[1].pow(3)

        inputs = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2)]
        assert torch.autograd.gradcheck(moved, inputs)
        assert torch.autograd.gradgradcheck(moved, inputs)


def test_casts_go_back_to_the_source_dtype():
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS), dtypes=("float64", "float32"))
        mine = {r: s.requires_grad_() for r, s in sa.extract(ROWS, full(ROWS, torch.float64)).items()}
        sum(x.sum() for x in sa.run(ctx, bound, mine).values()).backward()
        assert all(x.grad.dtype == torch.float64 and x.grad.eq(1).all() for x in mine.values())


def test_integers_beside_floats_in_a_tree():
    tree = sa.plan_tree({"w": ROWS, "ids": ROWS}, {"w": COLUMNS, "ids": COLUMNS})
    with sa.backends.simulate(4) as ctx:
        w = {r: s.requires_grad_() for r, s in sa.extract(ROWS, full(ROWS)).items()}
        out = sa.run(ctx, sa.bind(ctx, tree), {"w": w, "ids": sa.extract(ROWS, full(ROWS, torch.int64))})
        require(out["ids"], sa.extract(COLUMNS, full(ROWS, torch.int64)))
        sum(x.sum() for x in out["w"].values()).backward()
        assert all(x.grad.eq(1).all() for x in w.values())


def test_a_module_trains_through_a_run(world):
    """Two layers with a transfer in between get the gradients of one process."""
    torch.manual_seed(0)
    x, w = torch.randn(8, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    whole = w.clone().requires_grad_()
    (x @ whole).tanh().pow(2).sum().backward()

    def rank(ctx):
        (r,) = ctx.ranks
        mine = sa.extract(ROWS, x, r) @ w  # this rank's rows
        mine.requires_grad_()
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), {r: mine})
        out[r].tanh().pow(2).sum().backward()
        return sa.extract(ROWS, x, r).T @ mine.grad

    torch.testing.assert_close(sum(world(4, rank).good()), whole.grad)


# --- who takes part in a backward ---------------------------------------------------------

SOON = 2.0  # seconds that an error takes where nobody has to wait for a timeout


def loud(ctx, layout=ROWS):
    """This process's shards, requiring gradients."""
    return {r: x.requires_grad_() for r, x in own(ctx, sa.extract(layout, full(layout))).items()}


def usable(ctx):
    """The context is as good as before."""
    out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), own(ctx, sa.extract(ROWS, full(ROWS))))
    require(out, own(ctx, sa.extract(COLUMNS, full(ROWS))))


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("strategy", ["fused", "shared"])
def test_targets_that_a_loss_does_not_use_have_zero_gradients(world, size, strategy):
    """Each rank's loss uses other targets; only one source requires gradients, and one is an integer."""
    a, b, n = rows(size), columns(size), {"ids": torch.int64}
    tree = sa.plan_tree({"w": a, "v": a, "ids": a}, {"w": b, "v": b, "ids": b})

    def rank(ctx):
        (r,) = ctx.ranks
        bound = sa.bind(ctx, tree)
        given = {
            name: own(ctx, sa.extract(a, full(a, n.get(name, torch.float32)))) for name in ("w", "v", "ids")
        }
        given["w"][r].requires_grad_()
        out = sa.run(ctx, bound, given)
        used = out["w" if r % 2 else "v"][r]
        (used * (r + 1)).sum().backward()
        assert given["v"][r].grad is None
        return given["w"][r].grad

    weights = {r: torch.full(b.shard_shape(r), (r + 1.0) * (r % 2)) for r in range(size)}
    wanted = sa.extract(a, sa.rebuild(b, weights))
    require(dict(enumerate(world(size, rank, strategy=strategy).good())), wanted)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_relayed_runs_go_back_without_relay(world, size):
    """One rank holds the source, all receive and forward; its gradient is the sum of theirs."""
    source, target = sa.layout((8, 6), sa.Replicate(), ranks=1), sa.layout((8, 6), sa.Replicate(), ranks=size)
    program = sa.schedule(sa.plan(source, target), max_bytes=256, dtypes="float32", relay=True)

    def rank(ctx):
        (r,) = ctx.ranks
        mine = loud(ctx, source)
        out = sa.run(ctx, sa.bind(ctx, program), mine)
        (out[r] * (r + 1)).sum().backward()
        return mine[0].grad if r == 0 else None

    found = world(size, rank).good()
    assert found[0].eq(sum(range(1, size + 1))).all()


def test_a_rank_whose_targets_have_no_gradients_is_told(world):
    """It gets integers only, so nothing there would lead back into the run."""
    few = sa.layout((8, 6), sa.Split(0), ranks=[0, 1, 2])
    tree = sa.plan_tree(
        {"w": few, "ids": ROWS}, {"w": sa.layout((8, 6), sa.Split(1), ranks=[0, 1, 2]), "ids": COLUMNS}
    )

    def rank(ctx):
        bound = sa.bind(ctx, tree)
        given = {"w": loud(ctx, few), "ids": own(ctx, sa.extract(ROWS, full(ROWS, torch.int64)))}
        with pytest.raises(sa.UnsupportedError, match=r"ranks \[3\] get no tensor that has any") as refused:
            sa.run(ctx, bound, given)
        with torch.no_grad():
            sa.run(ctx, bound, given)
        return str(refused.value)

    assert len(set(world(4, rank).good())) == 1


UNABLE = {
    "out": lambda ctx, bound: sa.run(
        ctx,
        bound,
        loud(ctx),
        {r: torch.zeros_like(x) for r, x in own(ctx, sa.extract(COLUMNS, full(ROWS))).items()},
    ),
    "no_grad": torch.no_grad()(lambda ctx, bound: sa.run(ctx, bound, loud(ctx))),
    "inference": torch.inference_mode()(lambda ctx, bound: sa.run(ctx, bound, loud(ctx))),
}


@pytest.mark.parametrize("what", UNABLE)
def test_a_rank_that_records_nothing_is_named_on_every_rank(world, what):
    """The others' backward would wait for it."""

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        act = UNABLE[what] if ctx.ranks == (2,) else lambda ctx, bound: sa.run(ctx, bound, loud(ctx))
        with pytest.raises(sa.UnsupportedError) as refused:
            act(ctx, bound)
        usable(ctx)
        return str(refused.value)

    (said,) = set(world(4, rank, timeout=20).good())
    assert "inputs of ranks [0, 1, 3] require gradients, but ranks [2] gave out=" in said


def test_what_requires_gradients_cannot_be_donated(world):
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        mine = loud(ctx)
        with pytest.raises(sa.UnsupportedError if ctx.ranks == (2,) else sa.TransferError, match="donate"):
            sa.run(ctx, bound, mine, donate=ctx.ranks == (2,))
        assert all(x.numel() for x in mine.values())
        with torch.no_grad():
            sa.run(ctx, bound, mine, donate=True)
        assert not any(x.numel() for x in mine.values())

    world(4, rank, timeout=20).good()


def test_a_rank_may_donate_what_requires_none(world):
    """Others' gradients come back; its own are nobody's."""

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        quiet = ctx.ranks == (2,)
        mine = own(ctx, sa.extract(ROWS, full(ROWS))) if quiet else loud(ctx)
        out = sa.run(ctx, bound, mine, donate=quiet)
        sum(x.sum() for x in out.values()).backward()
        return [x.numel() == 0 if quiet else bool(x.grad.eq(1).all()) for x in mine.values()]

    assert world(4, rank).good() == [[True]] * 4


@pytest.mark.parametrize("strategy", ["fused", "shared"])
def test_a_rank_that_never_goes_back_is_named_at_the_timeout(world, strategy):
    over = threading.Barrier(4)

    def rank(ctx):
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), loud(ctx))
        if ctx.ranks == (2,):
            over.wait(20)
            return None
        start = time.monotonic()
        with pytest.raises(sa.TransferError) as refused:
            sum(x.sum() for x in out.values()).backward()
        seconds = time.monotonic() - start
        over.wait(20)
        return str(refused.value), seconds

    found = world(4, rank, timeout=0.5, strategy=strategy).good()
    for r in (0, 1, 3):
        said, seconds = found[r]
        assert "every rank must go back through run 0" in said and seconds < 0.5 + SOON
    assert any("no answer from rank 2" in found[r][0] for r in (0, 1, 3))


ELSEWHERE = {
    "runs on": (lambda ctx, bound, out: sa.run(ctx, bound, loud(ctx)), "rank 2 in a run"),
    "goes back through another": (lambda ctx, bound, out: out[1].sum().backward(), "through run 0, rank 2 1"),
    "wants a graph": (
        lambda ctx, bound, out: torch.autograd.grad(
            out[0].square().sum(), [out[2]], create_graph=True
        ), r"ranks \[2\] go back with create_graph=True, ranks \[0, 1, 3\] without",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_rank_that_does_not_go_back_with_the_others_is_heard_at_once(world, what):
    other, words = ELSEWHERE[what]

    def rank(ctx):
        (r,) = ctx.ranks
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        mine = loud(ctx)
        out = [sa.run(ctx, bound, mine)[r], sa.run(ctx, bound, mine)[r], mine[r]]
        start = time.monotonic()
        with pytest.raises(sa.ShardalgError, match=words) as refused:
            other(ctx, bound, out) if r == 2 else out[0].square().sum().backward()
        assert time.monotonic() - start < SOON
        usable(ctx)
        return str(refused.value)

    assert len(set(world(4, rank, timeout=20).good())) == 1


@pytest.mark.parametrize("strategy", ["fused", "shared"])
def test_a_backward_through_a_closed_context_is_refused(world, strategy):
    def rank(ctx):
        out = sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), loud(ctx))
        if ctx.ranks == (2,):
            ctx.close()
        start = time.monotonic()
        kind = sa.ProvenanceError if ctx.ranks == (2,) else sa.TransferError
        with pytest.raises(kind, match=r"closed|gloo"):
            sum(x.sum() for x in out.values()).backward()
        return time.monotonic() - start

    assert max(world(4, rank, timeout=20, strategy=strategy).good()) < SOON


def test_a_run_in_the_background_is_recorded_where_it_was_asked_for(world):
    """Whatever mode the thread is in that waits for it."""

    def rank(ctx):
        mine = loud(ctx)
        handle = sa.run_async(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), mine)
        with torch.no_grad():
            out = handle.wait()
        sum(x.sum() for x in out.values()).backward()
        return all(x.grad.eq(1).all() for x in mine.values())

    assert world(4, rank).good() == [True] * 4


def test_autograd_hears_that_an_out_was_written():
    """Else a backward would use what is not there any more."""
    m = sa.layout((4,), sa.Replicate(), ranks=1)
    ctx = sa.backends.simulate(1)
    bound = sa.bind(ctx, sa.plan(m, m))
    weight, saved = torch.ones(4, requires_grad=True), torch.full((4,), 3.0)
    loss = (weight * saved).sum()
    sa.run(ctx, bound, {0: torch.zeros(4)}, {0: saved})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
