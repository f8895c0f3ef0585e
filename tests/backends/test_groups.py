"""Any group of processes: parts of a world, two sides that do not meet, two contexts at once, launchers."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, columns, full, move, own, require, rows

import shardalg as sa

HERE = Path(__file__).parent
LIMIT = timedelta(seconds=20)
X = full(ROWS)


@contextmanager
def joined(ctx):
    """The default group of this worker, over the store of its context."""
    store = dist.PrefixStore("default", ctx.transport.store)
    (rank,) = ctx.ranks
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(ctx.peers), timeout=LIMIT)
    try:
        yield rank
    finally:
        dist.destroy_process_group()


def moved(ctx, plan, source, target, to_source=None, to_target=None):
    """Run a plan whose sides have ranks of their own; the shards that this process got."""
    here = set(ctx.ranks)
    local = [
        {r for r in m.ranks if (ranks[r] if ranks else r) in here}
        for m, ranks in ((source, to_source), (target, to_target))
    ]
    given = {r: s for r, s in sa.extract(source, X).items() if r in local[0]}
    wanted = {r: s for r, s in sa.extract(target, X).items() if r in local[1]}
    out = sa.run(ctx, sa.bind(ctx, plan), given)
    require(out, wanted)
    return sorted(out)


# --- ranks that are not those of the world ------------------------------------------------

SIDES = {
    "disjoint": ([0, 1], [2, 3]),
    "disjoint, reversed": ([1, 0], [3, 2]),
    "overlapping": ([0, 1, 2], [1, 2, 3]),
    "one to all": ([2], [0, 1, 2, 3]),
    "same processes in another order": ([0, 1, 2, 3], [3, 1, 0, 2]),
}


@pytest.mark.parametrize("side", SIDES)
def test_sides_on_any_processes(world, side):
    """Trainers send to engines; each side passes and gets only its own shards, under its own ranks."""
    to_source, to_target = SIDES[side]
    source, target = rows(len(to_source)), columns(len(to_target))
    plan = sa.plan(source, target, source_ranks=to_source, target_ranks=to_target)

    def rank(ctx):
        return moved(ctx, plan, source, target, to_source, to_target), ctx.counters.payload_bytes

    found = world(4, rank).good()
    assert [its for its, _ in found] == [[t for t, g in enumerate(to_target) if g == r] for r in range(4)]
    assert sum(sent for _, sent in found) == plan.stats.bytes_crossing(4)
    if side.startswith("disjoint"):
        assert plan.stats.elements_crossing == target.domain.size  # every byte crosses


def test_tensors_that_some_ranks_do_not_have(world):
    """One tensor lives on ranks 0 and 1, another on 2 and 3: absent is not empty, and no error."""
    first, second = (sa.layout((8, 6), sa.Split(0), ranks=r) for r in ([0, 1], [2, 3]))
    first_out, second_out = (sa.layout((8, 6), sa.Split(1), ranks=r) for r in ([0, 1], [3, 2]))
    tree = sa.plan_tree({"a": first, "b": second}, {"a": first_out, "b": second_out})

    def rank(ctx):
        bound = sa.bind(ctx, tree)
        given = {"a": own(ctx, sa.extract(first, X)) if ctx.ranks[0] < 2 else {}}
        given["b"] = own(ctx, sa.extract(second, X)) if ctx.ranks[0] > 1 else {}
        out = sa.run(ctx, bound, given)
        for name, layout in (("a", first_out), ("b", second_out)):
            require(out[name], {r: s for r, s in sa.extract(layout, X).items() if r in ctx.ranks})

    world(4, rank).good()


def test_trainers_give_engines_their_fused_weights(world):
    """Disjoint groups, other names, several rounds."""
    q, k, fused = rows(2, (8, 4)), rows(2, (2, 4)), sa.layout((10, 4), sa.Split(1), ranks=2)
    views = {"qk": sa.join(["q", "k"])}
    tree = sa.plan_tree(
        {"q": q, "k": k}, {"qk": fused}, views=views, source_ranks=[0, 1], target_ranks=[2, 3]
    )
    x = torch.arange(40.0).reshape(10, 4)

    def rank(ctx):
        (r,) = ctx.ranks
        bound = sa.bind(ctx, sa.schedule(tree, max_bytes=64))
        given = (
            {"q": {r: sa.extract(q, x[:8], r)}, "k": {r: sa.extract(k, x[8:], r)}}
            if r < 2
            else {"q": {}, "k": {}}
        )
        out = sa.run(ctx, bound, given)
        require(out["qk"], {r - 2: sa.extract(fused, x, r - 2)} if r >= 2 else {})

    world(4, rank).good()


# --- groups of torch.distributed ----------------------------------------------------------


def on_the_world(ctx):
    with joined(ctx) as rank, sa.backends.cpu(timeout=LIMIT) as mine:
        assert mine.ranks == (rank,) and mine.peers == (0, 1, 2, 3)
        move(mine, ROWS, COLUMNS)
    return True


def on_a_part(ctx):
    """Ranks 1 and 3 of the world, as expert-parallel ranks 0 and 1."""
    with joined(ctx) as rank:
        group = dist.new_group([1, 3], timeout=LIMIT)
        if rank in (0, 2):
            return None
        ranks = [dist.get_global_rank(group, r) for r in range(2)]
        plan = sa.plan(rows(2), columns(2), source_ranks=ranks, target_ranks=ranks)
        with sa.backends.cpu(group, timeout=LIMIT) as mine:
            assert mine.peers == (1, 3)
            return moved(mine, plan, rows(2), columns(2), ranks, ranks)


def in_two_groups_at_once(ctx):
    """Two expert groups move their own weights with equal local ranks, at the same time."""
    with joined(ctx) as rank:
        groups = [dist.new_group(its, timeout=LIMIT) for its in ([0, 2], [1, 3])]
        ranks = [dist.get_global_rank(groups[rank % 2], r) for r in range(2)]
        plan = sa.plan(rows(2), columns(2), source_ranks=ranks, target_ranks=ranks)
        with sa.backends.cpu(groups[rank % 2], timeout=LIMIT) as mine:
            return moved(mine, plan, rows(2), columns(2), ranks, ranks)


def with_two_contexts(ctx):
    """Two contexts on one group, and the caller's own collectives, in different orders on different ranks:
    a context talks on a group of its own, so nothing mixes."""
    with joined(ctx) as rank, sa.backends.cpu(timeout=LIMIT) as a, sa.backends.cpu(timeout=LIMIT) as b:
        bound = {c: sa.bind(c, sa.plan(ROWS, COLUMNS)) for c in (a, b)}
        for _ in range(3):
            order = (a, b) if rank % 2 else (b, a)
            handles = [sa.run_async(c, bound[c], own(ctx, sa.extract(ROWS, X))) for c in order]
            total = torch.ones(())
            dist.all_reduce(total)
            for handle in handles:
                require(handle.wait(), own(ctx, sa.extract(COLUMNS, X)))
            assert total == 4
        with pytest.raises(sa.ProvenanceError, match="another context"):
            sa.run(a, bound[b], own(ctx, sa.extract(ROWS, X)))
    return True


def after_a_failure(ctx):
    """A context that failed leaves the caller's group as it was; a new context works."""
    with joined(ctx) as rank:
        with sa.backends.cpu(timeout=LIMIT) as broken:
            bound = sa.bind(broken, sa.plan(ROWS, COLUMNS))
            if rank != 2:
                with pytest.raises(sa.TransferError):
                    sa.run(broken, bound, own(ctx, sa.extract(ROWS, X)))
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 4
        with sa.backends.cpu(timeout=LIMIT) as again:
            move(again, ROWS, COLUMNS)
    return True


