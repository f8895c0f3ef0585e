"""Every strategy gives what one process gives, bit for bit, within the same memory, and leaves nothing."""

import os
import queue
import threading
import tracemalloc
import weakref
from datetime import timedelta
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, columns, full, own, require, rows
from hypothesis import given
from hypothesis import strategies as st

import shardalg as sa
from shardalg.backends import STRATEGIES, _shared
from shardalg.testing import layout_pairs

RANKS = 3
HOSTS = {"mixed": ("a", "a", "b", "b")}  # two hosts on one machine
DTYPES = ("uint8", "int16", "bfloat16", "float32", "complex128")


class Standing:
    """Contexts in threads that stay for many calls."""

    def __init__(self, count, strategy):
        store, self.jobs, self.done = dist.HashStore(), [queue.Queue() for _ in range(count)], queue.Queue()
        hosts = HOSTS.get(strategy, (None,) * count)
        for r in range(count):
            arguments = (dist.PrefixStore("standing", store), r, count, strategy, hosts[r])
            threading.Thread(target=self._serve, args=arguments, daemon=True).start()

    def _serve(self, store, r, count, strategy, host):
        limit = timedelta(seconds=20)
        with sa.backends.cpu(
            store=store, rank=r, size=count, timeout=limit, strategy=strategy, host=host
        ) as ctx:
            while (work := self.jobs[r].get()) is not None:
                try:
                    self.done.put((r, work(ctx)))
                except BaseException as error:
                    self.done.put((r, error))
                    return

    def run(self, work):
        for job in self.jobs:
            job.put(work)
        found = dict(self.done.get(timeout=60) for _ in self.jobs)
        for answer in found.values():
            if isinstance(answer, BaseException):
                raise answer
        return found

    def close(self):
        for job in self.jobs:
            job.put(None)


@pytest.fixture(scope="module", params=STRATEGIES)
def standing(request):
    made = Standing(RANKS, request.param)
    yield made
    made.close()


def test_the_strategy_is_the_one_asked_for(standing):
    names = set(standing.run(lambda ctx: ctx.transport.strategy.name).values())
    assert len(names & set(STRATEGIES)) >= 1


def filled(shape, dtype):
    size = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    count = int(np.prod(shape)) * size
    return torch.arange(1, count + 1).to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


@given(
    layout_pairs(max_ranks=RANKS, max_size=12, scaled=False), st.sampled_from(DTYPES),
    st.sampled_from([None, 32, 200]), st.booleans(),
)  # fmt: skip
def test_every_strategy_equals_simulate(standing, pair, dtype, max_bytes, relay):
    pair = [m for m in pair if max(m.ranks) < RANKS]
    if len(pair) < 2:
        return
    program = sa.schedule(sa.plan(*pair, missing="leave"), max_bytes=max_bytes, dtypes=dtype, relay=relay)
    shards = {r: filled(pair[0].shard_shape(r), dtype) for r in pair[0].ranks}

    def work(ctx):
        out = {r: filled(pair[1].shard_shape(r), dtype) for r in pair[1].ranks if r in ctx.ranks}
        bound = sa.bind(ctx, program)
        fresh = sa.run(ctx, bound, own(ctx, shards))
        return {r: (fresh[r], x) for r, x in sa.run(ctx, bound, own(ctx, shards), out).items()}

    def alike(a, b):
        return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))

    found = {r: x for its in standing.run(work).values() for r, x in its.items()}
    for r, its in work(sa.backends.simulate(RANKS)).items():
        assert all(alike(a, b) for a, b in zip(its, found[r])), r
    for r, its in work(sa.backends.simulate(RANKS, messages=True)).items():
        assert all(alike(a, b) for a, b in zip(its, found[r])), r


