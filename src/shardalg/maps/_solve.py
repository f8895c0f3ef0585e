"""The exact solver: one linear equation over a box of digits.

Two pieces that meet in one box give ``sum(stride * digit) = constant`` with every digit in
``[0, extent)``. All strides are positive here: negative axes are flipped and zero strides
set aside before. Each digit carries a *payload*, a vector that says what one step of the
digit does elsewhere (to a slot, an element, an index), so a solution needs no memory of the
digits it came from: it is an offset vector and a few axes of vectors.

The method, for strides in descending order:

* *prune* by range and by the gcd of the strides;
* one or two digits: closed form by the extended Euclidean algorithm;
* *cut* the digits into high and low ones. The low sum ``v`` satisfies ``v = constant``
  modulo the gcd of the high strides and is a multiple of the gcd of the low ones, so only a
  few values of ``v`` are possible when the low digits span less than one high step; each
  value splits the problem in two independent ones;
* otherwise *split* a digit that runs past a larger stride it divides into a quotient, a
  remainder and a tail;
* otherwise *enumerate* the cheaper of the low sums and the shortest digit.

Near-linear in the output for digits that do not overlap, or overlap with dividing strides.
Unrelated overlapping strides are subset-sum, so ``Limits.steps`` bounds the branches.
Arithmetic is on Python integers and cannot overflow.
"""

from __future__ import annotations

from math import gcd, lcm
from typing import NamedTuple, TypeAlias

from .._limits import Budget

Vector: TypeAlias = tuple[int, ...]


class Digit(NamedTuple):
    """A bounded unknown: its stride in the equation, its extent, and its payload per step."""

    stride: int
    extent: int
    payload: Vector


class Solution(NamedTuple):
    """The points ``offset + sum(step_k * t_k)`` with every ``t_k`` in ``[0, extent_k)``."""

    offset: Vector
    axes: tuple[tuple[int, Vector], ...]


def add(a: Vector, b: Vector, times: int = 1) -> Vector:
    """``a + times * b``."""
    return tuple(x + times * y for x, y in zip(a, b))


def solve(digits: list[Digit], constant: int, width: int, budget: Budget) -> list[Solution]:
    """All solutions, pairwise disjoint, each assignment of digits exactly once.

    ``width`` is the length of the payload vectors.

    >>> from shardalg import Limits
    >>> ten = [Digit(4, 5, (1, 0)), Digit(6, 5, (0, 1))]
    >>> solve(ten, 24, 2, Budget(Limits()))
    [Solution(offset=(3, 2), axes=((2, (-3, 2)),))]
    """
    return _sorted_solve(digits, constant, (0,) * width, budget)


def _sorted_solve(digits: list[Digit], c: int, zero: Vector, budget: Budget) -> list[Solution]:
    live = sorted((d for d in digits if d.extent > 1), key=lambda d: -d.stride)
    return _solve(live, c, zero, budget)