def beside_a_default_group(ctx):
    """A context from a store makes no default group, and leaves one alone that an engine has."""
    (r,) = ctx.ranks
    assert not dist.is_initialized()  # ``ctx`` itself came from a store
    move(ctx, ROWS, COLUMNS)
    with joined(ctx):
        default = dist.group.WORLD
        store = dist.PrefixStore("own", ctx.transport.store)
        with sa.backends.cpu(store=store, rank=3 - r, size=4, timeout=LIMIT) as mine:
            assert mine.ranks == (3 - r,)
            move(mine, ROWS, COLUMNS)
        assert dist.group.WORLD is default and dist.get_rank() == r
        dist.barrier()
    assert not dist.is_initialized()
    return True


class FakeGroup:
    """What ``torch.distributed`` would say of an NCCL group."""


WORLDS = {
    "the world": (on_the_world, [True] * 4),
    "a part": (on_a_part, [None, [0], None, [1]]),
    "two groups at once": (in_two_groups_at_once, [[0], [0], [1], [1]]),
    "two contexts": (with_two_contexts, [True] * 4),
    "after a failure": (after_a_failure, [True] * 4),
    "beside a default group": (beside_a_default_group, [True] * 4),
}


@pytest.mark.parametrize("what", WORLDS)
def test_groups_of_torch(team, what):
    work, wanted = WORLDS[what]
    assert team.run(work, timeout=20).good() == wanted


