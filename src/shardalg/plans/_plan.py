"""Plans: which copies turn one layout into another."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import Any, TypeAlias

from .._errors import InvalidMapError
from .._limits import Budget, Limits, require_limits
from .._struct import struct
from ..maps import AffineMap, Side
from ..maps._composed import composed
from ..maps._fingerprint import fingerprint
from ..maps._map import FORMAT, check_format, require_shards
from ..maps._reading import as_int, as_text, counted, field, flag, one_of, optional, records
from ..maps._relation import count_common
from ..maps._space import MOST_RANK, Shape
from ._stats import Stats, Traffic, global_ranks, traffic, transfer_stats

RankMap: TypeAlias = tuple[tuple[int, int], ...] | None  # (rank of the layout, global rank)

MISSING = ("error", "leave")  # what happens to slots whose element nobody holds


@struct
class Copy:
    """``target block = source block * scale``: one strided block read from a source shard and
    written to a target shard. Offsets and strides in elements."""

    shape: Shape
    source: Side
    target: Side
    scale: Fraction = Fraction(1)


@struct
class TransferPlan:
    """The copies that turn ``source`` into ``target``, chosen once for every slot to be written.

    ``map`` is the plan itself as a map from target slots to source slots: single-valued, and
    a target slot holds ``source slot * scale``. ``source_ranks`` and ``target_ranks`` pair each
    side's ranks with global ones (None: they are global already). ``rank`` is set on a plan of
    what one global rank sends and receives. Pure geometry: no process, no tensor, no dtype.
    """

    source: AffineMap
    target: AffineMap
    map: AffineMap
    select: str = "stay"
    missing: str = "error"
    source_ranks: RankMap = None
    target_ranks: RankMap = None
    rank: int | None = None
    pairs: int = 0
    same_ranks: bool = True

    def __len__(self) -> int:
        return len(self.map)

    def __repr__(self) -> str:
        only = "" if self.rank is None else f", rank={self.rank}"
        return (
            f"<TransferPlan of {len(self)} copies, {self.map.size} elements,"
            f" {len(self.source.ranks)} -> {len(self.target.ranks)} ranks, select={self.select!r}{only}>"
        )

    @cached_property
    def copies(self) -> Sequence[Copy]:
        """The copies as objects, made on demand."""
        return Copies(self.map)

    @cached_property
    def stats(self) -> Stats:
        """Counts of the plan, in elements; ``bytes_crossing`` turns them into bytes."""
        return transfer_stats(self)

    @cached_property
    def traffic(self) -> Traffic:
        """Distinct elements per (source, target) pair of global ranks, the local ones included."""
        return traffic(self)

    @cached_property
    def digest(self) -> str:
        """A hex name of the question this plan answers: both layouts however cut, rank maps,
        selector and its arguments, format. Ranks that planned only their own part agree on it."""
        words = [
            f"shardalg.plan {FORMAT}", fingerprint(self.source), fingerprint(self.target),
            repr(self.source_ranks), repr(self.target_ranks), self.select, self.missing,
        ]  # fmt: skip
        return hashlib.sha256("\n".join(words).encode()).hexdigest()

    def global_source(self, rank: int) -> int:
        """The global rank of a rank of the source."""
        return _global(self.source_ranks, rank)

    def global_target(self, rank: int) -> int:
        """The global rank of a rank of the target."""
        return _global(self.target_ranks, rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with a format version."""
        return {
            "format": "shardalg.plan", "version": FORMAT,
            "source": self.source.to_dict(), "target": self.target.to_dict(), "map": self.map.to_dict(),
            "select": self.select, "missing": self.missing, "rank": self.rank, "pairs": self.pairs,
            "source_ranks": self.source_ranks, "target_ranks": self.target_ranks,
            "same_ranks": self.same_ranks,
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, limits: Limits = Limits()) -> TransferPlan:
        """The plan written by ``to_dict``: bounded, and every copy checked against both layouts."""
        check_format(data, "shardalg.plan")
        require_limits(limits)
        source, target, m = (field(data, k, _map_within(limits)) for k in ("source", "target", "map"))
        limits.hold("copies", len(m))
        of_source, of_target = (
            _read_ranks(layout, field(data, k, optional(records(2))), k)
            for layout, k in ((source, "source_ranks"), (target, "target_ranks"))
        )
        plan = cls(
            source, target, m, field(data, "select", as_text), field(data, "missing", _missing), of_source,
            of_target, field(data, "rank", optional(counted)), field(data, "pairs", counted),
            field(data, "same_ranks", flag),
        )  # fmt: skip
        verify_plan(plan, limits)
        return plan


