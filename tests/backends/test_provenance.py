"""A bound plan runs on the very context that bound it, and on no other; a refusal says nothing to anybody."""

import copy
import dataclasses
import pickle

import optree
import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as torch_pytree
from cases import COLUMNS, ROWS, columns, full, messages, own, require, rows

import shardalg as sa

PLAN = sa.plan(ROWS, COLUMNS)
X = full(ROWS)
NS = "shardalg"


def other(ctx):
    """A bound plan of another context with an equal program."""
    return sa.bind(sa.backends.simulate(4), PLAN)


def forced_program(ctx, bound):
    object.__setattr__(bound, "program", sa.schedule(PLAN, max_bytes=32))
    return bound


def forced_field(ctx, bound):
    object.__setattr__(bound.program, "max_bytes", 32)
    return bound


def forced_map(ctx, bound):
    plan = bound.program.plan.entries[0].plan
    object.__setattr__(plan, "map", sa.plan(ROWS, ROWS).map)
    return bound


def forced_entries(ctx, bound):
    tree = bound.program.plan
    object.__setattr__(tree, "entries", tuple(dataclasses.replace(e) for e in tree.entries))
    return bound


def through_a_treedef(ctx, bound):
    leaves, treedef = optree.tree_flatten(bound, namespace=NS)
    return optree.tree_unflatten(treedef, leaves)


def through_a_cached_treedef(ctx, bound):
    """A cache keyed by tree structure answers with what was put in by another context."""
    cache = {}
    foreign = other(ctx)
    cache.setdefault(optree.tree_structure(foreign, namespace=NS), foreign)
    return cache[optree.tree_structure(bound, namespace=NS)]


def through_a_pickled_treedef(ctx, bound):
    leaves, treedef = optree.tree_flatten(bound, namespace=NS)
    return optree.tree_unflatten(pickle.loads(pickle.dumps(treedef)), leaves)


def loaded(ctx, bound):
    plan = sa.TransferPlan.from_dict(PLAN.to_dict())
    return sa.Bound(sa.schedule(plan))


LOST = {
    "built by hand": lambda ctx, b: sa.Bound(b.program),
    "replaced": lambda ctx, b: dataclasses.replace(b),
    "replaced program": lambda ctx, b: dataclasses.replace(b, program=b.program),
    "copied": lambda ctx, b: copy.copy(b),
    "deep-copied": lambda ctx, b: copy.deepcopy(b),
    "deep-copied in a list": lambda ctx, b: copy.deepcopy([b])[0],
    "pickled": lambda ctx, b: pickle.loads(pickle.dumps(b)),
    "pickled in a dict": lambda ctx, b: pickle.loads(pickle.dumps({"b": b}))["b"],
    "loaded": loaded,
    "unflattened": through_a_treedef,
    "unflattened from a pickled treedef": through_a_pickled_treedef,
    "mapped": lambda ctx, b: sa.tree_map(lambda x: x, b),
    "mapped over two": lambda ctx, b: sa.tree_map(lambda mine, its: its, b, other(ctx)),
    "mapped over two in a tree": lambda ctx, b: sa.tree_map(lambda mine, its: its, [b], [other(ctx)])[0],
    "another's, mapped with mine": lambda ctx, b: sa.tree_map(lambda its, mine: mine, other(ctx), b),
    "from a cache by treedef": through_a_cached_treedef,
    "another context's": lambda ctx, b: other(ctx),
    "another context's clone": lambda ctx, b: other(ctx).clone(),
    "clone of a copy": lambda ctx, b: copy.copy(b).clone(),
    "other program by force": forced_program,
    "other bound by force": forced_field,
    "other map by force": forced_map,
    "other entries by force": forced_entries,
    "the plan": lambda ctx, b: PLAN,
    "the program": lambda ctx, b: b.program,
    "nothing": lambda ctx, b: None,
}
KEPT = {
    "itself": lambda ctx, b: b,
    "clone": lambda ctx, b: b.clone(),
    "clone of a clone": lambda ctx, b: b.clone().clone(),
    "opaque leaf": lambda ctx, b: optree.tree_map(lambda x: x, {"b": b})["b"],
    "opaque leaf in torch": lambda ctx, b: torch_pytree.tree_map(lambda x: x, [b])[0],
    "another's for mine": lambda ctx, b: optree.tree_map(lambda its, mine: mine, [other(ctx)], [b])[0],
}


def fresh_plan():
    """A plan of its own, so that a change by force harms no other test."""
    return sa.plan(rows(4), columns(4))


@pytest.mark.parametrize("way", LOST)
def test_lost_ownership_is_refused_before_any_message(world, way):
    def rank(ctx):
        bound = sa.bind(ctx, fresh_plan())
        before = messages(ctx)
        with pytest.raises(sa.ProvenanceError, match="bind"):
            sa.run(ctx, LOST[way](ctx, bound), own(ctx, sa.extract(ROWS, X)))
        with pytest.raises(sa.ProvenanceError, match="bind"):
            sa.run_async(ctx, LOST[way](ctx, sa.bind(ctx, fresh_plan())), own(ctx, sa.extract(ROWS, X)))
        return before, messages(ctx) - 1  # the second bind

    for before, after in world(4, rank).good():
        assert before == after == 1


