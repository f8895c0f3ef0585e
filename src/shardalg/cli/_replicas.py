"""Comparing what several ranks hold of the same thing, byte for byte, slice by slice."""

from __future__ import annotations

import math
import struct as bytes_of
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from .._errors import InvalidMapError
from .._torch import torch
from ..maps import AffineMap
from ..maps._space import index_of
from ..ops import plan
from ..ops._blocks import bits, block, flat
from ..ops._tensors import Strip, strips


def require_agreement(layout: AffineMap, shards: Mapping[int, Any]) -> None:
    """Raise ``InvalidMapError`` unless ranks that hold an element at the same scale store the same bytes.

    ``shards`` is ``{rank: tensor}``, all of one dtype. Every slot is compared with the one that the lowest
    rank has for its element; no tensor is built. The first difference names both ranks
    and the element.
    """
    if layout.injective:
        return
    for alike in _by_scale(layout):
        for s in strips(plan(alike, alike, select="lowest").map):
            if not _is_itself(s) and not _equal_bytes(*_both(s, shards)):
                _differ(alike, s, shards)


def _by_scale(layout: AffineMap) -> Iterator[AffineMap]:
    """A layout in parts, each with the pieces of one scale."""
    c = layout.table.columns
    scales = np.stack([c.numerator, c.denominator])
    for scale in np.unique(scales, axis=1).T:
        same = (scales == scale[:, None]).all(axis=0)
        yield AffineMap(layout.domain, layout.codomain, layout.table.take(np.flatnonzero(same)))


def _is_itself(s: Strip) -> bool:
    """Whether the slots of a strip would be compared with themselves."""
    here, there = (s.slot_offset, s.slot_strides), (s.element_offset, s.element_strides)
    return s.slot.rank == s.element.rank and here == there


def _both(s: Strip, shards: Mapping[int, Any]) -> tuple[Any, Any]:
    """The block of slots of a strip, and the slots it is compared with."""
    here, there = (flat(shards[box.rank or 0]) for box in (s.slot, s.element))
    return (
        block(here, s.shape, s.slot_strides, s.slot_offset),
        block(there, s.shape, s.element_strides, s.element_offset),
    )


def _equal_bytes(a: Any, b: Any) -> bool:
    return bool(torch().equal(_bits(a), _bits(b)))


def _bits(x: Any) -> Any:
    return bits(x.resolve_conj().resolve_neg())


def _differ(layout: AffineMap, s: Strip, shards: Mapping[int, Any]) -> None:
    """Raise for the first slot of a strip whose bytes differ."""
    a, b = map(_bits, _both(s, shards))
    wrong = (a != b).reshape(math.prod(s.shape), -1).any(dim=1)
    index = np.unravel_index(int(wrong.int().argmax()), s.shape) if s.shape else ()
    slot = s.slot_offset + sum(int(i) * step for i, step in zip(index, s.slot_strides))
    element = int(layout(slot, rank=s.slot.rank))
    raise InvalidMapError(
        f"replicas differ: the map says that ranks {s.element.rank} and {s.slot.rank} hold the same"
        f" element {element} (index {index_of(element, layout.logical_shape)}), and they store"
        " other bytes for it"
    )


def same(a: Any, b: Any) -> bool:
    """Whether two values of torch files are equal: tensors and floats as bytes, so that NaN equals itself,
    lists and tables by what they hold."""
    if type(a) is not type(b):
        return False
    if hasattr(a, "shape"):
        return bool(a.dtype == b.dtype and a.shape == b.shape and _equal_tensors(a, b))
    if isinstance(a, Mapping):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return bytes_of.pack("d", a) == bytes_of.pack("d", b)
    return bool(a == b)


def _equal_tensors(a: Any, b: Any) -> bool:
    """Whether tensors of one dtype and shape hold the same bytes; in other forms, the same entries."""
    if a.is_meta or b.is_meta or a.layout is not b.layout:
        return bool(a.is_meta and b.is_meta)
    if a.is_quantized:
        return bool(a.equal(b))
    return _equal_bytes(a, b) if is_plain(a) else _equal_bytes(a.to_dense(), b.to_dense())


def is_plain(x: Any) -> bool:
    """Whether a tensor is elements at strides."""
    return x.layout is torch().strided and not x.is_quantized and not x.is_meta