def _map_within(limits: Limits) -> Callable[[Any, str], AffineMap]:
    """How to read a field that is a map."""

    def read(data: Any, what: str) -> AffineMap:
        try:
            return AffineMap.from_dict(data, limits=limits)
        except InvalidMapError as error:
            raise InvalidMapError(f"{what} is no map: {error}") from None

    return read


def _missing(value: Any, what: str) -> str:
    return one_of(value, MISSING, what)


def _read_ranks(m: AffineMap, pairs: list[list[Any]] | None, what: str) -> RankMap:
    """The rank map of a layout from stored pairs, which name every rank of it once."""
    if pairs is None:
        return None
    locals_ = [as_int(a, f"a rank of the field {what!r}") for a, _ in pairs]
    if tuple(locals_) != m.ranks:
        raise InvalidMapError(f"the field {what!r} names ranks {locals_}, the layout has {m.ranks}")
    return rank_pairs(m, [b for _, b in pairs], what)


def rank_pairs(m: AffineMap, given: Sequence[Any], what: str) -> RankMap:
    """Each rank of a layout with its global rank, in order; checked to be distinct ranks."""
    pairs = tuple((r, as_int(g, f"an entry of {what}")) for r, g in zip(m.ranks, given))
    if any(not 0 <= g <= MOST_RANK for _, g in pairs) or len({g for _, g in pairs}) < len(pairs):
        raise InvalidMapError(
            f"{what} must give distinct global ranks of at least 0 and below 2**31, got {dict(pairs)}"
        )
    return pairs


def verify_plan(plan: TransferPlan, limits: Limits = Limits()) -> None:
    """Raise unless the plan does its job: every copy brings a target slot its own element at its
    own scale, no slot is written twice, and, for a whole plan under ``missing="error"``, none is
    left out."""
    if plan.map.domain != plan.target.domain or plan.map.codomain != plan.source.domain:
        raise InvalidMapError("the copies of a plan are not between its layouts' shards")
    if plan.source.codomain != plan.target.codomain:
        raise InvalidMapError(
            f"a plan is between layouts of one tensor; its source lays out {plan.source.codomain},"
            f" its target {plan.target.codomain}"
        )
    require_shards(plan.source, "the source of a plan")
    require_shards(plan.target, "the target of a plan")
    source, target, copies = plan.source.table, plan.target.table, plan.map.table
    if not (plan.source.single_valued and plan.target.single_valued and plan.map.single_valued):
        raise InvalidMapError("a plan is between layouts and writes every slot once; this one does not")
    brought = composed(source, copies, limits, Budget(limits))
    right = count_common(brought, target, limits, Budget(limits))
    if right != copies.size or brought.size != copies.size:
        raise InvalidMapError(
            f"{copies.size - right} of the {copies.size} elements that the copies move are not"
            " what their slots want"
        )
    _require_whole(plan)


