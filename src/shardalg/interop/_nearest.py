"""What a name that is not there was perhaps meant to be."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, names: Iterable[str]) -> str:
    """The name that looks most like another, or a few of those there are where none does.

    >>> nearest("wieght", ["weight", "bias"]), nearest("q", ["norm.weight"]), nearest("q", [])
    ("the nearest name is 'weight'", "there are 'norm.weight'", 'there are no tensors')
    """
    names = list(names)
    near = difflib.get_close_matches(name, names, n=1)
    if near:
        return f"the nearest name is {near[0]!r}"
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"there are {', '.join(map(repr, names[:3]))}{more}" if names else "there are no tensors"
