"""torch's distributed checkpoints for every layout: save in one, load in another.

A state dict holds ``sa.sharded(layout, shards)`` where others hold a DTensor, and these planners save and
load it: ``dcp.save(state, checkpoint_id=..., planner=SavePlanner())``. What is written are ordinary boxes of
the unsharded tensors, so any planner loads them, and ``LoadPlanner`` reads what any planner wrote. Each
process gives the shards of its own ranks; one process may give them all (``no_dist=True``).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_local_load_plan,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Budget, Limits
from ..maps import AffineMap, Piece, Sharded
from ..maps._digits import chain_boxes
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import Shape, row_major
from ..ops import check_layout, is_surjective, layout, plan, sharded
from ..ops._blocks import scaled
from ..placements import Replicate
from ._nearest import nearest

# --- geometry -------------------------------------------------------------------------------


class Chunk(NamedTuple):
    """A box of a tensor and the strided block of one rank's shard that holds it, times ``scale``."""

    offsets: Shape
    sizes: Shape
    rank: int
    slot: int
    strides: Shape
    scale: Fraction

    @property
    def stored(self) -> ChunkStorageMetadata:
        """The box in torch's words."""
        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


def chunks_to_load(m: AffineMap) -> Iterator[Chunk]:
    """Boxes that cover every slot of a layout that holds an element, each slot once.

    >>> from shardalg import Segments, Split
    >>> qk = layout((6, 2), Segments(0, ((4, Split(0)), (2, Split(0)))), ranks=2)
    >>> [(c.offsets, c.sizes, c.slot) for c in chunks_to_load(qk) if c.rank == 1]
    [((2, 0), (2, 2), 0), ((5, 0), (1, 2), 4)]
    """
    _require_one(m)
    for piece in m.pieces:
        yield from _boxes(m, piece, CODOMAIN, m.logical_shape)


def chunks_to_save(m: AffineMap) -> Iterator[Chunk]:
    """Boxes that cover every element of a layout once, each read from one of its slots; ranks that hold
    the same share the work. Raises ``InvalidMapError`` where nobody holds an element.

    >>> [(c.offsets, c.rank) for c in chunks_to_save(layout((4,), Replicate(), ranks=2))]
    [((0,), 0), ((2,), 1)]
    """
    _require_one(m)
    lost = is_surjective(m)
    if not lost:
        raise InvalidMapError(
            f"a checkpoint holds whole tensors, but {lost.reason}; save it in a layout that holds all"
        )
    whole = layout(m.logical_shape, Replicate(), ranks=1)
    file = 1 + max(m.ranks, default=0)  # as a process of its own: no holder is nearer to it
    copies = plan(m, whole, select="balanced", target_ranks=[file]).map
    found = False
    for piece in copies.pieces:
        found = True
        yield from _boxes(copies, piece, DOMAIN, m.logical_shape)
    if not found:  # a tensor without elements is a tensor too
        zero = (0,) * len(m.logical_shape)
        yield Chunk(zero, m.logical_shape, m.ranks[0], 0, zero, Fraction(1))


def _require_one(m: AffineMap) -> None:
    check_layout(m)
    if len(m.codomain) != 1 or any(b.name for b in m.domain.boxes):
        raise UnsupportedError("an entry of a checkpoint is one tensor; give those of a buffer one by one")


def _boxes(m: AffineMap, piece: Piece, side: int, whole: Shape) -> Iterator[Chunk]:
    """One piece as boxes of the tensor, which is on the given side; shards are on the other."""
    one = AffineMap.from_pieces(m.domain, m.codomain, [piece])
    shard, scale = (piece.domain, piece.scale) if side == CODOMAIN else (piece.codomain, 1 / piece.scale)
    assert shard.rank is not None
    blocks = side_blocks(one.table, side, DOMAIN + CODOMAIN - side)
    for start, counts, steps, slot, strides in chain_boxes(blocks, row_major(whole), Budget(Limits())):
        # along an axis that steps over elements, or runs backwards in the shard, every index is a box
        spread = [n if n > 1 and (step != 1 or s < 0) else 1 for n, step, s in zip(counts, steps, strides)]
        sizes = tuple(1 if n > 1 else count for n, count in zip(spread, counts))
        for index in itertools.product(*map(range, spread)):
            offsets = tuple(a + i * step for a, i, step in zip(start, index, steps))
            at = slot + sum(i * s for i, s in zip(index, strides))
            yield Chunk(
                offsets,
                sizes,
                shard.rank,
                at,
                tuple(s if n > 1 else 1 for n, s in zip(sizes, strides)),
                scale,
            )


