"""The exact solver against walking every assignment of digits."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from laws import many

from shardalg import LimitError, Limits
from shardalg._limits import Budget
from shardalg.maps._solve import Digit, solve

UNIT = [tuple(int(i == k) for i in range(4)) for k in range(4)]


def walked(pairs: list[tuple[int, int]], constant: int) -> Counter:
    """Assignments (by digit) whose sum is the constant."""
    every = itertools.product(*(range(n) for _, n in pairs))
    hits = (x for x in every if sum(i * s for i, (s, _) in zip(x, pairs)) == constant)
    return Counter((*x, *[0] * (4 - len(x))) for x in hits)


def solved(pairs: list[tuple[int, int]], constant: int) -> Counter:
    digits = [Digit(s, n, UNIT[k]) for k, (s, n) in enumerate(pairs)]
    found: Counter = Counter()
    for offset, axes in solve(digits, constant, 4, Budget(Limits())):
        for index in itertools.product(*(range(n) for n, _ in axes)):
            point = [sum(i * step[k] for i, (_, step) in zip(index, axes)) + offset[k] for k in range(4)]
            found[tuple(point)] += 1
    return found


@many
@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 6)), max_size=4), st.integers(-2, 60))
@example([(4, 5), (6, 5)], 24)
@example([(6, 3), (4, 2), (3, 5)], 12)  # a digit that runs past a larger one, and a tail
@example([(3, 4), (5, 4), (7, 4), (1, 3)], 29)
def test_every_solution_once(pairs, constant):
    assert solved(pairs, constant) == walked(pairs, constant)


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 4)), max_size=3), st.integers(0, 20))
def test_the_size_of_strides_does_not_matter(pairs, constant):
    far = 2**61 - 1
    assert solved([(s * far, n) for s, n in pairs], constant * far) == walked(pairs, constant)
    assert solved([(s * far, n) for s, n in pairs], constant * far + 1) == Counter()


def test_two_progressions_are_one_closed_form():
    (answer,) = solve([Digit(4, 10**12, (1, 0)), Digit(6, 10**12, (0, 1))], 2 * 10**12, 2, Budget(Limits()))
    ((count, step),) = answer.axes
    assert (count, step) == (2 * 10**12 // 12 + 1, (-3, 2))


def test_nested_digits_take_few_steps_whatever_their_extent():
    digits = [Digit(10**k, 10, UNIT[k % 4]) for k in range(16)]
    assert len(solve(digits, 1234567812345678, 4, Budget(Limits(steps=2_000)))) == 1


def test_the_budget_ends_the_search():
    digits = [Digit(10**6 + 7 * k * k, 2, (k,)) for k in range(24)]
    with pytest.raises(LimitError, match=r"Limits\(steps=1000\)"):
        solve(digits, 12 * 10**6 + 3001, 1, Budget(Limits(steps=1000)))