@pytest.mark.parametrize("way", KEPT)
def test_kept_ownership_runs(world, way):
    def rank(ctx):
        bound = KEPT[way](ctx, sa.bind(ctx, PLAN))
        require(sa.run(ctx, bound, own(ctx, sa.extract(ROWS, X))), own(ctx, sa.extract(COLUMNS, X)))
        return messages(ctx)

    assert min(world(4, rank).good()) > 1


def test_the_stamp_is_neutral():
    a, b = other(None), other(None)
    bare = sa.Bound(a.program)
    assert a == b == bare and hash(a) == hash(bare) and repr(a) == repr(bare)
    assert "_" not in repr(a)
    assert optree.tree_structure(a, namespace=NS) == optree.tree_structure(bare, namespace=NS)
    assert optree.tree_leaves(a, namespace=NS) == []
    last = dataclasses.fields(sa.Bound)[-1]
    assert (last.init, last.repr, last.compare, last.default) == (False, False, False, None)


def test_a_closed_context_refuses_its_own():
    ctx = sa.backends.simulate(4)
    bound = sa.bind(ctx, PLAN)
    ctx.close()
    for use in (lambda: sa.run(ctx, bound, sa.extract(ROWS, X)), lambda: sa.bind(ctx, PLAN)):
        with pytest.raises(sa.ProvenanceError, match="closed"):
            use()
    ctx.close()


def test_a_context_at_a_reused_address_is_another():
    """Bound plans live on when their context is gone, and the next one may lie where it lay."""
    stale, plan = {}, sa.plan(rows(2), columns(2))
    for _ in range(1000):
        ctx = sa.backends.simulate(2)
        if id(ctx) in stale:
            break
        stale[id(ctx)] = sa.bind(ctx, plan)
    with pytest.raises(sa.ProvenanceError, match="another context"):
        sa.run(ctx, stale[id(ctx)], sa.extract(rows(2), X))


GROUPS = {
    "another group of equal size": lambda r: r,
    "the same ranks in another order": lambda r: 3 - r,
    "the same ranks turned": lambda r: (r + 1) % 4,
}


@pytest.mark.parametrize("what", GROUPS)
def test_another_group_is_another_context(world, what):
    """Bound here, run there, and the other way round; neither says a word."""

    def rank(ctx):
        store = dist.PrefixStore("other", ctx.transport.store)
        with sa.backends.cpu(store=store, rank=GROUPS[what](ctx.ranks[0]), size=4, strategy="fused") as other:
            bound = {c: sa.bind(c, PLAN) for c in (ctx, other)}
            before = messages(ctx), messages(other)
            for here, there in ((ctx, other), (other, ctx)):
                with pytest.raises(sa.ProvenanceError, match="another context"):
                    sa.run(here, bound[there], own(here, sa.extract(ROWS, X)))
            unsaid = before == (messages(ctx), messages(other))
            for c in (ctx, other):
                require(sa.run(c, bound[c], own(c, sa.extract(ROWS, X))), own(c, sa.extract(COLUMNS, X)))
        return unsaid

    assert world(4, rank).good() == [True] * 4


def test_compiled_code_still_asks_for_the_owner():
    """The gate runs eagerly, so that a compiled step does not keep the answer of its first call."""
    ctx, foreign = sa.backends.simulate(4), sa.backends.simulate(4)
    mine, its = sa.bind(ctx, PLAN), sa.bind(foreign, PLAN)
    shards = sa.extract(ROWS, X)

    @torch.compile(backend="eager")
    def step(bound, shards):
        out = sa.run(ctx, bound, {r: x + 0 for r, x in shards.items()})
        return out[0] + 1

    wanted = sa.extract(COLUMNS, X, 0) + 1
    assert torch.equal(step(mine, shards), wanted)
    for refused in (its, sa.Bound(mine.program), copy.copy(mine)):
        with pytest.raises(sa.ProvenanceError):
            step(refused, shards)
        assert torch.equal(step(mine.clone(), shards), wanted)
    ctx.close()
    with pytest.raises(sa.ProvenanceError, match="closed"):
        step(mine, shards)


def test_the_gate_is_local_and_closing_tells_the_others(world):
    """The refusing rank says nothing; when it closes its context the others hear at once."""

    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        mine = copy.copy(bound) if ctx.ranks == (2,) else bound
        return sa.run(ctx, mine, own(ctx, sa.extract(ROWS, X)))

    errors = world(4, rank, timeout=30).errors
    assert isinstance(errors[2], sa.ProvenanceError)
    assert all(isinstance(errors[r], sa.TransferError) for r in (0, 1, 3))


def test_without_closing_the_others_raise_at_the_timeout(world):
    import threading

    done = threading.Barrier(3)

    def rank(ctx):
        bound = sa.bind(ctx, PLAN)
        if ctx.ranks == (1,):
            with pytest.raises(sa.ProvenanceError):
                sa.run(ctx, copy.copy(bound), own(ctx, sa.extract(ROWS, X)))
            ctx._held = done.wait(20)  # keep the context open until the others gave up
            return None
        try:
            return sa.run(ctx, bound, own(ctx, sa.extract(ROWS, X)))
        finally:
            if ctx.ranks[0] != 3:
                done.wait(20)

    errors = world(4, rank, timeout=1).errors
    assert errors[1] is None
    assert all(isinstance(errors[r], sa.TransferError) for r in (0, 2, 3))
    assert any("rank 1" in str(errors[r]) for r in (0, 2, 3))
