"""Placements: how people say a layout. Plain values; ``layout`` lowers them to maps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any, TypeAlias

from .._errors import InvalidMapError
from .._struct import struct
from ..maps import AffineMap
from ..maps._piece import as_scale
from ..maps._reading import as_int, by_position, listed, one_of

ByRank: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]

MOST_EXPERTS = 1 << 23  # of one placement: as many as the pieces that Limits allows
RULES = ("chunk", "balanced", "exact", "pad")


@struct
class Placement:
    """Base of all placements."""


@struct
class Replicate(Placement):
    """Every rank holds the whole tensor, stored as ``element * scale`` (exact rational).

    >>> from fractions import Fraction
    >>> Replicate(Fraction(1, 2))
    Replicate(scale=Fraction(1, 2))
    """

    scale: Fraction = Fraction(1)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", as_scale(self.scale))


@struct
class Split(Placement):
    """Consecutive ranges of one axis, one per rank.

    ``sizes`` gives the extents (elements). Otherwise ``rule`` decides, in whole units of
    ``unit`` elements (heads, quantisation blocks):

    * ``"chunk"``: ceil(n / ranks) each until none is left, as ``torch.chunk``;
    * ``"balanced"``: sizes differ by at most one unit, larger ones first;
    * ``"exact"``: equal sizes or an error;
    * ``"pad"``: as chunk, but every shard is allocated the full size.
    """

    axis: int
    sizes: tuple[int, ...] | None = None
    rule: str = "chunk"
    unit: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", as_int(self.axis, "Split.axis"))
        if self.sizes is not None:
            sizes = tuple(as_int(n, "a size of Split") for n in listed(self.sizes, "Split.sizes"))
            if any(n < 0 for n in sizes):
                raise InvalidMapError(f"Split sizes {sizes} contain a negative size")
            object.__setattr__(self, "sizes", sizes)
        one_of(self.rule, RULES, "Split rule")
        object.__setattr__(self, "unit", _positive(self.unit, "Split.unit"))


@struct
class Segments(Placement):
    """Consecutive segments of one axis, each placed on its own; a shard is the concatenation.

    ``parts`` is ``((size, placement), ...)``: the inner placement applies to that segment's
    sub-tensor. Sizes (elements) must add up to the axis.
    """

    axis: int
    parts: tuple[tuple[int, Placement], ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", as_int(self.axis, "Segments.axis"))
        pairs = listed(self.parts, "Segments.parts")
        if not all(isinstance(p, (tuple, list)) and len(p) == 2 for p in pairs):
            raise InvalidMapError(
                "the parts of Segments are (size, placement) pairs, as in Segments(0, ((4, Split(0)),)),"
                f" got {self.parts!r}"
            )
        parts = tuple((as_int(size, "a segment size"), inner) for size, inner in pairs)
        for size, inner in parts:
            if size < 0:
                raise InvalidMapError(f"a segment has the negative size {size}")
            as_placement(inner)
        object.__setattr__(self, "parts", parts)


@struct
class BlockGather(Placement):
    """Blocks of ``size`` elements of one axis, gathered in the listed order by each rank.

    ``by_rank`` maps ranks to block ids (or is a sequence whose positions are ranks). Blocks may
    be repeated on several ranks, left out, or listed in any order; the last may be short.
    """

    axis: int
    size: int
    by_rank: ByRank

    def __init__(
        self, axis: int, size: int, by_rank: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]
    ) -> None:
        object.__setattr__(self, "axis", as_int(axis, "BlockGather.axis"))
        object.__setattr__(self, "size", _positive(size, "BlockGather.size"))
        object.__setattr__(self, "by_rank", as_by_rank(by_rank, "block"))


@struct
class Cyclic(Placement):
    """Block-cyclic: block j of ``block`` elements goes to position ``(j + first) % ranks``.

    The counts are ScaLAPACK's NUMROC.
    """

    axis: int
    block: int
    first: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", as_int(self.axis, "Cyclic.axis"))
        object.__setattr__(self, "block", _positive(self.block, "Cyclic.block"))
        first = as_int(self.first, "Cyclic.first")
        if first < 0:
            raise InvalidMapError(f"Cyclic.first must be at least 0, got {first}")
        object.__setattr__(self, "first", first)


@struct
class StridedSplit(Placement):
    """torch's ``_StridedShard``: the axis is chunked ``split_factor`` ways, each chunk is chunked
    over the ranks, and a shard is the concatenation of its parts."""

    axis: int
    split_factor: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "axis", as_int(self.axis, "StridedSplit.axis"))
        object.__setattr__(self, "split_factor", _positive(self.split_factor, "StridedSplit.split_factor"))


@struct
class Flat(Placement):
    """The tensor flattened, padded to a multiple of lcm(align, ranks) elements, cut evenly (ZeRO)."""

    align: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "align", _positive(self.align, "Flat.align"))


@struct
class Experts(Placement):
    """Which experts (indices of axis 0) each rank holds, in packed order.

    Takes a mapping rank -> expert ids, or a sequence whose positions are ranks. Stored sorted
    by rank: another order of entries is equal, another order of ids within a rank is not.
    Uneven, reordered, empty and replicated placements are ordinary.

    >>> Experts({1: [2, 0], 0: [1]}) == Experts([[1], [2, 0]])
    True
    >>> Experts.uniform(4, 2)
    Experts({0: (0, 1), 1: (2, 3)})
    """

    by_rank: ByRank

    def __init__(self, by_rank: Mapping[int, Iterable[int]] | Sequence[Iterable[int]]) -> None:
        object.__setattr__(self, "by_rank", as_by_rank(by_rank, "expert"))

    @classmethod
    def uniform(cls, experts: int, ranks: int) -> Experts:
        """Contiguous and even: rank r holds experts r*E/R .. (r+1)*E/R - 1."""
        experts, ranks = as_int(experts, "the number of experts"), _positive(ranks, "the number of ranks")
        if max(experts, ranks) > MOST_EXPERTS:
            raise InvalidMapError(f"experts and ranks are at most {MOST_EXPERTS}, got {experts} and {ranks}")
        if experts < 0 or experts % ranks:
            raise InvalidMapError(
                f"cannot place {experts} experts evenly on {ranks} ranks:"
                f" {experts} = {ranks}*{experts // ranks} + {experts % ranks}; list them with Experts(...)"
            )
        each = experts // ranks
        return cls([range(r * each, (r + 1) * each) for r in range(ranks)])

    def __repr__(self) -> str:
        return f"Experts({dict(self.by_rank)})"


@struct
class Custom(Placement):
    """A layout given as a map; its ranks are positions on the mesh axis it is used for."""

    map: AffineMap

    def __post_init__(self) -> None:
        if not isinstance(self.map, AffineMap):
            raise InvalidMapError(f"Custom takes an AffineMap, got {self.map!r}")


def as_by_rank(by_rank: Any, what: str) -> ByRank:
    """Entries sorted by rank; ids are non-negative integers."""
    seen: dict[int, tuple[int, ...]] = {}
    for rank, ids in by_position(by_rank, "by_rank").items():
        rank = as_int(rank, "a rank")
        if rank < 0:
            raise InvalidMapError(f"a rank must be at least 0, got {rank}")
        seen[rank] = tuple(
            as_int(i, f"an {what} id" if what == "expert" else f"a {what} id")
            for i in listed(ids, f"the {what}s of rank {rank}")
        )
        if any(i < 0 for i in seen[rank]):
            raise InvalidMapError(f"rank {rank} lists the negative {what} id {min(seen[rank])}")
    return tuple(sorted(seen.items()))


OF_TORCH = {
    "Shard": "Split({0.dim})",
    "Replicate": "Replicate()",
    "_StridedShard": "StridedSplit({0.dim}, {0.split_factor})",
}


def as_placement(placement: Any) -> Placement:
    """The placement given; what is none is refused, partial sums and those of torch by name."""
    if isinstance(placement, Placement):
        return placement
    name = type(placement).__name__
    if type(placement).__module__.startswith("torch.") and name in OF_TORCH:
        ours = OF_TORCH[name].format(placement)
        raise InvalidMapError(
            f"{placement!r} is a placement of torch: write shardalg.{ours}, or read whole layouts with"
            " shardalg.interop.dtensor.from_placements(shape, mesh, placements)"
        )
    if "partial" in name.lower():
        raise InvalidMapError(
            f"{placement!r} is a pending sum, not a layout: reduce first, then describe the result"
        )
    raise InvalidMapError(
        f"expected a placement (Replicate, Split, Segments, BlockGather, Cyclic, StridedSplit,"
        f" Flat, Experts or Custom), got {placement!r}"
    )


def _positive(value: Any, what: str) -> int:
    number = as_int(value, what)
    if number < 1:
        raise InvalidMapError(f"{what} must be at least 1, got {number}")
    return number