def _solve(digits: list[Digit], c: int, zero: Vector, budget: Budget) -> list[Solution]:
    budget.spend(1 + len(digits))  # the work of a branch grows with its digits
    if not digits:
        return [Solution(zero, ())] if c == 0 else []
    if not 0 <= c <= _span(digits) or c % gcd(*(d.stride for d in digits)):
        return []
    if len(digits) == 1:
        return [Solution(add(zero, digits[0].payload, c // digits[0].stride), ())]
    if len(digits) == 2:
        return _pair(digits[0], digits[1], c, zero)
    at, count = _best_cut(digits, c)
    if count > 2:
        split = _split(digits)
        if split is not None:
            return _branches(digits, *split, c, zero, budget)
        shortest = min(range(len(digits)), key=lambda k: digits[k].extent)
        if digits[shortest].extent < count:
            return _enumerated(digits, shortest, c, zero, budget)
    return _cut(digits, at, c, zero, budget)


def _span(digits: list[Digit]) -> int:
    return sum(d.stride * (d.extent - 1) for d in digits)


def _pair(a: Digit, b: Digit, c: int, zero: Vector) -> list[Solution]:
    """``a.stride x + b.stride y = c`` in closed form: at most one progression."""
    g = gcd(a.stride, b.stride)
    if c % g:
        return []
    s, t, c = a.stride // g, b.stride // g, c // g
    x = c * pow(s, -1, t) % t
    least = -((t * (b.extent - 1) - c) // s)  # smallest x that keeps y in range
    if x < least:
        x += -((x - least) // t) * t
    last = min(a.extent - 1, c // s)
    if x > last:
        return []
    count = (last - x) // t + 1
    offset = add(add(zero, a.payload, x), b.payload, (c - s * x) // t)
    if count == 1:
        return [Solution(offset, ())]
    step = add(add(zero, a.payload, t), b.payload, -s)
    return [Solution(offset, ((count, step),))]


def _low_sums(digits: list[Digit], at: int, c: int) -> range:
    """The possible sums of the digits from ``at`` on."""
    high, low = digits[:at], digits[at:]
    g, h = gcd(*(d.stride for d in high)), gcd(*(d.stride for d in low))
    meet = gcd(g, h)
    if c % meet:
        return range(0)
    # v = c mod g and v = 0 mod h
    step = lcm(g, h)
    first = h * ((c // meet) * pow(h // meet, -1, g // meet) % (g // meet))
    least = max(0, c - _span(high))
    if first < least:
        first += -((first - least) // step) * step
    return range(first, min(_span(low), c) + 1, step)


def _length(sums: range) -> int:
    """``len`` without its limit of ``sys.maxsize``."""
    return max(0, (sums.stop - sums.start + sums.step - 1) // sums.step)


def _best_cut(digits: list[Digit], c: int) -> tuple[int, int]:
    """Where to cut so that the fewest low sums are possible, and their number."""
    counts = [(_length(_low_sums(digits, at, c)), at) for at in range(1, len(digits))]
    count, at = min(counts)
    return at, count


def _cut(digits: list[Digit], at: int, c: int, zero: Vector, budget: Budget) -> list[Solution]:
    found = []
    for v in _low_sums(digits, at, c):
        low = _solve(digits[at:], v, zero, budget)
        high = _solve(digits[:at], c - v, zero, budget) if low else []
        budget.spend(len(low) * len(high))
        found += [Solution(add(a.offset, b.offset), a.axes + b.axes) for a in high for b in low]
    return found


def _split(digits: list[Digit]) -> tuple[int, int] | None:
    """A digit that runs past a larger stride it divides, and that stride over its own."""
    for big in digits:
        for k, d in enumerate(digits):
            ratio, rest = divmod(big.stride, d.stride)
            if ratio > 1 and rest == 0 and d.extent > ratio:
                return k, ratio
    return None


def _branches(
    digits: list[Digit], k: int, ratio: int, c: int, zero: Vector, budget: Budget
) -> list[Solution]:
    """Digit ``k`` as quotient and remainder by ``ratio``, and the tail past the last multiple."""
    d, others = digits[k], digits[:k] + digits[k + 1 :]
    whole, tail = divmod(d.extent, ratio)
    quotient = Digit(d.stride * ratio, whole, add(zero, d.payload, ratio))
    found = _sorted_solve([*others, quotient, d._replace(extent=ratio)], c, zero, budget)
    if tail:
        start = whole * ratio
        shifted = add(zero, d.payload, start)
        rest = _sorted_solve([*others, d._replace(extent=tail)], c - d.stride * start, zero, budget)
        found += [Solution(add(s.offset, shifted), s.axes) for s in rest]
    return found


def _enumerated(digits: list[Digit], k: int, c: int, zero: Vector, budget: Budget) -> list[Solution]:
    """One branch for each value of digit ``k``."""
    d, others, found = digits[k], digits[:k] + digits[k + 1 :], []
    for x in range(d.extent):
        shifted = add(zero, d.payload, x)
        rest = _solve(others, c - d.stride * x, zero, budget)
        found += [Solution(add(s.offset, shifted), s.axes) for s in rest]
    return found
