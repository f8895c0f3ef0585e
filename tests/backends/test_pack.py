"""Copies between shards and messages: the quick ways equal the plain one, and many pieces are few steps."""

import weakref

import numpy as np
import pytest
import torch
from cases import columns, full, rows
from hypothesis import given
from hypothesis import strategies as st

import shardalg as sa
from shardalg.backends import _pack
from shardalg.backends._pack import Kept, Rows, Steps, Strided, View, attach
from shardalg.backends._stage import Stage
from shardalg.testing import layout_pairs

BYTE = torch.uint8


def staged(program, shards, target, *, messages=True):
    """What a stage makes of given shards, target boxes filled with 99 before."""
    entries = program.plan.entries
    stage = Stage(sa.backends.simulate(4, messages=messages), program)
    kind = getattr(torch, program.dtypes[0][1])
    out = {r: torch.full(target.shard_shape(r), 99).to(kind) for r in target.ranks}
    sources = {
        (k, b): shards[b.rank].reshape(-1) for k, e in enumerate(entries) for b in e.plan.source.domain.boxes
    }
    targets = {
        (k, b): out[b.rank].view(-1) for k, e in enumerate(entries) for b in e.plan.target.domain.boxes
    }
    for _ in range(2):  # the second time with kept views
        stage.local(sources, targets)
        for turn in range(len(stage.turns)):
            stage.unpack(turn, stage.swap(stage.pack(turn, sources, targets)), targets)
    return out


@given(
    layout_pairs(max_ranks=4, max_size=24, scaled=False),
    st.sampled_from(["uint8", "int16", "float32", "float64", "complex128"]),
    st.sampled_from([None, 48]),
)
def test_rows_equal_strided_copies(pair, dtype, max_bytes):
    if max(*pair[0].ranks, *pair[1].ranks) > 3:
        return
    program = sa.schedule(sa.plan(*pair, missing="leave"), dtypes=dtype, max_bytes=max_bytes)
    x = full(pair[0]).to(getattr(torch, dtype))
    shards = sa.extract(pair[0], x)
    found = []
    for many in (1, 10**9):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_pack, "MANY", many)
            found.append(staged(program, shards, pair[1]))
            found.append(staged(program, shards, pair[1], messages=False))
    for other in found[1:]:
        for r, out in found[0].items():
            assert torch.equal(out, other[r]), r


