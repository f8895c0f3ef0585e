"""What a user of shardalg tests: their own partition functions, layouts and transfers."""

from __future__ import annotations

from functools import partial

import layouts
import loader
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardalg.testing import ReshardMachine, laws


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_fused_projection_is_cut_as_we_say(ranks):
    cut = partial(loader.load_qkv, ranks=ranks)
    laws.check_partition(cut, (48, 3), ranks, expected=layouts.qkv(3, ranks))


@given(st.integers(1, 20), st.integers(1, 5))
def test_the_vocabulary_is_cut_as_we_say(rows, ranks):
    cut = partial(loader.load_vocabulary, ranks=ranks)
    laws.check_partition(cut, (rows, 2), ranks, expected=layouts.vocabulary(rows, 2, ranks))


def test_the_wrong_vocabulary_is_found():
    cut = partial(loader.load_vocabulary_wrongly, ranks=4)
    with pytest.raises(AssertionError, match=r"held by some rank: .*element 24 .* 2 in all"):
        laws.check_partition(cut, (13, 2), 4)


@pytest.mark.parametrize("source, target", [(2, 4), (4, 2), (2, 8)])
def test_weights_move_between_our_sizes(source, target):
    laws.check_transfer(layouts.qkv(3, source), layouts.qkv(3, target))
    laws.check_transfer(layouts.vocabulary(13, 2, source), layouts.vocabulary(13, 2, target))


@pytest.mark.parametrize("ranks", [2, 4])
def test_our_layouts_are_lawful(ranks):
    for m in (layouts.qkv(3, ranks), layouts.vocabulary(13, 2, ranks)):
        laws.check_layout_laws(m)
        laws.round_trip(m)


TestReshard = ReshardMachine.TestCase
TestReshard.settings = settings(max_examples=5, stateful_step_count=5)
