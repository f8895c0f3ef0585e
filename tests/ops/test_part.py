"""part: the boxes and pieces of some ranks alone."""

import pytest
from hypothesis import given
from laws import recut
from oracle import meaning

from shardalg import InvalidMapError, Split, check, layout, part
from shardalg.testing import layouts


@given(one=recut(layouts()))
def test_the_parts_of_all_ranks_are_the_whole(one):
    """Pointwise: a part has the triples of its ranks and no others, in their boxes alone."""
    whole, seen = meaning(one).triples, set()
    for rank in one.ranks:
        mine = check(part(one, rank))
        assert mine.ranks == (rank,) and mine.domain.boxes == one.domain.boxes_of(rank)
        seen |= meaning(mine).triples
        assert meaning(mine).triples == {t for t in whole if t[0][0][0] == rank}
    assert seen == whole and part(one, one.ranks) == one


def test_a_rank_that_is_not_there_is_refused():
    with pytest.raises(InvalidMapError, match=r"ranks \(0, 1\), not \[2\]"):
        part(layout((4,), Split(0), ranks=2), [0, 2])
