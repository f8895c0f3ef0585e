"""What the caller gives that the plan does not know is an error on every rank; what others hold is not."""

import itertools

import pytest
import torch
from cases import COLUMNS, ROWS, WHOLE, columns, full, own, require, rows

import shardalg as sa

X = full(ROWS)
SINGLE = sa.plan(ROWS, COLUMNS)
TREE = sa.plan_tree({"a": ROWS, "b": ROWS}, {"a": COLUMNS, "b": COLUMNS, "tied": COLUMNS}, tied={"tied": "b"})


def shards(ranks=range(4)):
    return {r: x for r, x in sa.extract(ROWS, X).items() if r in ranks}


def outs(ranks=range(4)):
    return {r: torch.zeros_like(x) for r, x in sa.extract(COLUMNS, X).items() if r in ranks}


def both(r):
    return {"a": shards([r]), "b": shards([r])}


def with_rank(its):
    return its | {7: torch.zeros(2, 6)}


STRANGE = {
    "rank": (
        SINGLE, lambda r: (with_rank(shards([r])), None),
        r"shards has shards of ranks \[7\]; the layout has \[0, 1, 2, 3\]",
    ),
    "rank of out": (SINGLE, lambda r: (shards([r]), with_rank(outs([r]))), r"out has shards of ranks \[7\]"),
    "rank of a tensor": (
        TREE, lambda r: (both(r) | {"b": with_rank(shards([r]))}, None),
        r"shards\['b'\] has shards of ranks \[7\]",
    ),
    "name": (
        TREE, lambda r: (both(r) | {"bias": X}, None),
        r"shards has tensors \['bias'\]; the plan knows \['a', 'b'\]",
    ),
    "name of out": (
        TREE, lambda r: (both(r), {name: outs([r]) for name in ("a", "b", "c")}),
        r"out has tensors \['c'\]; the plan knows \['a', 'b', 'tied'\]",
    ),
    "other tensors for a tie": (
        TREE, lambda r: (both(r), {name: outs([r]) for name in ("a", "b", "tied")}),
        r"out\['tied'\] is tied to 'b'",
    ),
    "a number for a rank": (SINGLE, lambda r: (shards([r]) | {"0": X}, None), r"\['0'\]"),
}  # fmt: skip


@pytest.mark.parametrize("what", STRANGE)
@pytest.mark.parametrize("first", [True, False], ids=["first run", "later run"])
def test_what_the_plan_does_not_know_stops_all(world, what, first):
    plan, give, words = STRANGE[what]

    def rank(ctx):
        bound = sa.bind(ctx, plan)
        (r,) = ctx.ranks
        good = shards([r]) if plan is SINGLE else both(r)
        if not first:
            sa.run(ctx, bound, good)
        given, out = give(r) if r == 2 else (good, None)
        with pytest.raises(sa.InvalidMapError if r == 2 else sa.TransferError, match=words):
            sa.run(ctx, bound, given, out)
        sa.run(ctx, bound, good)

    world(4, rank).good()


def test_what_others_hold_may_be_there(world):
    """Full dicts on every rank, with shards that other processes hold: they are left alone."""

    def rank(ctx):
        bound = sa.bind(ctx, TREE)
        given = {"a": shards(), "b": shards()}
        out = {"a": outs(), "b": outs()}
        out["tied"] = dict(out["b"])
        assert sa.run(ctx, bound, given, out) is out
        for name in ("a", "b", "tied"):
            require(own(ctx, out[name]), own(ctx, sa.extract(COLUMNS, X)))
            assert all(x.eq(0).all() for r, x in out[name].items() if r not in ctx.ranks)

    world(4, rank).good()


def test_names_within_a_shard(world):
    """A state dict per rank: 20 elements, each in one of two tensors of one of two ranks."""
    space = sa.Space.shards({r: {"w": (2, 3), "v": (5 - 2 * r,)} for r in range(2)})
    starts = itertools.accumulate((b.size for b in space.boxes), initial=0)
    source = sa.AffineMap.from_pieces(
        space, sa.Space.logical((20,)),
        [sa.Piece((b.size,), sa.Side(0, (1,), b.rank, b.name), sa.Side(at, (1,)))
         for b, at in zip(space.boxes, starts)],
    )  # fmt: skip
    whole = sa.layout((20,), sa.Replicate(), ranks=2)
    x = torch.arange(20.0)

    def rank(ctx):
        there, back = (sa.bind(ctx, sa.plan(*its)) for its in ((source, whole), (whole, source)))
        given = sa.extract(source, x)
        require(sa.run(ctx, there, given), own(ctx, {0: x, 1: x}))
        for r, its in sa.run(ctx, back, {0: x, 1: x}).items():
            require(its, given[r])
        wrong = {r: its | {"bias": x} for r, its in given.items()}
        with pytest.raises(sa.InvalidMapError, match=r"shards\[0\] has tensors \['bias'\].*\['v', 'w'\]"):
            sa.run(ctx, there, wrong)
        with pytest.raises(sa.InvalidMapError, match=r"out\[0\] has tensors \['bias'\]"):
            sa.run(
                ctx,
                back,
                {0: x, 1: x},
                {r: {k: s.clone() for k, s in its.items()} for r, its in wrong.items()},
            )

    world(2, rank).good()


def test_a_bare_tensor_stands_for_one_rank(world):
    """Neither for all ranks of a process nor for none."""
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(WHOLE, ROWS))
        with pytest.raises(sa.InvalidMapError, match=r"Tensor.*holds \[0, 1, 2, 3\] of its ranks"):
            sa.run(ctx, bound, X)
    p = sa.plan(rows(2), columns(2), target_ranks=[2, 3])

    def rank(ctx):
        bound = sa.bind(ctx, p)
        (r,) = ctx.ranks
        if r == 3:  # holds nothing of the source
            with pytest.raises(sa.InvalidMapError, match=r"holds none of its ranks \[0, 1\]"):
                sa.run(ctx, bound, X)
        else:
            with pytest.raises(sa.TransferError, match="rank 3 refused"):
                sa.run(ctx, bound, sa.extract(rows(2), X, r) if r < 2 else None)
        out = torch.zeros(8, 3)
        sa.run(ctx, bound, sa.extract(rows(2), X, r) if r < 2 else None, None if r < 2 else out)
        return out

    found = world(4, rank).good()
    require(dict(enumerate(found[2:])), sa.extract(columns(2), X))


def test_a_tree_is_a_dict_of_names():
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan_tree({}, {}))
        for given in ([X], X):
            with pytest.raises(sa.InvalidMapError, match="dict of tensors by name"):
                sa.run(ctx, bound, given)
        assert sa.run(ctx, bound, None) == sa.run(ctx, bound, {}) == {}
