"""Rows spread to slots and collected back: two linear operators, each the other's transpose.

``Spread`` copies an item's row to every slot that wants it; ``Collect`` adds the slots' rows back
to the item, in an order that is part of the meaning, so that every backend gives the same bits.
Both make one exchange. Backward of one is the other, to any order of differentiation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from ._buffer import Buffer, admit
from ._index import Table, as_bytes, sum_rows
from ._transport import Bundle

Tensors: TypeAlias = tuple[torch.Tensor, ...]
Finish: TypeAlias = Callable[[], Tensors]
Gradients: TypeAlias = Callable[[Sequence[torch.Tensor]], list[torch.Tensor | None]]


@dataclass(frozen=True)
class Spread:
    """Items to slots for the tables called ``kind`` ("payload", "routes", "copies"); any dtype.

    Takes, rank after rank, leaves [items, ...] and gives leaves [slots, ...], zero where no item goes.
    """

    buffer: Buffer
    plan: Any
    kind: str

    def start(self, xs: Sequence[torch.Tensor]) -> Finish:
        return _begun(self.buffer, [_Outward(self.buffer, t, part) for t, part in _by_rank(self, xs)])

    def adjoint(self, xs: Sequence[torch.Tensor]) -> Gradients:
        """From gradients of the results to those of ``xs``, None for what has none."""
        dtypes = [x.dtype for x in xs]
        kept = [i for i, d in enumerate(dtypes) if _differentiable(d)]
        back = Collect(self.buffer, self.plan, self.kind, tuple(dtypes[i] for i in kept))

        def gradients(grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            found: list[torch.Tensor | None] = [None] * len(dtypes)
            for i, g in zip(kept, apply(back, [grads[i] for i in kept])):
                found[i] = g
            return found

        return gradients


@dataclass(frozen=True)
class Collect:
    """Slots to items: the transpose of ``Spread``, ``dtypes`` those of the results.

    A rank adds an item's slots in ascending k, sends the sum in ``wire`` (by default the type it adds
    in, promote(float32, dtype)), and the item's rank adds the sums in order and rounds once. With
    ``based``, every rank's leaves are followed by as many values [items, ...] to start from.
    """

    buffer: Buffer
    plan: Any
    kind: str
    dtypes: tuple[torch.dtype, ...]
    wire: torch.dtype | None = None
    based: bool = False

    def start(self, xs: Sequence[torch.Tensor]) -> Finish:
        legs = []
        each = len(self.dtypes) // len(self.buffer.ranks)
        for i, (t, part) in enumerate(_by_rank(self, xs)):
            bases = part[each:] if self.based else [None] * each
            legs.append(_Homeward(self, t, part[:each], bases, self.dtypes[i * each : (i + 1) * each]))
        return _begun(self.buffer, legs)

    def adjoint(self, xs: Sequence[torch.Tensor]) -> Gradients:
        """From gradients of the results to those of ``xs``."""
        dtypes = [x.dtype for x in xs]
        each = len(self.dtypes) // len(self.buffer.ranks)
        back = Spread(self.buffer, self.plan, self.kind)

        def gradients(grads: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
            spread, found = list(apply(back, grads)), []
            for low in range(0, len(grads), each):
                found += spread[low : low + each] + (list(grads[low : low + each]) if self.based else [])
            return [g.to(d) for g, d in zip(found, dtypes)]

        return gradients

    def wire_of(self, x: torch.Tensor) -> torch.dtype:
        """What a row travels as: only tokens are added before they travel, the rest is sent as it is."""
        if self.kind != "payload":
            return x.dtype
        return summing(x.dtype) if self.wire is None else self.wire


Operator: TypeAlias = Spread | Collect


def summing(dtype: torch.dtype) -> torch.dtype:
    """The type sums are made in: promote(float32, dtype), which torch refuses to name for float8."""
    return torch.float32 if dtype.itemsize < 4 else torch.promote_types(torch.float32, dtype)


def apply(operator: Operator, xs: Sequence[torch.Tensor], finish: Finish | None = None) -> Tensors:
    """The operator's results with their gradients; ``finish`` completes an exchange begun earlier."""
    return _Linear.apply(operator, finish, *xs) if xs else ()  # type: ignore[no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(operator: Operator, finish: Finish | None, *xs: torch.Tensor) -> Tensors:
        return (operator.start(xs) if finish is None else finish)()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensors) -> None:
        operator, _, *xs = inputs
        ctx.adjoint = operator.adjoint(xs)
        ctx.mark_non_differentiable(*(out for out in output if not _differentiable(out.dtype)))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return (None, None, *ctx.adjoint(grads))


def _begun(buffer: Buffer, legs: Sequence[_Outward] | Sequence[_Homeward]) -> Finish:
    """The exchange of all legs, under way; the result waits for it and lands them."""
    wait = buffer.transport.exchange([leg.send for leg in legs], [leg.receive for leg in legs])

    def finish() -> Tensors:
        wait()
        return tuple(out for leg in legs for out in leg.land())

    return finish


