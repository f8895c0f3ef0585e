"""Composition of piece tables, and exact products of their scales."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

from .._errors import InvalidMapError
from .._limits import BOUND, Budget, Limits
from ._meet import meet
from ._relation import CODOMAIN, DOMAIN, side_blocks
from ._space import IntArray
from ._table import Columns, PieceTable, build


def composed(g: PieceTable, f: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """``f``, then ``g``, as pieces. Each pair is listed once if ``f`` is single-valued or ``g``
    injective; otherwise as often as there are ways through the middle."""
    met = meet(side_blocks(f, CODOMAIN, DOMAIN), side_blocks(g, DOMAIN, CODOMAIN), limits, budget)
    cf, cg = f.columns, g.columns
    numerator, denominator = product_scale(
        (cf.numerator[met.left], cf.denominator[met.left]),
        (cg.numerator[met.right], cg.denominator[met.right]),
    )
    return build(
        Columns(
            cf.dom_box[met.left], met.left_offset[0], cg.cod_box[met.right], met.right_offset[0],
            numerator, denominator, met.shape, met.left_strides[0], met.right_strides[0],
        )
    )  # fmt: skip


Ratio: TypeAlias = tuple[IntArray, IntArray]  # numerators and denominators


def reciprocal(scale: Ratio) -> Ratio:
    """Columnwise 1/s, denominators positive."""
    sign = np.sign(scale[0])
    return sign * scale[1], sign * scale[0]


def product_scale(a: Ratio, b: Ratio) -> Ratio:
    """Columnwise exact product of rationals in lowest terms."""
    if all((x == 1).all() for x in (*a, *b)):
        return a
    rows = zip(*(x.tolist() for x in (*a, *b)))
    terms = []
    for p, q, r, s in rows:
        g = np.gcd(abs(p), s), np.gcd(abs(r), q)
        top, bottom = (p // int(g[0])) * (r // int(g[1])), (q // int(g[1])) * (s // int(g[0]))
        if max(abs(top), bottom) > BOUND:
            raise InvalidMapError(f"the scale {p}/{q} * {r}/{s} has a term beyond 2**62 - 2")
        terms.append((top, bottom))
    pairs = np.array(terms, np.int64).reshape(len(terms), 2)
    return pairs[:, 0], pairs[:, 1]
