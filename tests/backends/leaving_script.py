"""One of two processes that leave without a word: ``leaving_script.py STORE STRATEGY LATE RANK``. Rank 1 runs
``LATE`` seconds after rank 0 began its run in the background and left."""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardalg as sa
from shardalg.backends import _context

path, strategy, late, rank = sys.argv[1], sys.argv[2], float(sys.argv[3]), int(sys.argv[4])
_context.FAREWELL = 0.5
store, limit = dist.FileStore(path, 2), timedelta(seconds=30)
rows, columns = (sa.layout((8, 6), sa.Split(axis), ranks=2) for axis in (0, 1))
ctx = sa.backends.cpu(store=store, rank=rank, size=2, timeout=limit, strategy=strategy)
bound = sa.bind(ctx, sa.schedule(sa.plan(rows, columns), dtypes="float32"))
mine = {rank: torch.ones(rows.shard_shape(rank))}
if rank == 0:
    handle = sa.run_async(ctx, bound, mine)
    while ctx.runs < 1:
        time.sleep(0.01)
    raise ZeroDivisionError("mine")
time.sleep(late)
start = time.monotonic()
try:
    sa.run(ctx, bound, mine)
    print(f"moved in {time.monotonic() - start}")
except sa.TransferError:
    print(f"an error after {time.monotonic() - start}")
