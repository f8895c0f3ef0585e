"""What worker processes do with torch's default group: DTensors moved, checkpoints written together."""

import math
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardalg as sa
from shardalg.interop import dtensor
from shardalg.interop.dcp import LoadPlanner, SavePlanner

SHAPE = (12, 12)
HARD = [Replicate(), Shard(0)], [Shard(1), _StridedShard(1, split_factor=2)]  # torch 2.13 moves this wrongly


def numbered(shape):
    return torch.arange(float(math.prod(shape))).reshape(shape)


@contextmanager
def default_group(ctx):
    """torch's default group over the ranks of a context."""
    store = dist.PrefixStore("default", ctx.transport.store)
    dist.init_process_group("gloo", store=store, rank=ctx.ranks[0], world_size=len(ctx.peers))
    try:
        yield
    finally:
        dist.destroy_process_group()


def grid():
    return DeviceMesh("cpu", torch.arange(4).reshape(2, 2))


def move_dtensors(ctx):
    """What each check of ``checks`` says."""
    with default_group(ctx):
        return {name: check(ctx) for name, check in CHECKS.items()}


def right(tensor, full):
    """Whether a DTensor's local tensor is what its placements say of ``full``."""
    m = dtensor.from_placements(full.shape, tensor.device_mesh, tensor.placements)
    rank = dist.get_rank()
    wanted = sa.extract(m, full, rank) if rank in m.ranks else torch.empty(0)
    return tensor.to_local().equal(wanted) and tensor.shape == full.shape


def made(full, mesh, placements):
    """The DTensor of a tensor, by our cut of it."""
    m = dtensor.from_placements(full.shape, dtensor.ranks_of(mesh), placements)
    mine = [r for r in m.ranks if r == dist.get_rank()]
    return dtensor.to_dtensor(m, {r: sa.extract(m, full, r) for r in mine}, mesh)


def hard_ours(ctx):
    full = numbered(SHAPE)
    source = made(full, grid(), HARD[0])
    moved = dtensor.redistribute(ctx, source, grid(), HARD[1])
    return right(source, full) and right(moved, full) and tuple(moved.placements) == tuple(HARD[1])


def hard_torchs(ctx):
    """Whether torch's own redistribution is right. It was not in 2.13."""
    full = numbered(SHAPE)
    return right(made(full, grid(), HARD[0]).redistribute(grid(), HARD[1]), full)


def chain(ctx):
    """Uneven, strided and replicated placements one after the other, then whole, as torch gathers it."""
    full = numbered((7, 5))
    steps = [
        [Shard(0), Shard(1)], [_StridedShard(0, split_factor=2), Shard(0)], [Shard(1), Replicate()],
        [Replicate(), _StridedShard(1, split_factor=3)], [Shard(1), Shard(1)], [Shard(0), Shard(0)],
    ]  # fmt: skip
    tensor = dtensor.redistribute(ctx, made(full, grid(), [Replicate(), Replicate()]), grid(), steps[0])
    seen = []
    for placements in steps[1:]:
        tensor = dtensor.redistribute(ctx, tensor, grid(), placements)
        seen.append(right(tensor, full))
    return all(seen) and tensor.full_tensor().equal(full)


def other_mesh(ctx):
    """From ranks 0 and 1 to ranks 3, 2: a process is in one mesh, the other, or none."""
    full = numbered((5, 3))
    source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3, 2])
    moved = dtensor.redistribute(ctx, made(full, source, [Shard(0)]), target, [Shard(1)])
    return right(moved, full)


def torchs_own(ctx):
    """DTensors that torch cut are read as they are."""
    full = numbered((8, 6))
    cuts = ([Shard(0), Shard(0)], [_StridedShard(0, split_factor=2), Shard(0)], [Replicate(), Shard(1)])
    return all(right(torch.distributed.tensor.distribute_tensor(full, grid(), p), full) for p in cuts)


def wrong_local(ctx):
    """A local tensor that is not what the placements say, which torch does not see."""
    local = torch.zeros(2, 3)
    tensor = DTensor.from_local(
        local, grid(), [Replicate(), Shard(0)], shape=torch.Size((7, 3)), stride=(3, 1)
    )
    try:
        dtensor.from_dtensor(tensor)
    except sa.InvalidMapError as error:
        return str(error)
    return "read"


CHECKS = {f.__name__: f for f in (hard_ours, hard_torchs, chain, other_mesh, torchs_own, wrong_local)}


# --- checkpoints ----------------------------------------------------------------------------


def save_and_load(ctx, folder):
    """Save in one layout, load in others; whether this rank's shards are then right."""
    full = numbered((7, 5))
    rank = ctx.ranks[0]
    layouts = [
        sa.layout((7, 5), sa.Segments(0, ((4, sa.Split(0)), (3, sa.Replicate()))), ranks=4),
        sa.layout((7, 5), sa.Cyclic(1, 1), ranks=4), sa.layout((7, 5), sa.Flat(3), ranks=4),
    ]  # fmt: skip
    with default_group(ctx):
        entry = sa.sharded(layouts[0], {rank: sa.extract(layouts[0], full, rank)})
        dcp.save({"w": entry, "step": 11}, checkpoint_id=folder, planner=SavePlanner())
        right = []
        for m in layouts:
            state = {"w": sa.sharded(m, {rank: torch.zeros(m.shard_shape(rank))}), "step": 0}
            dcp.load(state, checkpoint_id=folder, planner=LoadPlanner())
            right.append(state["w"].shards[rank].equal(sa.extract(m, full, rank)) and state["step"] == 11)
        return all(right)
