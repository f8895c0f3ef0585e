"""Maps as text: one line for people, a relation form that parses back."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import groupby
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Piece, Side, Space
from ..maps._map import require_map
from ..maps._reading import as_text
from ..maps._space import IntArray, Key, Shape, index_of, row_major
from ._coordinates import Axis, Slice, refined, slices

MOST_PIECES = 4096  # of a map that is read for its one-line form
MOST_GROUPS = 6  # rank patterns in one line
MOST_BLOCKS = 4  # blocks per pattern
UNROLLED = 3  # blocks of one piece that are written one by one
DIGITS = ("r", "pq", "pqs")  # rank variables: r alone, or mesh digits

# --- one line -----------------------------------------------------------------------------


def short(m: AffineMap) -> str:
    """A map on one line, with what its ranks have in common said once.

    Slices of both sides correspond in row-major order; a block that is no slice on some axis
    is written with indices. Long maps are cut, and say so.

    >>> from shardalg import layout, Split
    >>> short(layout((32,), Split(0), ranks=4))
    '[4 ranks x (8,) -> (32,)]  r:[0:8] -> [8r:8r+8]'
    >>> short(layout((4, 8), [Split(0), Split(1)], mesh={"dp": 2, "tp": 4}))
    '[8 ranks x (2, 2) -> (4, 8)]  r=4p+q:[0:2, 0:2] -> [2p:2p+2, 2q:2q+2]'
    """
    head = f"[{space_text(m.domain)} -> {space_text(m.codomain)}]"
    if len(m) > MOST_PIECES:
        return f"{head}  {len(m)} pieces"
    lines = patterns(m)
    more = f"; ... {len(lines) - MOST_GROUPS} more" if len(lines) > MOST_GROUPS else ""
    return "  ".join([head, "; ".join(lines[:MOST_GROUPS]) + more]).rstrip()


def space_text(space: Space) -> str:
    """The boxes of a space, ranks of one shape counted: ``3 ranks x (4, 8), 1 rank x (1, 8)``."""
    counts: dict[tuple[bool, str, Shape], int] = {}
    for box in space.boxes:
        form = (box.rank is not None, box.name, box.shape)
        counts[form] = counts.get(form, 0) + 1
    said = [_boxes_text(*form, count) for form, count in counts.items()]
    more = [f"... {len(said) - 4} more shapes"] if len(said) > 4 else []
    return ", ".join(said[:4] + more) or "nothing"


def _boxes_text(ranked: bool, name: str, shape: Shape, count: int) -> str:
    label = f"{name!r} " if name else ""
    return f"{label}{count} rank{'s' * (count > 1)} x {shape}" if ranked else f"{label}{shape}"


def patterns(m: AffineMap) -> list[str]:
    """What each group of ranks holds, one text per group: ``r:[0:8] -> [8r:8r+8]``."""
    keyed = [(key, _blocks(m, list(its))) for key, its in groupby(m.pieces, key=lambda p: p.domain.key)]
    groups: dict[object, list[tuple[int | None, tuple[Block, ...]]]] = {}
    for (rank, name), some in keyed:
        form = (rank is None, name, tuple((b.left.form, b.right.form, b.tail) for b in some))
        groups.setdefault(form, []).append((rank, some))
    return [text for group in groups.values() for text in _group_texts(group, m.ranks)]


def piece_words(m: AffineMap, piece: Piece) -> tuple[str, str, str]:
    """One piece in three texts: where in its domain box, where in the codomain, the rest.

    >>> from shardalg import layout, Split
    >>> m = layout((8, 8), Split(1), ranks=2)
    >>> piece_words(m, m.pieces[1])
    ('[0:8, 0:4]', '[0:8, 4:8]', '')
    """
    b = _block(m, piece)
    bare = [t.starts[1:] if t.form[1] else t.starts for t in (b.left, b.right)]
    forms = [(t.form[0], False, *t.form[2:]) for t in (b.left, b.right)]
    terms = [Term(starts, form) for starts, form in zip(bare, forms)]
    left, right = (_term_text(t, [(v,) for v in t.starts], 0) for t in terms)
    return left, right, b.tail


class Term(NamedTuple):
    """One side of a block: where it starts, which may vary by rank, and the rest, which may not."""

    starts: tuple[int, ...]
    form: tuple[object, ...]  # name, whether ranked, "index" or "flat", and what follows each start


class Block(NamedTuple):
    """One piece prepared for a line."""

    key: Key
    left: Term
    right: Term
    tail: str  # index ranges and scale


def _block(m: AffineMap, piece: Piece) -> Block:
    sides, shapes, axes = _refined(m, piece)
    left, right = (slices(s.offset, piece.shape, s.strides, shape) for s, shape in zip(sides, shapes))
    if left is not None and right is not None:
        terms = [_slice_term(side, cut) for side, cut in zip(sides, (left, right))]
        return Block(piece.domain.key, terms[0], terms[1], _times(piece.scale))
    extents = [a.extent for a in axes]
    strides = [a.left for a in axes], [a.right for a in axes]
    sums = [_sums(side.offset, extents, s, shape) for side, s, shape in zip(sides, strides, shapes)]
    whole = _last_is_slice(sums, len(axes))
    terms = [_index_term(side, found, s, extents, whole) for side, found, s in zip(sides, sums, strides)]
    ranges = extents[:-1] if whole else extents
    return Block(piece.domain.key, terms[0], terms[1], _ranges(ranges) + _times(piece.scale))


def _blocks(m: AffineMap, pieces: Sequence[Piece]) -> tuple[Block, ...]:
    """The pieces of one box; those of a few slices are written one by one where all of them then fit."""
    unrolled = [b for p in pieces for b in _unrolled(m, p) or [_block(m, p)]]
    return tuple(unrolled if len(unrolled) <= MOST_BLOCKS else [_block(m, p) for p in pieces])


def _unrolled(m: AffineMap, piece: Piece) -> list[Block]:
    """A piece that is no slice but two or three of them, without gaps, counted by its first index along a
    coordinate that others run along too (``[5i+j]``), slice by slice; nothing for another piece."""
    sides, shapes, axes = _refined(m, piece)
    if all(slices(s.offset, piece.shape, s.strides, shape) is not None for s, shape in zip(sides, shapes)):
        return []
    outer, inner = axes[0] if axes else Axis(0, 0, 0), axes[1:]
    extents, strides = [a.extent for a in inner], ([a.left for a in inner], [a.right for a in inner])
    if not 1 < outer.extent <= UNROLLED or not inner or not _shared(sides, shapes, axes):
        return []
    found = []
    for i in range(outer.extent):
        at = [side.offset + i * step for side, step in zip(sides, outer[1:])]
        left, right = (slices(o, extents, s, shape) for o, s, shape in zip(at, strides, shapes))
        if left is None or right is None or any(cut.step > 1 for cut in (*left, *right)):
            return []
        terms = [_slice_term(side, cut) for side, cut in zip(sides, (left, right))]
        found.append(Block(piece.domain.key, terms[0], terms[1], _times(piece.scale)))
    return found


def _shared(sides: Sequence[Side], shapes: Sequence[Shape], axes: Sequence[Axis]) -> bool:
    """Whether the first index adds to a coordinate that another one adds to, on either side."""
    extents = [a.extent for a in axes]
    steps = [a.left for a in axes], [a.right for a in axes]
    sums = [_sums(side.offset, extents, s, shape) for side, s, shape in zip(sides, steps, shapes)]
    coordinates = [terms for found in sums if found is not None for terms in found[1]]
    return any(len(terms) > 1 and terms[0][0] == 0 for terms in coordinates)


def _refined(m: AffineMap, piece: Piece) -> tuple[tuple[Side, Side], list[Shape], list[Axis]]:
    """The sides of a piece, the shapes of their boxes, and its axes cut at the ends of coordinates."""
    sides = piece.domain, piece.codomain
    shapes = [space.shape(*side.key) for space, side in zip((m.domain, m.codomain), sides)]
    axes = refined(
        [Axis(*a) for a in zip(piece.shape, sides[0].strides, sides[1].strides)],
        (sides[0].offset, shapes[0]), (sides[1].offset, shapes[1]),
    )  # fmt: skip
    return sides, shapes, axes


def _times(scale: Fraction) -> str:
    return "" if scale == 1 else f" x {scale}"


def _slice_term(side: Side, cut: Sequence[Slice]) -> Term:
    afters = tuple(("index", ()) if s.extent == 1 else ("slice", (s.extent * s.step, s.step)) for s in cut)
    return _term(side, tuple(s.start for s in cut), ("index", afters))


Sums: TypeAlias = "tuple[tuple[int, ...], list[list[tuple[int, int]]]]"  # starts; (axis, coefficient) terms


def _sums(offset: int, extents: Sequence[int], strides: Sequence[int], shape: Shape) -> Sums | None:
    """Each coordinate as a start plus multiples of indices, or None where a carry would be needed."""
    starts, weights = index_of(offset, shape), row_major(shape)
    sums: list[list[tuple[int, int]]] = [[] for _ in shape]
    for i, s in enumerate(strides):
        k = next((k for k, t in enumerate(weights) if t <= abs(s) < t * shape[k]), None)
        if s and (k is None or s % weights[k]):
            return None
        if s and k is not None:
            sums[k].append((i, s // weights[k]))
    for at, n, terms in zip(starts, shape, sums):
        reach = [c * (extents[i] - 1) for i, c in terms]
        if at + sum(v for v in reach if v < 0) < 0 or at + sum(v for v in reach if v > 0) >= n:
            return None
    return starts, sums


def _last_is_slice(sums: Sequence[Sums | None], axes: int) -> bool:
    """Whether the last index is all of the last coordinate's motion on both sides, one by one."""
    return all(found is not None and found[1][-1:] == [[(axes - 1, 1)]] for found in sums)


