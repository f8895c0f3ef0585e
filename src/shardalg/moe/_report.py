"""``report``: what a plan moves, saves and costs, as numbers and as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np

from .._struct import struct
from ..placements import Experts
from ..show._drawing import many
from ._geometry import capacities, round_up
from ._plan import CommPlan
from ._policy import Array

Row: TypeAlias = tuple[int, ...]
BREAK_EVEN = 1000.0


@struct
class Report:
    """Loads in routes per rank, traffic in rows per (source, destination), bytes where they say so.

    ``copied`` are the experts copied to each rank. ``rows`` (after deduplication) of a pair that no given
    plan knows is -1. ``lower_bound`` counts the distinct (token, other rank) pairs of the given plans: no
    exchange of whole rows can send fewer.
    """

    loads_before: Row
    loads_after: Row
    moved: int
    moved_at_least: int
    copies: int
    copied: tuple[Row, ...]
    routes: tuple[Row, ...]
    rows: tuple[Row, ...]
    lower_bound: int
    padding: Row
    row_bytes: int
    copied_bytes: int | None
    rows_saved: int
    break_even: float

    @property
    def copies_by_rank(self) -> Row:
        """Experts copied to each rank."""
        return tuple(map(len, self.copied))

    @property
    def imbalance_before(self) -> float:
        """max / mean of the loads that the router made."""
        return _imbalance(self.loads_before)

    @property
    def imbalance_after(self) -> float:
        return _imbalance(self.loads_after)

    @property
    def bytes_before(self) -> tuple[Row, ...]:
        """Bytes per pair if every route sent its own row."""
        return tuple(tuple(n * self.row_bytes for n in row) for row in self.routes)

    @property
    def bytes_after(self) -> tuple[Row, ...]:
        """Bytes per pair that are sent; -1 where unknown."""
        return tuple(tuple(n * self.row_bytes if n >= 0 else -1 for n in row) for row in self.rows)

    @property
    def pays(self) -> bool:
        """Whether the rows taken off the busiest rank outweigh the experts copied to any one rank."""
        return self.rows_saved >= self.break_even * max(self.copies_by_rank, default=0)

    def __str__(self) -> str:
        verdict, most = "pay" if self.pays else "do not pay", max(self.copies_by_rank, default=0)
        routes, rows = _crossing(self.routes), _crossing(self.rows)
        return "\n".join(
            (
                f"loads   {list(self.loads_before)} -> {list(self.loads_after)} rows,"
                f" max/mean {self.imbalance_before:.3f} -> {self.imbalance_after:.3f}",
                f"moved   {many(self.moved, 'token')} (at least {self.moved_at_least}),"
                f" {many(self.copies, 'expert copy')}",
                f"wire    {routes} routes -> {rows} rows of {self.row_bytes} bytes,"
                f" lower bound {self.lower_bound}",
                f"padding {list(self.padding)} rows",
                f"copies  {verdict}: {many(self.rows_saved, 'row')} off the busiest rank,"
                f" {many(most, 'copy')} on one rank, break-even {self.break_even:g} rows per copy",
            )
        )


def report(
    plan: CommPlan | Sequence[CommPlan], *, expert_bytes: int | None = None, break_even: float = BREAK_EVEN
) -> Report:
    """The ``Report`` of one rank's plan, or of all ranks' plans together (which know every pair).

    ``expert_bytes`` is the size of one expert. ``break_even`` is how many rows take as long to compute as one
    expert takes to copy: for bfloat16 weights the ratio of FLOP/s to wire bytes/s, whatever their size.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> import torch
    >>> topk = [torch.tensor([[0, 1], [0, 0], [2, 0]]), torch.tensor([[0, 1], [1, 3], [0, 2]])]
    >>> print(report(plan_dispatch(simulate(2, E=4, S=3, K=2, H=1, pad=2), topk)))
    loads   [9, 3] -> [6, 6] rows, max/mean 1.500 -> 1.000
    moved   3 tokens (at least 3), 1 expert copy
    wire    4 routes -> 3 rows of 4 bytes, lower bound 3
    padding [2, 2] rows
    copies  do not pay: 3 rows off the busiest rank, 1 copy on one rank, break-even 1000 rows per copy
    """
    plans = [plan] if isinstance(plan, CommPlan) else list(plan)
    p = plans[0]
    counts, alloc = (t.cpu().numpy().astype(np.int64) for t in (p.counts, p.alloc))
    copied = _copied(p)
    copies = sum(map(len, copied))
    before = counts.sum(0).reshape(p.R, p.epn).sum(1)
    after = alloc.sum(0)
    stay = alloc[np.arange(p.E), np.arange(p.E) // p.epn].sum()
    return Report(
        loads_before=_row(before),
        loads_after=_row(after),
        moved=int(alloc.sum() - stay),
        moved_at_least=int(np.maximum(before - capacities(int(before.sum()), p.R), 0).sum()),
        copies=copies,
        copied=copied,
        routes=_routes(counts, alloc),
        rows=_rows(plans),
        lower_bound=sum(_distinct_elsewhere(q) for q in plans),
        padding=_row((round_up(alloc, p.pad) - alloc).sum(0)),
        row_bytes=p.H * p.dtype.itemsize,
        copied_bytes=None if expert_bytes is None else copies * expert_bytes,
        rows_saved=int(before.max() - after.max()),
        break_even=break_even,
    )


def placements(plan: CommPlan) -> tuple[Experts, Experts]:
    """Where experts live, and where they are while this plan runs: ``(home, home + copy slots)``.

    ``prefetch`` is the transfer between the two, ``reduce_grad`` its adjoint.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> import torch
    >>> topk = [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])]
    >>> placements(plan_dispatch(simulate(2, E=4, S=2, K=1, H=1), topk)[0])
    (Experts({0: (0, 1), 1: (2, 3)}), Experts({0: (0, 1, 3), 1: (2, 3)}))
    """
    home = Experts.uniform(plan.E, plan.R)
    copied = _copied(plan)
    return home, Experts({rank: (*own, *copied[rank]) for rank, own in home.by_rank})


def _copied(plan: CommPlan) -> tuple[Row, ...]:
    """The experts copied to each rank."""
    return tuple(tuple(e for e in row if e >= 0) for row in plan.experts_to_copy.tolist())


def _routes(counts: Array, alloc: Array) -> tuple[Row, ...]:
    """[R, R] routes from source to destination: how two cuts of each expert's sequence overlap."""
    start, end = np.cumsum(counts, 0) - counts, np.cumsum(alloc, 1)
    low = np.maximum(start[:, :, None], (end - alloc)[None])
    high = np.minimum((start + counts)[:, :, None], end[None])
    return tuple(map(_row, np.maximum(high - low, 0).sum(1)))


def _rows(plans: Sequence[CommPlan]) -> tuple[Row, ...]:
    found = np.full((plans[0].R, plans[0].R), -1)
    for p in plans:
        found[p.rank, :] = p.send_rows.cpu().numpy()
        found[:, p.rank] = p.recv_rows.cpu().numpy()
    return tuple(map(_row, found))


def _distinct_elsewhere(p: CommPlan) -> int:
    dst = p.dst.cpu().numpy().astype(np.int64)
    real = np.flatnonzero(dst != np.iinfo(np.int32).min)
    to = np.where(dst[real] >= 0, dst[real], ~dst[real]) // p.NvS
    pairs = np.unique((real // p.K) * p.R + to)
    return int((pairs % p.R != p.rank).sum())


def _crossing(pairs: Sequence[Row]) -> int:
    return sum(n for s, row in enumerate(pairs) for d, n in enumerate(row) if s != d and n > 0)


def _imbalance(loads: Row) -> float:
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def _row(a: Array) -> Row:
    return tuple(a.tolist())
