"""DeepSpeed's affine maps and AutoEP expert placements, in and out.

Their words and ours: a piece's ``source_*`` addresses the full tensor and is our codomain side, its
``dest_*`` addresses the shard and is our domain side; ``shard = full * scale`` on both. Their
``plan_transfer(target, source)`` is ``plan(source, target)``, a ``TransferSegment`` is a copy, and
``PlanBudget`` is ``Limits``. The package is not needed: maps travel as the plain dicts that
``ParamAffineMap.to_dict`` writes and ``from_dict`` reads.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import product
from typing import Any, NamedTuple

from .._errors import InvalidMapError, UnsupportedError
from .._limits import Budget, Limits
from ..maps import AffineMap, Piece, Side, Space
from ..maps._digits import chain_boxes
from ..maps._ratio import simplest_ratio
from ..maps._relation import CODOMAIN, DOMAIN, side_blocks
from ..maps._space import Shape, as_int, as_shape, index_of, row_major
from ..ops import check_layout, corestrict, holders, named_qkv, restrict, simplify
from ..placements import Attention, Experts

MAP_VERSION = 1  # of affine maps and of placement descriptors alike: 0.19.8 writes 1

# --- maps in ------------------------------------------------------------------------------


def from_map(entry: Any) -> AffineMap:
    """The layout behind one of their maps: a ``ParamAffineMap`` or the dict it is stored as.

    Rank keys may be ints or strings. A float scale becomes the simplest fraction whose nearest
    double it is (0.3333333333333333 is 1/3). Declared ``locations`` must be exactly the derived
    holders of every element of a piece. Raises ``InvalidMapError``.

    >>> one = {"shape": [2], "source": [0, [1]], "dest": [0, [1]], "locations": [0]}
    >>> from_map({"logical_shape": [2], "ranks": {"0": {"shard_shape": [2], "pieces": [one]}}}).pieces
    (Piece((2,), Side(0, (1,), rank=0), Side(0, (1,))),)
    """
    logical, shards, pieces = _read(entry)
    m = AffineMap.from_pieces(Space.shards(shards), Space.logical(logical), [p for p, _ in pieces])
    check_layout(m)
    _check_locations(m, pieces)
    return simplify(m)


_Declared = list[tuple[Piece, frozenset[int]]]


def _read(entry: Any) -> tuple[Shape, dict[int, Shape], _Declared]:
    """Logical shape, shard shapes, and pieces with their declared locations."""
    if hasattr(entry, "pieces_by_rank"):
        entry = entry.to_dict()
    whole = _table(entry, "a DeepSpeed affine map", "logical_shape", "ranks")
    logical = as_shape(whole["logical_shape"], "logical_shape")
    shards: dict[int, Shape] = {}
    pieces: _Declared = []
    for key, value in _table(whole["ranks"], "the ranks of a map").items():
        rank = _rank(key)
        its = _table(value, f"rank {rank} of a map", "shard_shape", "pieces")
        if rank in shards:
            raise InvalidMapError(f"the map lists rank {rank} twice, once as {key!r}")
        shards[rank] = as_shape(its["shard_shape"], f"shard_shape of rank {rank}")
        pieces += [_piece(p, rank, k) for k, p in enumerate(_listed(its["pieces"], f"pieces of rank {rank}"))]
    return logical, shards, pieces


def _table(value: Any, what: str, *keys: str) -> Mapping[Any, Any]:
    """A mapping with these keys, or an error that says what there is."""
    if isinstance(value, Mapping) and all(key in value for key in keys):
        return value
    found = f"keys {sorted(map(str, value))}" if isinstance(value, Mapping) else f"{value!r:.80}"
    raise InvalidMapError(f"expected {what} with {' and '.join(map(repr, keys)) or 'keys'}, got {found}")


def _listed(value: Any, what: str) -> Sequence[Any]:
    if not isinstance(value, (list, tuple)):
        raise InvalidMapError(f"expected a list of {what}, got {value!r:.80}")
    return value


def _rank(key: Any) -> int:
    if isinstance(key, str) and not key.isdecimal():
        raise InvalidMapError(f"a rank key must be a non-negative integer, got {key!r}")
    return as_int(int(key) if isinstance(key, str) else key, "a rank")


def _piece(p: Mapping[str, Any], rank: int, position: int) -> tuple[Piece, frozenset[int]]:
    where = f"rank {rank}, piece {position}"
    try:
        (cod_offset, cod_strides), (dom_offset, dom_strides) = p["source"], p["dest"]
        shape, locations = p["shape"], frozenset(_rank(r) for r in p["locations"])
        source, target = Side(cod_offset, tuple(cod_strides)), Side(dom_offset, tuple(dom_strides), rank)
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InvalidMapError):
            raise
        raise InvalidMapError(f"{where} is malformed: {error!r}") from error
    if not locations:
        raise InvalidMapError(f"{where} names no holder in its locations")
    return Piece(as_shape(shape), target, source, _scale(p.get("scale", 1.0), where)), locations


def _scale(value: Any, where: str) -> Fraction:
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or value != value
        or value in (0, float("inf"))
    ):
        raise InvalidMapError(f"{where}: scale {value!r} is not a finite number other than 0")
    return simplest_ratio(float(value))


def _check_locations(m: AffineMap, pieces: _Declared) -> None:
    """Raise for the first piece whose declared locations are not its derived holders."""
    for ranks, its in holders(m):
        here = frozenset(ranks)
        wrong = [(p, said) for p, said in pieces if p.size and said != here]
        touched = [(p, said) for p, said in wrong if len(restrict(its, _elements(m, p)))]
        if touched:
            piece, said = touched[0]
            raise InvalidMapError(
                f"rank {piece.domain.rank} declares that {sorted(said)} hold the block at offset"
                f" {piece.codomain.offset} of shape {piece.shape}, but some of it is held by {sorted(here)}"
            )


def _elements(m: AffineMap, p: Piece) -> AffineMap:
    """The elements of one piece as a region."""
    side = p.codomain
    return AffineMap.from_pieces(m.codomain, m.codomain, [Piece(p.shape, side, side)])


# --- containers ---------------------------------------------------------------------------


def from_container(data: Mapping[str, Any]) -> dict[str, AffineMap]:
    """The maps of a stored container by parameter name.

    Reads the ``affine_map`` section of a universal checkpoint (``{"version", "params"}``, or all of
    ``universal_checkpoint_info``), AutoEP's ``affine_maps``, the ``conversion`` metadata of one
    parameter (without a version; its name is ``""``), or entries directly. Keys that are escaped
    regexes become the name they match. Newer versions are refused.
    """
    _table(data, "a container of DeepSpeed's affine maps")
    for key in ("affine_map", "affine_maps"):
        if key in data:
            return from_container(data[key])
    if "conversion" in data:
        conversion = _table(data["conversion"], "the conversion of a parameter", "affine_map")
        return {"": from_map(conversion["affine_map"])}
    if "logical_shape" in data:
        return {"": from_map(data)}
    version = data.get("version", MAP_VERSION)
    if not isinstance(version, int) or version > MAP_VERSION:
        raise InvalidMapError(
            f"the container has affine map version {version!r}; this release reads up to {MAP_VERSION}"
        )
    return {
        unescaped(name): from_map(entry)
        for name, entry in _table(data.get("params", data), "the params of a container").items()
        if name != "version"
    }


def unescaped(pattern: str) -> str:
    """The one name that an escaped regex matches; any other text as it is.

    >>> unescaped(r"layers\\.0\\.w"), unescaped("layers.*")
    ('layers.0.w', 'layers.*')
    """
    plain = re.sub(r"\\(.)", r"\1", pattern.removeprefix("^").removesuffix("$"))
    return plain if re.escape(plain) == pattern.removeprefix("^").removesuffix("$") else pattern


# --- maps out -----------------------------------------------------------------------------


class _Box(NamedTuple):
    """A box of the logical tensor and its place in a shard, both in coordinates."""

    low: tuple[int, ...]
    local: tuple[int, ...]
    shape: tuple[int, ...]


def to_map(m: AffineMap, *, limits: Limits = Limits(pieces=1 << 16)) -> dict[str, Any]:
    """A layout in their stored form, one homogeneous row-major box per piece with exact locations.

    ``ParamAffineMap.from_dict`` reads it and their planner accepts it. What that form cannot say
    raises ``UnsupportedError``: padding, several tensors, shards with another number of axes.
    A layout that steps otherwise than row-major takes a piece per row or element, and
    ``LimitError`` where those are more than ``limits.pieces``.

    >>> from shardalg import layout, Split
    >>> to_map(layout((4,), Split(0), ranks=2))["ranks"][1]
    {'shard_shape': [2], 'pieces': [{'shape': [2], 'source': [2, [1]], 'dest': [0, [1]], 'locations': [1]}]}
    """
    check_layout(m)
    _require_sayable(m)
    by_rank: dict[int, list[tuple[_Box, tuple[int, ...], Fraction]]] = {r: [] for r in m.ranks}
    count = 0
    for ranks, its in holders(m):
        for piece in simplify(corestrict(m, its)).pieces:
            assert piece.domain.rank is not None
            for box in _boxes(m, piece):
                count += 1
                limits.hold("pieces", count)
                by_rank[piece.domain.rank].append((box, ranks, piece.scale))
    return {
        "logical_shape": list(m.logical_shape),
        "ranks": {
            r: {"shard_shape": list(m.shard_shape(r)), "pieces": list(_entries(m, r, its))}
            for r, its in sorted(by_rank.items())
        },
    }


def _require_sayable(m: AffineMap) -> None:
    """Raise for what their form has no words for."""
    if len(m.codomain) != 1 or any(b.name for b in m.domain.boxes):
        raise UnsupportedError("DeepSpeed's maps describe one parameter with one shard per rank")
    for b in m.domain.boxes:
        if len(b.shape) != len(m.logical_shape):
            raise UnsupportedError(
                f"rank {b.rank} stores shape {b.shape} of a tensor of shape {m.logical_shape};"
                " DeepSpeed's maps need shards with as many axes as the tensor"
            )
        held = sum(p.size for p in m.pieces_of(b.rank))
        if held != b.size:
            raise UnsupportedError(
                f"rank {b.rank} holds {held} elements in {b.size} slots; DeepSpeed's maps cannot say padding"
            )


def _boxes(m: AffineMap, piece: Piece) -> Iterator[_Box]:
    """One piece as boxes that are row-major on both sides; where an axis steps otherwise, every
    index is a box of its own."""
    whole, shard = m.logical_shape, m.shard_shape(piece.domain.rank or 0)
    local_strides = row_major(shard)
    one = AffineMap.from_pieces(m.domain, m.codomain, [piece])
    blocks = side_blocks(one.table, CODOMAIN, DOMAIN)
    for start, counts, steps, slot, strides in chain_boxes(blocks, row_major(whole), Budget(Limits())):
        plain = [
            n > 1 and step == 1 and s == t for n, step, s, t in zip(counts, steps, strides, local_strides)
        ]
        extents = tuple(n if whole_axis else 1 for n, whole_axis in zip(counts, plain))
        for index in product(*(range(n // e) for n, e in zip(counts, extents))):
            low = tuple(s + i * step for s, i, step in zip(start, index, steps))
            at = slot + sum(i * s for i, s in zip(index, strides))
            yield _Box(low, index_of(at, shard), extents)


def _entries(
    m: AffineMap, rank: int, its: list[tuple[_Box, tuple[int, ...], Fraction]]
) -> Iterator[dict[str, Any]]:
    """Pieces of one rank in their form, neighbours joined greedily, in the order of the shard."""
    groups: dict[tuple[tuple[int, ...], Fraction], list[_Box]] = {}
    for box, ranks, scale in its:
        groups.setdefault((ranks, scale), []).append(box)
    whole, shard = row_major(m.logical_shape), row_major(m.shard_shape(rank))
    rows = []
    for (ranks, scale), boxes in groups.items():
        for box in _joined(boxes):
            source = sum(i * s for i, s in zip(box.low, whole))
            dest = sum(i * s for i, s in zip(box.local, shard))
            entry = {
                "shape": list(box.shape), "source": [source, list(whole)], "dest": [dest, list(shard)],
                "locations": list(ranks),
            }  # fmt: skip
            rows.append(
                (dest, entry if scale == 1 else entry | {"scale": scale.numerator / scale.denominator})
            )
    return (entry for _, entry in sorted(rows, key=lambda row: row[0]))


def _joined(boxes: Iterable[_Box]) -> list[_Box]:
    """Boxes that continue each other along an axis on both sides become one."""
    found = sorted(boxes, key=lambda b: b.local)
    axes = range(len(found[0].shape)) if found else range(0)
    for axis in reversed(axes):
        found = _joined_along(found, axis)
    return sorted(found, key=lambda b: b.local)


def _joined_along(boxes: Sequence[_Box], axis: int) -> list[_Box]:
    done: list[_Box] = []
    at: dict[Any, int] = {}
    for b in sorted(boxes, key=lambda b: (b.local[axis], b.local)):
        k = at.pop(_place(b, axis, b.local[axis], b.low[axis]), None)
        if k is None:
            done.append(b)
            k = len(done) - 1
        else:
            shape = list(done[k].shape)
            shape[axis] += b.shape[axis]
            done[k] = done[k]._replace(shape=tuple(shape))
        grown = done[k]
        end = (grown.local[axis] + grown.shape[axis], grown.low[axis] + grown.shape[axis])
        at[_place(grown, axis, *end)] = k
    return done


def _place(b: _Box, axis: int, local: int, low: int) -> Any:
    """Everything about a box but its extent along ``axis``, with a position on that axis."""
    others = tuple(x[:axis] + x[axis + 1 :] for x in (b.low, b.local, b.shape))
    return others, local, low


# --- choosing a layout by block type --------------------------------------------------------


def attention_of(meta: Any) -> Attention:
    """Our facts about a model from DeepSpeed's ``AutoTPMeta`` (or anything with its fields)."""
    fields = {
        "kv_heads": "num_kv_heads", "heads": "num_attention_heads", "hidden": "n_embd",
        "grain": "tp_grain_size",
    }  # fmt: skip
    found = {ours: getattr(meta, theirs, None) for ours, theirs in fields.items()}
    return Attention(**{k: v for k, v in found.items() if v is not None})