def test_a_group_of_another_backend_is_refused(monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    with pytest.raises(sa.InvalidMapError, match=r"nccl.*auto"):
        sa.backends.cpu(FakeGroup())


def test_without_any_group_the_error_says_how_to_get_one(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(sa.InvalidMapError, match="torchrun"):
        sa.backends.cpu()
    with pytest.raises(sa.InvalidMapError, match="rank=None"):
        sa.backends.cpu(store=dist.HashStore())


# --- layouts gathered ---------------------------------------------------------------------


def part(whole, rank):
    """What one process knows of a layout: its own boxes and pieces."""
    space = sa.Space(whole.domain.boxes_of(rank))
    return sa.AffineMap.from_pieces(space, whole.codomain, whole.pieces_of(rank) if space.boxes else [])


@pytest.mark.parametrize("placement", [sa.Split(0), sa.Split(1, sizes=(0, 1, 5)), sa.Replicate(), sa.Flat(4)])
def test_everybody_gets_the_whole_layout(world, placement):
    whole = sa.layout((8, 6), placement, ranks=3)
    found = world(3, lambda ctx: sa.gather_layouts(ctx, part(whole, ctx.ranks[0]))).good()
    assert found == [whole] * 3
    assert sa.gather_layouts(sa.backends.simulate(3), whole) == whole


def test_layouts_by_name_need_not_be_everywhere(world):
    a, b = sa.layout((8, 6), sa.Split(0), ranks=[0, 1]), sa.layout((4,), sa.Split(0), ranks=[1, 2])

    def rank(ctx):
        (r,) = ctx.ranks
        return sa.gather_layouts(ctx, {n: part(m, r) for n, m in (("a", a), ("b", b)) if r in m.ranks})

    assert world(3, rank).good() == [{"a": a, "b": b}] * 3


WRONG = {
    "one shard twice": (lambda r: part(rows(3), min(r, 1)), "rank 1.*by rank 1 and by rank 2"),
    "other tensors": (lambda r: part(rows(3, (8, 6 + (r == 2))), r), "lays out"),
    "no layout": (lambda r: sa.Split(0) if r == 1 else part(rows(3), r), "rank 1.*AffineMap"),
    "no ranks": (lambda r: sa.identity(sa.Space.logical((2,))), "ranks"),
    "one layout, several": (lambda r: part(rows(3), r) if r else {"a": part(rows(3), r)}, "by name"),
    "two elements in a slot": (
        lambda r: sa.union(
            part(rows(3), r), sa.translate(part(rows(3), r), codomain=(1 if r < 2 else -1, 0))
        ),
        "layout",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_parts_that_do_not_fit_are_the_same_error_everywhere(world, what):
    make, words = WRONG[what]

    def rank(ctx):
        with pytest.raises(sa.TransferError, match=words) as refused:
            sa.gather_layouts(ctx, make(ctx.ranks[0]))
        return str(refused.value)

    assert len(set(world(3, rank).good())) == 1


# --- launchers and machines ---------------------------------------------------------------


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def test_under_torchrun():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(HERE / "torchrun_script.py")],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
    )
    assert done.returncode == 0, done.stderr
    said = re.findall(r"rank \d of 2 moved \d+ bytes", done.stdout)  # two processes may share a line
    assert sorted(said) == [f"rank {r} of 2 moved 128 bytes" for r in range(2)]


def test_between_network_namespaces():
    """As between two machines, each with its own name and no way to the other but the network."""
    missing = [tool for tool in ("ip", "unshare", "nsenter") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"this machine has no {missing}")
    command = [
        "unshare",
        "--net",
        "--fork",
        "sh",
        str(HERE / "netns.sh"),
        sys.executable,
        str(HERE / "netns_script.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment())
    if done.returncode == 77 or "unshare failed" in done.stderr:
        pytest.skip(f"this machine allows no network namespaces: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    assert sorted(re.findall(r"rank \d: (?:p2p|fused)", done.stdout)) == ["rank 0: p2p", "rank 1: p2p"]
