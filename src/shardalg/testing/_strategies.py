"""Hypothesis strategies for spaces, pieces, maps, placements and layouts.

Sizes are small by default, so that an oracle that walks every slot is cheap; the shapes are
the awkward ones: empty ranks, padding, uneven replicas, extents of zero and one, strides that
are negative, zero or huge, sizes that do not divide.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from .._limits import BOUND
from .._torch import torch
from ..maps import AffineMap, Box, Piece, Sharded, Side, Space
from ..maps._map import with_table
from ..maps._space import Shape
from ..maps._table import empty_table
from ..ops import (
    context_parallel,
    extract,
    gate_up,
    is_surjective,
    layout,
    nest,
    padded_vocabulary,
    predivided_bias,
    qkv_codegen,
    relabel,
    subtract,
    union,
)
from ..ops import sharded as with_layout
from ..placements import (
    Attention,
    BlockGather,
    Custom,
    Cyclic,
    Experts,
    Flat,
    Placement,
    Replicate,
    Segments,
    Split,
    StridedSplit,
)

SCALES = tuple(Fraction(*terms) for terms in ((1, 1), (2, 1), (1, 2), (1, 3), (2, 3), (-1, 1)))
STRETCHES = (1, 1, 1, 3, 2**31 - 1, 2**31 + 1, 2**60 - 1, 2**60 - 1)
NAMES = ("", "a", "b")


def scales() -> SearchStrategy[Fraction]:
    """Exact scales of a few kinds. Shrinks towards 1."""
    return st.sampled_from(SCALES)


def shapes(*, max_axes: int = 2, max_size: int = 6) -> SearchStrategy[Shape]:
    """Shapes of at most ``max_axes`` axes and ``max_size`` elements, also 0-d, empty and with
    unit axes. Shrinks towards ``()``."""
    return st.sampled_from(_shapes(max_axes, max_size))


@cache
def _shapes(max_axes: int, max_size: int) -> tuple[Shape, ...]:
    """All shapes that are not empty, then a few that are."""
    by_axes = [itertools.product(range(1, max_size + 1), repeat=axes) for axes in range(max_axes + 1)]
    full = [shape for some in by_axes for shape in some if math.prod(shape) <= max_size]
    void = [shape for axes in range(1, max_axes + 1) for shape in itertools.product((0, 2), repeat=axes)]
    return (*full, *(shape for shape in void if 0 in shape))


def _seldom_zero(most: int) -> SearchStrategy[int]:
    some = min(1, most)
    return st.integers(some, most) | st.integers(some, most) | st.integers(0, most)


@st.composite
def spaces(
    draw: DrawFn,
    *,
    ranked: bool | None = None,
    max_boxes: int = 3,
    max_axes: int = 2,
    max_size: int = 4,
    stretch: int = 1,
) -> Space:
    """Spaces of up to ``max_boxes`` boxes of up to ``max_size`` slots, named or not, with ranks
    (``ranked=True``), without, or either. ``stretch`` multiplies the last extent of every box.
    Shrinks towards one 0-d logical tensor, or one 0-d shard on rank 0."""
    with_ranks = draw(st.booleans()) if ranked is None else ranked
    keys = st.tuples(st.integers(0, 4) if with_ranks else st.none(), st.sampled_from(NAMES))
    found = draw(st.lists(keys, min_size=1, max_size=max_boxes, unique=True))
    boxes = [draw(shapes(max_axes=max_axes, max_size=max_size)) for _ in found]
    return Space(tuple(Box(_stretched(shape, stretch), *key) for shape, key in zip(boxes, found)))


def _stretched(shape: Shape, stretch: int) -> Shape:
    """``shape`` with its last extent (a new one, where it is 0-d) ``stretch`` times as large."""
    if stretch == 1:
        return shape
    return (*shape[:-1], (shape[-1] if shape else 1) * stretch)


@st.composite
def pieces(
    draw: DrawFn,
    domain: Space | None = None,
    codomain: Space | None = None,
    *,
    max_axes: int = 3,
    max_extent: int = 3,
    stretch: int = 1,
    scaled: bool = True,
) -> Piece:
    """Pieces that stay inside the boxes of the two spaces (drawn where none is given), with
    strides of either sign and zero; every address is a multiple of ``stretch``. An empty space
    gives an empty piece. Shrinks towards one slot, offset 0, scale 1."""
    ends = [draw(spaces(stretch=stretch)) if s is None else s for s in (domain, codomain)]
    boxes = [draw(st.sampled_from([b for b in s.boxes if b.size] or list(s.boxes))) for s in ends]
    if not all(b.size for b in boxes):
        here, there = (Side(0, (1,), b.rank, b.name) for b in boxes)
        return Piece((0,), here, there)
    shape = tuple(draw(st.lists(st.integers(1, max_extent), max_size=max_axes)))
    here, there = (draw(_sides(b, shape, stretch)) for b in boxes)
    return Piece(shape, here, there, draw(scales()) if scaled else Fraction(1))


@st.composite
def _sides(draw: DrawFn, box: Box, shape: Shape, stretch: int) -> Side:
    """Sides of blocks of ``shape`` inside ``box``."""
    room = -(-box.size // stretch) - 1
    strides = draw(_free_strides(shape, room) | _digits(shape, room))
    steps = [s * (n - 1) for s, n in zip(strides, shape)]
    start = draw(st.integers(0, room - sum(map(abs, steps)))) - sum(min(0, s) for s in steps)
    return Side(start * stretch, tuple(s * stretch for s in strides), box.rank, box.name)


@st.composite
def _free_strides(draw: DrawFn, shape: Shape, room: int) -> list[int]:
    """Any strides with which a block of ``shape`` spans at most ``room``."""
    strides: list[int] = []
    for extent in shape:
        most = room // max(1, extent - 1)
        strides.append(draw(st.integers(-most, most)))
        room -= abs(strides[-1]) * (extent - 1)
    return strides


@st.composite
def _digits(draw: DrawFn, shape: Shape, room: int) -> list[int]:
    """Strides as real layouts have them: each a multiple of what the smaller ones span."""
    strides, step = [0] * len(shape), 1
    for k in draw(st.permutations(range(len(shape)))):
        if step * max(1, shape[k] - 1) <= room:
            strides[k] = step * draw(st.sampled_from([1, 1, -1]))
            room -= step * (shape[k] - 1)
            step *= shape[k] * draw(st.sampled_from([1, 1, 2, 3]))
    return strides


@st.composite
def affine_maps(
    draw: DrawFn,
    domain: Space | None = None,
    codomain: Space | None = None,
    *,
    max_pieces: int = 3,
    max_axes: int = 3,
    max_extent: int = 3,
    max_size: int = 4,
    stretch: int | None = None,
    scaled: bool = True,
    single_valued: bool = False,
    injective: bool = False,
) -> AffineMap:
    """Maps of up to ``max_pieces`` drawn pieces between two spaces (drawn where none is given, with
    boxes of ``max_size`` slots, stretched towards 2**31 and 2**61 now and then), single-valued or
    injective where asked: the parts that would break it are left out. Shrinks towards the
    empty map."""
    if stretch is None:
        stretch = 1 if domain or codomain else draw(stretches(max_size=max_size))
    drawn_spaces = spaces(stretch=stretch, max_size=max_size)
    dom, cod = (draw(drawn_spaces) if s is None else s for s in (domain, codomain))
    drawn = pieces(dom, cod, max_axes=max_axes, max_extent=max_extent, stretch=stretch, scaled=scaled)
    count = draw(_seldom_zero(max_pieces))
    found = draw(st.lists(drawn, min_size=count, max_size=count))
    if not single_valued and not injective:
        return AffineMap.from_pieces(dom, cod, found)
    return _kept(dom, cod, found, single_valued, injective)


def _kept(
    domain: Space, codomain: Space, found: list[Piece], single_valued: bool, injective: bool
) -> AffineMap:
    """The map of those pieces that keep it of the kinds asked for."""
    kept = AffineMap(domain, codomain, empty_table())
    for piece in found:
        more = union(kept, AffineMap.from_pieces(domain, codomain, [piece]))
        if (more.single_valued or not single_valued) and (more.injective or not injective):
            kept = more
    return kept


def stretches(*, max_size: int = 4) -> SearchStrategy[int]:
    """Factors for addresses of boxes of ``max_size`` slots: mostly 1, also near 2**31 and 2**60 where
    that stays in bounds. Shrinks towards 1."""
    return st.sampled_from([s for s in STRETCHES if s * max_size <= BOUND])


@st.composite
def chains(
    draw: DrawFn, /, *, length: int = 2, stretch: int | None = None, max_size: int = 4, **kinds: Any
) -> tuple[AffineMap, ...]:
    """``(f, g, ...)``, where each map starts in the space the one before ends in; ``kinds`` are
    keywords of ``affine_maps``. Shrinks towards empty maps."""
    by = draw(stretches(max_size=max_size)) if stretch is None else stretch
    ends = [draw(spaces(stretch=by, max_boxes=2, max_size=max_size)) for _ in range(length + 1)]
    return tuple(draw(affine_maps(a, b, stretch=by, **kinds)) for a, b in zip(ends, ends[1:]))


@st.composite
def parallels(
    draw: DrawFn, /, *, length: int = 2, stretch: int | None = None, max_size: int = 4, **kinds: Any
) -> tuple[AffineMap, ...]:
    """Maps between the same two spaces, some of them sharing pieces; ``kinds`` are keywords of
    ``affine_maps``. Shrinks towards empty maps."""
    by = draw(stretches(max_size=max_size)) if stretch is None else stretch
    first = draw(affine_maps(stretch=by, max_size=max_size, **kinds))
    found = [first]
    for _ in range(length - 1):
        other = draw(affine_maps(first.domain, first.codomain, stretch=by, **kinds))
        found.append(_sharing(other, draw(st.sampled_from(found)), kinds) if draw(st.booleans()) else other)
    return tuple(found)


def _sharing(other: AffineMap, first: AffineMap, kinds: dict[str, Any]) -> AffineMap:
    """``other`` with a part of ``first``, where that keeps it of the kinds asked for."""
    part = with_table(first, first.table.take(slice(0, -(-len(first) // 2))))
    more = union(subtract(other, first), part)
    asked = [name for name in ("single_valued", "injective") if kinds.get(name)]
    return more if all(getattr(more, name) for name in asked) else first


# --- placements and layouts ----------------------------------------------------------------


def placements(
    shape: Sequence[int] = (4, 2), ranks: int = 2, *, scaled: bool = True
) -> SearchStrategy[Placement]:
    """Placements that apply to a tensor of ``shape`` over ``ranks`` ranks 0, 1, ...: sizes that do
    not divide, empty and padded shards, uneven replicas, segments. Shrinks towards
    ``Replicate()``."""
    shape = tuple(shape)
    ways = [_replicates(scaled), st.builds(Flat, st.integers(1, 4)), _customs(shape, ranks)]
    for axis in range(len(shape)):
        ways += [*_along(shape, axis, ranks), _segments(shape, axis, ranks, scaled)]
    if shape:
        ways.append(_lists_by_rank(shape[0], ranks).map(Experts))
    return st.one_of(ways)


def _replicates(scaled: bool) -> SearchStrategy[Placement]:
    return st.builds(Replicate, scales() if scaled else st.just(Fraction(1)))


def _along(shape: Shape, axis: int, ranks: int) -> list[SearchStrategy[Placement]]:
    """Placements that cut one axis and keep the others whole."""
    n = shape[axis]
    return [*_even(axis), _sized(n, axis, ranks), _gathers(n, axis, ranks)]


def _even(axis: int) -> list[SearchStrategy[Placement]]:
    """Placements that apply to any extent of an axis."""
    axes = st.just(axis)
    rules = st.sampled_from(["chunk", "balanced", "pad"])
    return [
        st.builds(Split, axes, rule=rules, unit=st.integers(1, 2)),
        st.builds(Cyclic, axes, st.integers(1, 3), st.integers(0, 2)),
        st.builds(StridedSplit, axes, st.integers(1, 3)),
    ]


@st.composite
def _sized(draw: DrawFn, n: int, axis: int, ranks: int) -> Placement:
    cuts = sorted(draw(st.lists(st.integers(0, n), min_size=ranks - 1, max_size=ranks - 1)))
    return Split(axis, sizes=tuple(b - a for a, b in zip([0, *cuts], [*cuts, n])))


@st.composite
def _gathers(draw: DrawFn, n: int, axis: int, ranks: int) -> Placement:
    size = draw(st.integers(1, 3))
    return BlockGather(axis, size, draw(_lists_by_rank(-(-n // size), ranks)))


def _lists_by_rank(count: int, ranks: int) -> SearchStrategy[dict[int, list[int]]]:
    """Ids below ``count`` for each rank, in any order, replicated, left out."""
    ids = st.builds(lambda order, most: order[:most], st.permutations(range(count)), st.integers(0, count))
    return st.fixed_dictionaries(dict.fromkeys(range(ranks), ids))


@st.composite
def _segments(draw: DrawFn, shape: Shape, axis: int, ranks: int, scaled: bool) -> Placement:
    n = shape[axis]
    cut = draw(st.integers(0, n))
    parts = []
    for size in (cut, n - cut):
        inner = (*shape[:axis], size, *shape[axis + 1 :])
        parts.append((size, draw(st.one_of(_replicates(scaled), *_along(inner, axis, ranks)))))
    return Segments(axis, tuple(parts))


@st.composite
def _customs(draw: DrawFn, shape: Shape, ranks: int) -> Placement:
    """Any single-valued map of the ranks onto the tensor."""
    shards = {rank: draw(shapes(max_size=4)) for rank in range(ranks)}
    drawn = affine_maps(Space.shards(shards), Space.logical(shape), scaled=False, single_valued=True)
    return Custom(draw(drawn))


@st.composite
def layouts(
    draw: DrawFn,
    shape: Sequence[int] | None = None,
    *,
    max_ranks: int = 3,
    max_size: int = 6,
    scaled: bool = True,
    complete: bool = False,
) -> AffineMap:
    """Layouts of one tensor (of ``shape``, or drawn): one placement, a mesh of two, a layout
    whose ranks are renamed with gaps, one cut again, or one named after what real models do.
    ``complete``: every element is held. Shrinks towards a tensor held whole by rank 0."""
    tensor = draw(shapes(max_size=max_size)) if shape is None else tuple(shape)
    ranks = draw(st.integers(1, max_ranks))
    made = draw(_layouts(tensor, ranks, scaled))
    return made if not complete or is_surjective(made) else layout(tensor, Replicate(), ranks=made.ranks)


@st.composite
def _layouts(draw: DrawFn, tensor: Shape, ranks: int, scaled: bool) -> AffineMap:
    kind = draw(st.sampled_from(["plain", "mesh", "renamed", "nested", "named"]))
    names = _named_for(tensor, ranks, scaled) if kind == "named" else []
    if names:
        return NAMED_LAYOUTS[draw(st.sampled_from(names))](tensor, ranks)
    if kind == "mesh" and tensor:
        return draw(_meshes(tensor, scaled))
    made = layout(tensor, draw(placements(tensor, ranks, scaled=scaled)), ranks=ranks)
    if kind == "renamed":
        return relabel(made, domain=draw(st.permutations(range(ranks + 2)).map(lambda p: p[:ranks])))
    if kind == "nested":
        shards = {r: made.shard_shape(r) for r in made.ranks}
        return nest(made, {r: layout(s, draw(anywhere(s)), ranks=2) for r, s in shards.items()})
    return made


def _codegen(shape: Shape, ranks: int) -> AffineMap:
    return qkv_codegen(shape, Attention(kv_heads=ranks), ranks, mp_blocks=1)


def _padded(shape: Shape, ranks: int) -> AffineMap:
    return padded_vocabulary(shape, ranks, height=(shape[0] // ranks + 1) * ranks)


NAMED_LAYOUTS: Mapping[str, Callable[[Shape, int], AffineMap]] = {
    "padded_vocabulary": _padded,
    "gate_up": gate_up,
    "context_parallel": context_parallel,
    "predivided_bias": predivided_bias,
    "codegen": _codegen,
}


def _named_for(shape: Shape, ranks: int, scaled: bool) -> list[str]:
    """The named layouts that apply to a tensor of ``shape`` over ``ranks`` ranks."""
    rows = shape[0] if shape else 0
    applies = {
        "padded_vocabulary": rows > 0,
        "gate_up": rows > 0 and rows % 2 == 0,
        "context_parallel": rows > 0 and rows % (2 * ranks) == 0,
        "predivided_bias": scaled,
        "codegen": len(shape) == 2 and rows > 0 and rows % (3 * ranks) == 0,
    }
    return [name for name in NAMED_LAYOUTS if applies[name]]


@st.composite
def _meshes(draw: DrawFn, tensor: Shape, scaled: bool) -> AffineMap:
    outer = st.integers(0, len(tensor) - 1).flatmap(lambda axis: st.one_of(_replicates(scaled), *_even(axis)))
    parts = [draw(outer), draw(outer)]
    sizes = {"x": draw(st.integers(1, 2)), "y": draw(st.integers(1, 2))}
    return layout(tensor, parts, mesh=sizes, order=draw(st.permutations(["x", "y"])))


def anywhere(shape: Shape) -> SearchStrategy[Placement]:
    """Placements for a shard of ``shape``, whatever it is."""
    flat = st.builds(Flat, st.integers(1, 3))
    if not shape:
        return flat
    return st.one_of(flat, *_even(len(shape) - 1))


@st.composite
def layout_pairs(
    draw: DrawFn,
    shape: Sequence[int] | None = None,
    *,
    max_ranks: int = 3,
    max_size: int = 6,
    scaled: bool = True,
    complete: bool = False,
) -> tuple[AffineMap, AffineMap]:
    """A source and a target layout of one tensor, on ranks of their own; ``complete``: the source
    holds every element. Shrinks towards two equal layouts on rank 0."""
    tensor = draw(shapes(max_size=max_size)) if shape is None else tuple(shape)
    source = layouts(tensor, max_ranks=max_ranks, scaled=scaled, complete=complete)
    return draw(source), draw(layouts(tensor, max_ranks=max_ranks, scaled=scaled))


@st.composite
def expert_placements(
    draw: DrawFn, experts: int = 4, *, max_ranks: int = 3, complete: bool = False
) -> Experts:
    """Placements of ``experts`` experts on up to ``max_ranks`` ranks: uneven, in any order, replicated,
    with empty ranks, and with experts left out unless ``complete``. Shrinks towards one rank that
    holds few."""
    by_rank = draw(_lists_by_rank(experts, draw(st.integers(1, max_ranks))))
    left_out = sorted(set(range(experts)).difference(*by_rank.values()))
    if complete and left_out:
        by_rank[draw(st.sampled_from(sorted(by_rank)))] += left_out
    return Experts(by_rank)


@st.composite
def sharded(
    draw: DrawFn,
    layout: AffineMap | None = None,
    *,
    max_ranks: int = 3,
    max_size: int = 6,
    like: str = "numpy",
) -> Sharded:
    """Shards with their layout (given, or drawn without scales): int64, element e of the tensor is
    e + 1, padding is 0. ``like="torch"`` gives torch tensors. Shrinks as ``layouts``."""
    m = draw(layouts(max_ranks=max_ranks, max_size=max_size, scaled=False)) if layout is None else layout
    sizes = [b.size for b in m.codomain.boxes]
    parts = np.split(np.arange(1, sum(sizes) + 1), np.cumsum(sizes)[:-1])
    full = {b.name: _like(x.reshape(b.shape), like) for b, x in zip(m.codomain.boxes, parts)}
    return with_layout(m, extract(m, full))


def _like(x: Any, like: str) -> Any:
    return torch().from_numpy(x.copy()) if like == "torch" else x
