"""Simple fractions for floating-point numbers."""

from __future__ import annotations

import math
from fractions import Fraction


def simplest_between(low: Fraction, high: Fraction) -> Fraction:
    """The fraction with the least denominator in ``0 < low <= high``, and of those the least.

    >>> simplest_between(Fraction(31, 10), Fraction(32, 10))
    Fraction(16, 5)
    """
    whole = -(-low.numerator // low.denominator)
    if whole <= high:
        return Fraction(whole)
    below = whole - 1
    return below + 1 / simplest_between(1 / (high - below), 1 / (low - below))


def simplest_ratio(value: float, bits: int = 53) -> Fraction:
    """The simplest fraction that rounds to ``value`` in a binary type with ``bits`` significant bits.

    A scale written as 0.3333333333333333 was 1/3.

    >>> simplest_ratio(1 / 3), simplest_ratio(-0.1), simplest_ratio(0.333984375, bits=8)
    (Fraction(1, 3), Fraction(-1, 10), Fraction(1, 3))
    """
    exact = Fraction(value)
    if exact.denominator == 1:
        return exact
    half = Fraction(2) ** (math.frexp(value)[1] - bits - 1)  # half a unit in the last place
    below = half / 2 if abs(math.frexp(value)[0]) == 0.5 else half
    found = simplest_between(abs(exact) - below, abs(exact) + half)
    return found if exact > 0 else -found