def _require_whole(plan: TransferPlan) -> None:
    """Raise where slots are left out that ``missing="error"`` promises, or, in the plan of one rank, where
    a copy is neither from it nor to it."""
    copies, wanted = plan.map.table, plan.target.table
    if plan.rank is not None:
        to, of = global_ranks(plan.target, plan.target_ranks), global_ranks(plan.source, plan.source_ranks)
        here = to[copies.columns.dom_box] == plan.rank
        if not (here | (of[copies.columns.cod_box] == plan.rank)).all():
            raise InvalidMapError(f"a plan of rank {plan.rank} alone has copies between other ranks")
        copies, wanted = copies.take(here), wanted.take(to[wanted.columns.dom_box] == plan.rank)
    if plan.missing == "error" and copies.size != wanted.size:
        raise InvalidMapError(f"the copies write {copies.size} of the {wanted.size} slots of the target")


def _global(ranks: RankMap, rank: int) -> int:
    if ranks is None:
        return rank
    found = dict(ranks).get(as_int(rank, "a rank"))
    if found is None:
        raise InvalidMapError(f"the layout has ranks {[r for r, _ in ranks][:8]}, not {rank}")
    return found


class Copies(Sequence[Copy]):
    """The pieces of a plan's map read as copies."""

    __slots__ = ("_map",)

    def __init__(self, m: AffineMap) -> None:
        self._map = m

    def __len__(self) -> int:
        return len(self._map)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return tuple(self[i] for i in range(*k.indices(len(self))))
        p = self._map.pieces[k]
        return Copy(p.shape, p.codomain, p.domain, p.scale)

    def __iter__(self) -> Iterator[Copy]:
        return (Copy(p.shape, p.codomain, p.domain, p.scale) for p in self._map.pieces)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (Copies, tuple, list)) and tuple(self) == tuple(other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))


@struct
class Entry:
    """One target tensor of a tree plan: its name, the source tensors it is made of, its plan.

    The plan's source boxes have the names of the layout for one source; of several, their position goes
    before it: ``"0"``, ``"1.buffer"``.
    """

    target: str
    sources: tuple[str, ...]
    plan: TransferPlan

    def source_name(self, box_name: str) -> str:
        """The tensor behind a source box of the plan."""
        return self.sources[int(box_name.partition(".")[0]) if len(self.sources) > 1 else 0]

    def inner_name(self, box_name: str) -> str:
        """The name of a source box of the plan in the layout of its tensor."""
        return box_name.partition(".")[2] if len(self.sources) > 1 else box_name


@struct
class TreePlan:
    """Plans for a tree of tensors. Equal layout pairs share one plan object.

    ``tied`` pairs names of further target tensors with the name whose data they share.
    """

    entries: tuple[Entry, ...]
    tied: tuple[tuple[str, str], ...] = ()

    def __len__(self) -> int:
        return sum(len(e.plan) for e in self.entries)

    def __repr__(self) -> str:
        distinct = len({id(e.plan) for e in self.entries})
        return f"<TreePlan of {len(self.entries)} tensors, {len(self)} copies, {distinct} distinct plans>"

    @property
    def plans(self) -> dict[str, TransferPlan]:
        """The plan of each target tensor, by name, in a dict of the caller's own."""
        return {e.target: e.plan for e in self.entries}

    @cached_property
    def stats(self) -> Stats:
        """Counts added up over the tensors, in elements."""
        return Stats.total(e.plan.stats for e in self.entries)

    @cached_property
    def digest(self) -> str:
        """A hex name of the question: every tensor's name, sources and digest."""
        lines = [repr((e.target, e.sources, e.plan.digest)) for e in self.entries]
        return hashlib.sha256("\n".join([*lines, repr(self.tied)]).encode()).hexdigest()


def as_tree(plan: TransferPlan | TreePlan) -> TreePlan:
    """A single plan as a tree of one nameless tensor."""
    if isinstance(plan, TreePlan):
        return plan
    if not isinstance(plan, TransferPlan):
        raise InvalidMapError(f"a TransferPlan or a TreePlan is needed, got {type(plan).__name__}: see plan")
    return TreePlan((Entry("", ("",), plan),))
