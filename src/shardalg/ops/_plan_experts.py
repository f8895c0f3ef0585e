"""Plans between expert placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Limits
from ..maps import AffineMap
from ..maps._space import Shape, as_shape, by_key
from ..placements import Experts
from ..plans import TransferPlan
from ._equivalent import equivalent
from ._explain import explain
from ._layout import layout
from ._plan import RanksLike, plan
from ._select import SelectLike, as_selector


def expert_layouts(placement: Experts, shapes: Mapping[str, Any]) -> dict[str, AffineMap]:
    """The layout of each expert tensor under a placement.

    ``shapes`` are the logical shapes ``{"w1": (E, f, h), ...}`` of the unpartitioned tensors; each rank
    stores its experts packed as ``[local_experts, ...]``. Raises ``InvalidMapError`` where the shapes
    disagree about E or a placement names an expert beyond it.

    Cost: a piece per run of experts and rank, for each tensor.

    >>> expert_layouts(Experts([[1], [0, 2]]), {"w": (3, 4)})["w"].domain
    Space.shards({0: (1, 4), 1: (2, 4)})
    """
    if not isinstance(placement, Experts):
        raise InvalidMapError(f"expert_layouts takes Experts(...), got {placement!r}")
    if not placement.by_rank:
        raise InvalidMapError("the expert placement names no rank")
    whole = expert_shapes(shapes)
    return {name: layout(shape, placement) for name, shape in whole.items()}


def expert_shapes(shapes: Mapping[str, Any]) -> dict[str, Shape]:
    """Checked shapes ``[E, ...]`` that agree on E."""
    its = by_key(shapes, "the shapes of experts").items()
    whole = {name: as_shape(shape, f"the shape of {name!r}") for name, shape in its}
    counts = {name: shape[0] if shape else None for name, shape in whole.items()}
    if not counts or None in counts.values() or len(set(counts.values())) > 1:
        raise InvalidMapError(f"expert tensors are [experts, ...] with one number of experts; got {whole}")
    return whole


def plan_experts(
    source: Experts,
    target: Experts,
    shapes: Mapping[str, Any],
    *,
    packed: Experts | None = None,
    published: Mapping[str, tuple[Experts, AffineMap]] | None = None,
    select: SelectLike = "lowest",
    limits: Limits = Limits(),
    source_ranks: RanksLike = None,
    target_ranks: RanksLike = None,
) -> dict[str, TransferPlan]:
    """One plan per expert tensor between two placements: ``{name: TransferPlan}``.

    ``shapes`` are logical shapes ``{"w1": (E, f, h), ...}``; offsets of the copies address each rank's
    packed ``[local_experts, ...]``. ``packed`` is how the live source weights were really packed:
    a ``source`` that differs raises ``UnsupportedError`` with the first rank and position. It binds
    the source only; a target may be anything that can be written down, and plannable does
    not mean that a runtime can execute it. ``published[name]`` is ``(placement, map)`` as announced
    elsewhere: both must equal what ``source`` lowers to, else ``InvalidMapError``.

    The two sides number their ranks in groups of their own. Give ``source_ranks`` and
    ``target_ranks`` to say which processes they are; without both, crossing statistics and
    the lower bound are None. Nothing moves here and no tensor is touched.

    Cost: a plan per tensor.

    >>> plans = plan_experts(Experts.uniform(4, 2), Experts([[3, 0], [], [1, 2, 0]]), {"w": (4, 2, 3)})
    >>> plans["w"].map.size, plans["w"].stats.elements_crossing
    (30, None)
    """
    packed = source if packed is None else packed
    for word, its in (("source", source), ("target", target), ("packed", packed)):
        if not isinstance(its, Experts):
            raise InvalidMapError(f"plan_experts: {word} must be Experts(...), got {its!r}")
    _check_packed(source, packed)
    known = source_ranks is not None and target_ranks is not None
    selector = as_selector(select)
    if not known and selector.key == "stay":
        raise InvalidMapError(
            'select="stay" needs source_ranks= and target_ranks=: the two sides number ranks in groups of'
            " their own, so rank 0 of one need not be rank 0 of the other"
        )
    sources, targets = expert_layouts(source, shapes), expert_layouts(target, shapes)
    _check_published(source, sources, {} if published is None else by_key(published, "published"))
    plans = {
        name: plan(
            sources[name], targets[name], select=selector, limits=limits,
            source_ranks=source_ranks, target_ranks=target_ranks,
        )
        for name in sources
    }  # fmt: skip
    return {name: dataclasses.replace(p, same_ranks=known) for name, p in plans.items()}


def _check_packed(source: Experts, packed: Experts) -> None:
    """Raise with the first rank and position at which the live packing differs."""
    said, live = dict(source.by_rank), dict(packed.by_rank)
    for rank in sorted(set(said) | set(live)):
        a, b = said.get(rank), live.get(rank)
        if a is None or b is None:
            raise UnsupportedError(
                f"the source placement {'does not name' if a is None else 'names'} rank {rank},"
                f" the live weights are packed on ranks {sorted(live)}"
            )
        for position in range(max(len(a), len(b))):
            x, y = (ids[position] if position < len(ids) else None for ids in (a, b))
            if x != y:
                raise UnsupportedError(
                    f"rank {rank}, position {position}: the source placement says expert {x}, but the live"
                    f" weights are packed with expert {y} there; plan from the packed placement"
                )


def _check_published(
    source: Experts, live: Mapping[str, AffineMap], published: Mapping[str, tuple[Experts, AffineMap]]
) -> None:
    unknown = sorted(set(published) - set(live))
    if unknown:
        raise InvalidMapError(f"published= names tensors without a shape: {unknown}")
    for name, (placement, m) in published.items():
        if placement != source:
            raise InvalidMapError(
                f"{name!r}: the published placement is {placement!r}, the live one {source!r}"
            )
        if m.domain != live[name].domain or m.codomain != live[name].codomain:
            raise InvalidMapError(
                f"{name!r}: the published map goes from {m.domain} to {m.codomain},"
                f" the live one from {live[name].domain} to {live[name].codomain}"
            )
        if not equivalent(m, live[name]):
            raise InvalidMapError(
                f"{name!r}: the published map is not the live one: {explain(live[name], m)}"
            )
