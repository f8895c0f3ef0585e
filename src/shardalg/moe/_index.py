"""Index tables that make dispatch, combine and prefetch one linear operator and its transpose.

Source items (tokens, routes or experts) travel as wire rows, one per distinct (item, rank), and
arrive in slots. Read forwards a table copies; read backwards it adds, in a fixed order.
Wire rows are ordered by peer, and those that stay on their rank come last, so that what travels
is one contiguous block.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ._policy import Array
from ._tables import changes, count_by_run, positions_in_runs, run_lengths, stable_order

CHUNK = 1 << 19  # bytes of results summed at a time: they and the scratch stay in cache


@dataclass(frozen=True)
class Sums:
    """Which rows are added to which, by turns: turn 0 of every target first, then turn 1, ...

    Within a turn targets are distinct and ascending, so the order of addition is fixed on every
    device; ``ends`` closes each turn. ``dense`` says that turn 0 is every target. ``host`` are the
    targets on the host.
    """

    targets: torch.Tensor
    sources: torch.Tensor
    ends: tuple[int, ...]
    dense: bool
    host: Array

    @property
    def turns(self) -> list[slice]:
        return [slice(start, end) for start, end in zip((0, *self.ends), self.ends)]


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
class End:
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
    out: End,
    slot: Array,
    into: End,
    device: torch.device,
) -> Table:
    """The table of routes ``item -> slot`` among ``sizes`` = (items, slots).

    Routes are numbered so that an item's follow each other in adding order: ``item`` has one entry
    per number, ``order`` lists the numbers by peer as ``out`` counts them; ``slot`` and ``into`` list
    arrivals by peer.
    """
    sent, received = out.rows, into.rows
    first = own_last(order, out.count, rank)[~own_last(out.repeat, out.count, rank)]
    wire_of = np.full(len(item), -1, np.int32)
    wire_of[first] = np.arange(len(first), dtype=np.int32)
    kept = np.flatnonzero(wire_of >= 0)
    home = item[kept]
    slot, opens = own_last(slot, into.count, rank), ~own_last(into.repeat, into.count, rank)
    arrivals = int(received.sum())
    arrival = np.repeat(np.arange(arrivals, dtype=np.int32), run_lengths(opens))
    place = np.full(sizes[1], arrivals, np.int32)
    place[slot] = arrival
    return Table(
        *sizes,
        _without(sent, rank),
        _without(received, rank),
        int(sent[rank]),
        _tensor(item[first], device),
        _tensor(place, device),
        _sums(opens, arrival, slot, arrivals, device),
        _sums(changes(home), home, wire_of[kept], sizes[0], device),
    )


def own_last(listed: Array, count: Array, rank: int) -> Array:
    """A list by peer with ``rank``'s own part moved to the end.

    >>> own_last(np.array([10, 20, 21, 30]), np.array([1, 2, 1]), 1).tolist()
    [10, 30, 20, 21]
    """
    start, stop = int(count[:rank].sum()), int(count[: rank + 1].sum())
    return np.concatenate([listed[:start], listed[stop:], listed[start:stop]])


def _sums(first: Array, targets: Array, sources: Array, count: int, device: torch.device) -> Sums:
    """``first`` marks where the entries of another target begin; those of one are in adding order."""
    sizes = np.array([len(targets)])
    if not first.all():
        turn = positions_in_runs(first)
        sizes = np.bincount(turn)
        order = stable_order(turn, len(sizes))
        targets, sources = targets[order], sources[order]
    ends = tuple(np.cumsum(sizes).tolist())
    return Sums(_tensor(targets, device), _tensor(sources, device), ends, ends[0] == count, targets)


def _without(rows: Array, rank: int) -> tuple[int, ...]:
    return tuple(int(n) if r != rank else 0 for r, n in enumerate(rows))


def _tensor(a: Array, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        return torch.from_numpy(np.ascontiguousarray(a, np.int32)).to(device)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """[n, width] as [n, bytes], sharing memory; ``rows`` is contiguous, whatever its unit axes claim."""
    return rows.as_strided(rows.shape, (rows.shape[1], 1)).view(torch.uint8)


def sum_rows(rows: torch.Tensor, sums: Sums, low: int, out: torch.Tensor, *, fresh: bool) -> None:
    """Adds the rows of targets ``low``, ``low + 1``, ... to those rows of ``out``, turn by turn in its dtype.

    ``fresh`` starts from nothing: the first row of a target is copied, not added to zero, so that -0.0
    survives. On the host targets are taken in blocks that stay in cache through all their turns.
    """
    if fresh and not sums.dense:
        out.zero_()
    step = block_rows(out)
    edges = low + np.arange(0, len(out) + step, step).clip(max=len(out))
    bounds = [turn.start + np.searchsorted(sums.host[turn], edges) for turn in sums.turns]
    scratch = rows.new_empty((min(step, len(out)), rows.shape[1]))
    cast = scratch if rows.dtype == out.dtype else torch.empty_like(scratch, dtype=out.dtype)
    for k, edge in enumerate(edges[:-1].tolist()):
        into = out[edge - low : edge - low + step]
        for number, bound in enumerate(bounds):
            span = slice(int(bound[k]), int(bound[k + 1]))
            if span.start < span.stop:
                sources, targets = sums.sources[span], sums.targets[span] - edge
                _add(rows, sources, targets, into, (scratch, cast), sums.dense, fresh and number == 0)


def block_rows(out: torch.Tensor) -> int:
    """Rows of ``out`` summed at a time: as many as stay in cache, all on a device."""
    if out.device.type != "cpu":
        return max(1, len(out))
    return max(16, CHUNK // max(1, out.shape[1] * out.element_size()))


def _add(
    rows: torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    out: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor],
    dense: bool,
    copy: bool,
) -> None:
    """One turn of one block; rows pass through a scratch in the type of ``out``."""
    if copy and dense and rows.dtype == out.dtype:
        torch.index_select(as_bytes(rows), 0, sources, out=as_bytes(out))
        return
    picked, part = (s[: len(sources)] for s in scratch)
    torch.index_select(as_bytes(rows), 0, sources, out=as_bytes(picked))
    if part.dtype != picked.dtype:
        part.copy_(picked)
    if copy:
        out.index_copy_(0, targets.long(), part)
    else:
        out.index_add_(0, targets, part)
