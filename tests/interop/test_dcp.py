"""Checkpoints saved in one layout, loaded in another; torch's own planners read and write the same files."""

import math
from fractions import Fraction

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch_groups
from hypothesis import assume, given
from torch.distributed.checkpoint import CheckpointException

import shardalg as sa
from shardalg import InvalidMapError, UnsupportedError, extract, is_surjective, layout, rebuild, sharded
from shardalg.interop.dcp import LoadPlanner, SavePlanner, chunks_to_load, chunks_to_save
from shardalg.testing import layouts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")

SHAPE = (12, 6)
LAYOUTS = {
    "segments": layout(SHAPE, sa.Segments(0, ((8, sa.Split(0)), (4, sa.Replicate()))), ranks=3),
    "cyclic": layout(SHAPE, sa.Cyclic(1, 1), ranks=2),
    "gathered": layout(SHAPE, sa.Experts([[3, 0, 11], [], [*range(1, 3), *range(4, 11)]])),
    "flat": layout(SHAPE, sa.Flat(16), ranks=3),
    "padded": layout(SHAPE, sa.Split(0, rule="pad"), ranks=5),
    "halved": layout(SHAPE, sa.Replicate(Fraction(1, 2)), ranks=2),
    "turned": sa.AffineMap.from_pieces(
        sa.Space.shards({4: (6, 12)}),
        sa.Space.logical(SHAPE),
        [sa.Piece((6, 12), sa.Side(71, (-12, -1), 4), sa.Side(0, (1, 6)))],
    ),
}


def full():
    return torch.arange(1.0, 1 + math.prod(SHAPE)).reshape(SHAPE)


def blank(m, value=-7.0):
    return sharded(m, {r: torch.full(m.shard_shape(r), value) for r in m.ranks})


def save(folder, state, **options):
    dcp.save(state, checkpoint_id=folder, planner=SavePlanner(**options), no_dist=True)


