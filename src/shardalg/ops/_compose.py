"""Composition: f, then g."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from .._errors import InvalidMapError
from .._limits import Budget, Limits
from ..maps import AffineMap, Space
from ..maps._composed import composed
from ..maps._map import decided, inherit, known, require_map
from ..maps._relation import CODOMAIN, DOMAIN, disjoint
from ..maps._space import Key, Shape, describe_key
from ._folding import simplified


def compose(g: AffineMap, f: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """``f``, then ``g``: the pairs (s, e) with f(s) = m and g(m) = e for some m.

    Scales multiply. Associative, with the identity as unit; ``compose(invert(f), f)`` is
    "same element". Closed: any strides compose.

    Raises ``InvalidMapError`` if the middle spaces differ.

    Cost: near-linear in the output when the strides on the middle space are digits (each exceeds
    the span of the smaller ones, or divides the larger); unrelated overlapping strides are
    subset-sum and end in ``LimitError`` at ``limits.steps``.

    >>> from shardalg import AffineMap, Piece, Side, Space
    >>> line = lambda n, s, m: AffineMap.from_pieces(
    ...     Space.logical((n,)), Space.logical((m,)), [Piece((n,), Side(0, (1,)), Side(0, (s,)))])
    >>> compose(line(4, 3, 12), line(2, 2, 4)).pieces
    (Piece((2,), Side(0, (1,)), Side(0, (6,))),)
    """
    require_map(g, "compose: g")
    require_map(f, "compose: f")
    alike = f.codomain == g.codomain
    require_same_space(
        f.codomain, g.domain, "compose", "the codomain of f", "the domain of g",
        "; both lead to the same tensors: write ~g @ f, or plan(g, f) to move from g to f" if alike else "",
    )  # fmt: skip
    budget = Budget(limits)
    table = composed(g.table, f.table, limits, budget)
    listed_once = known(f, "single_valued") or known(g, "injective")
    if not (listed_once or decided(f, DOMAIN, limits) or decided(g, CODOMAIN, limits)):
        table = disjoint(table, limits, budget)
    return inherit(AffineMap(f.domain, g.codomain, simplified(table)), f, g)


def require_same_space(a: Space, b: Space, verb: str, a_name: str, b_name: str, hint: str = "") -> None:
    """Raise with the first difference between two spaces, and ``hint`` or what would make them equal."""
    if a is b or a == b:
        return
    mine, theirs = {x.key: x.shape for x in a.boxes}, {x.key: x.shape for x in b.boxes}
    for key in [*mine, *theirs]:
        if mine.get(key) != theirs.get(key):
            break
    say = [f"{name} has {'no box' if d.get(key) is None else f'shape {d[key]}'}"
           for name, d in ((a_name, mine), (b_name, theirs))]  # fmt: skip
    raise InvalidMapError(
        f"{verb} needs equal spaces, but for {describe_key(key)} {say[0]} and {say[1]}"
        + (hint or _remedy(mine, theirs))
    )


def _remedy(mine: Mapping[Key, Shape], theirs: Mapping[Key, Shape]) -> str:
    """What turns one space into the other, where one step does: the same boxes under other names, or
    boxes of the same sizes under the same keys."""
    forms = [Counter((rank, shape) for (rank, _), shape in boxes.items()) for boxes in (mine, theirs)]
    if forms[0] == forms[1]:
        return "; the boxes have other names: relabel one side first"
    if set(mine) != set(theirs) or any(math.prod(s) != math.prod(theirs[k]) for k, s in mine.items()):
        return ""
    turned = all(sorted(s) == sorted(theirs[k]) for k, s in mine.items())
    verb = "permute it if it is transposed, else reshape it" if turned else "reshape one side first"
    return f"; the sizes are the same: {verb}"