def tree_of_kinds():
    """Tensors of different dtypes, odd lengths, conversions and scales in one program."""
    kinds = {"flag": "bool", "small": "uint8", "half": "bfloat16", "wide": "float64", "cast": "float32"}
    source = {name: rows(RANKS, (7, 5)) for name in kinds} | {"third": rows(RANKS, (7, 5))}
    target = {name: columns(RANKS, (7, 5)) for name in kinds}
    scaled = sa.layout((7, 5), [sa.Split(1), sa.Replicate(Fraction(1, 3))], mesh={"x": RANKS, "y": 1})
    dtypes = {name: (kind, kind) for name, kind in kinds.items()}
    dtypes |= {"cast": ("float32", "bfloat16"), "third": ("float32", "float32")}
    return sa.plan_tree(source, target | {"third": scaled}), dtypes


@pytest.mark.parametrize("max_bytes", [None, 64])
def test_dtypes_scales_and_odd_lengths_travel_together(standing, max_bytes):
    tree, dtypes = tree_of_kinds()
    program = sa.schedule(tree, dtypes=dtypes, max_bytes=max_bytes)
    shards = {name: sa.extract(rows(RANKS, (7, 5)), full(rows(1, (7, 5))).to(getattr(torch, kind)))
              for name, (kind, _) in dtypes.items()}  # fmt: skip

    def work(ctx):
        return sa.run(ctx, sa.bind(ctx, program), {name: own(ctx, its) for name, its in shards.items()})

    one = work(sa.backends.simulate(RANKS))
    for its in standing.run(work).values():
        for name, tensors in its.items():
            for r, x in tensors.items():
                assert x.dtype == one[name][r].dtype and torch.equal(x, one[name][r]), (name, r)


# --- cases from the field -----------------------------------------------------------------


def strided_mesh():
    outer = sa.layout((12, 12), [sa.Replicate(), sa.Split(0)], mesh={"x": 2, "y": 2})
    return outer, sa.layout((12, 12), [sa.Split(1), sa.StridedSplit(1, 2)], mesh={"x": 2, "y": 2})


def strided_rows():
    return sa.layout((9, 4), sa.StridedSplit(0, 2), ranks=4), columns(4, (9, 4))


def uneven_rows():
    return rows(4, (5, 10)), sa.layout((5, 10), sa.Replicate(), ranks=4)


def idle_ranks():
    return sa.layout((8, 6), sa.Split(0, sizes=(4, 4, 0, 0)), ranks=4), columns(2)


