"""Strided blocks for tests: written down, drawn, and as the arrays that ``meet`` takes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from shardalg import AffineMap, Space
from shardalg.maps._relation import DOMAIN, side_blocks

Block = tuple[int, tuple[tuple[int, int], ...]]  # offset, (extent, stride) per axis
SPACE = Space.logical({"a": (200,), "b": (200,)})


def blocks_of(found: list[tuple[str, Block]]):
    """Blocks that carry their own addresses and the index along each axis."""
    axes = max((len(b[1]) for _, b in found), default=0)
    tables = [AffineMap.from_pieces(SPACE, SPACE, []).table]
    rows = np.zeros((6 + 3 * axes, len(found)), np.int64)
    rows[4:6] = 1
    rows[6 : 6 + axes] = 1
    for j, (name, (offset, its)) in enumerate(found):
        rows[0, j], rows[1, j] = "ab".index(name), offset
        for i, (n, s) in enumerate(its):
            rows[6 + i, j], rows[6 + axes + i, j] = n, s
    return side_blocks(type(tables[0])(rows), DOMAIN, DOMAIN, index=True)


@st.composite
def blocks(draw, strides=st.integers(-12, 12)):
    axes = draw(st.lists(st.tuples(st.integers(1, 4), strides), max_size=3))
    low = sum(min(0, s) * (n - 1) for n, s in axes)
    return draw(st.sampled_from("ab")), (draw(st.integers(0, 40)) - low, tuple(axes))


digits = st.sampled_from([0, 1, 1, 2, 4, 8, 12, 24, -4])
any_blocks = st.lists(blocks() | blocks(digits), max_size=3)
