"""Ready-made checks: the laws of the algebra on your own layouts, partitions and transfers.

Call them with what you have. Each returns what it proved, or raises ``AssertionError`` that names
the broken law and a witness; what is no layout at all is an ``InvalidMapError``. They walk
elements where that is the honest way, so give them small tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from random import Random
from typing import Any, TypeAlias

import numpy as np

from .. import backends
from .._errors import InvalidMapError, LimitError, ShardalgError
from .._torch import torch
from ..maps import AffineMap, Piece, Space
from ..maps._map import require_map
from ..maps._space import Shape, as_shape
from ..ops import (
    canonicalize,
    check_layout,
    compose,
    domain,
    equivalent,
    explain,
    extract,
    fingerprint,
    holders,
    image,
    invert,
    is_surjective,
    match,
    padding,
    plan,
    probe,
    rebuild,
    restrict,
    simplify,
    subtract,
    uncovered,
)
from ..ops._layout import rank_ids
from ..ops._plan import RanksLike
from ..ops._probe import asker
from ..plans import TransferPlan
from ..show import from_text, to_text
from ._resplit import resplit

Law: TypeAlias = Callable[[AffineMap], Any]  # a witness, or nothing where the law holds

LARGEST = 1 << 20  # values in test data stay below it, so that every type is exact
MEMORYLESS = ("stay", "lowest")
ROUNDING = 1e-5  # relative, of one scaling in float32


def _require(law: str, witness: Any) -> None:
    """Raise with the law's name unless there is no witness against it."""
    if witness:
        raise AssertionError(f"broken law: {law}: {witness}")


def _differ(wanted: AffineMap, found: AffineMap) -> str:
    """How two maps that should be equivalent differ."""
    return "" if equivalent(wanted, found) else str(explain(wanted, found))


def _unequal(wanted: Any, found: Any, what: str) -> str:
    return "" if wanted == found else f"{what} {found}, not {wanted}"


# --- layouts --------------------------------------------------------------------------------


def _is_a_layout(m: AffineMap) -> str:
    try:
        check_layout(m)
    except ShardalgError as error:
        return str(error)
    return ""


def _has_one_meaning(m: AffineMap) -> str:
    again = resplit(m, Random(0))
    return _differ(m, again) or _unequal(fingerprint(m), fingerprint(again), "cut again it has fingerprint")


def _folds(m: AffineMap) -> str:
    less = simplify(resplit(m, Random(1)))
    return _differ(m, less) or ("" if simplify(less) == less else "folding it again changes it")


def _has_one_form(m: AffineMap) -> str:
    """How the canonical form differs from the map, from its own, or from that of another cut."""
    try:
        form = canonicalize(m)
        others = {"of the form": canonicalize(form), "of another cut": canonicalize(resplit(m, Random(2)))}
    except LimitError:  # some maps have no small one
        return ""
    changed = [which for which, other in others.items() if other != form]
    return _differ(m, form) or (f"the canonical form {changed[0]} is another" if changed else "")


def _undoes(m: AffineMap) -> str:
    return _differ(m, invert(invert(m)))


def _reads_back(m: AffineMap) -> str:
    return _differ(image(m), compose(m, invert(m)))


def _holds_or_pads(m: AffineMap) -> str:
    return _unequal(m.domain.size, domain(m).size + padding(m).size, "slots that hold or pad are")


def _covers_or_not(m: AffineMap) -> str:
    return _unequal(m.codomain.size, image(m).size + uncovered(m).size, "elements that are held or not are")


def _has_holders(m: AffineMap) -> str:
    counted = sum(region.size for _, region in holders(m))
    return _unequal(image(m).size, counted, "elements by their holders are")


def _stays(m: AffineMap) -> str:
    return _unequal(0, plan(m, m).stats.elements_crossing, "elements that move from it to itself are")


def _is_stored(m: AffineMap) -> str:
    again = AffineMap.from_dict(json.loads(json.dumps(m.to_dict())))
    return _differ(m, again) or _differ(m, from_text(to_text(m)))