def _view(entry: Sharded, chunk: Chunk) -> torch.Tensor:
    """The block of a shard, a view where the shard is contiguous."""
    shard: torch.Tensor = entry.shards[chunk.rank].detach().reshape(-1)
    return shard.as_strided(chunk.sizes, chunk.strides, shard.storage_offset() + chunk.slot)


def _entries(state: dict[str, Any], moments: frozenset[str]) -> dict[str, Sharded]:
    """The entries of a state dict that have a layout, checked."""
    found = {name: x for name, x in state.items() if isinstance(x, Sharded)}
    for name, entry in found.items():
        sharded(entry.layout, entry.shards)
        scales = {p.scale for p in entry.layout.pieces} - {1} if name in moments else set()
        if scales:
            raise UnsupportedError(
                f"{name!r} is an optimizer moment over the scale {min(scales)}: it would resume with the"
                " learning rate and epsilon of another scale; leave moments of scaled parameters out"
            )
    return found


# --- planners -------------------------------------------------------------------------------


class SavePlanner(DefaultSavePlanner):
    """Saves entries with a layout as boxes of the unsharded tensor, all others as torch does.

    Every element is written once, by one of its holders; values are written unscaled. ``moments`` names the
    entries that are optimizer moments: those are refused over a scale. Raises ``InvalidMapError`` where
    nobody holds an element, or where a process does not pass the shards of its ranks.
    """

    def __init__(self, *, moments: Iterable[str] = ()) -> None:
        super().__init__()
        self.moments = frozenset(moments)
        self.blocks: dict[tuple[str, Shape], tuple[Sharded, Chunk]] = {}
        self.chunks: dict[str, tuple[Chunk, ...]] = {}

    def create_local_plan(self) -> SavePlan:
        state, ours = self.state_dict, _entries(self.state_dict, self.moments)
        self.state_dict = {name: x for name, x in state.items() if name not in ours}
        others = super().create_local_plan()
        self.state_dict = state
        items = [item for name, entry in ours.items() for item in self._items(name, entry)]
        self.plan = dataclasses.replace(others, items=[*others.items, *items])
        return self.plan

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _require_shards(self.chunks, all_plans)
        return super().create_global_plan(all_plans)

    def _items(self, name: str, entry: Sharded) -> Iterator[WriteItem]:
        """What this process writes of one entry."""
        self.chunks[name] = _named_chunks(name, entry.layout)
        for chunk in self.chunks[name]:
            if chunk.rank in entry.shards:
                self.blocks[name, chunk.offsets] = entry, chunk
                properties = TensorProperties.create_from_tensor(entry.shards[chunk.rank])
                data = TensorWriteData(chunk.stored, properties, torch.Size(entry.layout.logical_shape))
                index = MetadataIndex(name, chunk.offsets)
                yield WriteItem(index, WriteItemType.SHARD, tensor_data=data)

    def lookup_object(self, index: MetadataIndex) -> Any:
        found = self.blocks.get((index.fqn, tuple(index.offset or ())))
        if found is None or index.offset is None:
            return super().lookup_object(index)
        entry, chunk = found
        return scaled(_view(entry, chunk), chunk.scale.denominator, chunk.scale.numerator)


def _named_chunks(name: str, m: AffineMap) -> tuple[Chunk, ...]:
    try:
        return tuple(chunks_to_save(m))
    except InvalidMapError as error:
        raise InvalidMapError(f"{name!r}: {error}") from error


