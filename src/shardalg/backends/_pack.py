"""Moving blocks between shards and messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ..ops._blocks import block, write
from ..plans import Program
from ..plans._dtypes import itemsize
from ..plans._program import wire_dtype
from ._script import Local, Move

Tensors: TypeAlias = Mapping[tuple[int, Any], torch.Tensor]  # flat shards by (entry, box)


def fill(program: Program, sources: Tensors, m: Move, buffer: torch.Tensor, start: int) -> None:
    """Source block -> message."""
    dtypes = _dtypes(program, m.entry)
    wire = wire_dtype(program.plan.entries[m.entry], dtypes)
    values = block(_raw(sources[m.entry, m.box], dtypes[0] == wire), m.shape, m.strides, m.offset)
    if dtypes[0] != wire:
        values = values.to(getattr(torch, wire))
    count = values.numel()
    size = count * itemsize(wire)
    room = buffer[start + m.at : start + m.at + size]
    if (start + m.at) % itemsize(wire):  # a message of odd length came before
        room.copy_(values.contiguous().reshape(-1).view(torch.uint8))
    else:
        room.view(values.dtype).view(m.shape).copy_(values)


def drain(
    program: Program,
    targets: Tensors,
    moves: tuple[tuple[int, Move], ...],
    buffer: torch.Tensor,
    starts: dict[int, int],
) -> None:
    """Messages -> target blocks."""
    for peer, m in moves:
        dtypes = _dtypes(program, m.entry)
        wire = wire_dtype(program.plan.entries[m.entry], dtypes)
        exact = wire == dtypes[1] and m.scale[0] == m.scale[1]
        span = 1 + sum(abs(s) * (n - 1) for s, n in zip(m.buffer_strides, m.shape))
        low = sum(s * (n - 1) for s, n in zip(m.buffer_strides, m.shape) if s < 0)
        first = starts[peer] + m.at + low * itemsize(wire)
        data = buffer[first : first + span * itemsize(wire)]
        if first % itemsize(wire):
            data = data.clone()
        typed = data.view(_raw_dtype(wire) if exact else getattr(torch, wire))
        values = block(typed, m.shape, m.buffer_strides, -low)
        target = _raw(targets[m.entry, m.box], exact)
        write(
            target, m.shape, m.strides, m.offset, values if exact else _converted(values, dtypes[1], m.scale)
        )


def copy_local(program: Program, sources: Tensors, targets: Tensors, moves: tuple[Local, ...]) -> None:
    for m in moves:
        dtypes = _dtypes(program, m.entry)
        exact = dtypes[0] == dtypes[1] and m.scale[0] == m.scale[1]
        source = _raw(sources[m.entry, m.source], exact)
        values = block(source, m.shape, m.source_strides, m.source_offset)
        if not exact:
            values = _converted(values, dtypes[1], m.scale)
        write(_raw(targets[m.entry, m.target], exact), m.shape, m.target_strides, m.target_offset, values)


def _dtypes(program: Program, entry: int) -> tuple[str, str]:
    assert program.dtypes is not None
    return program.dtypes[entry]


def _converted(values: torch.Tensor, dtype: str, scale: tuple[int, int]) -> torch.Tensor:
    """``values * numerator / denominator`` in the promoted type, one rounding each, then cast."""
    target = getattr(torch, dtype)
    if scale[0] == scale[1]:
        return values.to(target)
    values = values.to(torch.promote_types(values.dtype, target))
    if scale[0] != 1:
        values = values * scale[0]
    if scale[1] != 1:
        values = values / scale[1]
    return values.to(target)


RAW = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def _raw_dtype(name: str) -> torch.dtype:
    """The integer type of the same size: moving it moves the bytes as they are."""
    return RAW[itemsize(name)]


def _raw(x: torch.Tensor, exact: bool) -> torch.Tensor:
    return x.view(RAW[x.element_size()]) if exact else x
