"""A digest of a map that does not depend on how it is cut."""

from __future__ import annotations

import json
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np

from ._map import AffineMap, require_map
from ._space import IntArray

PRIME = 2**127 - 1
VERSION = "shardalg.fingerprint 1"


def fingerprint(m: AffineMap) -> str:
    """A stable hex digest: equal for equivalent maps however they are cut, and for no others
    that anybody will meet. The same on every machine and in every process.

    A map is the polynomial with one term x**slot * y**element for each of its triples, times
    factors that name the two boxes and the scale. Two maps are equivalent exactly when their spaces
    and polynomials are equal; here the polynomial is evaluated at two fixed points of the field
    of 2**127 - 1 elements. A piece is a product of geometric series, one per axis. The points are
    public: the digest tells different maps apart by chance (about 2**-128), it does not stop a forger.

    Cost: a few powers per axis of each piece; never the elements.

    >>> from shardalg import Split, layout
    >>> halves = layout((8,), Split(0), ranks=2)
    >>> fingerprint(halves) == fingerprint(layout((8,), Split(0, sizes=(4, 4)), ranks=2))
    True
    >>> fingerprint(halves) == fingerprint(layout((8,), Split(0, sizes=(3, 5)), ranks=2))
    False
    """
    require_map(m, "fingerprint: m")
    spaces = json.dumps([m.domain.to_dict(), m.codomain.to_dict()], sort_keys=True)
    forms = _forms(m)
    values = [_value(m, forms, number) for number in (0, 1)]
    return sha256(json.dumps([VERSION, spaces, *map(str, values)]).encode()).hexdigest()


def _element(number: int, *words: Any) -> int:
    """A fixed element of the field for each point and choice of words, neither 0 nor 1."""
    digest = sha256(json.dumps([VERSION, number, *words]).encode()).digest()
    return 2 + int.from_bytes(digest, "big") % (PRIME - 2)


class _Forms(NamedTuple):
    """What pieces have in common but for ranks and offsets: each form is
    ``(domain name, codomain name, numerator, denominator, *axes)``; ``where`` gives a piece's form."""

    distinct: list[tuple[Any, ...]]
    where: list[int]


def _forms(m: AffineMap) -> _Forms:
    c = m.table.columns
    sides = (m.domain, c.dom_box), (m.codomain, c.cod_box)
    names = [[space.boxes[i].name for i in box.tolist()] for space, box in sides]
    rows = [c.numerator, c.denominator, *c.shape, *c.dom_strides, *c.cod_strides]
    ids: dict[tuple[Any, ...], int] = {}
    where = [ids.setdefault(form, len(ids)) for form in zip(*names, *(row.tolist() for row in rows))]
    return _Forms(list(ids), where)


def _value(m: AffineMap, forms: _Forms, number: int) -> int:
    """The polynomial of a map at one of the fixed points."""
    c = m.table.columns
    exponents = {
        "slot": c.dom_offset,
        "element": c.cod_offset,
        "domain rank": m.domain.box_ranks[c.dom_box] + 1,
        "codomain rank": m.codomain.box_ranks[c.cod_box] + 1,
    }
    starts = _products([_powers(_element(number, word), e) for word, e in exponents.items() if e.any()])
    sums = [0] * len(forms.distinct)
    for form, start in zip(forms.where, starts or [1] * len(forms.where)):
        sums[form] += start
    return sum(total * _factor(number, *form) for total, form in zip(sums, forms.distinct)) % PRIME


def _powers(base: int, exponents: IntArray) -> list[int]:
    """``base`` to each exponent, going up from one to the next: their differences repeat."""
    distinct, where = np.unique(exponents, return_inverse=True)
    jumps: dict[int, int] = {}
    power, found = 1, []
    for jump in np.diff(distinct, prepend=0).tolist():
        if jump not in jumps:
            jumps[jump] = pow(base, jump, PRIME)
        power = power * jumps[jump] % PRIME
        found.append(power)
    return [found[i] for i in where.reshape(-1).tolist()]


def _products(factors: list[list[int]]) -> list[int]:
    """The product of each column of factors."""
    done: list[int] = []
    for more in factors:
        done = [a * b % PRIME for a, b in zip(done, more)] if done else more
    return done


def _factor(number: int, domain: str, codomain: str, numerator: int, denominator: int, *axes: int) -> int:
    """What the names, the scale and the axes of a form contribute."""
    product = _element(number, "form", domain, codomain, numerator, denominator)
    x, y = _element(number, "slot"), _element(number, "element")
    count = len(axes) // 3
    for axis in zip(axes[:count], axes[count : 2 * count], axes[2 * count :]):
        product = product * _geometric(*axis, x, y) % PRIME
    return product


def _geometric(extent: int, slot: int, element: int, x: int, y: int) -> int:
    """``1 + r + ... + r**(extent - 1)`` for the ratio ``r`` of one step; where r is 1, the extent."""
    ratio = pow(x, slot, PRIME) * pow(y, element, PRIME) % PRIME
    if ratio == 1:
        return extent % PRIME
    return (pow(ratio, extent, PRIME) - 1) * pow(ratio - 1, -1, PRIME) % PRIME
