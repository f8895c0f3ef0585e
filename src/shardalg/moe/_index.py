"""Index tables that make dispatch, combine and prefetch one linear operator and its transpose.

Source items (tokens, routes or experts) travel as wire rows, one per distinct (item, rank), and
arrive in slots. Read forwards a table copies; read backwards it adds, in a fixed order.
Wire rows are ordered by peer, and those that stay on their rank come last, so that what travels
is one contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch

from ._tables import changes, count_by_run, positions_in_runs, run_lengths, stable_order

Array: TypeAlias = np.ndarray[Any, Any]

CHUNK = 1 << 20  # bytes of one temporary while adding rows: stays in cache and off fresh pages


@dataclass(frozen=True)
class Sums:
    """Which rows are added to which, by turns: turn 0 of every target first, then turn 1, ...

    ``sizes`` counts the entries of each turn; ``dense`` says that turn 0 is every target in order.
    Within a turn targets are distinct, so the order of addition is fixed on every device.
    """

    targets: torch.Tensor
    sources: torch.Tensor
    sizes: tuple[int, ...]
    dense: bool


@dataclass(frozen=True)
class Table:
    """One rank's part of an exchange of rows; ``sent`` and ``received`` are 0 for the rank itself."""

    items: int
    slots: int
    sent: tuple[int, ...]
    received: tuple[int, ...]
    own: int
    pick: torch.Tensor
    place: torch.Tensor
    arrive: Sums
    home: Sums

    @property
    def out_rows(self) -> int:
        return sum(self.sent)

    @property
    def in_rows(self) -> int:
        return sum(self.received)


@dataclass(frozen=True)
class Side:
    """One end of a list of routes by peer: ``count`` [R], and per route whether it shares the row before."""

    count: Array
    repeat: Array

    @property
    def rows(self) -> Array:
        """[R]: distinct rows per peer."""
        return count_by_run(~self.repeat, self.count)


def table(
    rank: int,
    sizes: tuple[int, int],
    item: Array,
    order: Array,
    out: Side,
    slot: Array,
    into: Side,
    device: torch.device,
) -> Table:
    """The table of routes ``item -> slot`` among ``sizes`` = (items, slots).

    Routes are numbered so that an item's follow each other in adding order: ``item`` has one entry
    per number, ``order`` lists the numbers by peer as ``out`` counts them; ``slot`` and ``into`` list arrivals by peer.
    """
    sent, received = out.rows, into.rows
    wire, arrival = _own_last(sent, rank), _own_last(received, rank)
    first = order[~out.repeat]
    pick = np.empty(len(wire), np.int32)
    pick[wire] = item[first]
    wire_of = np.full(len(item), -1, np.int32)
    wire_of[first] = wire
    kept = np.flatnonzero(wire_of >= 0)
    home = item[kept]
    group = np.repeat(arrival, run_lengths(~into.repeat))
    place = np.full(sizes[1], len(arrival), np.int32)
    place[slot] = group
    return Table(
        *sizes,
        _without(sent, rank),
        _without(received, rank),
        int(sent[rank]),
        _tensor(pick, device),
        _tensor(place, device),
        _sums(~into.repeat, group, slot, len(arrival), device),
        _sums(changes(home), home, wire_of[kept], sizes[0], device),
    )


def _own_last(rows: Array, rank: int) -> Array:
    """Wire position of each row listed by peer, the rank's own rows moved to the end."""
    start, own = int(rows[:rank].sum()), int(rows[rank])
    position = np.arange(int(rows.sum()), dtype=np.int32)
    position[start : start + own] = np.arange(len(position) - own, len(position))
    position[start + own :] -= own
    return position


def _sums(first: Array, targets: Array, sources: Array, count: int, device: torch.device) -> Sums:
    """``first`` marks where the entries of another target begin; those of one are in adding order."""
    sizes = np.array([len(targets)])
    if not first.all():
        turn = positions_in_runs(first)
        sizes = np.bincount(turn)
        order = stable_order(turn, len(sizes))
        targets, sources = targets[order], sources[order]
    dense = int(sizes[0]) == count
    if dense:
        in_order = np.array(sources, np.int32)
        in_order[targets[:count]] = sources[:count]
        targets, sources = np.concatenate([np.arange(count, dtype=np.int32), targets[count:]]), in_order
    return Sums(_tensor(targets, device), _tensor(sources, device), tuple(sizes.tolist()), dense)


def _without(rows: Array, rank: int) -> tuple[int, ...]:
    return tuple(int(n) if r != rank else 0 for r, n in enumerate(rows))


def _tensor(a: Array, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[n, width] as [n, bytes], sharing memory; ``rows`` is contiguous, whatever strides its unit axes claim."""
    return rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def sum_rows(rows: torch.Tensor, sums: Sums, out: torch.Tensor, *, fresh: bool) -> None:
    """Adds the listed rows to ``out`` turn by turn in ``out``'s dtype; ``fresh`` starts from nothing.

    The first row of a target is copied, not added to zero, so that -0.0 survives.
    """
    if fresh and not sums.dense:
        out.zero_()
    step = max(1, CHUNK // max(1, out.shape[1] * out.element_size()))
    start = 0
    for number, size in enumerate(sums.sizes):
        for low in range(start, start + size, step):
            high = min(low + step, start + size)
            _add(rows, sums, low, high, out, copy=fresh and number == 0)
        start += size


def _add(rows: torch.Tensor, sums: Sums, low: int, high: int, out: torch.Tensor, *, copy: bool) -> None:
    part = rows.index_select(0, sums.sources[low:high]).to(out.dtype)
    if copy and sums.dense:
        out[low:high] = part
    elif copy:
        out.index_copy_(0, sums.targets[low:high].long(), part)
    else:
        out.index_add_(0, sums.targets[low:high], part)