def layout_for(module: Any, meta: Any, tp: int, *, shape: Any = None) -> AffineMap:
    """The layout DeepSpeed gives a fused qkv weight of a block under ``tp``-way tensor parallelism.

    ``module`` is the block (or its type's name), ``meta`` its ``AutoTPMeta``. The layout is chosen by the
    block type from one table, ``NAMED``; the shape of the fused weight is ``shape``, or that of
    ``module.weight``.

    >>> from types import SimpleNamespace
    >>> layout_for("CodeGenBlock", SimpleNamespace(num_kv_heads=8), 2, shape=(24, 8)).shard_shape(0)
    (12, 8)
    """
    block = module if isinstance(module, str) else type(module).__name__
    found = shape if shape is not None else getattr(getattr(module, "weight", None), "shape", None)
    if found is None:
        raise InvalidMapError(f"layout_for({block}) needs shape=: the module has no weight")
    return named_qkv(block)(tuple(found), attention_of(meta), tp)


# --- expert placements --------------------------------------------------------------------


def from_descriptor(descriptor: Mapping[str, Any]) -> Experts:
    """The placement behind an AutoEP descriptor. Newer versions and bad ids are refused."""
    if not isinstance(descriptor, Mapping) or descriptor.get("version") != MAP_VERSION:
        found = descriptor.get("version") if isinstance(descriptor, Mapping) else type(descriptor).__name__
        raise InvalidMapError(
            f"expected an AutoEP placement descriptor of version {MAP_VERSION}, got {found!r}"
        )
    experts = as_int(descriptor.get("num_experts"), "num_experts")
    ranks = descriptor.get("ranks")
    size = as_int(descriptor.get("ep_size"), "ep_size")
    if not isinstance(ranks, list) or len(ranks) != size:
        count = len(ranks) if isinstance(ranks, list) else ranks
        raise InvalidMapError(f"the descriptor says ep_size {size} and lists {count} ranks")
    by_rank: dict[int, list[int]] = {}
    for entry in ranks:
        rank, ids = _expert_entry(entry)
        if not 0 <= rank < size or rank in by_rank:
            raise InvalidMapError(f"rank {rank} is outside 0..{size - 1} or repeated")
        by_rank[rank] = ids
    held = sorted({i for ids in by_rank.values() for i in ids})
    outside = [i for i in held if not 0 <= i < experts]
    if outside:
        raise InvalidMapError(f"the descriptor places experts outside 0..{experts - 1}: {outside[:8]}")
    if len(held) < experts:
        lost = next(i for i, found in enumerate([*held, None]) if i != found)
        raise InvalidMapError(
            f"the descriptor places {len(held)} of {experts} experts; nobody holds the first lost, {lost}"
        )
    return Experts(by_rank)


