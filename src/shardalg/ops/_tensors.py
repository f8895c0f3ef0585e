"""The meaning of a layout on tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from .._errors import InvalidMapError
from ..maps import AffineMap, Box, Sharded, Space
from ..maps._map import require_map, require_shards
from ..maps._space import BoolArray, Shape, as_int, by_key, describe_key, index_of
from ._blocks import Tensor, bits, block, flat, is_torch, scaled, write, zeros
from ._holders import holders


def extract(layout: AffineMap, full: Tensor | Mapping[str, Tensor], rank: int | None = None) -> Any:
    """The shards that a layout gives: ``{rank: shard}``, or one rank's shard.

    ``full`` is the logical tensor, or ``{name: tensor}`` where the layout has several; a
    rank with several boxes gets ``{name: shard}``. Shards are fresh, and zero where a slot holds no
    element; scaled slots hold ``element * scale``. Works on torch tensors and NumPy arrays.

    ``rebuild(L, extract(L, x)) == x`` wherever every element is held.

    Raises ``InvalidMapError`` where names, shapes or dtypes do not fit the layout, ``UnsupportedError`` for
    integers and bools under a scale.

    Cost: the elements; a view and a copy per piece.

    >>> import numpy as np
    >>> from shardalg import layout, Split
    >>> extract(layout((5,), Split(0), ranks=2), np.arange(5))
    {0: array([0, 1, 2]), 1: array([3, 4])}
    """
    require_shards(layout, "the layout of extract")
    tensors = by_name(layout.codomain, full, "the logical tensor")
    if rank is not None:
        layout.domain.boxes_of(as_int(rank, "rank")) or layout.domain.index(rank)
        return _shard(layout, tensors, rank)
    return {r: _shard(layout, tensors, r) for r in layout.ranks}


def _shard(layout: AffineMap, tensors: Mapping[str, Tensor], rank: int) -> Any:
    sample = next(iter(tensors.values()))
    boxes = [(i, b) for i, b in enumerate(layout.domain.boxes) if b.rank == rank]
    sources = {name: flat(t) for name, t in tensors.items()}
    shards = {}
    for i, b in boxes:
        its = list(strips(layout, dom_box=i))
        like = tensors[its[0].element.name] if its else sample
        shard = zeros(like, b.shape)
        out = shard.reshape(-1)
        for s in its:
            _require_dtype(tensors[s.element.name], like, s.element, s.slot)
            values = block(sources[s.element.name], s.shape, s.element_strides, s.element_offset)
            write(out, s.shape, s.slot_strides, s.slot_offset, scaled(values, *s.scale))
        shards[b.name] = shard
    return shards[""] if list(shards) == [""] else shards


class Strip(NamedTuple):
    """One piece as plain numbers: a block of slots and its block of elements."""

    shape: Shape
    slot: Box
    slot_offset: int
    slot_strides: Shape
    element: Box
    element_offset: int
    element_strides: Shape
    scale: tuple[int, int]


def strips(m: AffineMap, dom_box: int | None = None) -> Iterator[Strip]:
    """The pieces of a map (from one box of its domain) as plain numbers."""
    c = m.table.columns
    picked = range(len(m)) if dom_box is None else np.flatnonzero(c.dom_box == dom_box).tolist()
    for k in picked:
        live = c.shape[:, k] > 1
        shape, ds, cs = (tuple(x[live, k].tolist()) for x in (c.shape, c.dom_strides, c.cod_strides))
        scale = (int(c.numerator[k]), int(c.denominator[k]))
        slot, element = m.domain.boxes[int(c.dom_box[k])], m.codomain.boxes[int(c.cod_box[k])]
        yield Strip(shape, slot, int(c.dom_offset[k]), ds, element, int(c.cod_offset[k]), cs, scale)


def rebuild(layout: AffineMap, shards: Mapping[int, Any]) -> Any:
    """The logical tensor (or ``{name: tensor}``) that shards ``{rank: shard}`` hold.

    Elements nobody holds are zero. Replicas must agree: they are compared as bytes where
    their scales are equal, and the first disagreement raises ``InvalidMapError`` naming the
    ranks and the element. Every rank of the layout must be given.

    Cost: the elements; replicas are compared, not copied twice.

    >>> import numpy as np
    >>> from shardalg import layout, Replicate
    >>> rebuild(layout((2,), Replicate(), ranks=2), {0: np.array([1, 2]), 1: np.array([1, 2])})
    array([1, 2])
    """
    require_shards(layout, "the layout of rebuild")
    boxes = _boxes(layout, shards)
    sample = next(iter(boxes.values()), None)
    if sample is None:
        raise InvalidMapError("rebuild needs at least one shard")
    full: dict[str, Tensor] = {}
    once = layout.injective
    for b in layout.codomain.boxes:
        its = [s for s in strips(layout) if s.element.name == b.name]
        its = its if once else [part for s in its for part in _apart(s)]
        like = boxes[its[0].slot.key] if its else sample
        full[b.name] = _rebuilt(layout, b, its, boxes, like, once)
    return full[""] if list(full) == [""] else full


def _apart(s: Strip) -> Iterator[Strip]:
    """A strip in parts that hold no element twice, so that its own replicas are compared too."""
    span, twice = 0, []
    for k in sorted(range(len(s.shape)), key=lambda k: abs(s.element_strides[k])):
        step = abs(s.element_strides[k])
        if step > span:
            span += step * (s.shape[k] - 1)
        else:
            twice.append(k)
    rest = [k for k in range(len(s.shape)) if k not in twice]
    shape, slots, elements = (tuple(x[k] for k in rest) for x in (s.shape, s.slot_strides, s.element_strides))
    for index in product(*(range(s.shape[k]) for k in twice)):
        yield s._replace(
            shape=shape, slot_strides=slots, element_strides=elements,
            slot_offset=s.slot_offset + sum(i * s.slot_strides[k] for i, k in zip(index, twice)),
            element_offset=s.element_offset + sum(i * s.element_strides[k] for i, k in zip(index, twice)),
        )  # fmt: skip


def _rebuilt(
    layout: AffineMap, b: Box, its: list[Strip], boxes: Mapping[Any, Tensor], like: Tensor, once: bool
) -> Tensor:
    tensor = zeros(like, b.shape)
    out = tensor.reshape(-1)
    seen: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # per scale: who is written, and as what
    done = None if once else np.zeros(b.size, bool)
    for s in its:
        _require_dtype(boxes[s.slot.key], like, s.slot, b)
        stored = block(flat(boxes[s.slot.key]), s.shape, s.slot_strides, s.slot_offset)
        values = scaled(stored, s.scale[1], s.scale[0])
        if done is not None:
            held, kept = seen.setdefault(s.scale, (np.zeros(b.size, bool), zeros(like, (b.size,))))
            mine = block(held, s.shape, s.element_strides, s.element_offset)
            _compare(layout, s, mine, block(kept, s.shape, s.element_strides, s.element_offset), stored)
            write(kept, s.shape, s.element_strides, s.element_offset, stored)
            mine[...] = True
            fresh = block(done, s.shape, s.element_strides, s.element_offset)
            if len(seen) > 1 and fresh.any():  # the same element at another scale: the first stands
                old = block(out, s.shape, s.element_strides, s.element_offset)
                values = _where(fresh, old, values)
            fresh[...] = True
        write(out, s.shape, s.element_strides, s.element_offset, values)
    return tensor


def _where(mask: BoolArray, old: Tensor, new: Tensor) -> Tensor:
    """``old`` where the mask is set, ``new`` elsewhere."""
    if not is_torch(old):
        return np.where(mask, old, new)
    chosen = new.clone()
    picked = new.new_tensor(mask.copy()).bool() if mask.ndim else bool(mask)
    if isinstance(picked, bool):
        return old.clone() if picked else chosen
    chosen[picked] = old[picked]
    return chosen


def _compare(layout: AffineMap, s: Strip, held: Any, kept: Tensor, stored: Tensor) -> None:
    if not held.any():
        return
    a, b = _plain_bits(kept), _plain_bits(stored)
    differs = (a != b).any(axis=-1) if a.ndim > held.ndim else a != b
    wrong = np.argwhere(held & differs)
    if not len(wrong):
        return
    index = wrong[0].tolist()
    element = s.element_offset + sum(i * t for i, t in zip(index, s.element_strides))
    ranks = holders(layout, element, name=s.element.name)
    raise InvalidMapError(
        f"replicas differ: ranks {ranks} hold element {element}"
        f" (index {index_of(element, s.element.shape)}) of {describe_key(s.element.key)},"
        f" and rank {s.slot.rank} stores other bytes for it than rank {ranks[0]}"
    )


def _plain_bits(x: Tensor) -> Any:
    raw = bits(x if is_torch(x) else np.ascontiguousarray(x))
    return raw.cpu().numpy() if is_torch(raw) else raw.reshape(x.shape + raw.shape[x.ndim :])


def sharded(layout: AffineMap, shards: Mapping[int, Any]) -> Sharded:
    """Shards with their layout. A process gives its own ranks.

    Raises ``InvalidMapError`` for a rank that the layout lacks and for a shard of another shape.

    Cost: a look at each shard's shape.

    >>> import numpy as np
    >>> from shardalg import layout, Split, tree_leaves
    >>> halves = sharded(layout((4,), Split(0), ranks=2), {1: np.array([2, 3])})
    >>> tree_leaves(halves)
    [array([2, 3])]
    """
    require_map(layout, "the layout of sharded")
    shards = by_key(shards, "shards by rank")
    extra = [r for r in shards if r not in layout.ranks]
    if extra:
        raise InvalidMapError(f"the layout has ranks {layout.ranks}; shards are given for {extra}")
    for b in layout.domain.boxes:
        if b.rank in shards:
            _shard_of(shards[b.rank], b)
    return Sharded(shards, layout)


# --- checking what is given ---------------------------------------------------------------


def by_name(space: Space, given: Any, what: str) -> dict[str, Tensor]:
    """``{name: tensor}`` for the boxes of a logical space, shapes checked."""
    tensors = dict(given) if isinstance(given, Mapping) else {"": given}
    names = {b.name for b in space.boxes}
    if set(tensors) != names:
        raise InvalidMapError(
            f"{what}: the layout has tensors {sorted(names)}, given were {sorted(map(str, tensors))}"
        )
    for b in space.boxes:
        require_shape(tensors[b.name], b, what)
    return tensors


def _boxes(layout: AffineMap, shards: Mapping[Any, Any]) -> dict[Any, Tensor]:
    """``{box key: tensor}`` for shards by rank, shapes and ranks checked."""
    if not isinstance(shards, Mapping):
        raise InvalidMapError(f"shards are given as {{rank: shard}}, got {type(shards).__name__}")
    missing = [r for r in layout.ranks if r not in shards]
    extra = [r for r in shards if r not in layout.ranks]
    if missing or extra:
        raise InvalidMapError(
            f"the layout has ranks {layout.ranks}; shards are missing for {missing}"
            + (f" and given for {extra}" if extra else "")
        )
    return {b.key: _shard_of(shards[b.rank], b) for b in layout.domain.boxes}


def _shard_of(given: Any, b: Box) -> Tensor:
    """The tensor for one box in what a rank gave, its shape checked."""
    if isinstance(given, Mapping):
        if b.name not in given:
            raise InvalidMapError(f"the shard of {describe_key(b.key)} is missing")
        given = given[b.name]
    require_shape(given, b, "a shard")
    return given


def _require_dtype(x: Tensor, like: Tensor, of: Box, into: Box) -> None:
    """Raise where a tensor would be converted to the dtype of another that lies in the same one."""
    if str(x.dtype) != str(like.dtype):
        raise InvalidMapError(
            f"{describe_key(of.key)} is {x.dtype}, but {describe_key(into.key)} also holds {like.dtype}:"
            " convert one first"
        )


def require_shape(x: Tensor, b: Box, what: str) -> None:
    """Raise unless a tensor has the shape of its box."""
    shape = getattr(x, "shape", None)
    if not isinstance(shape, tuple):
        raise InvalidMapError(f"{what} for {describe_key(b.key)} must be a tensor, got {type(x).__name__}")
    if tuple(shape) != b.shape:
        raise InvalidMapError(
            f"{what} for {describe_key(b.key)} has shape {tuple(shape)}, the layout says {b.shape}"
        )