def _index_term(
    side: Side, sums: Sums | None, strides: Sequence[int], extents: Sequence[int], whole: bool
) -> Term:
    if sums is None:
        return _term(side, (side.offset,), ("flat", (tuple(enumerate(strides)),)))
    starts, terms = sums
    afters: list[object] = [("index", tuple(some)) for some in terms]
    if whole:
        afters[-1] = ("slice", (extents[-1], 1))
    return _term(side, starts, ("index", tuple(afters)))


def _term(side: Side, starts: tuple[int, ...], form: tuple[object, ...]) -> Term:
    rank = () if side.rank is None else (side.rank,)
    return Term((*rank, *starts), (side.name, bool(rank), *form))


INDICES = "ijklmnuvwxyz"


def _index_name(i: int) -> str:
    return INDICES[i] if i < len(INDICES) else f"i{i}"


def _ranges(extents: Sequence[int]) -> str:
    return f" ({', '.join(f'{_index_name(i)}<{n}' for i, n in enumerate(extents))})" if extents else ""


Holding: TypeAlias = "tuple[int | None, tuple[Block, ...]]"


def _group_texts(group: list[Holding], ranks: Sequence[int]) -> list[str]:
    """One text per stretch of ranks whose starts follow one rule."""
    if group[0][0] is None:
        return [_text("", some, []) for _, some in group]
    found: list[str] = []
    while group:
        count, fit = _stretch(group, 3 if found else 2)
        labels = [rank for rank, _ in group[:count] if rank is not None]
        found.append(_text(_rank_label(labels, ranks, fit.radices), group[0][1], fit.rules))
        group = group[count:]
    return found


