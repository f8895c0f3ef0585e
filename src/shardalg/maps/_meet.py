"""Where two sets of strided blocks meet: the one primitive under every operator.

``meet(a, b)`` takes two sets of blocks in the same boxes and returns every pair of block
points that share an address, as strided families. Each block carries *payload* addresses
(a slot, an element, an index); a family gives both blocks' payloads as an offset plus strides.
Composition reads the far sides, intersection filters them, subtraction reads indices.

The fast path writes every address as digits of one mixed-radix system (``_digits.py``) in which
each block is one arithmetic progression per digit. Then two blocks meet digit by digit, and
all candidate pairs are solved together with NumPy; candidates come from a sort on the digit
that has the fewest. Blocks that are no such product are carved into blocks that are. Where that leaves
much to try, other radices are weighed and blocks cut along an axis; what resists even that goes to
the exact solver pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ._digits import Blocks as Blocks  # what meet takes
from ._digits import Digits, chain_digits, finest_chain, forward, long_chain, products, sliced, spare_axis
from ._solve import Digit, Solution, add, solve
from ._space import IntArray

WIDE = 1 << 31  # products of two values below this fit an int64
FEW = 1 << 12  # pairs up to which no other way is sought
CUTS = 1 << 14  # slices that are always worth an answer without the solver
HARD = 64  # candidates that take as long as one pair in the exact solver


class Met(NamedTuple):
    """Families of meeting points: block ``left[k]`` of a with block ``right[k]`` of b.

    ``shape`` is ``[axes, m]``; ``left_offset`` ``[P, m]`` and ``left_strides`` ``[P, axes, m]``
    are a's payload over the family, ``right_*`` b's.
    """

    left: IntArray
    right: IntArray
    shape: IntArray
    left_offset: IntArray
    left_strides: IntArray
    right_offset: IntArray
    right_strides: IntArray

    def take(self, picked: IntArray) -> Met:
        return Met(*(x[..., picked] for x in self))


def meet(a: Blocks, b: Blocks, limits: Limits, budget: Budget, bound: str = "pieces") -> Met:
    """Every point that a block of ``a`` and a block of ``b`` share, each exactly once.

    Raises ``LimitError`` past ``limits.pairs`` candidates, ``limits.steps`` branches, or
    more families than the bound of that name, before any family is built.
    """
    a, b = forward(a), forward(b)
    parts = []
    for some_a, some_b, chain in groups(a, b):
        parts += _meet_group(a.take(some_a), b.take(some_b), chain, some_a, some_b, limits, budget, bound)
    limits.hold(bound, sum(len(p.left) for p in parts))
    return _joined(parts, len(a.pay_offset), len(b.pay_offset))


def groups(a: Blocks, b: Blocks) -> Iterator[tuple[IntArray, IntArray, list[int]]]:
    """Blocks of boxes that can share one chain of digits, with that chain."""
    if not len(a.box) or not len(b.box):
        return
    strides = _strides_by_box(a, b)
    chains = {box: tuple(finest_chain(found)) for box, found in strides.items()}
    if len(set(chains.values())) == 1:
        yield np.arange(len(a.box)), np.arange(len(b.box)), list(next(iter(chains.values())))
        return
    for chain in dict.fromkeys(chains.values()):
        boxes = np.array([box for box, its in chains.items() if its == chain], np.int64)
        some_a, some_b = (np.flatnonzero(np.isin(x.box, boxes)) for x in (a, b))
        if len(some_a) and len(some_b):
            yield some_a, some_b, list(chain)


def _strides_by_box(a: Blocks, b: Blocks) -> dict[int, set[int]]:
    """The positive strides used in each box that both sides touch."""
    found: list[dict[int, set[int]]] = [{}, {}]
    for side, x in zip(found, (a, b)):
        if (x.box == x.box[0]).all():
            side[int(x.box[0])] = _distinct(x)
            continue
        for box in np.unique(x.box).tolist():
            side[box] = set()
        for strides, shape in zip(x.strides, x.shape):
            live = (strides > 0) & (shape > 1)
            pairs = np.unique(np.stack([x.box[live], strides[live]]), axis=1)
            for box, stride in pairs.T.tolist():
                side[box].add(stride)
    return {box: found[0][box] | found[1][box] for box in found[0] if box in found[1]}


def _distinct(x: Blocks) -> set[int]:
    out: set[int] = set()
    for strides, shape in zip(x.strides, x.shape):
        first = int(strides[0])
        if first and (strides == first).all() and (shape > 1).all():
            out.add(first)
        else:
            out |= set(np.unique(strides[(strides > 0) & (shape > 1)]).tolist())
    return out


# --- one group of boxes -------------------------------------------------------------------


def _meet_group(
    a: Blocks,
    b: Blocks,
    chain: list[int],
    name_a: IntArray,
    name_b: IntArray,
    limits: Limits,
    budget: Budget,
    bound: str,
) -> list[Met]:
    """All meetings of two sets of blocks over one chain, under their original positions."""
    one, two, found = in_digits(a, b, chain, name_a, name_b, budget)
    parts = []
    if found is not None:
        parts.append(_meet_products(one, two, found, limits, bound))
    if len(one.hard):
        parts += _meet_hard(one.blocks, two.blocks, one.hard, np.arange(len(two.names)), limits, budget)
    if len(two.hard) and len(one.easy):
        parts += _meet_hard(one.blocks, two.blocks, one.easy, two.hard, limits, budget)
    return [p._replace(left=one.names[p.left], right=two.names[p.right]) for p in parts]


class InDigits(NamedTuple):
    """The blocks of one side in the digits of a chain, after cutting; ``names`` are the blocks they are cut
    from, ``easy`` the positions of products and ``hard`` of those that resist."""

    blocks: Blocks
    names: IntArray
    digits: Digits
    easy: IntArray
    hard: IntArray
    chain: list[int]


class _Ranges(NamedTuple):
    """How many pairs of products overlap in one digit, and their ranges there."""

    total: int
    low_a: IntArray
    high_a: IntArray
    low_b: IntArray
    high_b: IntArray


def in_digits(
    a: Blocks, b: Blocks, chain: list[int], name_a: IntArray, name_b: IntArray, budget: Budget
) -> tuple[InDigits, InDigits, _Ranges | None]:
    """Both sides in a chain that leaves little to try: the finest one, or where that leaves much, the one of
    the strides that many blocks use or that keeps long strides, with blocks cut until they are products."""
    found = _in_chain(a, b, chain, name_a, name_b, budget)
    if _work(*found) <= 8 * (len(name_a) + len(name_b)) + FEW:
        return found
    strides = _usual(a) | _usual(b)
    for other in dict.fromkeys(map(tuple, (chain, finest_chain(strides), long_chain(strides)))):
        some = found if list(other) == chain else _in_chain(a, b, list(other), name_a, name_b, budget)
        found = min(found, some, _cut_both(*some, budget), key=lambda its: _work(*its))
    return found


def _cut_both(
    one: InDigits, two: InDigits, ranges: _Ranges | None, budget: Budget
) -> tuple[InDigits, InDigits, _Ranges | None]:
    """Both sides with their blocks that are no product cut into products."""
    cut = cut_hard(one, budget)
    other = cut if two is one else cut_hard(two, budget)
    if cut is one and other is two:
        return one, two, ranges
    return cut, other, _least_ranges(cut, other)


def _in_chain(
    a: Blocks, b: Blocks, chain: list[int], name_a: IntArray, name_b: IntArray, budget: Budget
) -> tuple[InDigits, InDigits, _Ranges | None]:
    one = _side(a, chain, name_a, budget)
    two = one if b is a else _side(b, chain, name_b, budget)
    return one, two, _least_ranges(one, two)


def _side(x: Blocks, chain: list[int], names: IntArray, budget: Budget) -> InDigits:
    x, names, digits, hard = products(x, chain, names, budget)
    return InDigits(x, names, digits, np.flatnonzero(digits.product), hard, chain)


def cut_hard(x: InDigits, budget: Budget) -> InDigits:
    """The blocks that are no product cut along one axis after the other until they are, where that takes
    few cuts."""
    blocks, names, hard = x.blocks, x.names, x.hard
    while len(hard):
        axis, times = spare_axis(blocks, hard, x.chain)
        if int(times.sum()) > CUTS + 4 * len(names):
            return x
        blocks, of = sliced(blocks, hard, axis, budget)
        names = names[of]
        hard = np.flatnonzero(~chain_digits(blocks, x.chain).product)
    return x if hard is x.hard else _side(blocks, x.chain, names, budget)


def _work(one: InDigits, two: InDigits, ranges: _Ranges | None) -> int:
    """Candidates among the products, and what the pairs for the solver are worth."""
    return (ranges.total if ranges is not None else 0) + HARD * _hard_pairs(one, two)


def _hard_pairs(one: InDigits, two: InDigits) -> int:
    return len(one.hard) * len(two.names) + len(two.hard) * len(one.easy)


def _usual(x: Blocks) -> set[int]:
    """The positive strides that at least one block in 64 uses."""
    strides, counts = np.unique(x.strides[(x.strides > 0) & (x.shape > 1)], return_counts=True)
    return set(strides[64 * counts >= len(x.box)].tolist())


# --- products: every digit at once --------------------------------------------------------


def _meet_products(one: InDigits, two: InDigits, ranges: _Ranges, limits: Limits, bound: str) -> Met:
    """The meetings of blocks that are products: those of their digits, outermost first, then the free
    axes of a and those of b."""
    a, b, da, db = one.blocks, two.blocks, one.digits, two.digits
    left, right = _candidates(one, two, ranges, limits)
    levels = [_progressions(da, db, k, left, right) for k in reversed(range(len(da.start)))]
    keep = np.logical_and.reduce([level[2] > 0 for level in levels])
    if not keep.all():
        picked = np.flatnonzero(keep)
        left, right = left[picked], right[picked]
        levels = [
            (x[picked], y[picked], c[picked], _pick(i, picked), _pick(j, picked)) for x, y, c, i, j in levels
        ]
    limits.hold(bound, len(left))
    starts_a, starts_b, counts, steps_a, steps_b = zip(*levels)
    left_offset, left_strides = _payload(a, da, left, starts_a, steps_a)
    right_offset, right_strides = _payload(b, db, right, starts_b, steps_b)
    free_a, free_b = da.free_shape[:, left], db.free_shape[:, right]
    pay_a, pay_b = da.free_payload[:, :, left], db.free_payload[:, :, right]
    zero_a = np.zeros((len(left_offset), len(free_b), len(left)), np.int64)
    zero_b = np.zeros((len(right_offset), len(free_a), len(left)), np.int64)
    return Met(
        left,
        right,
        np.concatenate([np.array(counts), free_a, free_b]),
        left_offset,
        np.concatenate([left_strides, pay_a, zero_a], axis=1),
        right_offset,
        np.concatenate([right_strides, zero_b, pay_b], axis=1),
    )


def _pick(x: IntArray | int, picked: IntArray) -> IntArray | int:
    return x if isinstance(x, int) else x[picked]


def _payload(
    x: Blocks, d: Digits, picked: IntArray, starts: Sequence[IntArray], steps: Sequence[IntArray | int]
) -> tuple[IntArray, IntArray]:
    """Payload offset and strides of each family, from the index where it starts in each digit,
    outermost first, and by how many it steps."""
    levels = len(starts)
    offset = x.pay_offset[:, picked]
    strides = np.empty((len(offset), levels, len(picked)), np.int64)
    for k in range(levels):
        per_step = d.payload[:, levels - 1 - k][:, picked]
        offset = offset + per_step * starts[k]
        strides[:, k] = per_step * steps[k]
    return offset, strides


def _candidates(one: InDigits, two: InDigits, ranges: _Ranges, limits: Limits) -> tuple[IntArray, IntArray]:
    """Pairs of products whose ranges overlap in the digit where the fewest do."""
    limits.hold("pairs", ranges.total)
    left, right = overlap_pairs(*ranges[1:], limits)
    left, right = one.easy[left], two.easy[right]
    same = one.blocks.box[left] == two.blocks.box[right]
    return (left, right) if same.all() else (left[same], right[same])


def _least_ranges(one: InDigits, two: InDigits) -> _Ranges | None:
    """The ranges in the digit where the fewest overlap; None where a side has no products."""
    if not len(one.easy) or not len(two.easy):
        return None
    best: _Ranges | None = None
    box_a, box_b = one.blocks.box[one.easy], two.blocks.box[two.easy]
    boxed = bool((box_a != box_a[0]).any() or (box_b != box_a[0]).any())
    for k in range(len(one.digits.start) - 1, -1, -1):
        low_a, high_a = _range(one.digits, k, one.easy)
        low_b, high_b = _range(two.digits, k, two.easy)
        if boxed:
            reach = int(max(high_a.max(), high_b.max())) + 1
            most = int(max(box_a.max(), box_b.max())) + 1
            if reach < (1 << 62) // most:
                low_a, high_a = low_a + box_a * reach, high_a + box_a * reach
                low_b, high_b = low_b + box_b * reach, high_b + box_b * reach
        total = overlapping(low_a, high_a, low_b, high_b)
        if best is None or total < best.total:
            best = _Ranges(total, low_a, high_a, low_b, high_b)
        if total <= max(len(one.easy), len(two.easy)):
            break
    return best


def _range(d: Digits, k: int, picked: IntArray) -> tuple[IntArray, IntArray]:
    low = d.start[k][picked]
    return low, low + d.step[k][picked] * (d.extent[k][picked] - 1)


def overlapping(low_a: IntArray, high_a: IntArray, low_b: IntArray, high_b: IntArray) -> int:
    """How many pairs of closed ranges overlap, without listing them."""
    before = np.searchsorted(np.sort(high_b), low_a, "left")
    until = np.searchsorted(np.sort(low_b), high_a, "right")
    return int((until - before).sum())


def overlap_pairs(
    low_a: IntArray, high_a: IntArray, low_b: IntArray, high_b: IntArray, limits: Limits
) -> tuple[IntArray, IntArray]:
    """The overlapping pairs, ordered by a and then by b's start."""
    order = np.argsort(low_b, kind="stable")
    low, high = low_b[order], high_b[order]
    until = np.searchsorted(low, high_a, "right")
    begin = np.searchsorted(np.maximum.accumulate(high), low_a, "left")
    counts = np.maximum(until - begin, 0)
    total = int(counts.sum())
    if total > FEW and total > 2 * overlapping(low_a, high_a, low, high):
        left, right = _nested_pairs(low_a, high_a, low, high, limits)
        return left, order[right]
    limits.hold("pairs", total)
    left = np.repeat(np.arange(len(low_a)), counts)
    first = np.cumsum(counts) - counts
    right = np.arange(len(left)) - np.repeat(first - begin, counts)
    nested = high[right] < low_a[left]
    if nested.any():
        left, right = left[~nested], right[~nested]
    return left, order[right]


