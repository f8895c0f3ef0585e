"""torchrun --nproc-per-node 4 examples/trainer_to_engine.py: ranks 0 and 1 train, 2 and 3 serve."""

import torch

import shardalg as sa

with sa.backends.auto() as ctx:
    (rank,) = ctx.ranks
    # Each process describes the shards it holds; everybody learns the whole.
    rows = sa.layout((8, 4), sa.Split(0), ranks=2)
    trainer = sa.gather_layouts(ctx, {n: sa.part(rows, rank) for n in "qkv"} if rank < 2 else {})
    engine = {"qkv": sa.layout((24, 4), sa.Segments(0, ((8, sa.Split(0)),) * 3), ranks=[2, 3])}
    tree = sa.plan_tree(trainer, engine, views={"qkv": sa.join(["q", "k", "v"])})
    bound = sa.bind(ctx, sa.schedule(tree, max_bytes=64 << 20))
    for step in range(3):
        weights = {n: {rank: torch.full((4, 4), step + 0.1 * rank)} for n in "qkv"} if rank < 2 else {}
        out = sa.run(ctx, bound, weights, tag=step)
    held = {r: round(x.mean().item(), 2) for r, x in out["qkv"].items()}
    print(f"rank {rank} serves {held}\n", end="")
