"""Plans: from all homes an element could be read from, one per slot to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Limits, require_limits
from ..maps import AffineMap
from ..maps._map import decided, remember, require_shards
from ..maps._reading import as_int, by_position, one_of
from ..maps._relation import DOMAIN
from ..plans import TransferPlan
from ..plans._plan import MISSING, RankMap, rank_pairs
from ..plans._stats import global_ranks
from ._choose import chosen
from ._compose import compose, require_same_space
from ._questions import is_single_valued, say_slot
from ._regions import domain
from ._select import SelectLike, as_selector
from ._sets import subtract

HOLDS = ("parameters", "moments", "rescaled moments")
RanksLike: TypeAlias = Sequence[int] | Mapping[int, int] | None


def plan(
    source: AffineMap,
    target: AffineMap,
    *,
    select: SelectLike = "stay",
    limits: Limits = Limits(),
    missing: str = "error",
    source_ranks: RanksLike = None,
    target_ranks: RanksLike = None,
    rank: int | None = None,
    holds: str = "parameters",
) -> TransferPlan:
    """The copies that turn layout ``source`` into layout ``target``.

    Read as a map from target slots to source slots the plan is single-valued, lies inside
    ``invert(match(source, target))``, and is defined exactly where the source holds the
    target's element. ``select`` chooses among replicas: ``"stay"``, ``"lowest"``, ``"balanced"``,
    ``cheapest(cost)`` or a function of a ``Request``. ``missing="error"`` raises for a target slot
    whose element nobody holds, ``"leave"`` skips it. ``source_ranks``/``target_ranks`` give the
    global rank of each side's ranks (a sequence or mapping) where equal numbers do not mean
    the same process. ``rank=r`` plans only what global rank r sends and receives (memoryless
    selectors). ``holds="moments"`` says that the tensors are optimizer moments: copies whose ratio is
    not 1 are then refused, unless ``"rescaled moments"`` says that the caller rescales what
    belongs to them. Deterministic; pure geometry.

    Raises ``InvalidMapError`` (not layouts of one logical tensor, missing elements),
    ``SelectionError``, ``LimitError``, ``UnsupportedError`` (moments over a scale).

    Cost: near-linear in the copies; between two grids, in the cuts of each axis until copies are asked for.

    >>> from shardalg import layout, Split
    >>> p = plan(layout((8, 8), Split(0), ranks=2), layout((8, 8), Split(1), ranks=4))
    >>> len(p), p.stats.elements_crossing, p.copies[3].source, p.copies[3].target
    (8, 48, Side(2, (8, 1), rank=1), Side(8, (2, 1), rank=1))
    """
    require_limits(limits)
    _require_layout(source, "the source of a plan", limits)
    _require_layout(target, "the target of a plan", limits)
    require_same_space(source.codomain, target.codomain, "plan", "the source", "the target")
    one_of(missing, MISSING, "missing=")
    selector = as_selector(select)
    of_source = rank_map(source, source_ranks, "source_ranks")
    of_target = rank_map(target, target_ranks, "target_ranks")
    if rank is not None and as_int(rank, "rank") < 0:
        raise InvalidMapError(f"rank must be None or a global rank of at least 0, got {rank!r}")
    if rank is not None and selector.key == "balanced":
        raise InvalidMapError('select="balanced" needs the whole plan: rank= works with memoryless selectors')
    table, pairs = chosen(source, target, selector, of_source, of_target, rank, limits)
    copies = AffineMap(target.domain, source.domain, table)
    if missing == "error":
        _require_complete(target, copies, of_target, rank, limits)
    _check_moments(copies, holds)
    limits.hold("plan_bytes", table.nbytes)
    remember(copies, single_valued=True)
    return TransferPlan(
        source, target, copies, selector.key, missing, of_source, of_target, rank, pairs
    )  # fmt: skip


def _require_layout(m: AffineMap, what: str, limits: Limits) -> None:
    require_shards(m, what)
    if not decided(m, DOMAIN, limits):
        reason = is_single_valued(m, limits=limits).reason
        raise InvalidMapError(f"{what} is no layout: {reason}")


def _check_moments(copies: AffineMap, holds: str) -> None:
    """Refuse optimizer moments over a ratio other than 1."""
    one_of(holds, HOLDS, "holds=")
    if holds != "moments" or not copies.table.scaled:
        return
    c = copies.table.columns
    k = int(np.flatnonzero(c.numerator != c.denominator)[0])
    ratio = f"{c.numerator[k]}/{c.denominator[k]}"
    raise UnsupportedError(
        f"a copy has the ratio {ratio}, which moves parameters only: moments would be right under its"
        " powers -1 and -2, but the learning rate and epsilon would still belong to the old scale;"
        ' resume without moments, or rescale those too and pass holds="rescaled moments"'
    )


def rank_map(m: AffineMap, ranks: RanksLike, what: str) -> RankMap:
    """Pairs (rank of the layout, global rank), every rank of the layout covered once."""
    if ranks is None:
        return None
    given = by_position(ranks, what)
    missing = [r for r in m.ranks if r not in given]
    if missing:
        raise InvalidMapError(f"{what} says nothing about ranks {missing[:8]}; it covers {sorted(given)[:8]}")
    return rank_pairs(m, [given[r] for r in m.ranks], what)


def _require_complete(
    target: AffineMap, copies: AffineMap, of_target: RankMap, rank: int | None, limits: Limits
) -> None:
    """Raise for the first target slot whose element nobody holds."""
    wanted, got = target, copies
    if rank is not None:
        boxes = np.flatnonzero(global_ranks(target, of_target) == rank)
        wanted, got = (
            AffineMap(m.domain, m.codomain, m.table.take(np.isin(m.table.columns.dom_box, boxes)))
            for m in (target, copies)
        )
    if wanted.size == got.size:
        return
    left = subtract(domain(wanted, limits=limits), domain(got, limits=limits), limits=limits)
    c = left.table.columns
    box, slot = int(c.dom_box[0]), int(c.dom_offset[0])
    at = compose(target, AffineMap(left.domain, left.codomain, left.table.take(slice(0, 1)))).table.columns
    element = say_slot(target.codomain, int(at.cod_box[0]), int(at.cod_offset[0]))
    raise InvalidMapError(
        f"no source rank holds element {element}, wanted in slot {say_slot(target.domain, box, slot)};"
        f' {left.size} target slots have no source: cover them, or pass missing="leave"'
    )