def _nested_pairs(
    low_a: IntArray, high_a: IntArray, low_b: IntArray, high_b: IntArray, limits: Limits
) -> tuple[IntArray, IntArray]:
    """Overlapping pairs where a few long ranges reach over many others: those where b starts within a,
    and those where a starts within b, past its start. ``low_b`` ascends."""
    order = np.argsort(low_a, kind="stable")
    low, high = low_a[order], high_a[order]
    sides = []
    for starts, first, last, side in ((low_b, low, high, "left"), (low, low_b, high_b, "right")):
        begin = np.searchsorted(starts, first, side)  # type: ignore[call-overload]
        counts = np.maximum(np.searchsorted(starts, last, "right") - begin, 0)
        limits.hold("pairs", int(counts.sum()))
        over = np.repeat(np.arange(len(counts)), counts)
        sides.append((over, np.arange(len(over)) + np.repeat(begin - np.cumsum(counts) + counts, counts)))
    (left, right), (over, within) = sides
    left, right = order[np.concatenate([left, within])], np.concatenate([right, over])
    by_a = np.lexsort((right, left))
    return left[by_a], right[by_a]


_Level = tuple[IntArray, IntArray, IntArray, "IntArray | int", "IntArray | int"]


def _progressions(da: Digits, db: Digits, k: int, left: IntArray, right: IntArray) -> _Level:
    """Where two progressions of digit ``k`` meet: first index in each, count, index steps."""
    a, n = da.start[k][left], da.extent[k][left]
    b, m = db.start[k][right], db.extent[k][right]
    s, t = da.step[k][left], db.step[k][right]
    if (s == 1).all() and (t == 1).all():
        low, high = np.maximum(a, b), np.minimum(a + n, b + m)
        return low - a, low - b, high - low, 1, 1
    return _congruent(a, n, s, b, m, t)