CASES = {
    "15: strided rows to columns": strided_rows,
    "19: uneven rows to a replica": uneven_rows,
    "32: ranks with nothing": idle_ranks,
    "37: a strided mesh": strided_mesh,
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", CASES)
def test_cases(world, strategy, case):
    source, target = CASES[case]()
    x = full(source)
    program = sa.schedule(sa.plan(source, target), max_bytes=96)

    def rank(ctx):
        bound = sa.bind(ctx, program)
        shards = own(ctx, sa.extract(source, x))
        for _ in range(2):
            require(sa.run(ctx, bound, shards), own(ctx, sa.extract(target, x)))
        return sum(s.numel() for s in shards.values()) + ctx.last_report.received // 4

    held = world(4, rank, strategy=strategy).good()
    if case.startswith("15"):
        assert max(held) < 36


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_disjoint_processes(world, strategy):  # case 36
    source, target = rows(2, (8, 6)), columns(3, (8, 6))
    plan = sa.plan(source, target, source_ranks=[0, 1], target_ranks=[2, 3, 4])
    x = full(source)

    def rank(ctx):
        (me,) = ctx.ranks
        mine = {me: sa.extract(source, x, me)} if me < 2 else {}
        out = sa.run(ctx, sa.bind(ctx, sa.schedule(plan, dtypes="float32")), mine)
        require(out, {} if me < 2 else {me - 2: sa.extract(target, x, me - 2)})
        return ctx.last_report.sent, ctx.last_report.received

    moved = world(5, rank, strategy=strategy).good()
    assert [sent for sent, _ in moved] == [96, 96, 0, 0, 0]
    assert [received for _, received in moved] == [0, 0, 64, 64, 64]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_wire_bytes_are_those_of_the_plan(world, strategy):
    plan = sa.plan(ROWS, COLUMNS)

    def rank(ctx):
        bound = sa.bind(ctx, sa.schedule(plan, dtypes="float32"))
        sa.run(ctx, bound, own(ctx, sa.extract(ROWS, full(ROWS))))
        same = sa.bind(ctx, sa.schedule(sa.plan(ROWS, ROWS), dtypes="float32"))
        before = ctx.counters.payload_bytes
        sa.run(ctx, same, own(ctx, sa.extract(ROWS, full(ROWS))))
        assert ctx.counters.payload_bytes == before
        return before

    assert sum(world(4, rank, strategy=strategy).good()) == plan.stats.bytes_crossing(4)


# --- memory -------------------------------------------------------------------------------


def growth(ctx, max_bytes, size):
    """How far a run with given tensors raises the peak of this process's own memory."""
    source, target = rows(len(ctx.peers), (size, 1024)), columns(len(ctx.peers), (size, 1024))
    (me,) = ctx.ranks
    shard, out = torch.ones(source.shard_shape(me)), torch.zeros(target.shard_shape(me))
    bound = sa.bind(ctx, sa.schedule(sa.plan(source, target), max_bytes=max_bytes, dtypes="float32"))
    ready = sa.schedule(sa.plan(source, target), max_bytes=max_bytes, dtypes="float32").peak_staging
    sa.run(ctx, sa.bind(ctx, sa.schedule(sa.plan(rows(2), columns(2)), dtypes="float32")),
           {me: torch.ones(rows(2).shard_shape(me))} if me < 2 else {})  # fmt: skip
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = peak()
    sa.run(ctx, bound, {me: shard}, {me: out})
    assert bool((out == 1).all())
    return peak() - before, ready


def peak():
    with open("/proc/self/status") as file:
        return 1024 * next(int(line.split()[1]) for line in file if line.startswith("VmHWM"))


SLACK = 3 << 20  # the interpreter's own, and pages of shared memory that other ranks wrote


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_needs_no_more_memory_than_its_bound(team, strategy):
    max_bytes = 2 << 20
    for grown, staged in team.run(growth, max_bytes, 8192, strategy=strategy).good():
        assert staged <= max_bytes
        assert grown <= 2 * max_bytes + SLACK  # a whole tensor would be 32 MiB, a shard 8


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_replay_allocates_nothing(world, strategy):
    source, target = rows(2, (1024, 256)), columns(2, (1024, 256))
    bytes_of_shard = 1024 * 128 * 4

    def rank(ctx):
        bound = sa.bind(ctx, sa.schedule(sa.plan(source, target), dtypes="float32"))
        (me,) = ctx.ranks
        shards, out = {me: torch.ones(source.shard_shape(me))}, {me: torch.empty(target.shard_shape(me))}
        for _ in range(2):
            sa.run(ctx, bound, shards, out)
        before = (ctx.counters.allocations, ctx.counters.preparations, ctx.counters.gathers)
        for _ in range(3):
            sa.run(ctx, bound, shards, out)
        return before, (ctx.counters.allocations, ctx.counters.preparations, ctx.counters.gathers)

    tracemalloc.start()
    try:
        for before, after in world(2, rank, strategy=strategy).good():
            assert before == after
        assert tracemalloc.get_traced_memory()[1] < 16 * bytes_of_shard
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_tensor_of_the_caller_is_kept_alive(world, strategy):
    def rank(ctx):
        (me,) = ctx.ranks
        bound = sa.bind(ctx, sa.schedule(sa.plan(rows(2), columns(2)), dtypes="float32"))
        given = np.ones(rows(2).shard_shape(me), np.float32)
        for _ in range(2):
            out = sa.run(ctx, bound, {me: torch.from_numpy(given)})
        gone = weakref.ref(given)
        del given, out
        return gone() is None

    assert world(2, rank, strategy=strategy).good() == [True, True]


# --- where memory can be shared -----------------------------------------------------------


def name_of(ctx):
    require_moved(ctx)
    return ctx.transport.strategy.name


def require_moved(ctx):
    source, target = rows(3, (8, 6)), columns(3, (8, 6))
    x = full(source)
    bound = sa.bind(ctx, sa.plan(source, target))
    require(sa.run(ctx, bound, own(ctx, sa.extract(source, x))), own(ctx, sa.extract(target, x)))


def ranks_on(hosts, strategy=None):
    """The strategy that each rank uses where ranks think they are on these hosts."""
    store, found = dist.HashStore(), {}

    def rank(r):
        mine = dist.PrefixStore("hosts", store)
        limit = timedelta(seconds=10)
        with sa.backends.cpu(
            store=mine, rank=r, size=len(hosts), timeout=limit, strategy=strategy, host=hosts[r]
        ) as ctx:
            found[r] = name_of(ctx)

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(hosts))]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    return [found[r] for r in range(len(hosts))]


