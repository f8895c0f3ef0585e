"""The strategies reach what they promise, and re-splitting changes no map."""

from __future__ import annotations

import math
import subprocess
import sys
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from laws import agree, randoms
from oracle import triples

from shardalg import (
    AffineMap,
    Piece,
    Placement,
    Replicate,
    Space,
    check,
    is_surjective,
    layout,
    multiplicity,
    padding,
)
from shardalg.testing import (
    affine_maps,
    chains,
    layout_pairs,
    layouts,
    parallels,
    pieces,
    placements,
    resplit,
    shapes,
    spaces,
)
from shardalg.testing._register import register


def strides(m: AffineMap) -> list[int]:
    return [s for p in m.pieces for side in (p.domain, p.codomain) for s in side.strides]


def uneven(m: AffineMap) -> bool:
    """Whether some element is held twice and another once."""
    counts = {multiplicity(m, e) for e in range(m.codomain.size)}
    return 1 in counts and max(counts, default=0) > 1


def does_not_divide(m: AffineMap) -> bool:
    sizes = {m.domain.box(r).size for r in m.ranks}
    return len(sizes) > 1 and m.codomain.size % len(m.ranks) > 0


REACH = {
    "layouts": {
        "an empty rank": lambda m: any(m.domain.box(r).size == 0 for r in m.ranks) and len(m),
        "padding": lambda m: len(padding(m)) and len(m),
        "uneven replicas": uneven,
        "a scale": lambda m: m.table.scaled,
        "sizes that do not divide": does_not_divide,
        "elements nobody holds": lambda m: len(m) and not is_surjective(m),
        "many ranks": lambda m: len(m.ranks) >= 4,
        "ranks with gaps": lambda m: m.ranks != tuple(range(len(m.ranks))),
        "several pieces on a rank": lambda m: any(len(m.pieces_of(r)) > 1 for r in m.ranks),
    },
    "spaces": {
        "an extent of 0": lambda s: any(0 in b.shape for b in s.boxes),
        "an extent of 1": lambda s: any(1 in b.shape and b.size > 1 for b in s.boxes),
        "a 0-d box": lambda s: any(b.shape == () for b in s.boxes),
        "named boxes of one rank": lambda s: any(len(s.boxes_of(r)) > 1 for r in s.ranks),
        "several logical tensors": lambda s: len(s) > 1 and not s.ranks,
    },
    "affine_maps": {
        "a negative step": lambda m: min(strides(m), default=0) < 0,
        "a zero stride": lambda m: 0 in strides(m),
        "a slot with two elements": lambda m: not m.single_valued,
        "an element in two slots": lambda m: not m.injective,
        "a slot with two scales": lambda m: len({t[:2] for t in triples(m)}) < m.size,
        "strides near 2**31": lambda m: any(abs(abs(s) - 2**31) < 2 for s in strides(m)),
        "strides near 2**61": lambda m: max(map(abs, strides(m)), default=0) > 2**60,
    },
    "parallels": {
        "common parts": lambda ms: set(triples(ms[0])) & set(triples(ms[1])) and ms[0] != ms[1],
    },
    "chains": {"a composite of several pieces": lambda ms: len(ms[1] @ ms[0]) > 1},
    "layout_pairs": {"different ranks": lambda ab: ab[0].ranks != ab[1].ranks},
    "placements": {
        kind.__name__: lambda p, kind=kind: type(p) is kind for kind in Placement.__subclasses__()
    },
}


def sample(strategy: SearchStrategy[Any], count: int) -> list[Any]:
    """Values that a strategy generates, the same ones every time."""
    found = []

    @settings(max_examples=count, phases=[Phase.generate], derandomize=True, database=None)
    @given(strategy)
    def collect(value):
        found.append(value)

    collect()
    return found


KINDS = {
    "layouts": layouts(), "affine_maps": affine_maps(), "spaces": spaces(), "chains": chains(),
    "parallels": parallels(), "layout_pairs": layout_pairs(), "placements": placements((4, 2), 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_the_strategies_reach(kind):
    found = sample(KINDS[kind], 60 if kind in ("chains", "layout_pairs", "parallels") else 120)
    missed = [feature for feature, shows in REACH[kind].items() if not any(map(shows, found))]
    assert not missed


def test_a_feature_that_is_not_there_is_missed():
    assert not any(map(REACH["affine_maps"]["a zero stride"], sample(affine_maps(max_pieces=0), 20)))


@given(shapes(max_axes=3, max_size=5))
def test_shapes_stay_in_bounds(shape):
    assert len(shape) <= 3 and math.prod(shape) <= 5


@given(affine_maps() | layouts(), randoms())
def test_resplitting_changes_no_map(m, random):
    again = resplit(m, random)
    assert agree(m, again)
    assert len(again) >= len(m)


def test_resplitting_really_cuts():
    m = layout((6, 4), Replicate(), ranks=1)
    counts = {len(resplit(m, Random(seed))) for seed in range(20)}
    assert len(counts) > 3 and min(counts) > 1


@given(affine_maps(single_valued=True, injective=True))
def test_kinds_are_what_was_asked_for(m):
    assert check(m).single_valued and m.injective


def test_types_are_registered():
    register()
    for kind in (Space, Piece, AffineMap, Placement):
        assert all(isinstance(x, kind) for x in sample(st.from_type(kind), 5))


def test_the_kit_loads_no_torch():
    code = "import sys, shardalg.testing._register; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_pieces_between_empty_spaces_are_empty():
    void = Space.logical((0, 2))
    assert [p.size for p in sample(pieces(void, void), 5)] == [0]
