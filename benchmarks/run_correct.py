"""How many moves between random mesh placements come out right: DTensor.redistribute and ours.

360 pairs on a 2 x 2 mesh with ``_StridedShard`` among them. Right is what cutting the whole tensor by
torch's own placements gives, axis of the mesh by axis.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from _measure import arguments, report
from _ranks import Methods, timed
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh
from torch.distributed.tensor.placement_types import _StridedShard

import shardalg as sa

MESH = {"x": 2, "y": 2}
RANKS = 4
OUTCOMES = ("right", "wrong", "refused", "crash")
SIZES = (8, 16, 24)  # uneven shards make torch's collectives end the process


def placements(choose: random.Random) -> list[Any]:
    """One placement per mesh axis."""
    kinds = [Replicate(), Shard(0), Shard(1)]
    kinds += [_StridedShard(axis, split_factor=2) for axis in (0, 1)]
    return [choose.choice(kinds), choose.choice(kinds)]


def cases(count: int) -> list[tuple[tuple[int, int], list[Any], list[Any]]]:
    """Random pairs that have a strided shard on one side at least; one known pair first."""
    choose = random.Random(0)
    known = ([Replicate(), Shard(0)], [Shard(1), _StridedShard(1, split_factor=2)])
    found = [((12, 12), *known)]
    while len(found) < count:
        shape = (choose.choice(SIZES), choose.choice(SIZES))
        pair = (placements(choose), placements(choose))
        if any(isinstance(p, _StridedShard) for side in pair for p in side):
            found.append((shape, *pair))
    return found


def cut(whole: torch.Tensor, its: list[Any], place: list[int]) -> torch.Tensor:
    """The shard that torch's placements give at one place of the mesh."""
    for p, count, k in zip(its, MESH.values(), place):
        if not p.is_replicate():
            whole = p._split_tensor(whole, count, with_padding=False, contiguous=True)[0][k]
    return whole


def ours(shape: tuple[int, int], its: list[Any]) -> sa.AffineMap:
    """The layout of a list of placements."""
    words = [
        sa.Replicate() if p.is_replicate()
        else sa.StridedSplit(p.dim, p.split_factor) if isinstance(p, _StridedShard) else sa.Split(p.dim)
        for p in its
    ]  # fmt: skip
    return sa.layout(shape, words, mesh=MESH)


def by_ours(rank: int, count: int) -> Methods:
    place = init_device_mesh("cpu", tuple(MESH.values())).get_coordinate()
    assert place is not None
    outcomes = []
    with sa.backends.cpu() as ctx:
        for shape, source, target in cases(count):
            whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) + 1
            mine, wanted = cut(whole, source, place), cut(whole, target, place)
            plan = sa.plan(ours(shape, source), ours(shape, target))
            moved = sa.run(ctx, sa.bind(ctx, sa.schedule(plan, dtypes="float32")), {rank: mine})[rank]
            outcomes.append("right" if _equal(moved, wanted) else "wrong")
    return Methods({"nothing": lambda: None}, facts={"outcomes": outcomes})


def by_torch(rank: int, count: int, first: int, last: int) -> Methods:
    mesh = init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH))
    place = mesh.get_coordinate()
    assert place is not None
    outcomes = []
    for shape, source, target in cases(count)[first:last]:
        whole = torch.arange(shape[0] * shape[1], dtype=torch.float32).view(shape) + 1
        mine, wanted = cut(whole, source, place), cut(whole, target, place)
        outcomes.append(_torch(mine, wanted, shape, source, target, mesh))
        dist.barrier()
    return Methods({"nothing": lambda: None}, facts={"outcomes": outcomes})


def outcomes_of_torch(count: int, first: int, last: int) -> list[str]:
    """The worst outcome over ranks of each case; a case that ends the process is found by halving."""
    try:
        times = timed(by_torch, RANKS, count, first, last, rounds=1)
    except (EOFError, RuntimeError):
        if last - first == 1:
            return ["crash"]
        middle = (first + last) // 2
        return outcomes_of_torch(count, first, middle) + outcomes_of_torch(count, middle, last)
    return [_worst(its) for its in zip(*(f["outcomes"] for f in times.facts))]


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a, b)


def _torch(mine: torch.Tensor, wanted: torch.Tensor, shape: Any, source: Any, target: Any, mesh: Any) -> str:
    try:
        given = DTensor.from_local(
            mine, mesh, source, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
        )
        moved = given.redistribute(mesh, target).to_local()
    except Exception:
        return "refused"
    return "right" if _equal(moved, wanted) else "wrong"


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    count = 60 if options.quick else 360
    its = zip(*(f["outcomes"] for f in timed(by_ours, RANKS, count, rounds=1).facts))
    mine = Counter(_worst(outcomes) for outcomes in its)
    theirs = Counter(outcomes_of_torch(count, 0, count))
    table: list[dict[str, Any]] = [
        {"method": name, "cases": count, **{w: found[w] for w in OUTCOMES}}
        for name, found in (("DTensor.redistribute", theirs), ("ours", mine))
    ]
    table[1]["ok"] = mine["right"] == count
    return 0 if report("random mesh placements", table, options.json) else 1


def _worst(outcomes: Sequence[str]) -> str:
    return next(w for w in reversed(OUTCOMES) if w in outcomes)


if __name__ == "__main__":
    sys.exit(main())