class _Outward:
    """One rank's side of a ``Spread``: packed at once, landed when the exchange is over."""

    def __init__(self, buffer: Buffer, t: Table, xs: Sequence[torch.Tensor]) -> None:
        self.buffer, self.table, self.xs = buffer, t, xs
        rows = [flat(x, t.items) for x in xs]
        self.columns = columns([as_bytes(r).shape[1] for r in rows])
        width = self.columns[-1][1]
        self.packed, wire = staged(buffer, t.out_rows, width)
        self.landing, self.landed = staged(buffer, t.in_rows + t.own + 1, width)
        own = self.landed[t.in_rows : t.in_rows + t.own]
        for (low, high), r in zip(self.columns, rows):
            torch.index_select(as_bytes(r), 0, t.pick[: t.out_rows], out=wire[:, low:high])
            torch.index_select(as_bytes(r), 0, t.pick[t.out_rows :], out=own[:, low:high])
        self.landed[-1] = 0
        self.send = bundle(wire, t.sent)
        self.receive = bundle(self.landed[: t.in_rows], t.received)

    def land(self) -> list[torch.Tensor]:
        outs = []
        for (low, high), x in zip(self.columns, self.xs):
            out = self.buffer.pool.result((self.table.slots, *x.shape[1:]), x.dtype)
            into = as_bytes(flat(out, self.table.slots))
            torch.index_select(self.landed[:, low:high], 0, self.table.place, out=into)
            outs.append(out)
        self.buffer.pool.give(self.packed, self.landing)
        return outs


class _Homeward:
    """One rank's side of a ``Collect``."""

    def __init__(
        self,
        operator: Collect,
        t: Table,
        xs: Sequence[torch.Tensor],
        bases: Sequence[Any],
        dtypes: Sequence[torch.dtype],
    ) -> None:
        self.buffer, self.table, self.xs, self.bases, self.dtypes = operator.buffer, t, xs, bases, dtypes
        self.wires = [operator.wire_of(x) for x in xs]
        self.columns = columns([math.prod(x.shape[1:]) * d.itemsize for x, d in zip(xs, self.wires)])
        width = self.columns[-1][1]
        self.packed, wire = staged(self.buffer, t.in_rows, width)
        self.landing, self.landed = staged(self.buffer, t.out_rows + t.own, width)
        for (low, high), x, d in zip(self.columns, xs, self.wires):
            self._sum(flat(x, t.slots), d, 0, wire[:, low:high])
            self._sum(flat(x, t.slots), d, t.in_rows, self.landed[t.out_rows :, low:high])
        self.send = bundle(wire, t.received)
        self.receive = bundle(self.landed[: t.out_rows], t.sent)

    def _sum(self, rows: torch.Tensor, wire: torch.dtype, low: int, into: torch.Tensor) -> None:
        """Arrivals from ``low`` on: their slots added, rounded to ``wire``, written as bytes."""
        kind = self._adds(rows, wire)
        direct = into.is_contiguous() and wire == kind
        total = into.view(wire) if direct else rows.new_empty((len(into), rows.shape[1]), dtype=kind)
        sum_rows(rows, self.table.arrive, low, total, fresh=True)
        if not direct:
            into.copy_(as_bytes(total.to(wire)))

    def _adds(self, rows: torch.Tensor, wire: torch.dtype) -> torch.dtype:
        return wire if len(self.table.arrive.ends) < 2 else summing(rows.dtype)

    def land(self) -> list[torch.Tensor]:
        outs = []
        for (low, high), x, base, wire, dtype in zip(
            self.columns, self.xs, self.bases, self.wires, self.dtypes
        ):
            rows = self.landed[:, low:high].contiguous().view(wire)
            kind = summing(dtype)
            shape = (self.table.items, rows.shape[1])
            total = self.buffer.pool.result(shape, kind)
            if base is not None:
                total.copy_(flat(base, shape[0]))
            sum_rows(rows, self.table.home, 0, total, fresh=base is None)
            outs.append(total.to(dtype).view(self.table.items, *x.shape[1:]))
        self.buffer.pool.give(self.packed, self.landing)
        return outs


def flat(x: torch.Tensor, rows: int) -> torch.Tensor:
    """[rows, ...] as contiguous [rows, width]; one column where there are no further axes."""
    return x.detach().contiguous().view(rows, math.prod(x.shape[1:]))


def columns(widths: Sequence[int]) -> list[tuple[int, int]]:
    """Byte ranges of leaves inside one wire row."""
    ends = [sum(widths[: i + 1]) for i in range(len(widths))]
    return [(end - width, end) for end, width in zip(ends, widths)]


def staged(buffer: Buffer, rows: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A pooled block and [rows, width] bytes of it."""
    block = buffer.pool.take(rows * width)
    return block, block[: rows * width].view(rows, width)


def bundle(rows: torch.Tensor, count: Sequence[int]) -> Bundle:
    """Rows of bytes for the exchange, ``count`` of them per peer."""
    return Bundle(rows.reshape(-1), tuple(n * rows.shape[1] for n in count))


def _by_rank(operator: Operator, xs: Sequence[torch.Tensor]) -> list[tuple[Table, Sequence[torch.Tensor]]]:
    seals = admit(operator.buffer, operator.plan)
    each = len(xs) // len(seals)
    return [(getattr(s, operator.kind), xs[i * each : (i + 1) * each]) for i, s in enumerate(seals)]


def _differentiable(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
