"""The same map cut into other pieces: what every law must be blind to."""

from __future__ import annotations

from random import Random
from typing import TypeAlias

import numpy as np

from ..maps import AffineMap
from ..maps._map import from_columns
from ..maps._table import HEAD, Columns

Axis: TypeAlias = tuple[int, int, int]  # extent, domain stride, codomain stride
Cut: TypeAlias = tuple[int, int, list[Axis]]  # domain offset, codomain offset, axes


def resplit(m: AffineMap, random: Random, *, cuts: int = 2) -> AffineMap:
    """``m`` with its pieces cut at random and in random order; nothing is folded again.

    ``equivalent(resplit(m, random), m)``. Each piece is cut up to ``cuts`` times: in two along
    an axis, by residues, into slices, or along the diagonals of two axes.

    >>> from random import Random
    >>> from shardalg import Split, equivalent, layout
    >>> m = layout((8,), Split(0), ranks=2)
    >>> again = resplit(m, Random(1))
    >>> len(again) > len(m), equivalent(again, m)
    (True, True)
    """
    heads, parts = [], []
    for k in range(len(m)):
        head = m.table.rows[:HEAD, k].tolist()
        whole = (head[1], head[3], _axes(m, k))
        for part in _recut(whole, random, cuts):
            heads.append(head)
            parts.append(part)
    order = random.sample(range(len(parts)), len(parts))
    return from_columns(m.domain, m.codomain, _columns([heads[i] for i in order], [parts[i] for i in order]))


def _axes(m: AffineMap, k: int) -> list[Axis]:
    c = m.table.columns
    return [axis for axis in zip(*(x[:, k].tolist() for x in c[-3:])) if axis[0] > 1]


def _recut(part: Cut, random: Random, cuts: int) -> list[Cut]:
    part = (*part[:2], [axis for axis in part[2] if axis[0] > 1])
    if not cuts or not part[2]:
        return [part]
    way = random.choice([_halves, _residues, _slices, _diagonals])
    return [again for some in way(part, random) for again in _recut(some, random, cuts - 1)]


def _at(part: Cut, k: int, start: int, axes: list[Axis]) -> Cut:
    """The cut that starts at index ``start`` of axis ``k``, with other axes in its place."""
    _, ds, cs = part[2][k]
    return part[0] + start * ds, part[1] + start * cs, part[2][:k] + axes + part[2][k + 1 :]


def _halves(part: Cut, random: Random) -> list[Cut]:
    k = random.randrange(len(part[2]))
    n, ds, cs = part[2][k]
    at = random.randrange(1, n)
    return [_at(part, k, 0, [(at, ds, cs)]), _at(part, k, at, [(n - at, ds, cs)])]


def _residues(part: Cut, random: Random) -> list[Cut]:
    k = random.randrange(len(part[2]))
    n, ds, cs = part[2][k]
    by = random.randint(2, min(n, 4))
    return [_at(part, k, r, [(-(-(n - r) // by), ds * by, cs * by)]) for r in range(by)]


def _slices(part: Cut, random: Random) -> list[Cut]:
    k = random.randrange(len(part[2]))
    n = part[2][k][0]
    return [_at(part, k, i, []) for i in range(n)] if n <= 8 else _halves(part, random)


def _diagonals(part: Cut, random: Random) -> list[Cut]:
    """Two axes as runs that step along both at once."""
    if len(part[2]) < 2:
        return _halves(part, random)
    i, j = sorted(random.sample(range(len(part[2])), 2))
    (n, ds, cs), (m, dt, ct) = part[2][i], part[2][j]
    if n + m > 16:
        return _halves(part, random)
    rest = [axis for k, axis in enumerate(part[2]) if k not in (i, j)]
    starts = [(0, y) for y in range(m)] + [(x, 0) for x in range(1, n)]
    return [
        (part[0] + x * ds + y * dt, part[1] + x * cs + y * ct, [(min(n - x, m - y), ds + dt, cs + ct), *rest])
        for x, y in starts
    ]


def _columns(heads: list[list[int]], parts: list[Cut]) -> Columns:
    axes = max((len(part[2]) for part in parts), default=0)
    blocks = np.zeros((3, axes, len(parts)), np.int64)
    blocks[0] = 1
    for j, (_, _, its) in enumerate(parts):
        for i, axis in enumerate(its):
            blocks[:, i, j] = axis
    head = np.array(heads, np.int64).reshape(len(heads), HEAD).T.copy()
    head[1], head[3] = ([part[side] for part in parts] for side in (0, 1))
    return Columns(*head, *blocks)