def load(folder, state, **options):
    dcp.load(state, checkpoint_id=folder, planner=LoadPlanner(**options), no_dist=True)
    return state


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A checkpoint of the tensor in every layout, of a tensor without elements, and of what has none."""
    folder = tmp_path_factory.mktemp("dcp")
    state = {name: sharded(m, extract(m, full())) for name, m in LAYOUTS.items()}
    state["none"] = blank(layout((0, 3), sa.Split(1), ranks=2))
    state["one"] = sharded(layout((), sa.Replicate(), ranks=2), dict.fromkeys((0, 1), torch.tensor(5.0)))
    save(folder, {"model": state, "step": 3, "plain": torch.ones(2)})
    return folder


@pytest.mark.parametrize("target", LAYOUTS)
def test_what_is_saved_in_any_layout_is_loaded_in_any_other(saved, target):
    m = LAYOUTS[target]
    state = {"model": {name: blank(m) for name in LAYOUTS}, "step": 0}
    found = load(saved, state)
    assert found["step"] == 3
    wanted = extract(m, full())
    held = extract(m, torch.ones(SHAPE))
    for entry in found["model"].values():
        for rank, shard in entry.shards.items():
            assert shard.equal(torch.where(held[rank] != 0, wanted[rank], -7.0))  # padding is left alone


def test_torchs_own_planner_reads_the_files(saved):
    state = {"model": {name: torch.zeros(SHAPE) for name in LAYOUTS}, "plain": torch.zeros(2)}
    state["model"] |= {"none": torch.zeros(0, 3), "one": torch.tensor(0.0)}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    assert all(state["model"][name].equal(full()) for name in LAYOUTS)
    assert state["model"]["one"] == 5 and state["plain"].equal(torch.ones(2))


def test_what_torch_wrote_is_read_and_converted(tmp_path):
    dcp.save({"w": full()}, checkpoint_id=tmp_path, no_dist=True)
    m = LAYOUTS["cyclic"]
    shards = {r: torch.zeros(m.shard_shape(r), dtype=torch.bfloat16) for r in m.ranks}
    load(tmp_path, {"w": sharded(m, shards)})
    assert rebuild(m, shards).equal(full().bfloat16())


@given(m=layouts(max_size=12))
def test_chunks_cover_what_they_should_once(m):
    """Pointwise: loading writes every slot that holds an element, saving reads every element."""
    assume(bool(is_surjective(m)))
    values = torch.arange(1.0, 1 + math.prod(m.logical_shape)).reshape(m.logical_shape)
    shards, wanted = {r: torch.zeros(math.prod(m.shard_shape(r))) for r in m.ranks}, extract(m, values)
    for c in chunks_to_load(m):
        box = values[tuple(slice(a, a + n) for a, n in zip(c.offsets, c.sizes))]
        view = shards[c.rank].as_strided(c.sizes, c.strides, c.slot)
        assert not view.any()
        view.copy_(box * c.scale.numerator / c.scale.denominator)
    assert all(shards[r].equal(wanted[r].reshape(-1)) for r in m.ranks)
    made = torch.zeros(m.logical_shape)
    for c in chunks_to_save(m):
        box = made[tuple(slice(a, a + n) for a, n in zip(c.offsets, c.sizes))]
        assert not box.any()
        view = wanted[c.rank].reshape(-1).as_strided(c.sizes, c.strides, c.slot)
        box.copy_(view * c.scale.denominator / c.scale.numerator)
    torch.testing.assert_close(made, values)


def test_ranks_that_hold_the_same_share_the_work():
    sizes = {}
    for c in chunks_to_save(layout((16, 4), sa.Replicate(), ranks=4)):
        sizes[c.rank] = sizes.get(c.rank, 0) + math.prod(c.sizes)
    assert sizes == dict.fromkeys(range(4), 16)


# --- refusals -------------------------------------------------------------------------------


def refusal(action):
    """The error that torch carries to every rank."""
    with pytest.raises(CheckpointException) as raised:
        action()
    (failure,) = raised.value.failures.values()
    return failure[0]


@pytest.mark.parametrize(
    "name, m, words",
    [
        ("nowhere", LAYOUTS["cyclic"], "'nowhere' is not in it; there "),
        ("step", LAYOUTS["cyclic"], "'step' is no tensor there"),
        ("plain", LAYOUTS["cyclic"], r"'plain' has shape \(2,\), its layout \(12, 6\)"),
    ],
)
def test_what_cannot_be_loaded_is_refused(saved, name, m, words):
    with pytest.raises(InvalidMapError, match=words):
        raise refusal(lambda: load(saved, {name: blank(m)}))


def test_a_shard_that_is_not_contiguous_is_refused(saved):
    entry = sharded(layout((2,), sa.Replicate(), ranks=1), {0: torch.zeros(4)[::2]})
    with pytest.raises(InvalidMapError, match="the shard of rank 0 is not contiguous"):
        raise refusal(lambda: load(saved, {"plain": entry}))


def test_a_partial_load_leaves_what_is_not_there(saved):
    state = load(saved, {"nowhere": blank(LAYOUTS["cyclic"])}, allow_partial_load=True)
    assert all((x == -7).all() for x in state["nowhere"].shards.values())


def test_an_element_that_nobody_holds_is_not_saved_as_zero(tmp_path):
    m = layout((4, 2), sa.Experts([[0], [2, 3]]))
    words = (
        r"'layer.w': a checkpoint holds whole tensors, but element 2 \(index \(1, 0\)\) .* is held by nobody"
    )
    with pytest.raises(InvalidMapError, match=words):
        raise refusal(lambda: save(tmp_path, {"layer": {"w": blank(m)}}))


def test_a_shard_that_nobody_passes_is_no_hole(tmp_path):
    m = LAYOUTS["segments"]
    some = sharded(m, {r: x for r, x in extract(m, full()).items() if r != 1})
    with pytest.raises(InvalidMapError, match=r"'w': no process passes the shards of ranks \[1\]"):
        raise refusal(lambda: save(tmp_path, {"w": some}))
    assert not list(tmp_path.glob("*.distcp"))


def test_moments_over_a_scale_are_refused(saved, tmp_path):
    entry = blank(LAYOUTS["halved"])
    for action in (
        lambda: save(tmp_path, {"exp_avg": entry}, moments=["exp_avg"]),
        lambda: load(saved, {"model": {"halved": entry}}, moments=["model.halved"]),
    ):
        with pytest.raises(UnsupportedError, match="optimizer moment over the scale 1/2"):
            raise refusal(action)


# --- real processes -------------------------------------------------------------------------


def test_processes_save_and_load_together(team, tmp_path):
    """Four processes, each with its own shard, write one checkpoint and read it in two other layouts."""
    assert team.run(torch_groups.save_and_load, str(tmp_path)).good() == [True] * 4
    state = {"w": torch.zeros(7, 5), "step": 0}
    dcp.load(state, checkpoint_id=tmp_path, no_dist=True)
    assert state["w"].equal(torch_groups.numbered((7, 5))) and state["step"] == 11