def scattered(pieces, size):
    """Layouts whose plan moves ``pieces`` pieces of ``size`` elements that no strides describe."""
    order = np.random.default_rng(0).permutation(pieces).tolist()
    blocks = {0: order[: pieces // 2], 1: order[pieces // 2 :]}
    shape = (pieces * size,)
    return sa.layout(shape, sa.BlockGather(0, size, blocks), ranks=2), sa.layout(shape, sa.Split(0), ranks=2)


def steps_of(stage):
    for turn in stage._copies:
        for its in turn.values():
            yield from (its.pack.steps, its.forward.steps, its.unpack.steps)
    yield stage._local.steps


@pytest.mark.parametrize("size", [1, 16, 256])
def test_many_small_pieces_are_one_indexed_copy(size):
    source, target = scattered(512, size)
    program = sa.schedule(sa.plan(source, target), dtypes="float32")
    stage = Stage(sa.backends.simulate(2, messages=True), program)
    counts = [(len(s.strided), len(s.rows)) for s in steps_of(stage)]
    assert sum(strided for strided, _ in counts) == 0
    assert sum(indexed for _, indexed in counts) <= 8
    x = full(source)
    found = staged(program, sa.extract(source, x), target)
    for r, wanted in sa.extract(target, x).items():
        assert torch.equal(found[r], wanted)


def test_big_pieces_are_strided_copies():
    program = sa.schedule(sa.plan(rows(2, (64, 64)), columns(2, (64, 64))), dtypes="float32")
    stage = Stage(sa.backends.simulate(2, messages=True), program)
    assert [(len(s.strided), len(s.rows)) for s in steps_of(stage)] == [(1, 0), (0, 0), (1, 0)] * 2 + [(2, 0)]


@given(st.lists(st.sampled_from([-1, 1]), min_size=2, max_size=2), st.booleans())
def test_blocks_may_run_backwards(signs, on_target):
    shape, strides = (3, 4), tuple(s * n for s, n in zip(signs, (4, 1)))
    offset = sum(-s * (n - 1) for s, n in zip(strides, shape) if s < 0)
    there = View(
        ("target", 0), torch.int32, shape, strides if on_target else (4, 1), offset if on_target else 0
    )
    here = View(
        ("source", 0), torch.int32, shape, (4, 1) if on_target else strides, 0 if on_target else offset
    )
    x, y = torch.arange(12, dtype=torch.int32), torch.zeros(12, dtype=torch.int32)
    attach(Steps((Strided(there, here),), ()), {("target", 0): y, ("source", 0): x}).go()
    wanted = x.view(3, 4).flip([k for k, s in enumerate(signs) if s < 0]).reshape(-1)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("width", [1, 2, 4, 8, 12, 16, 64])
@pytest.mark.parametrize("kind", ["gather", "scatter", "both"])
def test_rows_of_every_width(width, kind):
    source, target = torch.arange(20 * width).to(BYTE), torch.zeros(20 * width, dtype=BYTE)
    at, index = np.array([7, 0, 3]), np.array([1, 19, 4])
    r = {
        "gather": Rows(("target", 0), ("source", 0), width, None, index, 5, 3),
        "scatter": Rows(("target", 0), ("source", 0), width, at, None, 5, 3),
        "both": Rows(("target", 0), ("source", 0), width, at, index, 0, 3),
    }[kind]
    attach(Steps((), (r,)), {("target", 0): target, ("source", 0): source}).go()
    to = [5, 6, 7] if kind == "gather" else at.tolist()
    of = [5, 6, 7] if kind == "scatter" else index.tolist()
    wanted = torch.zeros(20, width, dtype=BYTE)
    wanted[to] = source.view(20, width)[of]
    assert torch.equal(target.view(20, width), wanted)
    device = _pack._indexed_on_device(r, again := torch.zeros_like(target), source)
    device()
    assert torch.equal(again, target)


# --- views that are kept ------------------------------------------------------------------


def one_copy():
    views = [View((side, 0), torch.int32, (4,), (1,), 0) for side in ("target", "source")]
    return Kept(Steps((Strided(*views),), ()))


def test_views_are_kept_while_memory_comes_again():
    kept, x, y = one_copy(), torch.arange(4, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    kept.go({0: x}, {0: y})
    (before,) = kept.attached.values()
    x += 1
    kept.go({0: x}, {0: y})
    assert list(kept.attached.values()) == [before] and torch.equal(x, y)
    other = torch.zeros(4, dtype=torch.int32)
    for target in (other, y, other):  # as turns take one buffer and then the other
        kept.go({0: x}, {0: target.zero_()})
        assert torch.equal(x, target) and len(kept.attached) == 2
    assert next(iter(kept.attached.values())) is before


def test_few_sets_of_views_are_kept():
    kept, x = one_copy(), torch.arange(4, dtype=torch.int32)
    targets = [torch.zeros(4, dtype=torch.int32) for _ in range(_pack.MEMORIES + 3)]
    for y in targets:
        kept.go({0: x}, {0: y})
        assert torch.equal(x, y)
    assert len(kept.attached) == _pack.MEMORIES


def test_kept_views_keep_no_memory_alive():
    kept, given = one_copy(), np.arange(4, dtype=np.int32)
    kept.go({0: torch.from_numpy(given)}, {0: torch.zeros(4, dtype=torch.int32)})
    gone = weakref.ref(given)
    del given
    assert gone() is None and kept.attached


# --- messages that need no copy -----------------------------------------------------------


class Straight:
    """A strategy that only says that it takes blocks where they lie."""

    name, turn_bytes, straight = "p2p", None, True


def straight_stage(source, target, dtypes="float32"):
    ctx = sa.backends.simulate(4, messages=True)
    ctx.transport.strategy = Straight()
    return Stage(ctx, sa.schedule(sa.plan(source, target), dtypes=dtypes))


def test_whole_blocks_leave_and_arrive_where_they_lie():
    (turn,) = straight_stage(rows(2, (8, 4)), rows(4, (8, 4)))._copies
    assert {r: sorted(its.out) for r, its in turn.items()} == {0: [1], 1: [2, 3], 2: [], 3: []}
    assert {r: sorted(its.into) for r, its in turn.items()} == {0: [], 1: [0], 2: [1], 3: [1]}
    assert all(its.packed_bytes == [0, 0, 0, 0] and not its.pack.where for its in turn.values())


def test_blocks_with_gaps_are_packed():
    (turn,) = straight_stage(rows(2, (8, 4)), columns(2, (8, 4)))._copies
    for rank in (0, 1):
        assert not turn[rank].out and turn[rank].pack.where
        assert sorted(turn[rank].into) == [1 - rank] and not turn[rank].unpack.where


def test_converted_blocks_are_packed():
    (turn,) = straight_stage(rows(2, (8, 4)), rows(4, (8, 4)), ("float32", "bfloat16"))._copies
    assert not any(its.out for its in turn.values())
    assert sorted(turn[2].into) == [1]  # the wire holds the target's dtype already
