"""One rank of two in network namespaces of their own: ``netns_script.py RANK ADDRESS PORT``."""

import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import shardalg as sa

rank, address, port = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
limit = timedelta(seconds=30)
store = dist.TCPStore(address, port, 2, is_master=rank == 0, timeout=limit, wait_for_workers=False)
rows, columns = (sa.layout((300, 400), sa.Split(axis), ranks=2) for axis in (0, 1))
x = torch.arange(120000.0).reshape(300, 400)
mine = dist.PrefixStore("netns", store)
with sa.backends.cpu(store=mine, rank=rank, size=2, timeout=limit, host=f"machine {rank}") as ctx:
    bound = sa.bind(ctx, sa.plan(rows, columns))
    for step in range(2):
        out = sa.run(ctx, bound, {rank: sa.extract(rows, x, rank)}, tag=step, verify=True)
        assert torch.equal(out[rank], sa.extract(columns, x, rank))
    print(f"rank {rank}: {ctx.transport.strategy.name}", flush=True)
