"""Arguments and fields of plain data, each checked as it is read."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from .._errors import InvalidMapError

T = TypeVar("T")


def as_int(value: Any, what: str) -> int:
    """``value`` as a Python int; bools and floats are refused."""
    if isinstance(value, (bool, np.bool_)):
        raise InvalidMapError(f"{what} must be an integer, got {value!r}")
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidMapError(f"{what} must be an integer, got {value!r}") from None


def listed(items: Any, what: str) -> list[Any]:
    """The items of a sequence in its order; what has none, or no order, is refused."""
    if isinstance(items, (tuple, list)):
        return list(items)
    unordered = isinstance(items, (str, bytes, set, frozenset, Mapping))
    if unordered or not isinstance(items, Iterable) or getattr(items, "ndim", 1) == 0:
        raise InvalidMapError(f"{what} must be a sequence, got {items!r}")
    return list(items)


def by_position(items: Any, what: str) -> dict[Any, Any]:
    """A mapping as it is, or a sequence as one from its positions."""
    return dict(items) if isinstance(items, Mapping) else dict(enumerate(listed(items, what)))


def by_key(items: Any, what: str) -> dict[Any, Any]:
    """A mapping, nothing else."""
    if not isinstance(items, Mapping):
        raise InvalidMapError(f"{what} must be a mapping, got {items!r}")
    return dict(items)


def field(data: Any, name: str, kind: Callable[[Any, str], T]) -> T:
    """The field ``name`` of plain data. ``kind`` takes what was found and what to call it, and returns it
    checked. Raises ``InvalidMapError`` naming the field where it is missing or is none of its kind."""
    if not isinstance(data, Mapping):
        raise InvalidMapError(f"the field {name!r} is looked for in a mapping, got {data!r}")
    if name not in data:
        raise InvalidMapError(f"the field {name!r} is missing; there are {sorted(map(str, data))}")
    return kind(data[name], f"the field {name!r}")


def optional(kind: Callable[[Any, str], T]) -> Callable[[Any, str], T | None]:
    """A kind that also takes None."""
    return lambda value, what: None if value is None else kind(value, what)


def counted(value: Any, what: str) -> int:
    """An integer of at least 0."""
    n = as_int(value, what)
    if n < 0:
        raise InvalidMapError(f"{what} must be at least 0, got {n}")
    return n


def as_text(value: Any, what: str) -> str:
    """A str."""
    if not isinstance(value, str):
        raise InvalidMapError(f"{what} must be a str, got {value!r}")
    return value


def scalar(value: Any) -> bool:
    """Whether an argument is one thing, not several: an array without axes is one number."""
    return not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0


def flag(value: Any, what: str) -> bool:
    """True or False, nothing that is merely taken for one."""
    if not isinstance(value, (bool, np.bool_)):
        raise InvalidMapError(f"{what} must be True or False, got {value!r}")
    return bool(value)


def one_of(value: Any, choices: tuple[str, ...], what: str) -> str:
    """One of some words."""
    if not isinstance(value, str) or value not in choices:
        said = " or ".join(f'"{c}"' for c in choices) if len(choices) < 3 else f"one of {choices}"
        raise InvalidMapError(f"{what} must be {said}, got {value!r}")
    return value


def records(width: int) -> Callable[[Any, str], list[list[Any]]]:
    """A sequence of records of ``width`` entries each."""

    def read(value: Any, what: str) -> list[list[Any]]:
        found = [listed(record, f"each record of {what}") for record in listed(value, what)]
        for record in found:
            if len(record) != width:
                raise InvalidMapError(f"each record of {what} has {width} entries, got {record!r}")
        return found

    return read


def rows(value: Any, what: str) -> list[list[int]]:
    """A sequence of rows of integers."""
    found = [listed(row, f"each row of {what}") for row in listed(value, what)]
    return [[as_int(n, f"a number of {what}") for n in row] for row in found]