@pytest.mark.parametrize(
    "hosts, names",
    [("aaa", ["shared"] * 3), ("aab", ["mixed", "mixed", "p2p"]), ("abc", ["p2p"] * 3)],
)
def test_memory_is_shared_where_it_can_be(hosts, names):
    assert ranks_on(hosts) == names
    assert ranks_on(hosts, "shared") == names


def test_a_rank_without_memory_to_share_is_reached_otherwise(monkeypatch):
    made, lock = [], threading.Lock()
    reserve = os.posix_fallocate

    def full_for_one(file, start, size):
        with lock:
            made.append(file)
            if len(made) == 1:
                raise OSError(28, "No space left on device")
        reserve(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", full_for_one)
    assert sorted(ranks_on("aaa")) == ["mixed", "mixed", "p2p"]


def test_a_segment_that_is_not_the_one_meant_is_not_used():
    segment, file = _shared.make(2)
    nonce = int(segment.words[_shared.NONCE])
    assert _shared.look(os.getpid(), file, 2, nonce) is not None
    assert _shared.look(os.getpid(), file, 2, nonce + 1) is None
    assert _shared.look(os.getpid(), file, 3000, nonce) is None
    assert _shared.look(os.getpid(), 10**6, 2, nonce) is None
    os.close(file)


def test_ranks_must_ask_for_the_same(world):
    store, errors = dist.HashStore(), []

    def rank(r):
        mine = dist.PrefixStore("asked", store)
        try:
            sa.backends.cpu(
                store=mine, rank=r, size=2, strategy=("fused", "p2p")[r], timeout=timedelta(seconds=5)
            )
        except sa.InvalidMapError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=rank, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(errors) == 2 and all("ask for different strategies" in e for e in errors)
    with pytest.raises(sa.InvalidMapError, match="no strategy 'post'"):
        sa.backends.cpu(store=store, rank=0, size=1, strategy="post")


# --- ends ---------------------------------------------------------------------------------


def test_a_waiting_rank_hears_when_another_closes(world):
    def rank(ctx):
        strategy = ctx.transport.strategy
        if ctx.ranks[0] == 1:
            return None
        with pytest.raises(sa.TransferError, match="closed"):
            strategy._wait(1, _shared.READY, 5)

    world(2, rank, strategy="shared", timeout=30).good()


def test_a_waiting_rank_gives_up_in_time(world):
    over = threading.Event()

    def rank(ctx):
        strategy = ctx.transport.strategy
        if ctx.ranks[0] == 1:
            over.wait(20)
            return
        strategy._seconds = 0.1
        with pytest.raises(sa.TransferError, match=r"did not answer within 0.1 s"):
            strategy._wait(1, _shared.READY, 5)
        over.set()

    world(2, rank, strategy="shared").good()
