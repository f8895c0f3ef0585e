"""Affine maps: finite sets of (slot, element, scale) written as strided pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .._errors import InvalidMapError
from .._limits import Budget, Limits, require_limits
from .._struct import struct
from ._piece import Piece, Side
from ._reading import field, listed, rows, scalar
from ._relation import CODOMAIN, DOMAIN, collides, disjoint
from ._space import IntArray, Shape, Space, as_key, describe_key
from ._table import HEAD, Columns, PieceTable, build, concatenate

FORMAT = 1


@struct
class AffineMap:
    """A finite set of strided pieces from slots of ``domain`` to elements of ``codomain``.

    Pieces are pairwise disjoint as sets of (slot, element) pairs and in normal form.
    ``==`` and ``hash`` are structural, on the stored pieces; ``equivalent`` compares the sets.

    >>> m = AffineMap.from_pieces(
    ...     Space.shards({0: (2, 4), 1: (2, 4)}), Space.logical((4, 4)),
    ...     [Piece((2, 4), Side(0, (4, 1), rank=0), Side(0, (4, 1))),
    ...      Piece((2, 4), Side(0, (4, 1), rank=1), Side(8, (4, 1)))])
    >>> m.pieces[1]
    Piece((8,), Side(0, (1,), rank=1), Side(8, (1,)))
    """

    domain: Space
    codomain: Space
    table: PieceTable

    def __post_init__(self) -> None:
        spaces = isinstance(self.domain, Space) and isinstance(self.codomain, Space)
        if not (spaces and isinstance(self.table, PieceTable)):
            raise InvalidMapError(
                "AffineMap takes two spaces and a table of pieces, which this library makes:"
                " write layout(...) or AffineMap.from_pieces(...)"
            )

    @classmethod
    def from_pieces(
        cls, domain: Space, codomain: Space, pieces: Iterable[Piece], *, limits: Limits = Limits()
    ) -> AffineMap:
        """The union of the pieces as a map: normalised, bounds checked, made disjoint.

        Raises ``InvalidMapError`` for a piece whose box is missing or that reaches outside it.
        Empty pieces are dropped and not bounds-checked, but their boxes must exist.
        """
        for word, space in (("domain", domain), ("codomain", codomain)):
            if not isinstance(space, Space):
                raise InvalidMapError(f"the {word} of a map must be a Space, got {space!r}")
        columns = columns_of(domain, codomain, _pieces(pieces))
        check_bounds(domain, codomain, columns)
        table = build(columns)
        single_valued = not collides(table, DOMAIN, limits)
        if not single_valued:
            table = disjoint(table, limits, Budget(limits))
        limits.hold("pieces", len(table))
        return remember(cls(domain, codomain, table), single_valued=single_valued)

    if TYPE_CHECKING:  # installed by ops/_syntax.py

        def __matmul__(self, f: AffineMap) -> AffineMap: ...
        def __or__(self, b: AffineMap) -> AffineMap: ...
        def __and__(self, b: AffineMap) -> AffineMap: ...
        def __sub__(self, b: AffineMap) -> AffineMap: ...
        def __invert__(self) -> AffineMap: ...
        def __call__(
            self, slots: Any, rank: int | None = None, name: str | None = None, *, limits: Limits = ...
        ) -> IntArray: ...

    # --- reading ---

    def __len__(self) -> int:
        return len(self.table)

    @property
    def size(self) -> int:
        """(slot, element) pairs in the map."""
        return self.table.size

    @cached_property
    def pieces(self) -> Sequence[Piece]:
        """The pieces as objects, made on demand."""
        return Pieces(self, np.arange(len(self.table)))

    def pieces_of(self, rank: int | None, name: str | None = None) -> tuple[Piece, ...]:
        """The pieces whose domain box has this rank (and name, where one is given)."""
        rank, asked = as_key((rank, "" if name is None else name))
        boxes = [i for i, b in enumerate(self.domain.boxes) if b.rank == rank and name in (None, b.name)]
        if not boxes:
            self.domain.index(rank, asked)
        return tuple(Pieces(self, np.flatnonzero(np.isin(self.table.columns.dom_box, boxes))))

    @cached_property
    def single_valued(self) -> bool:
        """Whether every slot has at most one element and one scale; decided once, remembered."""
        return not collides(self.table, DOMAIN)

    @cached_property
    def injective(self) -> bool:
        """Whether every element sits in at most one slot, at one scale; decided once, remembered."""
        return not collides(self.table, CODOMAIN)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a box in the domain, also where nothing is mapped."""
        return self.domain.ranks

    @property
    def logical_shape(self) -> Shape:
        """The shape of the one logical tensor of a layout."""
        if len(self.codomain) != 1:
            raise InvalidMapError(f"logical_shape needs one logical tensor, the codomain is {self.codomain}")
        return self.codomain.boxes[0].shape

    def shard_shape(self, rank: int, name: str = "") -> Shape:
        """The shape of one rank's shard."""
        return self.domain.shape(rank, name)

    def __repr__(self) -> str:
        pieces = ", ".join(map(repr, self.pieces))
        return f"AffineMap.from_pieces({self.domain!r}, {self.codomain!r}, [{pieces}])"

    # --- plain data ---

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, with a format version."""
        return {
            "format": "shardalg.map", "version": FORMAT,
            "domain": self.domain.to_dict(), "codomain": self.codomain.to_dict(),
            "pieces": self.table.rows.T.tolist(),
        }  # fmt: skip

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], *, limits: Limits = Limits()) -> AffineMap:
        """The map written by ``to_dict``; everything is checked again."""
        check_format(data, "shardalg.map")
        require_limits(limits)
        domain, codomain = (field(data, word, _space) for word in ("domain", "codomain"))
        limits.hold("pieces", len(field(data, "pieces", listed)))
        pieces = [_piece_from_row(domain, codomain, row) for row in field(data, "pieces", rows)]
        return cls.from_pieces(domain, codomain, pieces, limits=limits)


def _space(data: Any, what: str) -> Space:
    try:
        return Space.from_dict(data)
    except InvalidMapError as error:
        raise InvalidMapError(f"{what} is no space: {error}") from None


def check_format(data: Mapping[str, Any], kind: str) -> None:
    """Refuse plain data of another kind or of a newer version."""
    if not isinstance(data, Mapping) or data.get("format") != kind:
        found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
        raise InvalidMapError(f"expected plain data of format {kind!r}, got {found!r}")
    if data.get("version") != FORMAT:
        raise InvalidMapError(
            f"{kind} version {data.get('version')!r} cannot be read; this release reads version {FORMAT}"
        )


def _piece_from_row(domain: Space, codomain: Space, row: Sequence[int]) -> Piece:
    if len(row) < HEAD or (len(row) - HEAD) % 3:
        raise InvalidMapError(f"a piece row has {HEAD} + 3 * axes numbers, got {len(row)}")
    if not (0 <= row[0] < len(domain) and 0 <= row[2] < len(codomain)) or row[5] < 1:
        raise InvalidMapError(f"a piece row names boxes {row[0]}, {row[2]} and denominator {row[5]}")
    d = (len(row) - HEAD) // 3
    a, b = domain.boxes[row[0]], codomain.boxes[row[2]]
    shape, ds, cs = (tuple(row[HEAD + i * d : HEAD + (i + 1) * d]) for i in range(3))
    return Piece(
        shape, Side(row[1], ds, a.rank, a.name), Side(row[3], cs, b.rank, b.name), Fraction(row[4], row[5])
    )


class Pieces(Sequence[Piece]):
    """Some pieces of a map as a sequence of ``Piece`` objects made on demand."""

    __slots__ = ("_map", "_picked")

    def __init__(self, m: AffineMap, picked: IntArray) -> None:
        self._map, self._picked = m, picked

    def __len__(self) -> int:
        return len(self._picked)

    def __getitem__(self, k: Any) -> Any:
        if isinstance(k, slice):
            return tuple(self._piece(int(i)) for i in self._picked[k])
        return self._piece(int(self._picked[k]))

    def __iter__(self) -> Iterator[Piece]:
        return (self._piece(int(i)) for i in self._picked)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, (tuple, list, Pieces)):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return repr(tuple(self))

    def _piece(self, k: int) -> Piece:
        c = self._map.table.columns
        live = c.shape[:, k] > 1
        a = self._map.domain.boxes[int(c.dom_box[k])]
        b = self._map.codomain.boxes[int(c.cod_box[k])]
        shape, ds, cs = (tuple(x[live, k].tolist()) for x in (c.shape, c.dom_strides, c.cod_strides))
        return Piece(
            shape,
            Side(int(c.dom_offset[k]), ds, a.rank, a.name),
            Side(int(c.cod_offset[k]), cs, b.rank, b.name),
            Fraction(int(c.numerator[k]), int(c.denominator[k])),
        )


def _pieces(pieces: Iterable[Piece]) -> list[Piece]:
    if scalar(pieces):
        raise InvalidMapError(f"a map is made of pieces, got {pieces!r}")
    its = list(pieces)
    for p in its:
        if not isinstance(p, Piece):
            raise InvalidMapError(f"a map is made of pieces, got {p!r}")
    return its


def columns_of(domain: Space, codomain: Space, pieces: Sequence[Piece]) -> Columns:
    """The columns of piece objects, each placed in its boxes."""
    axes = max((len(p.shape) for p in pieces), default=0)
    rows = []
    for p in pieces:
        pad = axes - len(p.shape)
        head = [
            domain.index(*p.domain.key), p.domain.offset, codomain.index(*p.codomain.key),
            p.codomain.offset, p.scale.numerator, p.scale.denominator,
        ]  # fmt: skip
        if not p.size:  # dropped later: its addresses mean nothing
            rows.append(head[:1] + [0] + head[2:3] + [0, 1, 1] + [0] * axes + [0] * axes * 2)
            continue
        fill = [0] * pad
        rows.append([*head, *p.shape, *[1] * pad, *p.domain.strides, *fill, *p.codomain.strides, *fill])
    table = np.array(rows, np.int64).reshape(len(rows), HEAD + 3 * axes).T
    if pieces and axes == 0 and not all(p.size for p in pieces):
        table = table[:, [bool(p.size) for p in pieces]]
    shape, blocks = table[HEAD : HEAD + axes], table[HEAD + axes :]
    left = (table[0], table[1], table[2], table[3], table[4], table[5])
    return Columns(*left, shape, blocks[:axes], blocks[axes:])


def check_bounds(domain: Space, codomain: Space, c: Columns) -> None:
    """Raise for the first piece that reaches outside its box on either side."""
    live = (c.shape > 0).all(axis=0)
    for word, space, box, offset, strides in (
        ("domain", domain, c.dom_box, c.dom_offset, c.dom_strides),
        ("codomain", codomain, c.cod_box, c.cod_offset, c.cod_strides),
    ):
        steps = strides * (c.shape - 1)
        low = offset + np.minimum(steps, 0).sum(axis=0)
        high = offset + np.maximum(steps, 0).sum(axis=0)
        out = live & ((low < 0) | (high >= space.sizes[box]))
        if out.any():
            k = int(np.flatnonzero(out)[0])
            b = space.boxes[int(box[k])]
            raise InvalidMapError(
                f"piece {k} of shape {tuple(c.shape[:, k].tolist())} covers {word} addresses"
                f" {int(low[k])}..{int(high[k])}, but {describe_key(b.key)} of shape {b.shape}"
                f" holds {b.size} slots, 0..{b.size - 1}"
            )


def require_map(m: object, what: str) -> None:
    """Raise unless ``m`` is a map, with the way to one."""
    if isinstance(m, AffineMap):
        return
    hint = (
        "use plan_tree for several tensors"
        if isinstance(m, Mapping)
        else "probe(function, shape, ranks) finds the layout of a function"
        if callable(m)
        else "lower a placement with layout(shape, ...)"
    )
    raise InvalidMapError(f"{what} must be an AffineMap, got {type(m).__name__}: {hint}")


def require_shards(m: AffineMap, what: str) -> None:
    """Raise unless ``m`` is a map from shards of ranks, as every layout is."""
    require_map(m, what)
    if not m.domain.ranked:
        raise InvalidMapError(f"{what} is no layout: that starts from shards of ranks, not from {m.domain}")


def remember(m: AffineMap, **known: bool | None) -> AffineMap:
    """Note what is known about ``m`` (``single_valued=``, ``injective=``), so that nobody
    computes it again. ``None`` and False leave the question open."""
    m.__dict__.update({name: True for name, value in known.items() if value})
    return m


def inherit(m: AffineMap, *wholes: AffineMap) -> AffineMap:
    """Note on ``m`` what is known about all the maps it is made of."""
    return remember(m, **{q: all(known(w, q) for w in wholes) for q in ("single_valued", "injective")})


def decided(m: AffineMap, side: int, limits: Limits) -> bool:
    """Whether no two pairs of ``m`` share an address on one side: ``single_valued`` of the domain,
    ``injective`` of the codomain, decided within limits and remembered."""
    name = "single_valued" if side == DOMAIN else "injective"
    if name not in m.__dict__:
        m.__dict__[name] = not collides(m.table, side, limits)
    return bool(m.__dict__[name])


def known(m: AffineMap, name: str) -> bool:
    """Whether the answer True to a question is already known."""
    return bool(m.__dict__.get(name))


def from_columns(domain: Space, codomain: Space, columns: Columns) -> AffineMap:
    """A map from columns that the caller knows to be in bounds and disjoint."""
    return AffineMap(domain, codomain, build(columns))


def full(space: Space) -> AffineMap:
    """The identity on every slot of a space."""
    n = len(space)
    box = np.arange(n, dtype=np.int64)
    zero, one = np.zeros(n, np.int64), np.ones(n, np.int64)
    flat = one[None]
    return from_columns(space, space, Columns(box, zero, box, zero, one, one, space.sizes[None], flat, flat))


def with_table(m: AffineMap, *tables: PieceTable) -> AffineMap:
    """A map between the spaces of ``m`` with the pieces of the (disjoint) tables."""
    return AffineMap(m.domain, m.codomain, concatenate(tables))


def rebox(table: PieceTable, dom: IntArray | None, cod: IntArray | None) -> Columns:
    """The columns of a table with its boxes renumbered."""
    c = table.columns
    return c._replace(
        dom_box=c.dom_box if dom is None else dom[c.dom_box],
        cod_box=c.cod_box if cod is None else cod[c.cod_box],
    )
