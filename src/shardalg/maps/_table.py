"""The piece table: the pieces of a map as read-only int64 columns.

Column ``k`` of every array is one piece, so axis arrays are ``[axes, pieces]`` and each
row is contiguous. Pieces with fewer axes than the table are filled with extent 1 and
strides 0 at the end. A table is always in *normal form*:

* no empty piece, no unit axis and no axis with both strides 0;
* each axis is flipped so that its domain stride is positive (its codomain stride where
  the domain stride is 0);
* axes are sorted by domain stride, then codomain stride, both descending, and an axis
  that continues its inner neighbour on both sides is merged with it;
* pieces are sorted by domain box, domain offset, codomain box, codomain offset, rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from ._space import BoolArray, IntArray

HEAD = 6  # domain box, domain offset, codomain box, codomain offset, numerator, denominator


class Columns(NamedTuple):
    """Pieces before normalisation: what a table is built from. Side 0 is the domain, 1 the codomain."""

    dom_box: IntArray
    dom_offset: IntArray
    cod_box: IntArray
    cod_offset: IntArray
    numerator: IntArray
    denominator: IntArray
    shape: IntArray
    dom_strides: IntArray
    cod_strides: IntArray

    def side(self, k: int) -> tuple[IntArray, IntArray, IntArray]:
        """The boxes, offsets and strides of one side."""
        if k == 0:
            return self.dom_box, self.dom_offset, self.dom_strides
        return self.cod_box, self.cod_offset, self.cod_strides

    def swapped(self) -> Columns:
        """The sides exchanged, the scales as they were."""
        return self._replace(
            dom_box=self.cod_box, dom_offset=self.cod_offset, dom_strides=self.cod_strides,
            cod_box=self.dom_box, cod_offset=self.dom_offset, cod_strides=self.dom_strides,
        )  # fmt: skip


class PieceTable:
    """Pieces in normal form behind equality and hash; ``rows`` is ``[6 + 3 * axes, pieces]``.

    A table may be *unwritten*: its number of pieces and of pairs are known, and its rows are
    written when they are first asked for (plans in product form).
    """

    __slots__ = ("_count", "_hash", "_most_axes", "_rows", "_size", "_write")

    def __init__(self, rows: IntArray) -> None:
        rows = np.ascontiguousarray(rows, dtype=np.int64)
        rows.setflags(write=False)
        self._rows: IntArray | None = rows
        self._count = int(rows.shape[1])
        self._most_axes = (len(rows) - HEAD) // 3
        self._write: Callable[[], PieceTable] | None = None
        self._hash: int | None = None
        self._size: int | None = None

    @classmethod
    def unwritten(cls, count: int, size: int, most_axes: int, write: Callable[[], PieceTable]) -> PieceTable:
        """A table of ``count`` pieces of at most ``most_axes`` axes and ``size`` pairs that ``write``
        makes on demand."""
        table = cls.__new__(cls)
        table._most_axes = most_axes
        table._rows, table._count, table._write = None, count, write
        table._hash, table._size = None, size
        return table

    @property
    def rows(self) -> IntArray:
        if self._rows is None:
            assert self._write is not None
            self._rows, self._write = self._write().rows, None
            assert self._rows.shape[1] == self._count
        return self._rows

    @property
    def axes(self) -> int:
        return (len(self.rows) - HEAD) // 3

    @property
    def nbytes(self) -> int:
        """Bytes that the rows take, or will take at most."""
        return 8 * (HEAD + 3 * self._most_axes) * self._count

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PieceTable):
            return NotImplemented
        return self is other or np.array_equal(self.rows, other.rows)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.rows.shape, self.rows.tobytes()))
        return self._hash

    def __repr__(self) -> str:
        return f"<PieceTable of {len(self)} pieces, {self.axes} axes>"

    def __reduce__(self) -> tuple[type[PieceTable], tuple[IntArray]]:
        return (PieceTable, (np.array(self.rows),))

    @property
    def columns(self) -> Columns:
        r, d = self.rows, self.axes
        head = (r[0], r[1], r[2], r[3], r[4], r[5])
        return Columns(*head, r[HEAD : HEAD + d], r[HEAD + d : HEAD + 2 * d], r[HEAD + 2 * d :])

    @property
    def shape(self) -> IntArray:
        return self.rows[HEAD : HEAD + self.axes]

    @property
    def sizes(self) -> IntArray:
        """Pairs per piece."""
        sizes: IntArray = np.prod(self.shape, axis=0, dtype=np.int64)
        return sizes

    @property
    def size(self) -> int:
        """Pairs in all pieces, exactly."""
        if self._size is None:
            self._size = sum(self.sizes.tolist())
        return self._size

    @property
    def scaled(self) -> bool:
        """Whether any piece has a scale other than 1."""
        return bool((self.rows[4] != self.rows[5]).any())

    def take(self, picked: IntArray | BoolArray | slice) -> PieceTable:
        """The picked pieces, in ascending order of position: still in normal form but for width."""
        return _trimmed(self.rows[:, picked])


def empty_table() -> PieceTable:
    """The table without pieces."""
    return PieceTable(np.zeros((HEAD, 0), np.int64))


def _trimmed(rows: IntArray) -> PieceTable:
    """Drop trailing axes that no piece uses."""
    axes = (len(rows) - HEAD) // 3
    used = axes
    while used and (rows.shape[1] == 0 or (rows[HEAD + used - 1] == 1).all()):
        used -= 1
    if used == axes:
        return PieceTable(rows)
    blocks = [rows[:HEAD]] + [rows[HEAD + i * axes : HEAD + i * axes + used] for i in range(3)]
    return PieceTable(np.concatenate(blocks))


def build(c: Columns) -> PieceTable:
    """A table in normal form from arbitrary columns (bounds already checked)."""
    full = (c.shape > 0).all(axis=0)
    if not full.all():
        c = Columns(*(x[..., full] for x in c))
    return _trimmed(_sorted(_normal_rows(c))) if len(c.dom_box) else empty_table()


def unsorted(c: Columns) -> PieceTable:
    """Non-empty pieces in normal form in the order given, so that positions stay known."""
    return _trimmed(_normal_rows(c))


def _normal_rows(c: Columns) -> IntArray:
    """The rows of non-empty pieces with their axes in normal form."""
    shape, ds, cs, dom_shift, cod_shift = normal_axes(c.shape, c.dom_strides, c.cod_strides)
    head = [
        c.dom_box, c.dom_offset + dom_shift, c.cod_box, c.cod_offset + cod_shift, c.numerator, c.denominator,
    ]  # fmt: skip
    return np.concatenate([np.stack(head), shape, ds, cs]).astype(np.int64, copy=False)


def normal_axes(
    shape: IntArray, ds: IntArray, cs: IntArray
) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Axes of non-empty pieces in normal form, and how far the flips moved each offset."""
    unit = (shape == 1) | ((ds == 0) & (cs == 0))
    shape, ds, cs = (np.where(unit, fill, x) for fill, x in ((1, shape), (0, ds), (0, cs)))
    back = (ds < 0) | ((ds == 0) & (cs < 0))
    dom_shift = cod_shift = np.zeros(shape.shape[1], np.int64)
    if back.any():
        dom_shift = np.where(back, ds * (shape - 1), 0).sum(axis=0)
        cod_shift = np.where(back, cs * (shape - 1), 0).sum(axis=0)
        ds, cs = np.where(back, -ds, ds), np.where(back, -cs, cs)
    if len(shape) > 1:
        shape, ds, cs = _merged(*_ordered(shape, ds, cs))
    return shape, ds, cs, dom_shift, cod_shift


