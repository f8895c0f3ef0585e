"""Placements as written in TOML: a name, or a table of a name and fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from .._errors import InvalidMapError
from ..maps._space import Shape, as_int, listed
from ..placements import (
    BlockGather,
    Cyclic,
    Experts,
    Flat,
    Placement,
    Replicate,
    Segments,
    Split,
    StridedSplit,
)

Table: TypeAlias = tuple[tuple[str, Any], ...]  # a TOML table, hashable

PLAIN = {kind.__name__: kind for kind in (Replicate, Split, BlockGather, Cyclic, StridedSplit, Flat, Experts)}
DIGITS = 18  # of a number written in a text; one more may be beyond 64 bits
KINDS = (*PLAIN, "Segments")
OF_TORCH = {
    "Shard": 'kind = "Split", axis = ...',
    "_StridedShard": 'kind = "StridedSplit", axis = ..., split_factor = ...',
}


def require_keys(table: Mapping[str, Any], known: Sequence[str], needed: Sequence[str], where: str) -> None:
    """Raise for keys that are not ``known`` and for ``needed`` ones that are not there."""
    wrong = {
        "unknown": [k for k in table if k not in known],
        "missing": [k for k in needed if k not in table],
    }
    if any(wrong.values()):
        said = ", ".join(f"{word} keys {keys}" for word, keys in wrong.items() if keys)
        raise InvalidMapError(f"{where}: {said}; known are {list(known)}")


def frozen(value: Any) -> Any:
    """Tables as sorted pairs and lists as tuples: hashable."""
    if isinstance(value, Mapping):
        return tuple(sorted((k, frozen(v)) for k, v in value.items()))
    return tuple(map(frozen, value)) if isinstance(value, list) else value


def build_placement(
    written: Any, parts: tuple[Shape, ...] | None, shape: Shape, units: Mapping[str, int]
) -> Placement | tuple[Placement, ...]:
    """The placement that a (frozen) table or name says, for a tensor of ``shape`` joined from ``parts``."""
    if isinstance(written, str):
        written = (("kind", written),)
    if not isinstance(written, tuple) or not written:
        raise InvalidMapError(f"a placement is one of {KINDS} or a table with its kind, got {written!r}")
    if not all(
        isinstance(field, tuple) and len(field) == 2 and isinstance(field[0], str) for field in written
    ):
        return tuple(_one(w, parts, shape, units) for w in written)
    fields = dict(written)
    kind = fields.pop("kind", None)
    if kind == "Segments":
        return _segments(fields, parts, shape, units)
    if kind not in PLAIN:
        said = f"write {OF_TORCH[kind]}" if kind in OF_TORCH else f"known are {', '.join(KINDS)}"
        raise InvalidMapError(f"a placement has the kind {kind!r}; {said}")
    if "by_rank" in fields:
        fields["by_rank"] = _by_rank(fields["by_rank"])
    if "unit" in fields:
        fields["unit"] = unit_of(fields["unit"], units)
    if "scale" in fields:
        fields["scale"] = _scale_of(fields["scale"])
    known = dataclasses.fields(PLAIN[kind])
    needed = [f.name for f in known if f.default is dataclasses.MISSING]
    require_keys(fields, [f.name for f in known], needed, kind)
    try:
        return PLAIN[kind](**fields)
    except TypeError as error:  # a value of another type
        raise InvalidMapError(f"{kind}: {error}") from None


def _one(written: Any, parts: tuple[Shape, ...] | None, shape: Shape, units: Mapping[str, int]) -> Placement:
    made = build_placement(written, parts, shape, units)
    if isinstance(made, tuple):
        raise InvalidMapError(f"expected one placement, got the list {written!r}")
    return made


def _segments(
    fields: dict[str, Any], parts: tuple[Shape, ...] | None, shape: Shape, units: Mapping[str, int]
) -> Segments:
    require_keys(fields, ("axis", "segments", "each", "sizes", "equal"), ("axis",), "Segments")
    axis = as_int(fields["axis"], "Segments: axis")
    if ("segments" in fields) == ("each" in fields):
        raise InvalidMapError("Segments needs either segments = [{ size, placement }, ...] or each = ...")
    if "segments" in fields:
        tables = [_table(t) for t in listed(fields["segments"], "Segments: segments")]
        for t in tables:
            require_keys(t, ("size", "placement"), ("size", "placement"), "a segment")
        return Segments(axis, tuple((t["size"], _one(t["placement"], None, shape, units)) for t in tables))
    each = _one(fields["each"], None, shape, units)
    return Segments(axis, tuple((size, each) for size in _segment_sizes(fields, axis, parts, shape)))


def _table(written: Any) -> dict[str, Any]:
    """The fields of a (frozen) table."""
    pairs = written if isinstance(written, tuple) else (written,)
    if not all(isinstance(f, tuple) and len(f) == 2 and isinstance(f[0], str) for f in pairs):
        raise InvalidMapError(f"a segment is a table {{ size = 32, placement = ... }}, got {written!r}")
    return dict(pairs)


def _segment_sizes(
    fields: Mapping[str, Any], axis: int, parts: tuple[Shape, ...] | None, shape: Shape
) -> tuple[int, ...]:
    if "sizes" in fields:
        return tuple(listed(fields["sizes"], "Segments: sizes"))
    if not -len(shape) <= axis < len(shape):
        raise InvalidMapError(f"Segments: axis {axis} of a tensor of shape {shape}")
    if "equal" in fields:
        count, n = as_int(fields["equal"], "Segments: equal"), shape[axis]
        if count < 1 or n % count:
            raise InvalidMapError(f"Segments: axis {axis} of shape {shape} is not {count} equal segments")
        return (n // count,) * count
    if parts is None:
        raise InvalidMapError("Segments: each without sizes or equal is for joined tensors, this is none")
    return tuple(p[axis] for p in parts)


def _by_rank(written: Any) -> Any:
    """A table with rank keys, or a list by rank."""
    if not isinstance(written, tuple):
        raise InvalidMapError(f"by_rank is a table with rank keys, or a list by rank, got {written!r}")
    if written and all(isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], str) for e in written):
        wrong = [k for k, _ in written if not _is_count(k)]
        if wrong:
            raise InvalidMapError(f"the keys of by_rank are ranks, got {wrong[0]!r}")
        return {int(k): v for k, v in written}
    return written


def _is_count(text: str) -> bool:
    """Whether a text is a count that fits 64 bits."""
    return text.isdecimal() and len(text) <= DIGITS


def _scale_of(written: Any) -> Any:
    """An exact scale: an integer, or ``"1/3"``.

    >>> _scale_of("1/3")
    Fraction(1, 3)
    """
    if isinstance(written, int) and not isinstance(written, bool):
        return written
    above, _, below = written.partition("/") if isinstance(written, str) else ("", "", "")
    if not _is_count(above.removeprefix("-")) or not _is_count(below) or not int(below):
        raise InvalidMapError(f'a scale is an integer or an exact ratio such as "1/3", got {written!r}')
    return Fraction(int(above), int(below))


def unit_of(written: Any, units: Mapping[str, int]) -> Any:
    """A unit in elements: a number, a word of ``units``, or ``"3*word"``.

    >>> unit_of("3*head", {"head": 64})
    192
    """
    if not isinstance(written, str):
        return written
    times, _, word = written.rpartition("*")
    if word.strip() not in units:
        raise InvalidMapError(
            f"the unit {word.strip()!r} is not known (known: {dict(units)}); write its size under [units]"
            f" or pass --unit {word.strip()}=SIZE"
        )
    if times and not _is_count(times.strip()):
        raise InvalidMapError(f'a count of a unit is written as "3*{word.strip()}", got {written!r}')
    return int(times or 1) * units[word.strip()]
