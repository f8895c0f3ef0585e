"""A normal form that depends on the relation alone."""

from __future__ import annotations

from itertools import combinations
from math import gcd

import numpy as np

from .._limits import Budget, Limits
from ..maps import AffineMap
from ..maps._map import inherit, require_map
from ..maps._reading import flag
from ..maps._table import HEAD, PieceTable, concatenate
from ._chains import Relation, refined, relation
from ._folding import Axis, Family, Point, families_of, fold, fold_points, grouped, simplified, table_of
from ._homogeneous import by_holders

NEAR, FAR = 3, 1024  # points at either end whose differences are tried as steps: at first, and then
MOST = 16  # steps tried
SMALL = 4096  # points of a set that is also folded in their order


def canonicalize(m: AffineMap, *, homogeneous: bool = False, limits: Limits = Limits()) -> AffineMap:
    """The map in a form that depends on its triples alone, not on how they are cut.

    ``equivalent(canonicalize(m), m)``; ``canonicalize(a) == canonicalize(b)`` exactly when
    ``equivalent(a, b)``, whenever both return; and it is idempotent. Per pair of boxes and scale
    the points (slot, element) are cut into the maximal chains of one step, the step that
    repeats most among the differences of the first and last points; then the starts of the chains
    of each length in turn, and the points in no chain by another step. Everything decided is decided by
    the set of points; large sets are never listed. Points that no step relates are listed if
    there are at most ``limits.steps``.

    With ``homogeneous`` no piece spans a change of holders, as in ``simplify``.

    Raises ``LimitError`` where the work would exceed ``limits``: some maps have no small
    canonical form.

    Cost: near-linear in the pieces where steps repeat, at most ``limits.steps`` where they do not.

    >>> from shardalg import Split, layout
    >>> columns = layout((10**9, 8), Split(1), ranks=2)
    >>> len(canonicalize(columns))
    2
    """
    require_map(m, "canonicalize: m")
    budget = Budget(limits)
    table = _canonical(m.table, limits, budget)
    if flag(homogeneous, "homogeneous"):
        parts = by_holders(AffineMap(m.domain, m.codomain, table), limits)
        table = concatenate([_canonical(part, limits, budget) for part in parts])
    limits.hold("pieces", len(table))
    return inherit(AffineMap(m.domain, m.codomain, table), m)


def _canonical(table: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """Each group of pieces that share boxes and scale in canonical form."""
    table = simplified(table)
    families = families_of(table)
    plain = np.zeros(len(table), bool)
    seen: dict[bytes, PieceTable] = {}
    cut = []
    for picked in grouped(table, alone=True):
        if len(picked) == 1 and _is_plain(families[picked[0]]):
            plain[picked] = True
        else:
            cut.append(_decomposed(table.take(picked), seen, limits, budget))
    return simplified(concatenate([table.take(plain), *cut]))


def _is_plain(family: Family) -> bool:
    """Whether a piece is at most a parallelogram: its own canonical form."""
    axes = family[1]
    return len(axes) < 2 or (len(axes) == 2 and axes[0][1] * axes[1][2] != axes[0][2] * axes[1][1])


def _decomposed(
    table: PieceTable, seen: dict[bytes, PieceTable], limits: Limits, budget: Budget
) -> PieceTable:
    """One group in canonical form, worked out at the origin, since ranks are often alike."""
    start = table.rows[:HEAD, 0]
    rows = table.rows.copy()
    rows[[0, 2]] = 0
    rows[[1, 3]] -= start[[1, 3], None]
    at_origin = PieceTable(rows)
    key = rows.tobytes()
    if key not in seen:
        seen[key] = _canonical_group(at_origin, limits, budget)
    moved = seen[key].rows.copy()
    moved[[0, 2]] = start[[0, 2], None]
    moved[[1, 3]] += start[[1, 3], None]
    return PieceTable(moved)


def _canonical_group(table: PieceTable, limits: Limits, budget: Budget) -> PieceTable:
    """By chains, or for a small set in order of its points where that gives fewer pieces."""
    points = relation(table, limits, budget)
    head = table.rows[:HEAD, 0]
    chains = simplified(table_of(sorted(_families(points)), head))
    if len(chains) < 3 or points.size > SMALL:
        return chains
    walked = simplified(table_of(sorted(fold(fold_points(points.listed()))), head))
    return min(chains, walked, key=len)


def _families(points: Relation | None) -> list[Family]:
    """The points as families: chains of one step, and the rest by another step."""
    found: list[Family] = []
    while points is not None:
        step = _step(points) if points.size > 1 else None
        if step is None:
            return found + fold_points(points.listed())
        chains = points.chains(step)
        points = chains.pop(1, None)
        found += _of_chains(chains, step)
    return found


def _of_chains(chains: dict[int, Relation], step: Point) -> list[Family]:
    """Chains as families: by their lengths, or in runs of the common granule where that gives fewer.

    A chain may run on across what is a digit boundary of the layout; the granule undoes that.
    """
    apart = [f for n in sorted(chains) for f in _along(chains[n], (n, *step))]
    granule = gcd(*chains)
    if len(chains) == 1 or granule == 1:
        return apart
    runs = _along(refined(chains, granule, step), (granule, *step))
    return min(apart, runs, key=len)


def _along(starts: Relation, axis: Axis) -> list[Family]:
    return [(head, (*axes, axis)) for head, axes in _families(starts)]


def _step(points: Relation) -> Point | None:
    """The step that most points repeat: half of them among the differences of the nearest
    points at either end, or a quarter among the differences from the end that both ends share."""
    near = _differences(points.first(NEAR)) | _differences(points.last(NEAR)[::-1])
    best = _most_repeated(points, near)
    if 2 * best[0] < points.size:
        first, last = points.first(FAR), points.last(FAR)
        periods = {_minus(p, first[0]) for p in first[1:]} & {_minus(last[0], p) for p in last[1:]}
        best = max(best, _most_repeated(points, periods - near))
    return best[1] if 4 * best[0] >= points.size else None


def _most_repeated(points: Relation, steps: set[Point]) -> tuple[int, Point]:
    """How many points repeat the best of the steps, and that step."""
    return max(((points.repeats(step), step) for step in sorted(steps)[:MOST]), default=(0, (0, 0)))


def _differences(ascending: list[Point]) -> set[Point]:
    return {_minus(b, a) for a, b in combinations(ascending, 2)}


def _minus(a: Point, b: Point) -> Point:
    return a[0] - b[0], a[1] - b[1]
