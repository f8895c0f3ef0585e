"""Other keys for the boxes of one side."""

from __future__ import annotations

import oracle
import pytest
from hypothesis import given
from laws import agree, composable, means, placed, randoms, some
from oracle import meaning

from shardalg import InvalidMapError, Space, Split, compose, invert, layout, relabel


def renaming(space: Space, random) -> dict:
    """New keys for all boxes: ranks shuffled among more of them, names kept."""
    ranks = dict(zip(space.ranks, random.sample(range(9), len(space.ranks))))
    return {b.key: (ranks.get(b.rank), b.name) for b in space.boxes}


@given(some(), randoms())
def test_each_box_takes_its_slots_along(m, random):
    new = renaming(m.domain, random)
    found = relabel(m, domain=new)
    assert means(
        found, oracle.moved(meaning(m), found.domain, m.codomain, lambda s: (new[s[0]], s[1]), lambda e: e)
    )


@given(some(), randoms())
def test_it_is_a_group_action(m, random):
    """V2."""
    once = renaming(m.domain, random)
    middle = relabel(m, domain=once)
    twice = renaming(middle.domain, random)
    assert relabel(middle, domain=twice) == relabel(m, domain={key: twice[new] for key, new in once.items()})
    assert relabel(middle, domain={new: key for key, new in once.items()}) == m


@given(composable(), randoms())
def test_it_is_an_isomorphism(maps, random):
    f, g = maps
    new = renaming(f.codomain, random)
    assert agree(compose(relabel(g, domain=new), relabel(f, codomain=new)), compose(g, f))
    assert invert(relabel(f, codomain=new)) == relabel(invert(f), domain=new)


@given(placed(max_ranks=3))
def test_a_sequence_lists_new_ranks(m):
    new = [10 + r for r in range(max(m.ranks) + 1)]
    assert relabel(m, domain=new) == relabel(m, domain=lambda key: (key[0] + 10, key[1]))


def test_names_are_keys_too():
    m = relabel(layout((4,), Split(0), ranks=2), codomain=lambda key: (None, "w"))
    assert m.codomain == Space.logical({"w": (4,)})
    assert relabel(m, codomain={"w": "v"}).codomain == Space.logical({"v": (4,)})


def test_two_boxes_cannot_share_a_key():
    m = layout((4,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match="two boxes of a space share the key rank 1"):
        relabel(m, domain={0: 1})
    with pytest.raises(InvalidMapError, match="no new rank is given for rank 1"):
        relabel(m, domain=[4])
