"""Run under ``python -m torch.distributed.run``: each process passes and gets its own rank's shard."""

import torch

import shardalg as sa

rows, columns = (sa.layout((8, 8), sa.Split(axis), ranks=2) for axis in (0, 1))
x = torch.arange(64.0).reshape(8, 8)
with sa.backends.auto() as ctx:
    bound = sa.bind(ctx, sa.plan(rows, columns))
    for step in range(3):
        (rank,) = ctx.ranks
        out = sa.run(ctx, bound, sa.extract(rows, x, rank), tag=step)
        assert torch.equal(out[rank], sa.extract(columns, x, rank))
    print(f"rank {rank} of {len(ctx.peers)} moved {ctx.last_report.wire_bytes} bytes", flush=True)
torch.distributed.destroy_process_group()
