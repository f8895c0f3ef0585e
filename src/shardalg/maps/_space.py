"""Spaces: sets of boxes of slots, keyed by rank, tensor name, or both."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from .._errors import InvalidMapError
from .._limits import BOUND
from .._struct import struct
from ._reading import as_int as as_int
from ._reading import as_text, field, records
from ._reading import by_key as by_key
from ._reading import by_position as by_position
from ._reading import listed as listed

Shape: TypeAlias = tuple[int, ...]
Key: TypeAlias = tuple[int | None, str]
IntArray: TypeAlias = npt.NDArray[np.int64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]

MOST_RANK = 2**31 - 1  # keys made of a rank and a position stay below 2**62


def as_shape(shape: Any, what: str = "shape") -> Shape:
    """A checked tuple of extents; an int means one axis."""
    if isinstance(shape, (int, np.integer)) and not isinstance(shape, bool):
        shape = (shape,)
    word = f"each extent of {what}"
    extents = tuple(as_int(n, word) for n in listed(shape, what))
    if any(n < 0 for n in extents):
        raise InvalidMapError(f"{what} {extents} has a negative extent")
    if math.prod(max(n, 1) for n in extents) > BOUND:
        raise InvalidMapError(f"{what} {extents} holds more than 2**62 - 2 = {BOUND} elements")
    return extents


def row_major(shape: Sequence[int]) -> Shape:
    """Strides in elements of a contiguous row-major box.

    >>> row_major((2, 3, 4))
    (12, 4, 1)
    """
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * max(shape[k + 1], 1)
    return tuple(strides)


def index_of(address: int, shape: Shape) -> Shape:
    """The index of a flat address in a row-major box.

    >>> index_of(7, (2, 3, 4))
    (0, 1, 3)
    """
    index = []
    for stride in row_major(shape):
        at, address = divmod(address, stride)
        index.append(at)
    return tuple(index)


@struct
class Box:
    """A row-major block of slots with its key: a rank, a tensor name, or both."""

    shape: Shape
    rank: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "shape", as_shape(self.shape))
        if self.rank is not None:
            object.__setattr__(self, "rank", as_int(self.rank, "a rank"))
            if not 0 <= self.rank <= MOST_RANK:
                raise InvalidMapError(f"a rank must be at least 0 and below 2**31, got {self.rank}")
        if not isinstance(self.name, str):
            raise InvalidMapError(f"a tensor name must be a str, got {self.name!r}")

    def __repr__(self) -> str:
        return f"Box({self.shape}{key_text(self.key)})"

    @property
    def key(self) -> Key:
        return (self.rank, self.name)

    @cached_property
    def size(self) -> int:
        """Slots in the box, in elements."""
        return math.prod(self.shape)


def as_key(key: Any) -> Key:
    """The (rank, name) of a box from a rank, a name or both."""
    if isinstance(key, tuple):
        if len(key) != 2:
            raise InvalidMapError(f"the key of a box is a rank, a name or (rank, name), got {key!r}")
        rank, name = key
    else:
        rank, name = (None, key) if isinstance(key, str) else (key, "")
    return None if rank is None else as_int(rank, "the rank of a key"), as_text(name, "the name of a key")


def as_range(cut: slice, n: int) -> range:
    """The indices of an axis of ``n`` elements that a slice keeps, its ends clipped."""
    try:
        return range(*cut.indices(n))
    except (TypeError, ValueError) as error:
        raise InvalidMapError(f"{cut} is no range of an axis: {error}") from None


def key_text(key: Key) -> str:
    """A key as the last arguments of a repr: ``, rank=3, name='q'``."""
    rank = "" if key[0] is None else f", rank={key[0]}"
    return rank + ("" if not key[1] else f", name={key[1]!r}")


def read_only(numbers: IntArray) -> IntArray:
    """The array itself, from now on refusing to be written on."""
    numbers.setflags(write=False)
    return numbers


def _order(box: Box) -> tuple[int, str]:
    return (-1 if box.rank is None else box.rank, box.name)


def describe_key(key: Key) -> str:
    """A key in words: ``rank 3``, ``'q'``, ``rank 3, 'q'`` or ``the tensor``."""
    rank, name = key
    words = ([] if rank is None else [f"rank {rank}"]) + (
        [] if isinstance(name, str) and not name else [repr(name)]
    )
    return ", ".join(words) or "the tensor"


@struct
class Space:
    """A set of boxes, sorted by key.

    >>> Space.shards({0: (4, 8), 1: (4, 8)}).size
    64
    >>> Space.logical((8, 8))
    Space.logical((8, 8))
    >>> Space.logical({"q": (8, 4), "k": (2, 4)}).names
    ('k', 'q')
    """

    boxes: tuple[Box, ...]

    def __post_init__(self) -> None:
        given = listed(self.boxes, "the boxes of a space")
        for b in given:
            if not isinstance(b, Box):
                raise InvalidMapError(f"a space is made of boxes, got {b!r}: see Space.shards, Space.logical")
        boxes = tuple(sorted(given, key=_order))
        object.__setattr__(self, "boxes", boxes)
        for a, b in zip(boxes, boxes[1:]):
            if a.key == b.key:
                raise InvalidMapError(
                    f"two boxes of a space share the key {describe_key(a.key)}: {a.shape} and {b.shape}"
                )

    @classmethod
    def shards(cls, shapes: Mapping[int, Any] | Sequence[Any]) -> Space:
        """One box per rank (``{rank: shape}``, or a sequence of shapes), or named boxes
        per rank (``{rank: {name: shape}}``)."""
        boxes = []
        for rank, shape in by_position(shapes, "the shapes of shards").items():
            if rank is None:
                raise InvalidMapError("a shard needs a rank, got None; use Space.logical")
            named = shape if isinstance(shape, Mapping) else {"": shape}
            boxes += [Box(s, rank, name) for name, s in named.items()]
        return cls(tuple(boxes))

    @classmethod
    def logical(cls, shape: Any) -> Space:
        """One box without a rank, or one per name (``{name: shape}``)."""
        named = shape if isinstance(shape, Mapping) else {"": shape}
        return cls(tuple(Box(s, None, name) for name, s in named.items()))

    def __repr__(self) -> str:
        if not self.boxes:
            return "Space(())"
        if not self.ranks:
            shapes: Any = {b.name: b.shape for b in self.boxes}
            return f"Space.logical({shapes[''] if list(shapes) == [''] else shapes})"
        if not self.ranked:
            return f"Space({self.boxes})"
        if all(b.name == "" for b in self.boxes):
            return f"Space.shards({{{', '.join(f'{b.rank}: {b.shape}' for b in self.boxes)}}})"
        nested: dict[int | None, dict[str, Shape]] = {}
        for b in self.boxes:
            nested.setdefault(b.rank, {})[b.name] = b.shape
        return f"Space.shards({nested})"

    def __len__(self) -> int:
        return len(self.boxes)

    def __getstate__(self) -> dict[str, Any]:
        return {"boxes": self.boxes}  # an array that is unpickled could be written on

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Ranks that have a box, ascending."""
        return tuple(dict.fromkeys(b.rank for b in self.boxes if b.rank is not None))

    @cached_property
    def ranked(self) -> bool:
        """Whether every box has a rank: storage, as layouts start from."""
        return all(b.rank is not None for b in self.boxes)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Tensor names, sorted."""
        return tuple(sorted({b.name for b in self.boxes}))

    @cached_property
    def size(self) -> int:
        """Slots in all boxes."""
        return sum(b.size for b in self.boxes)

    @cached_property
    def sizes(self) -> IntArray:
        """Slots per box, in box order."""
        return read_only(np.array([b.size for b in self.boxes], np.int64))

    @cached_property
    def box_ranks(self) -> IntArray:
        """The rank of each box, -1 where it has none."""
        return read_only(np.array([-1 if b.rank is None else b.rank for b in self.boxes], np.int64))

    @cached_property
    def _index(self) -> dict[Key, int]:
        return {b.key: i for i, b in enumerate(self.boxes)}

    def __contains__(self, key: object) -> bool:
        return key in self._index

    def index(self, rank: int | None = None, name: str = "") -> int:
        """Position of the box with this key; a missing key is an error."""
        try:
            found = self._index.get((rank, name))
        except TypeError:  # no key at all, such as a list
            found = None
        if found is None:
            near = ", ".join(describe_key(b.key) for b in self.boxes[:8])
            more = ", ..." if len(self.boxes) > 8 else ""
            raise InvalidMapError(
                f"the space has no box for {describe_key((rank, name))}; it has {near or 'none'}{more}"
            )
        return found

    def box(self, rank: int | None = None, name: str = "") -> Box:
        """The box with this key."""
        return self.boxes[self.index(rank, name)]

    def shape(self, rank: int | None = None, name: str = "") -> Shape:
        """The shape of the box with this key."""
        return self.box(rank, name).shape

    def boxes_of(self, rank: int | None) -> tuple[Box, ...]:
        """The boxes of one rank, in name order."""
        rank = as_key((rank, ""))[0]
        return tuple(b for b in self.boxes if b.rank == rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {"boxes": [[b.rank, b.name, list(b.shape)] for b in self.boxes]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Space:
        """The space written by ``to_dict``; everything is checked again."""
        boxes = field(data, "boxes", records(3))
        return cls(tuple(Box(tuple(listed(shape, "a shape")), rank, name) for rank, name, shape in boxes))