class Fit(NamedTuple):
    """Starts as affine functions of rank digits: per start its coefficients and constant."""

    radices: tuple[int, ...]
    rules: list[tuple[int, ...]]


def _stretch(group: list[Holding], least: int) -> tuple[int, Fit]:
    """How many of the leading ranks follow one rule, and the rule; fewer than ``least`` stand alone."""
    labels = np.array([rank for rank, _ in group], np.int64)
    starts = np.array([_starts(some) for _, some in group], np.int64).reshape(len(group), -1)
    for radices in _meshes(len(group)) if len(group) >= least else ():
        fit = _fit(labels, starts, radices)
        if fit is not None:
            return len(group), fit
    count = _line(labels, starts)
    fit = _fit(labels[:count], starts[:count], (count,)) if count > 2 else None
    return (1, Fit((1,), [])) if fit is None else (count, fit)


def _starts(blocks: tuple[Block, ...]) -> list[int]:
    return [v for b in blocks for term in (b.left, b.right) for v in term.starts]


def _meshes(n: int) -> Iterator[tuple[int, ...]]:
    """Ways to write n ranks as one, two or three digits."""
    yield (n,)
    divisors = [d for d in range(2, n) if n % d == 0] if n <= 1 << 16 else []
    yield from ((n // d, d) for d in divisors)
    small = divisors if len(divisors) < 20 else []
    yield from ((n // (d * e), d, e) for d in small for e in small if n % (d * e) == 0 and n > d * e)


def _fit(labels: IntArray, starts: IntArray, radices: tuple[int, ...]) -> Fit | None:
    """The rule, if every start is a constant plus coefficients times rank digits."""
    digits = labels[:, None]
    if len(radices) > 1:
        if len(set(np.diff(labels).tolist())) > 1:
            return None
        digits = np.stack(np.unravel_index(np.arange(len(labels)), radices), axis=1)
    coefficients = []
    for k in range(digits.shape[1]):
        one = int(np.argmax(digits[:, k] != digits[0, k]))
        gap = int(digits[one, k] - digits[0, k]) or 1
        step, left = np.divmod(starts[one] - starts[0], gap)
        if one and left.any():
            return None
        coefficients.append(step if one else np.zeros_like(step))
    slope = np.array(coefficients, np.int64).reshape(digits.shape[1], starts.shape[1])
    constant = starts[0] - digits[0] @ slope
    if (digits @ slope + constant != starts).any() or (len(labels) == 2 and (slope < 0).any()):
        return None
    return Fit(radices, [(*c, k) for *c, k in np.vstack([slope, constant]).T.tolist()])


def _line(labels: IntArray, starts: IntArray) -> int:
    """How many leading ranks lie on one line with the first two."""
    if len(labels) < 3:
        return 1
    run = (starts - starts[0]) * (labels[1] - labels[0])
    on = (run == (labels - labels[0])[:, None] * (starts[1] - starts[0])).all(axis=1)
    return len(labels) if on.all() else int(np.argmin(on))


def _rank_label(labels: list[int], ranks: Sequence[int], radices: tuple[int, ...]) -> str:
    if len(labels) == 1:
        return f"{labels[0]}"
    step = labels[1] - labels[0]
    if len(radices) > 1:
        weights = [step * math.prod(radices[k + 1 :]) for k in range(len(radices))]
        some = "" if len(labels) == len(ranks) else f"<{labels[-1] + 1}"
        return f"r={_affine((*weights, labels[0]), DIGITS[len(radices) - 1])}{some}"
    if len(labels) == len(ranks):
        return "r"
    if labels == list(range(labels[0], labels[-1] + 1, step)):
        return f"r={labels[0]}..{labels[-1]}" + (f" by {step}" if step > 1 else "")
    return f"r={','.join(map(str, labels[:8]))}" + ",..." * (len(labels) > 8)


def _affine(rule: tuple[int, ...], names: Sequence[str], plus: int = 0) -> str:
    """``8r+4`` from coefficients and a constant."""
    terms = [(c, name) for c, name in zip(rule[:-1], names) if c]
    constant = rule[-1] + plus
    said = "".join(f"{c:+d}{name}" if abs(c) != 1 else f"{'+' if c > 0 else '-'}{name}" for c, name in terms)
    if constant or not said:
        said += f"{constant:+d}"
    return said.removeprefix("+")


def _text(label: str, blocks: tuple[Block, ...], rules: list[tuple[int, ...]]) -> str:
    """The blocks of one group, after its label."""
    said: list[str] = []
    at = 0
    rules = rules or [(v,) for v in _starts(blocks)]
    for b in blocks:
        n = len(b.left.starts) + len(b.right.starts)
        mine, at = rules[at : at + n], at + n
        if len(said) < MOST_BLOCKS:
            skip = 0 if b.key[0] is None else 1
            left = _term_text(b.left, mine[: len(b.left.starts)], skip)
            said.append(f"{left} -> {_term_text(b.right, mine[len(b.left.starts) :], 0)}{b.tail}")
    more = [f"... {len(blocks) - len(said)} more"] if len(blocks) > len(said) else []
    return f"{label}:{', '.join(said + more)}" if label else ", ".join(said + more)


def _term_text(term: Term, rules: list[tuple[int, ...]], skip: int) -> str:
    name, ranked, kind, afters = term.form
    assert isinstance(afters, tuple)
    lead = f"{_affine(rules[0], _digits(rules[0]))}:" if ranked and not skip else ""
    body = [_start_text(rule, *after) for rule, after in zip(rules[bool(ranked) :], _marked(kind, afters))]
    return f"{lead}{repr(name) if name else ''}[{'@' if kind == 'flat' else ''}{', '.join(body)}]"


def _marked(kind: object, afters: tuple[Any, ...]) -> tuple[Any, ...]:
    return (("index", afters[0]),) if kind == "flat" else afters


def _digits(rule: tuple[int, ...]) -> str:
    return DIGITS[len(rule) - 2] if len(rule) > 1 else ""


def _start_text(rule: tuple[int, ...], kind: str, after: tuple[Any, ...]) -> str:
    """One coordinate: ``8r:8r+8`` for a slice, ``2r+3i+1`` for a sum of indices."""
    names = _digits(rule)
    if kind == "slice":
        reach, step = after
        return f"{_affine(rule, names)}:{_affine(rule, names, reach)}" + (f":{step}" if step > 1 else "")
    indices = [(c, _index_name(i)) for i, c in after]
    coefficients = (*rule[:-1], *(c for c, _ in indices), rule[-1])
    return _affine(coefficients, [*names, *(name for _, name in indices)])


# --- the relation form --------------------------------------------------------------------

HEADER = "shardalg map 1"


def to_text(m: AffineMap) -> str:
    """The whole map as lines of text: a header, one line per box, one per piece.

    A piece line is ``key: offset + strides -> key: offset + strides over shape``. Exact:
    ``from_text(to_text(m)) == m``.

    >>> from shardalg import layout, Split
    >>> print(to_text(layout((4, 8), Split(0), ranks=2)))
    shardalg map 1
    domain rank 0: (2, 8)
    domain rank 1: (2, 8)
    codomain tensor: (4, 8)
    rank 0: 0 + (1,) -> tensor: 0 + (1,) over (16,)
    rank 1: 0 + (1,) -> tensor: 16 + (1,) over (16,)
    """
    require_map(m, "to_text: m")
    boxes = [f"{word} {_key(b.key)}: {b.shape}" for word, s in _sides(m) for b in s.boxes]
    return "\n".join([HEADER, *boxes, *map(_piece_line, m.pieces)])


def _sides(m: AffineMap) -> tuple[tuple[str, Space], tuple[str, Space]]:
    return ("domain", m.domain), ("codomain", m.codomain)


def _key(key: Key) -> str:
    rank, name = key
    words = ([] if rank is None else [f"rank {rank}"]) + ([json.dumps(name)] if name else [])
    return " ".join(words) or "tensor"


def _piece_line(p: Piece) -> str:
    sides = [f"{_key(s.key)}: {s.offset} + {s.strides}" for s in (p.domain, p.codomain)]
    return f"{sides[0]} -> {sides[1]} over {p.shape}" + ("" if p.scale == 1 else f" times {p.scale}")


KEY = r'(?:tensor|rank (\d+)(?: ("(?:[^"\\]|\\.)*"))?|("(?:[^"\\]|\\.)*"))'
TUPLE = r"\(([-\d, ]*)\)"
BOX = rf"(domain|codomain) {KEY}: {TUPLE}"
PIECE = rf"{KEY}: (-?\d+) \+ {TUPLE} -> {KEY}: (-?\d+) \+ {TUPLE} over {TUPLE}(?: times (-?\d+)(?:/(\d+))?)?"


def from_text(text: str, *, limits: Limits = Limits()) -> AffineMap:
    """The map written by ``to_text``; bounds and disjointness are checked again.

    Raises ``InvalidMapError`` naming the line that does not parse.

    >>> from_text("shardalg map 1\\ndomain rank 0: (2,)\\ncodomain tensor: (2,)").shard_shape(0)
    (2,)
    """
    as_text(text, "the text of a map")
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines or lines[0][1] != HEADER:
        found = lines[0][1] if lines else "nothing"
        raise InvalidMapError(f"the text of a map starts with {HEADER!r}; found {found[:80]!r}")
    boxes: dict[str, list[Box]] = {"domain": [], "codomain": []}
    pieces = []
    for n, line in lines[1:]:
        box, piece = re.fullmatch(BOX, line), re.fullmatch(PIECE, line)
        if box:
            boxes[box[1]].append(Box(_ints(box[5], n), *_parsed_key(box, 2, n)))
        elif piece:
            pieces.append(_parsed_piece(piece, n))
        else:
            raise InvalidMapError(f"line {n} is neither a box nor a piece of a map: {line[:80]!r}")
    domain, codomain = (Space(tuple(boxes[word])) for word in ("domain", "codomain"))
    return AffineMap.from_pieces(domain, codomain, pieces, limits=limits)


def _parsed_key(found: re.Match[str], at: int, line: int) -> Key:
    rank, name, alone = found[at], found[at + 1], found[at + 2]
    quoted = name or alone
    try:
        return (None if rank is None else int(rank), json.loads(quoted) if quoted else "")
    except ValueError as error:  # a string that is none, or too many digits
        raise InvalidMapError(f"line {line} has a key that is none: {error}") from None


def _ints(text: str, line: int) -> Shape:
    try:
        return tuple(int(n) for n in text.replace(" ", "").split(",") if n)
    except ValueError as error:
        raise InvalidMapError(f"line {line} has a number that is none: {error}") from None


def _parsed_piece(found: re.Match[str], line: int) -> Piece:
    at, to, top, bottom = _ints(",".join([found[4], found[9], found[12] or "1", found[13] or "1"]), line)
    if not bottom:
        raise InvalidMapError(f"line {line} has a scale with denominator 0")
    domain = Side(at, _ints(found[5], line), *_parsed_key(found, 1, line))
    codomain = Side(to, _ints(found[10], line), *_parsed_key(found, 6, line))
    return Piece(_ints(found[11], line), domain, codomain, Fraction(top, bottom))
