"""The obvious slow version of every operator: a map as a set of triples.

A triple is (slot, element, scale); a slot and an element are (key of the box, flat address).
Nothing here knows pieces or strides beyond ``triples``, which walks them one by one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from shardalg import AffineMap, Piece, Side, Space

Key = tuple[int | None, str]
Point = tuple[Key, int]
Triple = tuple[Point, Point, Fraction]
WALK = 4096  # slots of the largest space the oracle walks


@dataclass(frozen=True)
class Relation:
    """What a map means."""

    domain: Space
    codomain: Space
    triples: frozenset[Triple]

    def __le__(self, other: Relation) -> bool:
        return spaces(self) == spaces(other) and self.triples <= other.triples

    def with_(self, triples: Iterable[Triple]) -> Relation:
        return replace(self, triples=frozenset(triples))


def spaces(r: Any) -> tuple[Space, Space]:
    return r.domain, r.codomain


def triples_of(piece: Piece) -> list[Triple]:
    """Every triple of a piece, as often as the piece lists it."""
    found = []
    for index in itertools.product(*map(range, piece.shape)):
        ends = [
            (s.key, s.offset + sum(i * t for i, t in zip(index, s.strides)))
            for s in (piece.domain, piece.codomain)
        ]
        found.append((ends[0], ends[1], piece.scale))
    return found


def triples(m: AffineMap) -> list[Triple]:
    return [t for p in m.pieces for t in triples_of(p)]


def meaning(m: AffineMap) -> Relation:
    """The relation of a map; its pieces must list each triple once."""
    listed = triples(m)
    found = frozenset(listed)
    assert len(found) == len(listed), f"{m!r} lists a triple twice"
    return Relation(m.domain, m.codomain, found)


def written(r: Relation) -> AffineMap:
    """The map with one piece for each triple."""
    points = [
        Piece((), Side(s[1], (), *s[0]), Side(e[1], (), *e[0]), scale)
        for s, e, scale in sorted(r.triples, key=str)
    ]
    return AffineMap.from_pieces(r.domain, r.codomain, points)


def slots(space: Space) -> list[Point]:
    assert space.size <= WALK, "this space is too large to walk"
    return [(b.key, a) for b in space.boxes for a in range(b.size)]


# --- operators ------------------------------------------------------------------------------


def identity(space: Space) -> Relation:
    return Relation(space, space, frozenset((s, s, Fraction(1)) for s in slots(space)))


def compose(g: Relation, f: Relation) -> Relation:
    assert f.codomain == g.domain
    found = {(s, e, a * b) for s, m, a in f.triples for n, e, b in g.triples if m == n}
    return Relation(f.domain, g.codomain, frozenset(found))


def invert(f: Relation) -> Relation:
    return Relation(f.codomain, f.domain, frozenset((e, s, 1 / a) for s, e, a in f.triples))


def union(f: Relation, g: Relation) -> Relation:
    assert spaces(f) == spaces(g)
    return f.with_(f.triples | g.triples)


def intersect(f: Relation, g: Relation) -> Relation:
    assert spaces(f) == spaces(g)
    return f.with_(f.triples & g.triples)


def subtract(f: Relation, g: Relation) -> Relation:
    assert spaces(f) == spaces(g)
    return f.with_(f.triples - g.triples)


def region(space: Space, points: Iterable[Point]) -> Relation:
    return Relation(space, space, frozenset((p, p, Fraction(1)) for p in points))


def domain(f: Relation) -> Relation:
    return region(f.domain, {s for s, _, _ in f.triples})


def image(f: Relation) -> Relation:
    return region(f.codomain, {e for _, e, _ in f.triples})


def complement(d: Relation) -> Relation:
    return region(d.domain, set(slots(d.domain)) - {s for s, _, _ in d.triples})


def uncovered(f: Relation) -> Relation:
    return complement(image(f))


def padding(f: Relation) -> Relation:
    return complement(domain(f))


def restrict(f: Relation, d: Relation) -> Relation:
    inside = {s for s, _, _ in d.triples}
    return f.with_(t for t in f.triples if t[0] in inside)


def corestrict(f: Relation, d: Relation) -> Relation:
    inside = {s for s, _, _ in d.triples}
    return f.with_(t for t in f.triples if t[1] in inside)


def moved(
    f: Relation,
    domain: Space,
    codomain: Space,
    slot: Callable[[Point], Point],
    element: Callable[[Point], Point],
) -> Relation:
    """The relation with every slot and every element moved to other spaces."""
    return Relation(domain, codomain, frozenset((slot(s), element(e), a) for s, e, a in f.triples))


def index_of(space: Space, point: Point) -> tuple[int, ...]:
    """The index of a point in its box, row-major."""
    index: list[int] = []
    address = point[1]
    for n in reversed(space.shape(*point[0])):
        address, i = divmod(address, n)
        index.insert(0, i)
    return tuple(index)


def address_of(shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    address = 0
    for n, i in zip(shape, index, strict=True):
        address = address * n + i
    return address


# --- questions ------------------------------------------------------------------------------


def repeats(points: Iterable[Point]) -> bool:
    points = list(points)
    return len(set(points)) < len(points)


def is_single_valued(f: Relation) -> bool:
    return not repeats(s for s, _, _ in f.triples)


def is_injective(f: Relation) -> bool:
    return not repeats(e for _, e, _ in f.triples)


def is_total(f: Relation) -> bool:
    return {s for s, _, _ in f.triples} == set(slots(f.domain))


def is_surjective(f: Relation) -> bool:
    return {e for _, e, _ in f.triples} == set(slots(f.codomain))


def multiplicity(f: Relation, element: Point) -> int:
    return sum(e == element for _, e, _ in f.triples)
