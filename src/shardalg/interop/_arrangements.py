"""Arrangements: how each tensor of a checkpoint is stored, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from .._errors import InvalidMapError
from .._struct import struct
from ..maps import AffineMap, Space
from ..maps._space import Shape
from ..ops import compose, identity, invert, layout, plan_tree, relabel, reshape
from ..placements import Split
from ..plans import TreePlan


@struct
class Logical:
    """A tensor of a checkpoint as its users name it: dtype (``"bfloat16"``) and shape."""

    dtype: str
    shape: Shape


@struct
class Stored:
    """A tensor as it is stored: its dtype, the layout of its shards, and what it is made of.

    ``joined`` maps the logical tensors it joins (boxes by name) to the stored one; None says that it
    is the logical tensor of the same name.
    """

    dtype: str
    layout: AffineMap
    joined: AffineMap | None = None


Arrangement: TypeAlias = Mapping[str, Stored]


def parts_of(name: str, stored: Stored) -> dict[str, Shape]:
    """The logical tensors in a stored one, and their shapes."""
    if stored.joined is None:
        return {name: stored.layout.logical_shape}
    return {b.name: b.shape for b in stored.joined.domain.boxes}


def logical_tensors(arrangement: Arrangement) -> dict[str, Logical]:
    """The logical tensors of an arrangement; one name in two stored tensors is an error."""
    found: dict[str, Logical] = {}
    for name, stored in arrangement.items():
        for part, shape in parts_of(name, stored).items():
            if part in found:
                raise InvalidMapError(f"{part!r} is stored twice, once of them in {name!r}")
            found[part] = Logical(stored.dtype, shape)
    return found


def elements_of(name: str, stored: Stored) -> AffineMap:
    """From the slots of a stored tensor to the elements of the logical tensors, boxes by name."""
    if stored.joined is None:
        return relabel(stored.layout, codomain={(None, ""): (None, name)})
    return compose(invert(stored.joined), stored.layout)


def even(tensors: Mapping[str, Logical], ranks: int) -> dict[str, Stored]:
    """Each tensor cut, as it lies in a file, into ``ranks`` consecutive ranges of nearly equal size.

    >>> [even({"w": Logical("bool", (3, 5))}, 2)["w"].layout.shard_shape(r) for r in (0, 1)]
    [(8,), (7,)]
    """
    made: dict[Shape, AffineMap] = {}
    for tensor in tensors.values():
        if tensor.shape not in made:
            flat = Space.logical(tensor.shape).size
            ranges = layout((flat,), Split(0, rule="balanced"), ranks=ranks)
            made[tensor.shape] = reshape(ranges, codomain=tensor.shape)
    return {name: Stored(tensor.dtype, made[tensor.shape]) for name, tensor in tensors.items()}


def transfer(source: Arrangement, target: Arrangement) -> TreePlan:
    """The plan that turns one arrangement of a checkpoint into another.

    Raises ``InvalidMapError`` where names, shapes or dtypes of the logical tensors differ.

    >>> tensors = {"w": Logical("float32", (6, 4))}
    >>> transfer(even(tensors, 2), even(tensors, 3)).stats.elements_crossing
    12
    """
    _require_same(logical_tensors(source), logical_tensors(target))
    holder = {part: name for name, stored in source.items() for part in parts_of(name, stored)}
    views = {
        name: _view(name, stored, source, holder)
        for name, stored in target.items()
        if stored.joined is not None or source.get(name) is None or source[name].joined is not None
    }
    return plan_tree(
        {name: s.layout for name, s in source.items()},
        {name: s.layout for name, s in target.items()},
        views=views,
    )


def _require_same(source: Mapping[str, Logical], target: Mapping[str, Logical]) -> None:
    """Raise where two checkpoints do not have the same logical tensors."""
    here, there = sorted(set(source) - set(target)), sorted(set(target) - set(source))
    if here or there:
        raise InvalidMapError(
            f"names on one side only: the source alone has {here[:8]}, the target alone {there[:8]}"
        )
    for name, tensor in source.items():
        if tensor != target[name]:
            raise InvalidMapError(
                f"{name!r} is {tensor.dtype} of shape {tensor.shape} in the source,"
                f" {target[name].dtype} of shape {target[name].shape} in the target"
            )


def _view(name: str, stored: Stored, source: Arrangement, holder: Mapping[str, str]) -> AffineMap:
    """From the stored source tensors that hold its parts to the stored target tensor."""
    parts = parts_of(name, stored)
    holders = list(dict.fromkeys(holder[part] for part in parts))
    held = {part: shape for h in holders for part, shape in parts_of(h, source[h]).items()}
    middle = Space.logical(held)
    taken = _over(middle, *(_opened(h, source[h]) for h in holders))
    made = _joined(name, stored)
    return compose(AffineMap.from_pieces(middle, made.codomain, made.pieces), taken)


def _over(middle: Space, *opened: AffineMap) -> AffineMap:
    """Maps to parts of ``middle`` from boxes of their own as one map."""
    boxes = Space(tuple(b for m in opened for b in m.domain.boxes))
    return AffineMap.from_pieces(boxes, middle, [p for m in opened for p in m.pieces])


def _opened(name: str, stored: Stored) -> AffineMap:
    """From a stored tensor, named, to its parts."""
    return relabel(invert(_joined(name, stored)), domain={(None, ""): (None, name)})


def _joined(name: str, stored: Stored) -> AffineMap:
    """From the parts of a stored tensor, named, to it."""
    if stored.joined is not None:
        return stored.joined
    return relabel(identity(Space.logical(stored.layout.logical_shape)), domain={(None, ""): (None, name)})


def components(source: Arrangement, target: Arrangement) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The smallest groups (source names, target names) that can be moved on their own, in target order."""
    parts = {name: set(parts_of(name, s)) for name, s in source.items()}
    holder = {part: name for name, its in parts.items() for part in its}
    reader = {part: name for name, s in target.items() for part in parts_of(name, s)}
    groups, done = [], set[str]()
    for name in target:
        if name not in done:
            here, there = _reached(name, target, parts, holder, reader)
            done |= set(there)
            groups.append((here, there))
    return groups


def _reached(
    name: str,
    target: Arrangement,
    parts: Mapping[str, set[str]],
    holder: Mapping[str, str],
    reader: Mapping[str, str],
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """All sources and targets linked to one target by shared parts."""
    here, there, pending = dict[str, None](), {name: None}, [name]
    while pending:
        current = pending.pop()
        for part in parts_of(current, target[current]):
            here[holder[part]] = None
            for other in sorted(parts[holder[part]]):
                if reader[other] not in there:
                    there[reader[other]] = None
                    pending.append(reader[other])
    return tuple(here), tuple(there)