LAYOUT_LAWS: Mapping[str, Law] = {
    "a layout gives each slot at most one element": _is_a_layout,
    "K4, how a map is cut does not matter": _has_one_meaning,
    "K2, folding keeps the map and is idempotent": _folds,
    "K1 to K4, the canonical form is the map's, and its own": _has_one_form,
    "C3, the inverse of the inverse is the map": _undoes,
    "R7, the map after its inverse is the identity on what is held": _reads_back,
    "every slot holds an element or is padding": _holds_or_pads,
    "D2, every element is held or uncovered": _covers_or_not,
    "every held element has one set of holders": _has_holders,
    "T5, nothing moves between equal layouts": _stays,
    "K8, JSON and text give the map back": _is_stored,
}


def check_layout_laws(m: AffineMap) -> tuple[str, ...]:
    """The laws that a layout obeys, each one checked. Geometry only: no tensor is made.

    >>> from shardalg import Split, layout
    >>> len(check_layout_laws(layout((5, 2), Split(0), ranks=2))) == len(LAYOUT_LAWS)
    True
    """
    require_map(m, "check_layout_laws: m")
    for law, witness in LAYOUT_LAWS.items():
        _require(law, witness(m))
    return tuple(LAYOUT_LAWS)


# --- meaning on tensors ---------------------------------------------------------------------


def round_trip(m: AffineMap, *, like: str = "torch") -> dict[int, Any]:
    """The shards of test data under ``m``, after proving that they mean it: a shard holds the
    elements that ``m(slots)`` says, zero in its padding, and ``rebuild`` gives back what was held.

    ``like`` is ``"torch"`` or ``"numpy"``. Data are small integers that every scale of ``m`` keeps whole.

    >>> from shardalg import Split, layout
    >>> round_trip(layout((3,), Split(0), ranks=2), like="numpy")
    {0: array([1, 2]), 1: array([3])}
    """
    require_map(m, "round_trip: m")
    full = _data(m.codomain, like, m)
    shards: dict[int, Any] = extract(m, full)
    found, whole = _stored(m.domain, shards), _stored(m.codomain, full)
    elements = m(np.arange(m.domain.size))
    if not m.table.scaled:
        wanted = np.where(elements < 0, 0, whole[elements] if whole.size else 0)
        _require("a shard holds the elements that its layout says", _first(m.domain, wanted, found))
    held = np.zeros(whole.shape, bool)
    held[elements[elements >= 0]] = True
    back = _stored(m.codomain, rebuild(m, shards))
    law = "rebuilding shards gives back what they hold"
    _require(law, _first(m.codomain, np.where(held, whole, 0), back))
    return shards


