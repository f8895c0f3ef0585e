"""Dtypes as names, with a size table of our own: plans count bytes without torch."""

from __future__ import annotations

from typing import Any

from .._errors import InvalidMapError

ITEMSIZE: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1, "float4_e2m1fn_x2": 1,
    "uint16": 2, "int16": 2, "float16": 2, "bfloat16": 2,
    "uint32": 4, "int32": 4, "float32": 4, "complex32": 4,
    "uint64": 8, "int64": 8, "float64": 8, "complex64": 8,
    "complex128": 16,
}  # fmt: skip

UNSCALABLE = frozenset(n for n in ITEMSIZE if n.startswith(("bool", "int", "uint", "float4")))


def dtype_name(dtype: Any) -> str:
    """The name of a dtype given as a name, a torch dtype or a NumPy dtype.

    >>> dtype_name("torch.bfloat16")
    'bfloat16'
    """
    name = str(getattr(dtype, "name", dtype)).removeprefix("torch.")
    if name not in ITEMSIZE:
        raise InvalidMapError(f"unknown dtype {dtype!r}; known are {', '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: Any) -> int:
    """Bytes per element."""
    return ITEMSIZE[dtype_name(dtype)]


def lossy(source: str, target: str) -> str:
    """What a conversion between kinds would lose without a word, or "".

    >>> lossy("complex64", "float32"), lossy("float32", "bfloat16")
    ('the imaginary parts', '')
    """
    if source != target and "float4_e2m1fn_x2" in (source, target):
        return "one of the two values packed in each element"
    if source.startswith("complex") and not target.startswith("complex"):
        return "the imaginary parts"
    return "the fractions" if source not in UNSCALABLE and target in UNSCALABLE else ""
