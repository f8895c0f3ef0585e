"""The product of two maps: their axes side by side."""

from __future__ import annotations

import numpy as np

from .._limits import Budget, Limits, require_limits
from ..maps import AffineMap, Box, Space
from ..maps._composed import product_scale
from ..maps._map import inherit, require_map
from ..maps._relation import disjoint
from ..maps._space import IntArray
from ..maps._table import Columns, build


def product(a: AffineMap, b: AffineMap, *, limits: Limits = Limits()) -> AffineMap:
    """The map that does ``a`` on the first axes and ``b`` on the others.

    On each side a box of ``a`` and one of ``b`` make one whose axes are appended, of rank
    ``r1 * R2 + r2`` with R2 = 1 + the largest rank of b's side (a side without ranks counts
    as rank 0 and adds none); two names are joined by a dot. Scales multiply.

    ``compose(product(g1, g2), product(f1, f2)) = product(compose(g1, f1), compose(g2, f2))``;
    ``invert`` distributes; associative; the identity of one slot is the unit.

    Cost: the product of the numbers of pieces.

    >>> from shardalg import Split, equivalent, layout
    >>> rows, columns = layout((4,), Split(0), ranks=2), layout((6,), Split(0), ranks=3)
    >>> mesh = layout((4, 6), [Split(0), Split(1)], mesh=(2, 3))
    >>> equivalent(product(rows, columns), mesh)
    True
    """
    require_map(a, "the first of product")
    require_map(b, "the second of product")
    require_limits(limits)
    limits.hold("pieces", len(a) * len(b))
    dom, dom_box, dom_size = _paired(a.domain, b.domain)
    cod, cod_box, cod_size = _paired(a.codomain, b.codomain)
    i, j = (x.reshape(-1) for x in np.indices((len(a), len(b))))
    ca, cb = (Columns(*(x[..., k] for x in m.table.columns)) for m, k in ((a, i), (b, j)))
    up, across = dom_size[cb.dom_box], cod_size[cb.cod_box]
    numerator, denominator = product_scale((ca.numerator, ca.denominator), (cb.numerator, cb.denominator))
    table = build(
        Columns(
            dom_box[ca.dom_box, cb.dom_box], ca.dom_offset * up + cb.dom_offset,
            cod_box[ca.cod_box, cb.cod_box], ca.cod_offset * across + cb.cod_offset,
            numerator, denominator,
            np.concatenate([ca.shape, cb.shape]),
            np.concatenate([ca.dom_strides * up, cb.dom_strides]),
            np.concatenate([ca.cod_strides * across, cb.cod_strides]),
        )
    )  # fmt: skip
    if not _one_scale(a) and not _one_scale(b):
        table = disjoint(table, limits, Budget(limits))
    return inherit(AffineMap(dom, cod, table), a, b)


def _one_scale(m: AffineMap) -> bool:
    """Whether no (slot, element) pair has two scales, so that a pair tells its factors apart."""
    return not m.table.scaled or m.single_valued or m.injective


def _paired(a: Space, b: Space) -> tuple[Space, IntArray, IntArray]:
    """The product space, the position of each pair of boxes in it, and the sizes of b's boxes."""
    width = 1 + max(b.ranks, default=0)
    pairs = [[_box(x, y, width) for y in b.boxes] for x in a.boxes]
    space = Space(tuple(box for row in pairs for box in row))
    at = [[space.index(*box.key) for box in row] for row in pairs]
    return space, np.array(at, np.int64).reshape(len(a), len(b)), b.sizes


def _box(x: Box, y: Box, width: int) -> Box:
    ranked = x.rank is not None or y.rank is not None
    rank = (x.rank or 0) * width + (y.rank or 0) if ranked else None
    return Box(x.shape + y.shape, rank, ".".join(name for name in (x.name, y.name) if name))