def _congruent(a: IntArray, n: IntArray, s: IntArray, b: IntArray, m: IntArray, t: IntArray) -> _Level:
    """``a + s x = b + t y`` with ``0 <= x < n`` and ``0 <= y < m``, for many pairs at once."""
    s, t = np.where(n > 1, s, 1), np.where(m > 1, t, 1)
    g = np.gcd(s, t)
    s1, t1 = s // g, t // g
    apart = b - a
    meets = apart % g == 0
    inverse = _inverse(s1, t1)
    x = _times_mod((apart // g) % t1, inverse, t1)
    least = np.maximum(0, -(-apart // s))
    x = x + -((x - least) // t1) * t1
    last = np.minimum(n - 1, (apart + t * (m - 1)) // s)
    count = np.where(meets & (x <= last), (last - x) // t1 + 1, 0)
    y = (a + s * x - b) // t
    return x, y, count, t1, s1


def _inverse(s: IntArray, t: IntArray) -> IntArray:
    """The inverse of ``s`` modulo ``t``, elementwise (0 modulo 1)."""
    if (t == 1).all():
        return np.zeros_like(s)
    order = np.lexsort((t, s))
    fresh = np.ones(len(order), bool)
    fresh[1:] = (np.diff(s[order]) != 0) | (np.diff(t[order]) != 0)
    some = order[fresh]
    inverse = np.array([pow(x, -1, y) for x, y in zip(s[some].tolist(), t[some].tolist())], np.int64)
    found = np.empty_like(s)
    found[order] = inverse[np.cumsum(fresh) - 1]
    return found


def _times_mod(x: IntArray, y: IntArray, t: IntArray) -> IntArray:
    """``x * y % t`` without overflow."""
    if (t < WIDE).all():
        return x * y % t
    exact = [p * q % r for p, q, r in zip(x.tolist(), y.tolist(), t.tolist())]
    return np.array(exact, np.int64)


# --- the exact solver, pair by pair -------------------------------------------------------


def _meet_hard(
    a: Blocks, b: Blocks, some_a: IntArray, some_b: IntArray, limits: Limits, budget: Budget
) -> list[Met]:
    """Pairs that are no product of digits, one at a time."""
    highs = [x.offset + (x.strides * (x.shape - 1)).sum(axis=0) for x in (a, b)]
    lows = [a.offset, b.offset]
    pairs = overlap_pairs(lows[0][some_a], highs[0][some_a], lows[1][some_b], highs[1][some_b], limits)
    found: list[tuple[int, int, Solution]] = []
    for i, j in zip(some_a[pairs[0]].tolist(), some_b[pairs[1]].tolist()):
        if a.box[i] == b.box[j]:
            found += [(i, j, s) for s in _meet_pair(a, b, i, j, budget)]
    if not found:
        return []
    width_a, axes = len(a.pay_offset), max(len(s.axes) for _, _, s in found)
    width = width_a + len(b.pay_offset)
    shape = np.ones((axes, len(found)), np.int64)
    strides = np.zeros((width, axes, len(found)), np.int64)
    for k, (_, _, s) in enumerate(found):
        for i, (extent, step) in enumerate(s.axes):
            shape[i, k], strides[:, i, k] = extent, step
    offset = np.array([s.offset for _, _, s in found], np.int64).reshape(len(found), width).T
    left, right = (np.array([f[i] for f in found], np.int64) for i in (0, 1))
    return [Met(left, right, shape, offset[:width_a], strides[:width_a], offset[width_a:], strides[width_a:])]


def _meet_pair(a: Blocks, b: Blocks, i: int, j: int, budget: Budget) -> list[Solution]:
    """The meetings of one block with another; payload vectors are a's followed by b's."""
    pa, pb = len(a.pay_offset), len(b.pay_offset)
    none_a, none_b = (0,) * pa, (0,) * pb
    digits, free = [], []
    constant = int(b.offset[j]) - int(a.offset[i])
    offset = (*a.pay_offset[:, i].tolist(), *b.pay_offset[:, j].tolist())
    for extent, stride, step in _axes(a, i):
        pay = (*step, *none_b)
        if stride:
            digits.append(Digit(stride, extent, pay))
        else:
            free.append((extent, pay))
    for extent, stride, step in _axes(b, j):
        pay = (*none_a, *step)
        if stride:  # count down, so that both sides add up to the constant
            constant += stride * (extent - 1)
            offset = add(offset, pay, extent - 1)
            digits.append(Digit(stride, extent, tuple(-v for v in pay)))
        else:
            free.append((extent, pay))
    found = solve(digits, constant, pa + pb, budget)
    return [Solution(add(s.offset, offset), s.axes + tuple(free)) for s in found]


def _axes(x: Blocks, k: int) -> Iterator[tuple[int, int, tuple[int, ...]]]:
    steps = x.pay_strides[:, :, k].T.tolist()
    for extent, stride, step in zip(x.shape[:, k].tolist(), x.strides[:, k].tolist(), steps):
        if extent > 1:
            yield extent, stride, tuple(step)


def _joined(parts: list[Met], width_a: int, width_b: int) -> Met:
    """Families of all parts, with axes filled up to the widest."""
    if len(parts) == 1:
        return parts[0]
    axes = max((len(p.shape) for p in parts), default=0)
    if not parts:
        none = np.zeros(0, np.int64)
        flat = np.zeros((0, 0), np.int64)
        return Met(
            none, none, flat,
            np.zeros((width_a, 0), np.int64), np.zeros((width_a, 0, 0), np.int64),
            np.zeros((width_b, 0), np.int64), np.zeros((width_b, 0, 0), np.int64),
        )  # fmt: skip
    wide = []
    for p in parts:
        extra = axes - len(p.shape)
        grow = ((0, 0), (0, extra), (0, 0))
        wide.append(
            p._replace(
                shape=np.pad(p.shape, ((0, extra), (0, 0)), constant_values=1),
                left_strides=np.pad(p.left_strides, grow),
                right_strides=np.pad(p.right_strides, grow),
            )
        )
    return Met(*(np.concatenate(xs, axis=-1) for xs in zip(*wide)))
