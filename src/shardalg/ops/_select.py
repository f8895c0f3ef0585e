"""Selectors: from all ranks that hold an element, the one each target reads it from.

Policy lives only here. A selector answers for *requests*: an atom (a set of elements with
the same holders) wanted by a target rank. The built-in ones except ``balanced`` are
memoryless: an answer depends on its request alone, so a rank may plan its own part.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol, TypeAlias

import numpy as np

from .._errors import InvalidMapError, SelectionError
from .._struct import struct
from ..maps import AffineMap
from ..maps._digits import repeated
from ..maps._reading import as_text, listed
from ..maps._space import BoolArray, IntArray


@dataclass(frozen=True)
class Requests:
    """What a selector is asked: one column per (atom, target rank), ranks global.

    Holders of request k are ``flat[start[k] : start[k] + count[k]]``, ascending.
    """

    atom: IntArray
    target: IntArray
    size: IntArray
    flat: IntArray
    start: IntArray
    count: IntArray
    region: Callable[[int], AffineMap]

    def holders(self, k: int) -> tuple[int, ...]:
        return tuple(self.flat[self.start[k] : self.start[k] + self.count[k]].tolist())


class Selector(Protocol):
    """Chooses a holder for each request; ``key`` names it in plan digests."""

    @property
    def key(self) -> str: ...

    def choose(self, requests: Requests) -> IntArray: ...


@struct
class Request:
    """One question to a selector written as a function: who gives ``region`` to rank ``target``?
    ``candidates`` are the ranks that hold all of it, ascending."""

    target: int
    region: AffineMap
    candidates: tuple[int, ...]


@struct
class Stay:
    """The target's own rank if it holds the element, else ``holders[target % len(holders)]``."""

    key: str = "stay"

    def choose(self, requests: Requests) -> IntArray:
        r = requests
        spread = r.flat[r.start + r.target % r.count]
        return np.where(_own(r), r.target, spread)


@struct
class Lowest:
    """The lowest rank that holds the element."""

    key: str = "lowest"

    def choose(self, requests: Requests) -> IntArray:
        return requests.flat[requests.start]


@struct
class Cheapest:
    """The holder with the least cost to the target; ties go to the lowest rank."""

    cost: Any
    key: str = "cheapest"

    def choose(self, requests: Requests) -> IntArray:
        chosen = []
        for k, target in enumerate(requests.target.tolist()):
            prices = [(_price(self._of(s, target)), s) for s in requests.holders(k)]
            chosen.append(min(prices)[1])
        return np.array(chosen, np.int64)

    def _of(self, source: int, target: int) -> Any:
        if callable(self.cost):
            return self.cost(source, target)
        if source >= len(self.cost) or target >= len(self.cost[source]):
            raise InvalidMapError(
                f"cost has no entry for source rank {source} and target rank {target}: it is a matrix of"
                f" {len(self.cost)} rows"
            )
        return self.cost[source][target]


def cheapest(
    cost: Callable[[int, int], float] | Sequence[Sequence[float]], *, key: str | None = None
) -> Cheapest:
    """A selector by cost: ``cost(source, target)`` or a matrix ``cost[source][target]``.

    A matrix enters the plan's digest by value; a function needs ``key=`` to be told apart from
    others. Raises ``InvalidMapError`` for costs that are no numbers, and when planning for a pair that a
    matrix lacks.

    >>> from shardalg import Replicate, Split, layout, plan
    >>> near = cheapest([[0, 9, 9], [9, 0, 0]])
    >>> p = plan(layout((6,), Replicate(), ranks=2), layout((6,), Split(0), ranks=3), select=near)
    >>> [c.source.rank for c in p.copies]
    [0, 1, 1]
    """
    if key is not None:
        as_text(key, "the key of cheapest")
    if callable(cost):
        return Cheapest(cost, f"cheapest({key or getattr(cost, '__qualname__', 'cost')})")
    table = tuple(tuple(map(_price, listed(row, "a row of cost"))) for row in listed(cost, "cost"))
    return Cheapest(table, f"cheapest({key or table})")


def _price(x: Any) -> float:
    try:
        price = float(x)
    except (TypeError, ValueError, OverflowError):
        price = math.nan
    if math.isnan(price):
        raise InvalidMapError(f"a cost must be a number, got {x!r}")
    return price


@dataclass(frozen=True)
class ByFunction:
    """A selector from a function of one ``Request``."""

    function: Callable[[Request], int]
    key: str

    def choose(self, requests: Requests) -> IntArray:
        r = requests
        chosen = []
        for k, (atom, target) in enumerate(zip(r.atom.tolist(), r.target.tolist())):
            candidates = r.holders(k)
            answer = self.function(Request(target, r.region(atom), candidates))
            if not isinstance(answer, (int, np.integer)) or answer not in candidates:
                raise SelectionError(
                    f"selector {self.key!r} chose {answer!r} for target rank {target},"
                    f" but the holders are {candidates}"
                )
            chosen.append(int(answer))
        return np.array(chosen, np.int64)


def _own(r: Requests) -> BoolArray:
    """Whether the target's own rank is among the holders."""
    width = int(max(r.flat.max(initial=0), r.target.max(initial=0))) + 1
    owner, offsets = repeated(r.count)
    held = np.isin(r.atom * width + r.target, r.atom[owner] * width + r.flat[r.start[owner] + offsets])
    return held


@struct
class Balanced:
    """Shares that make the largest sender as small as possible; regions are cut for it.

    Not memoryless: ``plan`` gives it the whole list of demands (see ``_balance.py``).
    """

    key: str = "balanced"

    def choose(self, requests: Requests) -> IntArray:
        raise AssertionError("plan cuts regions for this selector instead of asking it")


SELECTORS: Mapping[str, Selector] = MappingProxyType(
    {"stay": Stay(), "lowest": Lowest(), "balanced": Balanced()}
)

SelectLike: TypeAlias = "str | Selector | Callable[[Request], int]"


def as_selector(select: Any) -> Selector:
    """The selector behind a name, a selector value, or a function of a ``Request``.

    A function may carry a ``key`` attribute, which names it in digests.
    """
    if isinstance(select, str):
        named = SELECTORS.get(select)
        if named is None:
            raise InvalidMapError(
                f"no selector {select!r}; there are {tuple(SELECTORS)}, cheapest(cost) and functions"
            )
        return named
    if hasattr(select, "choose") and isinstance(getattr(select, "key", None), str):
        selector: Selector = select
        return selector
    if callable(select):
        return ByFunction(
            select, str(getattr(select, "key", None) or getattr(select, "__qualname__", "function"))
        )
    raise InvalidMapError(f"select= takes a name, a selector or a function, got {select!r}")
