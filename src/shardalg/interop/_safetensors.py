"""Safetensors files: a header checked to the last byte, tensors as mapped views, files written in place.

Reading maps the file and touches only the pages of the elements asked for, so that the slices of any
layout are read without the rest. Offsets here are bytes from the start of the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._errors import InvalidMapError, UnsupportedError
from .._limits import BOUND
from .._struct import struct
from .._torch import torch
from ..maps._space import Shape, as_shape

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # pages nobody writes need no memory set aside
HEADER_BOUND = 100_000_000  # bytes; the bound of the format's own reader
DTYPES = {  # the format's word: ours, and bytes per element
    "BOOL": ("bool", 1), "U8": ("uint8", 1), "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1), "F8_E5M2": ("float8_e5m2", 1), "F8_E8M0": ("float8_e8m0fnu", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
    "I16": ("int16", 2), "U16": ("uint16", 2), "F16": ("float16", 2), "BF16": ("bfloat16", 2),
    "I32": ("int32", 4), "U32": ("uint32", 4), "F32": ("float32", 4),
    "I64": ("int64", 8), "U64": ("uint64", 8), "F64": ("float64", 8), "C64": ("complex64", 8),
}  # fmt: skip
WORDS = {name: word for word, (name, _) in DTYPES.items()}
SIZES = dict(DTYPES.values())


@struct
class Entry:
    """One tensor of a file: its dtype (``"bfloat16"``), shape, and bytes ``begin`` to ``end``."""

    name: str
    dtype: str
    shape: Shape
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.begin


@struct
class TensorFile:
    """The header of a safetensors file: its entries in file order, and its free text."""

    path: str
    entries: tuple[Entry, ...]
    metadata: tuple[tuple[str, str], ...] = ()

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return max((e.end for e in self.entries), default=len(header_bytes(self)))


# --- reading ------------------------------------------------------------------------------


def read_header(path: str | os.PathLike[str]) -> TensorFile:
    """The checked header of a file; no tensor is read.

    Every byte after the header belongs to exactly one tensor. Raises ``InvalidMapError`` for a truncated
    file, an absurd header, a name given twice, and offsets that overlap, leave holes or do not fit
    the shape; ``UnsupportedError`` for a dtype whose elements are no whole bytes.
    """
    size = _file_size(path)
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8:
            raise InvalidMapError(
                f"{path}: truncated: a safetensors file starts with 8 bytes, this one has {size}"
            )
        if length > HEADER_BOUND:
            raise InvalidMapError(
                f"{path}: the header claims {length} bytes, more than the {HEADER_BOUND} allowed;"
                " this is no safetensors file"
            )
        if 8 + length > size:
            raise InvalidMapError(
                f"{path}: truncated: the header ends at byte {8 + length}, the file at {size}"
            )
        text = file.read(length)
    fields = _parsed(path, text)
    metadata = _metadata(path, fields.pop("__metadata__", {}))
    entries = [_entry(path, name, value, 8 + length) for name, value in fields.items()]
    entries.sort(key=lambda e: (e.begin, e.end))
    _require_tiling(path, entries, 8 + length, size)
    return TensorFile(str(path), tuple(entries), metadata)


def _file_size(path: str | os.PathLike[str]) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        raise InvalidMapError(f"{path}: there is no such file") from None


def _parsed(path: Any, text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise InvalidMapError(f"{path}: the header names {twice!r} twice")
        return made

    try:
        fields = json.loads(text, object_pairs_hook=once)
    except InvalidMapError:
        raise
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits, too
        raise InvalidMapError(
            f"{path}: the header is not JSON ({error}); is it a safetensors file?"
        ) from None
    if not isinstance(fields, dict):
        raise InvalidMapError(f"{path}: the header is a JSON {type(fields).__name__}, not an object")
    return fields


def _metadata(path: Any, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
        raise InvalidMapError(f"{path}: __metadata__ must map words to words, got {value!r}")
    return tuple(sorted(value.items()))


def _entry(path: Any, name: str, value: Any, start: int) -> Entry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise InvalidMapError(
            f"{path}: {name!r} must have exactly dtype, shape and data_offsets, got {value!r}"
        )
    shape = _shape(path, name, value["shape"])
    dtype, width = _dtype(path, name, value["dtype"])
    offsets = value["data_offsets"]
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_count(x) for x in offsets):
        raise InvalidMapError(f"{path}: {name!r} has data_offsets {offsets!r}, not two counts of bytes")
    begin, end = offsets
    wanted = width * math.prod(shape)
    if end - begin != wanted:
        raise InvalidMapError(
            f"{path}: {name!r} of shape {shape} and dtype {dtype} needs {wanted} bytes,"
            f" its data_offsets {offsets} hold {end - begin}"
        )
    return Entry(name, dtype, shape, start + begin, start + end)


def _is_count(x: Any) -> bool:
    return isinstance(x, int) and not isinstance(x, bool) and 0 <= x <= BOUND


def _shape(path: Any, name: str, value: Any) -> Shape:
    if not isinstance(value, list):
        raise InvalidMapError(f"{path}: {name!r} has shape {value!r}, not a list of sizes")
    return as_shape(value, f"{path}: the shape of {name!r}")


def _dtype(path: Any, name: str, word: Any) -> tuple[str, int]:
    if word in ("F4", "F6_E2M3", "F6_E3M2"):
        raise UnsupportedError(f"{path}: {name!r} has dtype {word}, whose elements are no whole bytes")
    if not isinstance(word, str) or word not in DTYPES:
        raise InvalidMapError(f"{path}: {name!r} has the unknown dtype {word!r}; known are {sorted(DTYPES)}")
    return DTYPES[word]


def _require_tiling(path: Any, entries: list[Entry], start: int, size: int) -> None:
    """Raise unless the tensors cover the bytes ``start`` to ``size`` once each."""
    at = start
    for e in entries:
        if e.begin != at:
            word = "overlaps the tensor before it" if e.begin < at else "leaves a hole before it"
            raise InvalidMapError(
                f"{path}: {e.name!r} begins at byte {e.begin}, the tensor before it ends at {at}: it {word}"
            )
        at = e.end
    if at != size:
        word = "truncated" if size < at else "longer than its header says"
        raise InvalidMapError(f"{path}: {word}: the last tensor ends at byte {at}, the file at {size}")


def mapped(path: str, entry: Entry) -> Any:
    """The tensor of an entry as a torch tensor over the mapped file.

    Only pages that are read are loaded; writing to it changes a private copy, never the file.
    """
    t = torch()
    dtype = getattr(t, entry.dtype)
    if not entry.nbytes:
        return t.empty(entry.shape, dtype=dtype)
    start = entry.begin - entry.begin % mmap.ALLOCATIONGRANULARITY
    flags, access = mmap.MAP_PRIVATE | NO_RESERVE, mmap.PROT_READ | mmap.PROT_WRITE
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), entry.end - start, flags, access, offset=start)
    raw = t.frombuffer(pages, dtype=t.uint8, offset=entry.begin - start, count=entry.nbytes)
    return raw.view(dtype).reshape(entry.shape)


# --- writing ------------------------------------------------------------------------------


def lay_out(
    path: str | os.PathLike[str],
    tensors: Iterable[tuple[str, str, Shape]],
    metadata: Mapping[str, str] | None = None,
) -> TensorFile:
    """The file that holds these ``(name, dtype, shape)``: wide dtypes first, then by name, so that every
    tensor is aligned. Nothing is written."""
    ordered = sorted(tensors, key=lambda t: (-SIZES[t[1]], t[0]))
    entries, at = [], 0
    for name, dtype, shape in ordered:
        size = SIZES[dtype] * math.prod(shape)
        entries.append(Entry(name, dtype, shape, at, at + size))
        at += size
    plain = TensorFile(str(path), tuple(entries), tuple(sorted((metadata or {}).items())))
    start = len(header_bytes(plain, 0))
    shifted = (Entry(e.name, e.dtype, e.shape, e.begin + start, e.end + start) for e in entries)
    return TensorFile(plain.path, tuple(shifted), plain.metadata)


def header_bytes(file: TensorFile, start: int | None = None) -> bytes:
    """The length and the header, padded with spaces to a multiple of 8 bytes."""
    if start is None:
        start = min((e.begin for e in file.entries), default=0)
    fields: dict[str, Any] = {"__metadata__": dict(file.metadata)} if file.metadata else {}
    for e in file.entries:
        offsets = [e.begin - start, e.end - start]
        fields[e.name] = {"dtype": WORDS[e.dtype], "shape": list(e.shape), "data_offsets": offsets}
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def create(file: TensorFile) -> None:
    """Make the file with its header and room for all tensors; it must not exist."""
    header = header_bytes(file)
    with open(file.path, "xb") as out:
        out.write(header)
        out.flush()
        if file.size > len(header):
            os.posix_fallocate(out.fileno(), 0, file.size)


def write_at(path: str, offset: int, tensor: Any) -> None:
    """Write the elements of a CPU tensor, in row-major order, from byte ``offset`` of a file."""
    t = torch()
    if not tensor.numel():
        return
    raw = tensor.contiguous().reshape(-1).view(t.uint8).numpy()
    with open(path, "r+b") as out:
        out.seek(offset)
        out.write(raw.data)


def sync(path: str | os.PathLike[str]) -> None:
    """Wait until a file or folder is on its disk."""
    handle = os.open(Path(path), os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