def _data(space: Space, like: str, *maps: AffineMap) -> Any:
    """Tensors of a logical space, ``{name: tensor}`` or one where it has no name: different integers
    (floats where a map scales) that every scale of ``maps``, one after the other, keeps whole."""
    unit = math.prod(_unit(m) for m in maps)
    values = (np.arange(space.size) % max(1, LARGEST // unit) + 1) * unit
    typed = values.astype(np.float64 if any(m.table.scaled for m in maps) else np.int64)
    parts = np.split(typed, np.cumsum([b.size for b in space.boxes])[:-1])
    tensors = {b.name: _tensor(x.reshape(b.shape), like) for b, x in zip(space.boxes, parts)}
    return tensors[""] if list(tensors) == [""] else tensors


def _unit(m: AffineMap) -> int:
    """The least number that every scale of a map, and its inverse, keeps whole."""
    c = m.table.columns
    return math.lcm(1, *c.numerator.tolist(), *c.denominator.tolist())


def _tensor(values: Any, like: str) -> Any:
    if like not in ("torch", "numpy"):
        raise InvalidMapError(f'like must be "torch" or "numpy", got {like!r}')
    return torch().from_numpy(values.copy()) if like == "torch" else values.copy()


def _stored(space: Space, given: Any) -> Any:
    """What tensors hold, the boxes of their space one after the other."""
    parts = []
    for b in space.boxes:
        x = given if b.rank is None else given[b.rank]
        parts.append(np.asarray(x[b.name] if isinstance(x, Mapping) else x).reshape(-1))
    return np.concatenate(parts) if parts else np.zeros(0)


def _first(space: Space, wanted: Any, found: Any) -> str:
    """The first place of a space where two lists of values differ, in words."""
    wrong = np.flatnonzero(wanted != found)
    if not len(wrong):
        return ""
    at, k = int(wrong[0]), 0
    while at >= space.boxes[k].size:
        at, k = at - space.boxes[k].size, k + 1
    where = "the tensor" if space.boxes[k].key == (None, "") else f"{space.boxes[k]!r}"
    return (
        f"address {at} of {where} holds {found[wrong[0]]}, not {wanted[wrong[0]]}; {len(wrong)} differ in all"
    )


# --- partition functions --------------------------------------------------------------------


def check_partition(
    partition: Callable[..., Any],
    shape: Any,
    ranks: Any,
    *,
    like: str = "torch",
    expected: AffineMap | None = None,
    complete: bool = True,
) -> AffineMap:
    """The layout of your partition function, after proving that it has one.

    ``partition`` is as for ``probe``: ``partition(full, rank)`` or ``partition(full)``. It must place
    elements, the same on every call, so that other data land where the layout says and
    rebuilding gives them back. ``complete``: every element is held somewhere. ``expected`` is the
    layout it should have; the error then counts what differs.

    >>> from shardalg import Split, layout
    >>> halves = lambda full, rank: full.chunk(2)[rank]
    >>> m = check_partition(halves, (4, 2), 2, expected=layout((4, 2), Split(0), ranks=2))
    >>> m.shard_shape(1)
    (2, 2)
    """
    shape, labels = as_shape(shape), rank_ids(ranks)
    found, again = (_probed(partition, shape, labels, like, seed) for seed in (0, 1))
    _require("a partition has one layout", _differ(found, again))
    _require("other data land where the layout says", _misplaced(partition, found, labels, like))
    if complete:
        _require("every element is held by some rank", is_surjective(found).reason)
    if expected is not None:
        words = explain(expected, found, names=("the layout", "the partition"))
        _require("the partition has the layout that was expected", "" if words else str(words))
    round_trip(found, like=like)
    return found


def _probed(
    partition: Callable[..., Any], shape: Shape, ranks: tuple[int, ...], like: str, seed: int
) -> AffineMap:
    try:
        return probe(partition, shape, ranks, like=like, seed=seed)
    except InvalidMapError as error:
        raise AssertionError(f"broken law: a partition places elements: {error}") from error


def _misplaced(partition: Callable[..., Any], m: AffineMap, ranks: tuple[int, ...], like: str) -> str:
    """The first slot that holds other than its element of fresh data."""
    ask, _ = asker(partition, m.logical_shape, ranks, like, None)
    full = ask.stored(_data(m.codomain, "numpy", m).reshape(-1)).reshape(m.logical_shape)
    wanted, found = extract(m, full), ask(full.reshape(-1))
    shapes = [{rank: x.shape for rank, x in shards.items()} for shards in (wanted, found)]
    if shapes[0] != shapes[1]:
        return f"shards of shapes {shapes[1]}, not {shapes[0]}"
    right, got = _stored(m.domain, wanted), _stored(m.domain, found)
    same = np.isclose(right, got, rtol=ROUNDING) if m.table.scaled else right == got
    mapped = m(np.arange(m.domain.size)) >= 0
    return _first(m.domain, right, np.where(same | ~mapped, right, got))


# --- transfers ------------------------------------------------------------------------------


def check_transfer(
    source: AffineMap,
    target: AffineMap,
    *,
    select: str = "stay",
    missing: str = "error",
    source_ranks: RanksLike = None,
    target_ranks: RanksLike = None,
) -> TransferPlan:
    """The plan from ``source`` to ``target``, after proving that it is right and running it.

    Laws T1, T3, T4, T9 (under ``select="stay"``) and T14, the plan's JSON form, then a run between simulated
    ranks against shards cut from the whole tensor. The arguments are those of ``plan``.

    >>> from shardalg import Split, layout
    >>> check_transfer(layout((4, 4), Split(0), ranks=2), layout((4, 4), Split(1), ranks=2))
    <TransferPlan of 4 copies, 16 elements, 2 -> 2 ranks, select='stay'>
    """
    require_map(source, "check_transfer: source")
    require_map(target, "check_transfer: target")
    try:
        made = plan(
            source,
            target,
            select=select,
            missing=missing,
            source_ranks=source_ranks,
            target_ranks=target_ranks,
        )
    except InvalidMapError as error:
        raise AssertionError(f"broken law: a transfer can be planned: {error}") from error
    for law, witness in _transfer_laws(made).items():
        _require(law, witness())
    return made


def _transfer_laws(made: TransferPlan) -> dict[str, Callable[[], Any]]:
    return {
        "T1, the converse of a match is the match of the converse": lambda: _converse(made),
        "T3, a plan stays inside the match": lambda: _outside(made),
        "T3, a plan writes the slots whose element is held": lambda: _unwritten(made),
        "T4, reading the source through the plan gives the target": lambda: _misread(made),
        "T9, the plan moves as little as any": lambda: _too_much(made),
        "T14, ranks may plan alone": lambda: _apart(made),
        "K8, JSON gives the plan back": lambda: _forgotten(made),
        "a run gives the shards that were cut from the whole tensor": lambda: _ran_wrong(made),
    }


def _converse(p: TransferPlan) -> str:
    return _differ(invert(match(p.source, p.target)), match(p.target, p.source))


def _outside(p: TransferPlan) -> Any:
    """A copy between a target slot and a source slot of other elements."""
    wrong = subtract(p.map, match(p.target, p.source))
    return (
        f"{wrong.size} of {p.map.size} elements come from other slots, first {wrong.pieces[0]}"
        if wrong.size
        else ""
    )


def _unwritten(p: TransferPlan) -> str:
    return _differ(domain(compose(invert(p.source), p.target)), domain(p.map))


def _misread(p: TransferPlan) -> str:
    return _differ(restrict(p.target, domain(p.map)), compose(p.source, p.map))


def _too_much(p: TransferPlan) -> str:
    if p.select != "stay":
        return ""
    return _unequal(p.stats.lower_bound, p.stats.elements_crossing, "elements that cross are")


def _apart(p: TransferPlan) -> str:
    """A rank whose own part of the plan is not what it reads and writes in the whole one."""
    if p.select not in MEMORYLESS:
        return ""
    here, there = (None if ranks is None else dict(ranks) for ranks in (p.source_ranks, p.target_ranks))
    for rank in _processes(p):
        part = plan(
            p.source, p.target, select=p.select, missing=p.missing, rank=rank,
            source_ranks=here, target_ranks=there,
        )  # fmt: skip
        mine = [c for c in p.map.pieces if rank in _ends(p, c)]
        differ = _differ(AffineMap.from_pieces(p.map.domain, p.map.codomain, mine), part.map)
        if differ:
            return f"rank {rank}: {differ}"
    return ""


def _processes(p: TransferPlan) -> list[int]:
    """The global ranks of both sides."""
    return sorted({*map(p.global_source, p.source.ranks), *map(p.global_target, p.target.ranks)})


def _ends(p: TransferPlan, copy: Piece) -> tuple[int, int]:
    """The global ranks that send and receive a copy."""
    assert copy.codomain.rank is not None and copy.domain.rank is not None
    return p.global_source(copy.codomain.rank), p.global_target(copy.domain.rank)


def _forgotten(p: TransferPlan) -> str:
    again = TransferPlan.from_dict(json.loads(json.dumps(p.to_dict())))
    return _differ(p.map, again.map) or _unequal(p.digest, again.digest, "its digest is then")


def _ran_wrong(p: TransferPlan) -> str:
    full = _data(p.source.codomain, "torch", p.source, p.target)
    given = extract(p.source, full)
    with backends.simulate(1 + max(_processes(p))) as ctx:
        out: Any = backends.run(ctx, backends.bind(ctx, p), given)
    cut = extract(restrict(p.target, domain(p.map)), full)
    return _first(p.target.domain, _stored(p.target.domain, cut), _stored(p.target.domain, out))
