"""One of two processes that leave without a word: ``leaving_script.py STORE RANK``.

Rank 0 begins two runs in the background and ends with an exception. Rank 1 comes in time for the one and too
late for the other, and closes neither context.
"""

import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import shardalg as sa
from shardalg.backends import _context

path, rank = sys.argv[1], int(sys.argv[2])
_context.FAREWELL = 1.0
store, limit = dist.FileStore(path, 2), timedelta(seconds=30)
rows, columns = (sa.layout((8, 6), sa.Split(axis), ranks=2) for axis in (0, 1))
program = sa.schedule(sa.plan(rows, columns), dtypes="float32")
mine = {rank: torch.ones(rows.shard_shape(rank))}
contexts = [
    sa.backends.cpu(store=dist.PrefixStore(name, store), rank=rank, size=2, timeout=limit, strategy=name)
    for name in ("shared", "p2p")
]
bound = [sa.bind(ctx, program) for ctx in contexts]
if rank == 0:
    handles = [sa.run_async(ctx, b, mine) for ctx, b in zip(contexts, bound)]
    while any(ctx.runs < 1 for ctx in contexts):
        time.sleep(0.01)
    raise ZeroDivisionError("mine")
for wait, ctx, b in zip((0.2, 2.0), contexts, bound):
    time.sleep(wait)
    start = time.monotonic()
    try:
        sa.run(ctx, b, mine)
        print(f"moved {time.monotonic() - start}")
    except sa.TransferError:
        print(f"failed {time.monotonic() - start}")