def _ordered(shape: IntArray, ds: IntArray, cs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Axes by descending (domain stride, codomain stride); unit axes come last."""
    falls = (ds[:-1] > ds[1:]) | ((ds[:-1] == ds[1:]) & (cs[:-1] >= cs[1:]))
    if falls.all() and not ((shape[:-1] == 1) & (shape[1:] > 1)).any():
        return shape, ds, cs
    order = np.lexsort((-cs, -ds, shape == 1), axis=0)
    a, b, c = (np.take_along_axis(x, order, axis=0) for x in (shape, ds, cs))
    return a, b, c


def _merged(shape: IntArray, ds: IntArray, cs: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Axes that continue their inner neighbour on both sides become one; the very same arrays
    where none does."""
    fresh = True
    for k in range(len(shape) - 2, -1, -1):
        inner = shape[k + 1]
        joins = (ds[k] == ds[k + 1] * inner) & (cs[k] == cs[k + 1] * inner) & (inner > 1)
        if not joins.any():
            continue
        if fresh:
            shape, ds, cs, fresh = shape.copy(), ds.copy(), cs.copy(), False
            inner = shape[k + 1]
        shape[k] = np.where(joins, shape[k] * inner, shape[k])
        for x in (ds, cs):
            x[k] = np.where(joins, x[k + 1], x[k])
            x[k + 1][joins] = 0
        inner[joins] = 1
    if not fresh and ((shape[:-1] == 1) & (shape[1:] > 1)).any():
        order = np.argsort(shape == 1, axis=0, kind="stable")
        shape, ds, cs = (np.take_along_axis(x, order, axis=0) for x in (shape, ds, cs))
    return shape, ds, cs


def from_ordered(rows: IntArray) -> PieceTable:
    """A table from rows of non-empty pieces whose axes already fall by domain stride: unit axes
    are moved to the end, axes merged, pieces sorted."""
    axes = (len(rows) - HEAD) // 3
    if axes > 1:
        shape, ds, cs = rows[HEAD : HEAD + axes], rows[HEAD + axes : HEAD + 2 * axes], rows[HEAD + 2 * axes :]
        if ((shape[:-1] == 1) & (shape[1:] > 1)).any():
            order = np.argsort(shape == 1, axis=0, kind="stable")
            shape, ds, cs = (np.take_along_axis(x, order, axis=0) for x in (shape, ds, cs))
        merged = _merged(shape, ds, cs)
        if merged[0].base is not rows:
            rows[HEAD:] = np.concatenate(merged)
    return _trimmed(_sorted(rows))


def _sorted(rows: IntArray) -> IntArray:
    """Pieces in ascending order of their columns; ties on the domain are rare and cost more."""
    if rows.shape[1] < 2:
        return rows
    if _rises(rows):
        return rows
    rows = np.take(rows, np.lexsort((rows[1], rows[0])), axis=1)
    if _rises(rows):
        return rows
    return np.take(rows, np.lexsort(rows[::-1]), axis=1)


def _rises(rows: IntArray) -> bool:
    """Whether (domain box, domain offset) rises strictly."""
    box, offset = rows[0], rows[1]
    rises = (box[1:] > box[:-1]) | ((box[1:] == box[:-1]) & (offset[1:] > offset[:-1]))
    return bool(rises.all())


def _widened(table: PieceTable, axes: int) -> IntArray:
    """The rows with axes filled up to ``axes``."""
    d, extra = table.axes, axes - table.axes
    if not extra:
        return table.rows
    r, n = table.rows, len(table)
    ones, zeros = np.ones((extra, n), np.int64), np.zeros((extra, n), np.int64)
    shape, ds, cs = r[HEAD : HEAD + d], r[HEAD + d : HEAD + 2 * d], r[HEAD + 2 * d :]
    return np.concatenate([r[:HEAD], shape, ones, ds, zeros, cs, zeros])


def concatenate(tables: Iterable[PieceTable]) -> PieceTable:
    """One table with the pieces of all, which the caller knows to be disjoint."""
    some = [t for t in tables if len(t)]
    return PieceTable(_sorted(in_order(some).rows)) if len(some) > 1 else in_order(some)


def in_order(tables: Iterable[PieceTable]) -> PieceTable:
    """Pieces one after the other, not sorted again, so that positions stay known."""
    some = [t for t in tables if len(t)]
    if len(some) < 2:
        return some[0] if some else empty_table()
    axes = max(t.axes for t in some)
    return PieceTable(np.concatenate([_widened(t, axes) for t in some], axis=1))
