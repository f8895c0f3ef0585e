"""One process against DeepSpeed's rebuild and extract, and against memcpy.

E8: >= 4x DeepSpeed; <= 1.8 times memcpy for pieces of 64 KiB and more; 512 pieces of 1 KiB >= 8x DeepSpeed.

DeepSpeed takes no buffers, so its results lie in memory that the system has just given ("x DeepSpeed":
ours has buffers; "both fresh": neither has). Where its allocator happens to have the memory already
("both warm"), its two copies stand against our one, and no method could be much more than twice as fast.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import torch
from _measure import arguments, memory, ratio, report
from deepspeed.checkpoint.affine import block_gather_map, contiguous_split_map

import shardalg as sa

DEEPSPEED, SMALL, MEMCPY = 4.0, 8.0, 1.8


def row(name: str, source: Any, target: Any, full: torch.Tensor, rounds: int, small: bool) -> dict[str, Any]:
    """Ours with buffers given; both results are checked."""
    ours_source, theirs_source = source
    ours_target, theirs_target = target
    shards = sa.extract(ours_source, full)
    wanted = sa.extract(ours_target, full)
    ctx = sa.backends.simulate(max([*ours_source.ranks, *ours_target.ranks]) + 1)
    bound = sa.bind(ctx, sa.schedule(sa.plan(ours_source, ours_target), dtypes="float32"))
    out = {r: torch.empty_like(x) for r, x in wanted.items()}

    def ours() -> Any:
        return sa.run(ctx, bound, shards, out)

    def fresh() -> Any:
        return sa.run(ctx, bound, shards)

    def theirs() -> Any:
        whole = theirs_source.rebuild(shards)
        return {r: theirs_target.extract(whole, r) for r in theirs_target.shard_shapes}

    copy = torch.empty_like(full)
    for result in (ours(), fresh(), theirs()):
        for r, x in wanted.items():
            assert torch.equal(result[r].reshape(x.shape), x), (name, r)
    memory("fresh")
    given, unpooled = (ratio(call, theirs, rounds=rounds) for call in (ours, fresh))
    memory("warm")
    warm, copying = ratio(ours, theirs, rounds=rounds), ratio(ours, lambda: copy.copy_(full), rounds=rounds)
    goal = SMALL if small else DEEPSPEED
    its: dict[str, Any] = {"case": name, "MiB": full.nbytes / 2**20, "copies": len(bound.program.plan)}
    its |= {"us": given.ours * 1e6, "x DeepSpeed": given.median, "both fresh": unpooled.median}
    its |= {"both warm": warm.median, "/ memcpy": 1 / copying.median}
    its["goal"] = f">= {goal}x" + ("" if small else f", <= {MEMCPY} memcpy")
    its["ok"] = given.median >= goal and (small or 1 / copying.median <= MEMCPY)
    return its


def even(shape: tuple[int, int], axis: int, ranks: int) -> tuple[Any, Any]:
    sizes = [shape[axis] // ranks] * ranks
    return sa.layout(shape, sa.Split(axis), ranks=ranks), contiguous_split_map(shape, sizes, axis)


def gathered(count: int, size: int, ranks: int) -> tuple[Any, Any]:
    """Blocks of one row dealt out in a shuffled order."""
    order = np.random.default_rng(0).permutation(count).tolist()
    blocks = {r: order[r * count // ranks : (r + 1) * count // ranks] for r in range(ranks)}
    shape = (count, size)
    ours = sa.layout(shape, sa.BlockGather(0, 1, blocks), ranks=ranks)
    return ours, block_gather_map(shape, blocks, 1, 0)


def main() -> int:
    options = arguments(__doc__.splitlines()[0])
    torch.set_num_threads(1)
    rounds, side = (5, 1024) if options.quick else (11, 4096)
    shape = (side, side)
    full = torch.arange(side * side, dtype=torch.float32).view(shape)
    small = torch.arange(512 * 256, dtype=torch.float32).view(512, 256)
    table = [
        row("4 rows -> 8 columns", even(shape, 0, 4), even(shape, 1, 8), full, rounds, False),
        row("4 rows -> 8 rows", even(shape, 0, 4), even(shape, 0, 8), full, rounds, False),
        row("8 columns -> 2 columns", even(shape, 1, 8), even(shape, 1, 2), full, rounds, False),
        row("512 pieces of 1 KiB", gathered(512, 256, 4), even((512, 256), 0, 4), small, rounds, True),
    ]
    return 0 if report("one process", table, options.json) else 1


if __name__ == "__main__":
    sys.exit(main())
