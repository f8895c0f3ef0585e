"""How the law tests say things: inputs cut again, and claims checked against the oracle."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from random import Random
from typing import Any

import oracle
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from oracle import Relation, meaning

from shardalg import AffineMap, Box, Piece, Side, Space, check, equivalent
from shardalg.maps._map import known
from shardalg.testing import (
    affine_maps,
    chains,
    layout_pairs,
    layouts,
    parallels,
    resplit,
    spaces,
    stretches,
)

# for the few tests that pit the engine against walking: more cases than a law needs
many = settings(max_examples=3 * settings.default.max_examples)


def randoms() -> SearchStrategy[Random]:
    return st.integers(0, 2**16).map(Random)


def recut(found: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """The drawn map, or each of a tuple of maps, cut into other pieces."""
    return st.builds(_recut, found, randoms())


def _recut(found: Any, random: Random) -> Any:
    if isinstance(found, tuple):
        return tuple(_recut(m, random) for m in found)
    return resplit(found, random)


def some(**kinds: Any) -> SearchStrategy[AffineMap]:
    return recut(affine_maps(**kinds))


def small(**kinds: Any) -> SearchStrategy[AffineMap]:
    """Maps between spaces that the oracle can walk."""
    return recut(affine_maps(stretch=1, **kinds))


def composable(length: int = 2, **kinds: Any) -> SearchStrategy[tuple[AffineMap, ...]]:
    """f, g, ... in the order they are applied."""
    return recut(chains(length=length, **kinds))


def alike(length: int = 2, **kinds: Any) -> SearchStrategy[tuple[AffineMap, ...]]:
    """Maps between the same spaces."""
    return recut(parallels(length=length, **kinds))


@st.composite
def forks(draw: DrawFn, *, single_valued: bool = False) -> tuple[AffineMap, AffineMap, AffineMap]:
    """A map f (single-valued where asked) and two maps g, h that start where it ends."""
    stretch = draw(stretches())
    g, h = draw(parallels(stretch=stretch))
    start = draw(spaces(stretch=stretch, max_boxes=2))
    f = draw(affine_maps(start, g.domain, stretch=stretch, single_valued=single_valued))
    return draw(recut(st.just((f, g, h))))


def placed(**kinds: Any) -> SearchStrategy[AffineMap]:
    return recut(layouts(**kinds))


def placed_pairs(**kinds: Any) -> SearchStrategy[tuple[AffineMap, AffineMap]]:
    return recut(layout_pairs(**kinds))


def means(m: AffineMap, expected: Relation) -> bool:
    """``m`` is what the oracle says, keeps what its constructor promises, and remembers the truth."""
    found = meaning(sound(m))
    assert oracle.spaces(found) == oracle.spaces(expected)
    assert found.triples == expected.triples
    return True


def sound(m: AffineMap) -> AffineMap:
    """``m`` itself, whose table and remembered answers are checked."""
    check(m)
    assert not known(m, "single_valued") or oracle.is_single_valued(meaning(m))
    assert not known(m, "injective") or oracle.is_injective(meaning(m))
    return m


def agree(a: AffineMap, b: AffineMap) -> bool:
    """Two maps mean the same, say so, and neither lists a triple twice."""
    assert meaning(sound(a)) == meaning(sound(b))
    assert equivalent(a, b) and equivalent(b, a)
    return True


def inside(a: AffineMap, b: AffineMap) -> bool:
    return meaning(a) <= meaning(b)


def line(n: int, rank: int | None = None) -> Space:
    return Space((Box((n,), rank),))


def sends(
    pairs: Mapping[int, Any], domain: int = 4, codomain: int = 4, scale: int | Fraction = 1
) -> AffineMap:
    """The map from a line to a line that sends each slot to its element, or to all of a tuple."""
    pieces = [
        Piece((), Side(slot, ()), Side(element, ()), Fraction(scale))
        for slot, elements in pairs.items()
        for element in (elements if isinstance(elements, tuple) else (elements,))
    ]
    return AffineMap.from_pieces(line(domain), line(codomain), pieces)


def empty(m: AffineMap) -> AffineMap:
    return AffineMap.from_pieces(m.domain, m.codomain, [])


def raises(error: type[Exception], call: Callable[[], Any]) -> str:
    """The message of the error that a call raises."""
    try:
        call()
    except error as found:
        return str(found)
    raise AssertionError(f"{error.__name__} was not raised")