def _require_shards(wanted: Mapping[str, Iterable[Chunk]], plans: list[SavePlan]) -> None:
    """Raise for a block that no process has planned to write: torch would leave a hole there."""
    planned = {(i.index.fqn, tuple(i.index.offset or ())) for p in plans for i in p.items}
    for name, chunks in wanted.items():
        lost = sorted({c.rank for c in chunks if (name, c.offsets) not in planned})
        if lost:
            raise InvalidMapError(
                f"{name!r}: no process passes the shards of ranks {lost[:8]}, which would leave a hole in the"
                " checkpoint; each process passes those of its ranks, one process alone all of them"
            )


class LoadPlanner(DefaultLoadPlanner):
    """Fills the shards of entries with a layout in place, all others as torch does.

    Slots without an element stay as they are. Raises ``InvalidMapError`` where the checkpoint has no such
    tensor, another shape of it, or not all of the elements. ``moments`` as in ``SavePlanner``.
    """

    def __init__(self, *, allow_partial_load: bool = False, moments: Iterable[str] = ()) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self.moments = frozenset(moments)
        self.blocks: dict[str, tuple[Sharded, list[Chunk]]] = {}
        self.ours: dict[str, Sharded] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        flat, paths = flatten_state_dict(state_dict)
        self.ours = _entries(flat, self.moments)
        for name in self.ours:  # torch's own set-up loses values that it does not know
            set_element(state_dict, paths[name], "")
        super().set_up_planner(state_dict, metadata, is_coordinator)
        for name, entry in self.ours.items():
            set_element(state_dict, paths[name], entry)

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None, "set_up_planner comes first"
        rest = {name: x for name, x in self.state_dict.items() if name not in self.ours}
        others = create_default_local_load_plan(rest, self.metadata, not self.allow_partial_load)
        items = [item for name, entry in self.ours.items() for item in self._items(name, entry)]
        return LoadPlan([*others.items, *items])

    def _items(self, name: str, entry: Sharded) -> list[ReadItem]:
        """What this process reads of one entry."""
        assert self.metadata is not None
        known = self.metadata.state_dict_metadata
        if name not in known and self.allow_partial_load:
            return []
        stored = known.get(name)
        if not isinstance(stored, TensorStorageMetadata):
            what = "is no tensor there" if name in known else "is not in it"
            raise InvalidMapError(f"the checkpoint: {name!r} {what}; {nearest(name, known)}")
        if tuple(stored.size) != entry.layout.logical_shape:
            shapes = f"shape {tuple(stored.size)}, its layout {entry.layout.logical_shape}"
            raise InvalidMapError(f"the checkpoint: {name!r} has {shapes}")
        scattered = [rank for rank, shard in entry.shards.items() if not shard.is_contiguous()]
        if scattered:
            raise InvalidMapError(
                f"{name!r}: the shard of rank {scattered[0]} is not contiguous; load into a contiguous one"
            )
        chunks = [c for c in chunks_to_load(entry.layout) if c.rank in entry.shards]
        self.blocks[name] = entry, chunks
        items = create_read_items_for_chunk_list(name, stored, [c.stored for c in chunks])
        wanted, got = sum(math.prod(c.sizes) for c in chunks), sum(math.prod(i.lengths) for i in items)
        if got < wanted:
            raise InvalidMapError(f"the checkpoint: {name!r} has {got} of the {wanted} elements asked for")
        return items

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        if index.fqn not in self.blocks:
            return super().lookup_tensor(index)
        return _view(*self._block(index))

    def _block(self, index: MetadataIndex) -> tuple[Sharded, Chunk]:
        entry, chunks = self.blocks[index.fqn]
        assert index.index is not None
        return entry, chunks[index.index]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        if read_item.dest_index.fqn in self.blocks:
            scale = self._block(read_item.dest_index)[1].scale
            if scale != 1:
                tensor.copy_(scaled(tensor, scale.numerator, scale.denominator))
