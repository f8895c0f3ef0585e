"""The ``balanced`` selector: the largest sender sends as little as possible.

An element may come from any holder, so demand is divisible: how much each holder gives of what
is a flow from sets of holders to ranks, and the smallest bound on a sender for which the flow
meets all demand is the optimum. Regions are then cut, element by element where needed, so that
every rank gives exactly its share: the largest sender of the plan *is* the smallest possible.
What a target's own rank holds stays there. Not memoryless: a share depends on all requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from math import prod
from typing import NamedTuple

import numpy as np

from ..maps._meet import Blocks, Met
from ..maps._space import IntArray

Block = tuple[int, int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""(target slot, element, extents, slot strides, element strides)"""


class Demand(NamedTuple):
    """Blocks wanted by one target rank from one set of holders; ``piece`` is the target piece."""

    piece: int
    holders: tuple[int, ...]
    block: Block


def shares(demands: Sequence[Demand], own: Sequence[int]) -> Iterator[tuple[Demand, int]]:
    """Every demand, cut where needed, with the rank that gives it. ``own[k]`` is the target rank
    of demand k, which gives to itself what it holds.

    >>> ten = Demand(0, (0, 1), (0, 0, (10,), (1,), (1,)))
    >>> [(d.block[:3], giver) for d, giver in shares([ten], [2])]
    [((0, 0, (5,)), 0), ((5, 5, (5,)), 1)]
    """
    by_holders: dict[tuple[int, ...], list[Demand]] = {}
    for d, rank in zip(demands, own):
        if rank in d.holders:
            yield d, rank
        else:
            by_holders.setdefault(d.holders, []).append(d)
    wanted = {holders: sum(prod(d.block[2]) for d in its) for holders, its in by_holders.items()}
    flow = _least_largest(wanted)
    for holders, its in by_holders.items():
        yield from _handed_out(its, [(h, flow[holders, h]) for h in holders])


def _handed_out(demands: list[Demand], quotas: list[tuple[int, int]]) -> Iterator[tuple[Demand, int]]:
    """Demands to givers in order, each exactly its quota."""
    givers = deque((rank, left) for rank, left in quotas if left)
    waiting = deque(demands)
    while waiting:
        d = waiting.popleft()
        rank, left = givers.popleft()
        size = prod(d.block[2])
        if size > left:
            first, *rest = _split(d.block, left)
            waiting.extendleft(d._replace(block=b) for b in reversed(rest))
            d = d._replace(block=first)
            size = prod(first[2])
        if left > size:
            givers.appendleft((rank, left - size))
        yield d, rank


def _split(block: Block, count: int) -> list[Block]:
    """A block as blocks of which the first has at most ``count`` elements, as many as whole slabs
    of its outermost long axis allow; ``0 < count < size``."""
    slot, element, shape, slots, elements = block
    axis = next(k for k, n in enumerate(shape) if n > 1)
    inner = prod(shape[axis + 1 :])
    at = count // inner
    if at:
        return [_slab(block, axis, 0, at), _slab(block, axis, at, shape[axis])]
    return [*_split(_slab(block, axis, 0, 1), count), _slab(block, axis, 1, shape[axis])]


def _slab(block: Block, axis: int, start: int, stop: int) -> Block:
    slot, element, shape, slots, elements = block
    extents = (*shape[:axis], stop - start, *shape[axis + 1 :])
    return slot + start * slots[axis], element + start * elements[axis], extents, slots, elements


# --- the flow -----------------------------------------------------------------------------

Holders = tuple[int, ...]


def _least_largest(wanted: dict[Holders, int]) -> dict[tuple[Holders, int], int]:
    """How much each rank gives to each demand so that the largest total is smallest."""
    total = sum(wanted.values())
    ranks = sorted({h for holders in wanted for h in holders})
    low = max(-(-total // max(len(ranks), 1)), max((v for h, v in wanted.items() if len(h) == 1), default=0))
    high = total
    while low < high:
        middle = (low + high) // 2
        if _flow(wanted, middle) is None:
            low = middle + 1
        else:
            high = middle
    found = _flow(wanted, high)
    assert found is not None
    return found


def _flow(wanted: dict[Holders, int], bound: int) -> dict[tuple[Holders, int], int] | None:
    """A flow that meets every demand with no rank above ``bound``, by shortest augmenting paths."""
    flow = {(holders, h): 0 for holders in wanted for h in holders}
    load: dict[int, int] = {h: 0 for holders in wanted for h in holders}
    takers: dict[int, list[Holders]] = {h: [] for h in load}
    for holders in wanted:
        for h in holders:
            takers[h].append(holders)
    for holders, need in wanted.items():
        while need:
            pushed = _augment(holders, need, flow, load, takers, bound)
            if not pushed:
                return None
            need -= pushed
    return flow


def _augment(
    start: Holders,
    need: int,
    flow: dict[tuple[Holders, int], int],
    load: dict[int, int],
    takers: dict[int, list[Holders]],
    bound: int,
) -> int:
    """Push along a shortest path from a demand to a rank with room; a full rank passes on what
    another demand can take elsewhere."""
    came: dict[int, tuple[Holders, int | None]] = {}
    queue: deque[tuple[Holders, int | None]] = deque([(start, None)])
    seen = {start}
    while queue:
        holders, via = queue.popleft()
        for h in holders:
            if h in came:
                continue
            came[h] = (holders, via)
            if load[h] < bound:
                return _push(h, need, bound, came, flow, load)
            for other in takers[h]:
                if other not in seen and flow[other, h]:
                    seen.add(other)
                    queue.append((other, h))
    return 0


def _push(
    end: int,
    need: int,
    bound: int,
    came: dict[int, tuple[Holders, int | None]],
    flow: dict[tuple[Holders, int], int],
    load: dict[int, int],
) -> int:
    path: list[tuple[Holders, int, int | None]] = []
    rank: int | None = end
    amount = min(need, bound - load[end])
    while rank is not None:
        holders, via = came[rank]
        path.append((holders, rank, via))
        if via is not None:
            amount = min(amount, flow[holders, via])
        rank = via
    load[end] += amount
    for holders, to, via in path:
        flow[holders, to] += amount
        if via is not None:
            flow[holders, via] -= amount
    return amount


def block_of(met: Met, k: int) -> Block:
    """Family ``k`` of meetings that carry (slot, element) on their right side."""
    slot, element = met.right_offset[:, k].tolist()
    slots, elements = (tuple(met.right_strides[i, :, k].tolist()) for i in (0, 1))
    return slot, element, tuple(met.shape[:, k].tolist()), slots, elements


def as_blocks(
    given: Sequence[tuple[Demand, int]], boxes: IntArray, axes: int
) -> tuple[IntArray, IntArray, Blocks]:
    """The target piece and giver of each share, and the shares as blocks of elements that carry
    their slots; ``boxes`` is the logical box of each target piece."""
    piece, giver = np.array([(d.piece, rank) for d, rank in given], np.int64).reshape(len(given), 2).T
    blocks = [d.block for d, _ in given]
    slot, element = np.array([b[:2] for b in blocks], np.int64).reshape(len(blocks), 2).T
    shape, slots, elements = (
        np.array([b[i] for b in blocks], np.int64).reshape(len(blocks), axes).T for i in (2, 3, 4)
    )
    return piece, giver, Blocks(boxes[piece], element, shape, elements, slot[None], slots[None])
