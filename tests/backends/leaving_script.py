"""One of two processes that leave without a word: ``leaving_script.py STORE STRATEGY RANK``."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardalg as sa

path, strategy, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
store, limit = dist.FileStore(path, 2), timedelta(seconds=30)
rows, columns = (sa.layout((8, 6), sa.Split(axis), ranks=2) for axis in (0, 1))
ctx = sa.backends.cpu(store=store, rank=rank, size=2, timeout=limit, strategy=strategy)
bound = sa.bind(ctx, sa.schedule(sa.plan(rows, columns), dtypes="float32"))
mine = {rank: torch.ones(rows.shard_shape(rank))}
if rank == 0:
    handle = sa.run_async(ctx, bound, mine)
    time.sleep(0.3)  # it waits for the other now
    raise ZeroDivisionError("mine")
time.sleep(1)
start = time.monotonic()
try:
    sa.run(ctx, bound, mine)
except sa.TransferError:
    print(f"an error after {time.monotonic() - start}")
