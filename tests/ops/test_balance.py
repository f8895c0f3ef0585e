"""The flow behind the balanced selector, against the formula for the smallest largest share."""

from itertools import combinations
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from shardalg.ops._balance import Demand, shares

RANKS = range(5)
HOLDERS = [holders for n in RANKS for holders in combinations(RANKS, n + 1)]


@given(st.dictionaries(st.sampled_from(HOLDERS), st.integers(1, 40), min_size=1, max_size=7))
def test_the_largest_share_is_the_smallest_possible(wanted):
    """By max-flow min-cut: the most, over sets of ranks, of what only they hold divided among them."""
    demands = [Demand(k, holders, (0, 0, (n,), (1,), (1,))) for k, (holders, n) in enumerate(wanted.items())]
    load = dict.fromkeys(RANKS, 0)
    parts = {d.piece: [] for d in demands}
    for d, giver in shares(demands, [-1] * len(demands)):
        assert giver in d.holders
        load[giver] += prod(d.block[2])
        parts[d.piece] += range(d.block[0], d.block[0] + d.block[2][0])
    for d in demands:
        assert sorted(parts[d.piece]) == list(range(d.block[2][0]))  # every slot is given once
    bounds = [-(-sum(n for h, n in wanted.items() if set(h) <= set(s)) // len(s)) for s in HOLDERS]
    assert max(load.values()) == max(bounds)


def test_a_full_rank_passes_on_what_another_can_give():
    """Rank 0 is asked first for what rank 1 also holds, then for what only it holds."""
    both, alone = Demand(0, (0, 1), (0, 0, (6,), (1,), (1,))), Demand(1, (0,), (6, 6, (6,), (1,), (1,)))
    given = [(d.piece, giver, prod(d.block[2])) for d, giver in shares([both, alone], [2, 2])]
    assert given == [(0, 1, 6), (1, 0, 6)]
