"""Plans: from all homes an element could be read from, one per slot to be written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from .._errors import InvalidMapError, SelectionError, UnsupportedError
from .._limits import Budget, Limits, require_limits
from ..maps import AffineMap
from ..maps._composed import product_scale
from ..maps._map import remember, require_shards
from ..maps._meet import Blocks, Met, meet
from ..maps._relation import CODOMAIN, DOMAIN, collides, exact_sizes, side_blocks, side_region
from ..maps._space import MOST_RANK, BoolArray, IntArray, as_int, by_position
from ..maps._table import Columns, PieceTable, build, concatenate, in_order
from ..plans import TransferPlan
from ..plans._plan import RankMap
from ..plans._stats import global_ranks
from ._balance import Demand, as_blocks, block_of, shares
from ._boxes import box_copies
from ._compose import compose, require_same_space
from ._folding import simplified
from ._holders import Atoms, atoms, lowest_slots
from ._questions import is_single_valued, say_slot
from ._regions import domain
from ._select import Requests, SelectLike, Selector, as_selector
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
    for word, m in (("source", source), ("target", target)):
        _require_layout(m, word)
    require_same_space(source.codomain, target.codomain, "plan", "the source", "the target")
    if missing not in ("error", "leave"):
        raise InvalidMapError(f'missing= must be "error" or "leave", got {missing!r}')
    require_limits(limits)
    selector = as_selector(select)
    of_source = rank_map(source, source_ranks, "source_ranks")
    of_target = rank_map(target, target_ranks, "target_ranks")
    if rank is not None and as_int(rank, "rank") < 0:
        raise InvalidMapError(f"rank must be None or a global rank of at least 0, got {rank!r}")
    if rank is not None and selector.key == "balanced":
        raise InvalidMapError('select="balanced" needs the whole plan: rank= works with memoryless selectors')
    table, pairs = _chosen(source, target, selector, of_source, of_target, rank, limits)
    copies = AffineMap(target.domain, source.domain, table)
    if missing == "error":
        _require_complete(target, copies, of_target, rank)
    _check_moments(copies, holds)
    limits.hold("plan_bytes", table.nbytes)
    remember(copies, single_valued=True)
    return TransferPlan(
        source, target, copies, selector.key, missing, of_source, of_target, rank, pairs
    )  # fmt: skip


def _require_layout(m: AffineMap, word: str) -> None:
    require_shards(m, f"the {word} of a plan")
    if not m.single_valued:
        raise InvalidMapError(f"the {word} is no layout: {is_single_valued(m).reason}")


def _check_moments(copies: AffineMap, holds: str) -> None:
    """Refuse optimizer moments over a ratio other than 1."""
    if holds not in HOLDS:
        raise InvalidMapError(f"holds= must be one of {HOLDS}, got {holds!r}")
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
    pairs = tuple((r, as_int(given[r], f"an entry of {what}")) for r in m.ranks)
    if any(not 0 <= g <= MOST_RANK for _, g in pairs) or len({g for _, g in pairs}) < len(pairs):
        raise InvalidMapError(
            f"{what} must give distinct global ranks of at least 0 and below 2**31, got {dict(pairs)}"
        )
    return pairs


# --- matching and choosing ----------------------------------------------------------------


class _Matched(NamedTuple):
    """All homes of all wanted elements: families of (target slot, source slot)."""

    met: Met
    source: PieceTable
    target: PieceTable
    atom: IntArray
    source_rank: IntArray
    target_rank: IntArray

    def take(self, picked: IntArray) -> _Matched:
        rest = (self.atom[picked], self.source_rank[picked], self.target_rank[picked])
        return self._replace(
            met=self.met.take(picked), atom=rest[0], source_rank=rest[1], target_rank=rest[2]
        )


def _chosen(
    source: AffineMap,
    target: AffineMap,
    selector: Selector,
    of_source: RankMap,
    of_target: RankMap,
    rank: int | None,
    limits: Limits,
) -> tuple[PieceTable, int]:
    """The copies as a table from target slots to source slots, and how many pairs met."""
    if rank is None and source.injective:
        table = box_copies(source, target, limits)
        if table is not None:
            return table, len(table)
    cut = atoms(source)
    source_rank = global_ranks(source, of_source)[cut.table.columns.dom_box]
    target_rank = global_ranks(target, of_target)[target.table.columns.dom_box]
    if selector.key == "balanced":
        shared = _balanced(cut, source_rank, target.table, target_rank, limits)
        return simplified(_copies(shared)), len(shared.atom)
    parts = [
        _match(cut, source_rank, target.table, target_rank, picked, limits)
        for picked in _own_part(rank, source_rank, target_rank)
    ]
    met_pairs = sum(len(m.atom) for m in parts)
    if any(len(h) > 1 for h in cut.holders):
        parts = [_select(m, cut, source, of_source, selector) for m in parts]
    if len(parts) == 2:
        # what r sends to others; what it keeps is among what it receives
        parts[1] = parts[1].take(np.flatnonzero(parts[1].target_rank != rank))
    return simplified(concatenate([_copies(m) for m in parts])), met_pairs


_Part = tuple[IntArray, IntArray]  # positions of source pieces and of target pieces


def _own_part(rank: int | None, source_rank: IntArray, target_rank: IntArray) -> list[_Part]:
    """Which source pieces meet which target pieces: all, or what one rank receives and sends."""
    every_source, every_target = np.arange(len(source_rank)), np.arange(len(target_rank))
    if rank is None:
        return [(every_source, every_target)]
    return [
        (every_source, np.flatnonzero(target_rank == rank)),
        (np.flatnonzero(source_rank == rank), every_target),
    ]


def _match(
    cut: Atoms,
    source_rank: IntArray,
    target: PieceTable,
    target_rank: IntArray,
    picked: _Part,
    limits: Limits,
) -> _Matched:
    s, t = picked
    a = side_blocks(cut.table, CODOMAIN, DOMAIN)
    b = side_blocks(target, CODOMAIN, DOMAIN)
    if len(s) < len(cut.table):
        a = a.take(s)
    if len(t) < len(target):
        b = b.take(t)
    met = meet(a, b, limits, Budget(limits), "copies")
    met = met._replace(left=s[met.left], right=t[met.right])
    return _Matched(met, cut.table, target, cut.atom[met.left], source_rank[met.left], target_rank[met.right])


def _select(m: _Matched, cut: Atoms, source: AffineMap, of_source: RankMap, selector: Selector) -> _Matched:
    """Only the families whose source rank was chosen."""
    if not len(m.atom):
        return m
    width = int(m.target_rank.max()) + 1
    key, where = np.unique(m.atom * width + m.target_rank, return_inverse=True)
    where = where.reshape(-1)
    local = dict(of_source) if of_source is not None else None
    lists = [sorted(local[r] for r in h) if local else list(h) for h in cut.holders]
    counts = np.array([len(h) for h in lists], np.int64)
    starts = np.cumsum(counts) - counts
    atom, target = key // width, key % width
    own = m.source_rank == np.array([h[0] for h in lists], np.int64)[m.atom]
    size = np.zeros(len(key), np.int64)
    np.add.at(size, where[own], np.array(exact_sizes(m.met.shape[:, own]), np.int64))
    requests = Requests(
        atom, target, size, np.array([r for h in lists for r in h], np.int64), starts[atom], counts[atom],
        lambda a: _atom_region(source, cut, a),
    )  # fmt: skip
    answer = selector.choose(requests)
    _check_answers(answer, requests, selector)
    return m.take(np.flatnonzero(answer[where] == m.source_rank))


def _balanced(
    cut: Atoms, source_rank: IntArray, target: PieceTable, target_rank: IntArray, limits: Limits
) -> _Matched:
    """Target pieces cut into the shares of their givers, matched with those alone."""
    holders: list[list[int]] = [[] for _ in cut.holders]
    for a, r in zip(cut.atom.tolist(), source_rank.tolist()):
        if r not in holders[a]:
            holders[a].append(r)
    first = np.array([min(h) for h in holders], np.int64)
    lead = np.flatnonzero(source_rank == first[cut.atom])
    budget = Budget(limits)
    once, once_rank = _wanted_once(target, target_rank, limits, budget)
    from_lead = side_blocks(cut.table, CODOMAIN).take(lead)
    met = meet(from_lead, side_blocks(once, CODOMAIN, DOMAIN, CODOMAIN), limits, budget, "copies")
    demands = [
        Demand(int(piece), tuple(sorted(holders[a])), block_of(met, k))
        for k, (piece, a) in enumerate(zip(met.right.tolist(), cut.atom[lead[met.left]].tolist()))
    ]
    given = list(shares(demands, once_rank[met.right].tolist()))
    piece, giver, wanted = as_blocks(given, once.columns.cod_box, len(met.shape))
    met = meet(side_blocks(cut.table, CODOMAIN, DOMAIN, CODOMAIN), wanted, limits, budget, "copies")
    met = met.take(np.flatnonzero(source_rank[met.left] == giver[met.right]))
    if once is target:
        met = met._replace(
            right=piece[met.right], left_offset=met.left_offset[:1], left_strides=met.left_strides[:1]
        )
    else:
        met = _all_slots(met, once_rank[piece[met.right]], cut.table, target, target_rank, limits, budget)
    return _Matched(met, cut.table, target, cut.atom[met.left], source_rank[met.left], target_rank[met.right])


def _wanted_once(
    target: PieceTable, target_rank: IntArray, limits: Limits, budget: Budget
) -> tuple[PieceTable, IntArray]:
    """The target with one slot per element and rank, and the rank of each piece; the very same
    table where no rank wants an element twice."""
    if not collides(_by_rank(target, target_rank), CODOMAIN):
        return target, target_rank
    parts = {
        int(r): lowest_slots(target.take(target_rank == r), limits, budget) for r in np.unique(target_rank)
    }
    ranks = [np.full(len(part), r, np.int64) for r, part in parts.items()]
    return in_order(list(parts.values())), np.concatenate(ranks)


def _by_rank(table: PieceTable, rank: IntArray) -> PieceTable:
    """The table with its codomain boxes told apart by rank."""
    c = table.columns
    place = np.unique(rank, return_inverse=True)[1].reshape(-1)
    return build(c._replace(cod_box=place * (int(c.cod_box.max(initial=0)) + 1) + c.cod_box))


def _all_slots(
    met: Met,
    rank: IntArray,
    source: PieceTable,
    target: PieceTable,
    target_rank: IntArray,
    limits: Limits,
    budget: Budget,
) -> Met:
    """From shares (source slot, element) of a rank to every slot of that rank that wants them."""
    s, t = source.columns, target.columns
    ranks, place = np.unique(np.concatenate([rank, target_rank]), return_inverse=True)
    place, width = place.reshape(-1), int(max(s.cod_box.max(initial=0), t.cod_box.max(initial=0))) + 1
    given = Blocks(
        place[: len(rank)] * width + s.cod_box[met.left], met.left_offset[1], met.shape, met.left_strides[1],
        met.left_offset[:1], met.left_strides[:1],
    )  # fmt: skip
    wanted = side_blocks(target, CODOMAIN, DOMAIN)._replace(box=place[len(rank) :] * width + t.cod_box)
    every = meet(given, wanted, limits, budget, "copies")
    return every._replace(left=met.left[every.left])


def _check_answers(answer: IntArray, requests: Requests, selector: Selector) -> None:
    for k in np.flatnonzero(~_among(answer, requests)).tolist():
        raise SelectionError(
            f"selector {selector.key!r} chose {answer[k]} for target rank {requests.target[k]},"
            f" but the holders are {requests.holders(k)}"
        )


def _among(answer: IntArray, r: Requests) -> BoolArray:
    """Whether each answer is a holder."""
    if answer.shape != r.target.shape:
        raise SelectionError(f"{len(r.target)} requests got answers of shape {answer.shape}")
    found = np.zeros(len(answer), bool)
    for k in range(int(r.count.max(initial=0))):
        here = k < r.count
        found |= here & (r.flat[np.where(here, r.start + k, 0)] == answer)
    return found


def _atom_region(source: AffineMap, cut: Atoms, atom: int) -> AffineMap:
    first = cut.holders[atom][0]
    its = cut.table.take((cut.atom == atom) & (cut.rank == first))
    return AffineMap(source.codomain, source.codomain, side_region(its, CODOMAIN))


def _copies(m: _Matched) -> PieceTable:
    """Families as a table from target slots to source slots; a target slot holds
    ``source slot * scale`` with scale = target scale / source scale."""
    s, t, met = m.source.columns, m.target.columns, m.met
    up = (t.numerator[met.right], t.denominator[met.right])
    down = _reciprocal(s.numerator[met.left], s.denominator[met.left])
    numerator, denominator = product_scale(up, down)
    return build(
        Columns(
            t.dom_box[met.right], met.right_offset[0], s.dom_box[met.left], met.left_offset[0],
            numerator, denominator, met.shape, met.right_strides[0], met.left_strides[0],
        )
    )  # fmt: skip


def _reciprocal(numerator: IntArray, denominator: IntArray) -> tuple[IntArray, IntArray]:
    sign = np.sign(numerator)
    return sign * denominator, sign * numerator


def _require_complete(target: AffineMap, copies: AffineMap, of_target: RankMap, rank: int | None) -> None:
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
    left = subtract(domain(wanted), domain(got))
    c = left.table.columns
    box, slot = int(c.dom_box[0]), int(c.dom_offset[0])
    at = compose(target, AffineMap(left.domain, left.codomain, left.table.take(slice(0, 1)))).table.columns
    element = say_slot(target.codomain, int(at.cod_box[0]), int(at.cod_offset[0]))
    raise InvalidMapError(
        f"no source rank holds element {element}, wanted in slot {say_slot(target.domain, box, slot)};"
        f' {left.size} target slots have no source: cover them, or pass missing="leave"'
    )
