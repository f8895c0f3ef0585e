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

from ._tables import positions_in_runs, stable_order

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
        before = np.concatenate([[0], np.cumsum(~self.repeat)])
        ends = np.cumsum(self.count)
        return before[ends] - before[ends - self.count]  # type: ignore[no-any-return]


def table(
    rank: int,
    items: int,
    slots: int,
    item: Array,
    turn: Array,
    out: Side,
    slot: Array,
    into: Side,
    device: torch.device,
) -> Table:
    """The table of routes ``item -> slot``; ``turn`` (unique, item-major) orders the sums at the source."""
    sent, received = out.rows, into.rows
    wire, arrival = _own_last(sent, rank), _own_last(received, rank)
    first = ~out.repeat
    pick = np.empty(len(wire), np.int64)
    pick[wire] = item[first]
    group = arrival[np.cumsum(~into.repeat) - 1]
    place = np.full(slots, len(arrival), np.int64)
    place[slot] = group
    by_turn = np.full(int(turn.max(initial=-1)) + 1, -1, np.int64)
    by_turn[turn[first]] = wire
    kept = np.flatnonzero(by_turn >= 0)
    item_at = np.empty(len(by_turn), np.int64)
    item_at[turn] = item
    return Table(
        items,
        slots,
        _without(sent, rank),
        _without(received, rank),
        int(sent[rank]),
        _tensor(pick, device),
        _tensor(place, device),
        _sums(np.cumsum(~into.repeat) - 1, group, slot, len(arrival), device),
        _sums(item_at[kept], item_at[kept], by_turn[kept], items, device),
    )


def _own_last(rows: Array, rank: int) -> Array:
    """Wire position of each row listed by peer, the rank's own rows moved to the end."""
    start, own = int(rows[:rank].sum()), int(rows[rank])
    position = np.arange(int(rows.sum()))
    position[start : start + own] = np.arange(len(position) - own, len(position))
    position[start + own :] -= own
    return position


def _sums(runs: Array, targets: Array, sources: Array, count: int, device: torch.device) -> Sums:
    """``runs`` is sorted and names the target of each entry; entries of a run are in adding order."""
    turn = positions_in_runs(runs)
    sizes = np.bincount(turn) if len(turn) else np.zeros(0, np.int64)
    order = stable_order(turn, len(sizes))
    targets, sources = targets[order], sources[order]
    if len(sizes) and sizes[0] == count:
        by_target = np.argsort(targets[:count])
        targets[:count], sources[:count] = targets[:count][by_target], sources[:count][by_target]
    dense = (int(sizes[0]) if len(sizes) else 0) == count
    return Sums(_tensor(targets, device), _tensor(sources, device), tuple(sizes.tolist()), dense)


def _without(rows: Array, rank: int) -> tuple[int, ...]:
    return tuple(int(n) if r != rank else 0 for r, n in enumerate(rows))


def _tensor(a: Array, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(a, np.int64)).to(device)


def gather_rows(rows: torch.Tensor, index: torch.Tensor, out: torch.Tensor) -> None:
    """``out[i] = rows[index[i]]`` as bytes, whatever the dtype; both [n, width], ``out`` contiguous."""
    torch.index_select(as_bytes(rows), 0, index, out=as_bytes(out))


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
        out.index_copy_(0, sums.targets[low:high], part)
    else:
        out.index_add_(0, sums.targets[low:high], part)