def _expert_entry(entry: Any) -> tuple[int, list[int]]:
    """The rank and the expert ids of one entry of a descriptor."""
    ids = entry.get("experts") if isinstance(entry, Mapping) else None
    if not isinstance(ids, list):
        raise InvalidMapError(f"each rank of a descriptor has a rank and a list of experts, got {entry!r}")
    rank, found = as_int(entry.get("rank"), "a rank"), [as_int(i, "an expert id") for i in ids]
    if len(set(found)) < len(found):
        raise InvalidMapError(f"rank {rank} lists an expert twice: {ids}")
    return rank, found


def to_descriptor(placement: Experts, experts: int) -> dict[str, Any]:
    """A placement of ``experts`` experts as an AutoEP descriptor; ranks must be 0 .. R - 1.

    >>> to_descriptor(Experts.uniform(2, 2), 2)["ranks"][1]
    {'rank': 1, 'experts': [1]}
    """
    ranks = [rank for rank, _ in placement.by_rank]
    if ranks != list(range(len(ranks))):
        raise UnsupportedError(f"AutoEP numbers ranks from 0 without gaps; this placement has ranks {ranks}")
    descriptor = {
        "version": MAP_VERSION, "num_experts": experts, "ep_size": len(ranks),
        "ranks": [{"rank": rank, "experts": list(ids)} for rank, ids in placement.by_rank],
    }  # fmt: skip
    from_descriptor(descriptor)
    return descriptor
