"""The adjoint of a transfer: gather becomes scatter-add."""

from __future__ import annotations

from typing import TypeAlias, TypeVar

import numpy as np

from .._errors import InvalidMapError
from ..maps import AffineMap, Box, Space
from ..maps._map import rebox
from ..maps._space import IntArray
from ..maps._table import build, concatenate
from ..plans import Entry, TransferPlan, TreePlan
from ._plan_tree import beside, side_by_side

P = TypeVar("P", TransferPlan, TreePlan)


def adjoint(plan: P) -> P:
    """The backward of a transfer, as a plan: from target slots back to source slots.

    ``<run(p, x), y> = <x, run(adjoint(p), y)>``, exact in integers. The scale stays the same. Where
    several slots arrive at one they are added in (source rank, slot) order, and where nothing arrives
    there is zero. ``adjoint(adjoint(p))`` moves what p moves. Unlike other plans its map may take one
    slot from many, so it lays nothing out: it can be bound and run, not stored.

    For a tree, each source tensor gets one entry that adds what all targets made of it send back.

    Raises ``InvalidMapError`` where targets made of one source name its processes differently.

    Cost: one pass over the copies.

    >>> from shardalg import layout, plan, Replicate
    >>> p = plan(layout((4,), Replicate(), ranks=1), layout((4,), Replicate(), ranks=2))
    >>> [(c.source.rank, c.target.rank) for c in adjoint(p).copies]
    [(0, 0), (1, 0)]
    """
    if isinstance(plan, TreePlan):
        return _of_tree(plan)  # type: ignore[return-value]
    if not isinstance(plan, TransferPlan):
        raise InvalidMapError(f"adjoint takes a TransferPlan or a TreePlan, got {type(plan).__name__}")
    back = AffineMap(plan.map.codomain, plan.map.domain, build(plan.map.table.columns.swapped()))
    return _turned(plan, plan.target, plan.source, back)


def _turned(p: TransferPlan, source: AffineMap, target: AffineMap, m: AffineMap) -> TransferPlan:
    back = p.select.removeprefix("adjoint(").removesuffix(")")
    select = back if p.select != back else f"adjoint({p.select})"
    return TransferPlan(
        source, target, m, select, "leave", p.target_ranks, p.source_ranks, p.rank, p.pairs, p.same_ranks
    )


# --- trees --------------------------------------------------------------------------------

Reader: TypeAlias = tuple[Entry, int]  # an entry, and which of its sources


def _of_tree(tree: TreePlan) -> TreePlan:
    readers: dict[str, list[Reader]] = {}
    for e in tree.entries:
        for k, name in enumerate(e.sources):
            readers.setdefault(name, []).append((e, k))
    return TreePlan(tuple(_entry_of(name, its) for name, its in readers.items()))


def _entry_of(name: str, readers: list[Reader]) -> Entry:
    """What one source tensor gets back from every target that read it."""
    first = readers[0][0].plan
    for e, _ in readers:
        if (e.plan.source_ranks, e.plan.target_ranks) != (first.source_ranks, first.target_ranks):
            raise InvalidMapError(f"the targets made of {name!r} disagree about source_ranks or target_ranks")
    targets = tuple(e.plan.target for e, _ in readers)
    source = targets[0] if len(targets) == 1 else side_by_side(targets)
    tables = []
    for at, reader in enumerate(readers):
        table = build(_copies_of(reader).table.columns.swapped())
        boxes = [b if len(readers) == 1 else beside(b, at) for b in targets[at].domain.boxes]
        numbers = np.array([source.domain.index(*b.key) for b in boxes], np.int64)
        tables.append(build(rebox(table, None, numbers)))
    target = _layout_of(readers[0])
    back = AffineMap(target.domain, source.domain, concatenate(tables))
    return Entry(name, tuple(e.target for e, _ in readers), _turned(first, source, target, back))


def _copies_of(reader: Reader) -> AffineMap:
    """The copies of an entry that read one of its sources, from target slots to that source's."""
    m = reader[0].plan.map
    space, numbers = _own_boxes(reader)
    mine = m.table.take(numbers[m.table.columns.cod_box] >= 0)
    return AffineMap(m.domain, space, build(rebox(mine, None, numbers)))


def _layout_of(reader: Reader) -> AffineMap:
    """The layout of one source of an entry."""
    m = reader[0].plan.source
    space, numbers = _own_boxes(reader)
    mine = m.table.take(numbers[m.table.columns.dom_box] >= 0)
    return AffineMap(space, m.codomain, build(rebox(mine, numbers, None)))


def _own_boxes(reader: Reader) -> tuple[Space, IntArray]:
    """The boxes of one source of an entry under its own names, and their numbers there (-1: not its)."""
    entry, k = reader
    storage = entry.plan.source.domain
    if len(entry.sources) == 1:
        return storage, np.arange(len(storage))
    mine = [b for b in storage.boxes if b.name.partition(".")[0] == str(k)]
    space = Space(tuple(Box(b.shape, b.rank, entry.inner_name(b.name)) for b in mine))
    numbers = np.full(len(storage), -1, np.int64)
    for b in mine:
        numbers[storage.index(*b.key)] = space.index(b.rank, entry.inner_name(b.name))
    return space, numbers
