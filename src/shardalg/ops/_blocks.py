"""Strided blocks of real tensors, for torch tensors and NumPy arrays alike.

Everything here works on flat one-dimensional views in elements. torch refuses negative
strides, so a block that runs backwards is viewed forwards and flipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .._errors import UnsupportedError
from .._torch import torch

Tensor = Any

UNFLIPPABLE = (
    "torch.float8",
    "torch.float4",
    "torch.uint16",
    "torch.uint32",
    "torch.uint64",
    "torch.complex32",
)


def is_torch(x: Tensor) -> bool:
    return hasattr(x, "as_strided")


def flat(x: Tensor) -> Tensor:
    """The elements of ``x`` in row-major order as one axis; a view where ``x`` is contiguous."""
    return x.reshape(-1) if is_torch(x) else np.ascontiguousarray(x).reshape(-1)


def zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A zeroed tensor of the dtype (and device) of ``like``."""
    return like.new_zeros(shape) if is_torch(like) else np.zeros(shape, like.dtype)


def block(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Tensor:
    """A strided view of flat ``x``; for torch a flipped copy where a stride is negative."""
    if not is_torch(x):
        size = x.itemsize
        view = np.lib.stride_tricks.as_strided(x[offset:], shape, [s * size for s in strides])
        return view
    back = [k for k, s in enumerate(strides) if s < 0]
    if not back:
        return x.as_strided(shape, strides, x.storage_offset() + offset)
    first = offset + sum(strides[k] * (shape[k] - 1) for k in back)
    forward = tuple(abs(s) for s in strides)
    view = x.as_strided(shape, forward, x.storage_offset() + first)
    return flipped(view, back)


def flipped(values: Tensor, axes: Sequence[int]) -> Tensor:
    """A torch tensor turned round along ``axes``; what torch does not flip goes as integers of its size."""
    if not axes:
        return values
    if str(values.dtype).startswith(UNFLIPPABLE):
        return values.view(getattr(torch(), f"int{8 * values.element_size()}")).flip(axes).view(values.dtype)
    return values.flip(axes)


def write(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], offset: int, values: Tensor) -> None:
    """Write ``values`` into a strided block of flat ``x``."""
    if is_torch(x):
        back = [k for k, s in enumerate(strides) if s < 0]
        first = offset + sum(strides[k] * (shape[k] - 1) for k in back)
        view = x.as_strided(shape, tuple(abs(s) for s in strides), x.storage_offset() + first)
        view.copy_(flipped(values, back))
    else:
        block(x, shape, strides, offset)[...] = values


def scaled(values: Tensor, numerator: int, denominator: int) -> Tensor:
    """``values * numerator / denominator`` in their own dtype, one rounding each; one-byte floats,
    which have no arithmetic, go through float32."""
    if numerator == denominator:
        return values
    require_scalable(values)
    if is_torch(values) and values.element_size() == 1:
        return scaled(values.float(), numerator, denominator).to(values.dtype)
    if numerator != 1:
        values = values * numerator
    if denominator != 1:
        values = values / denominator
    return values


def require_scalable(values: Tensor) -> None:
    """Raise for integers and bools, whose multiples by a rational are not exact."""
    dtype = values.dtype
    floating = dtype.is_floating_point or dtype.is_complex if is_torch(values) else dtype.kind in "fc"
    if not floating:
        raise UnsupportedError(f"a tensor of dtype {dtype} cannot be scaled; only scale 1 moves it")


def bits(x: Tensor) -> Tensor:
    """The same bytes as integers (an extra last axis where an element has 16 bytes)."""
    size = x.element_size() if is_torch(x) else x.itemsize
    names = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "int64"}
    if not is_torch(x):
        return x.view(names[size])
    t = torch()
    if size == 16:
        return t.view_as_real(x.resolve_conj()).contiguous().view(t.int64)
    return x.contiguous().view(getattr(t, names[size]))
