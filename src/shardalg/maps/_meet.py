"""Where two sets of strided blocks meet: the one primitive under every operator.

``meet(a, b)`` takes two sets of blocks in the same boxes and returns every pair of block
points that share an address, as strided families. Each block carries *payload* addresses
(a slot, an element, an index); a family gives both blocks' payloads as an offset plus strides.
Composition reads the far sides, intersection filters them, subtraction reads indices.

The fast path writes every address as digits of one mixed-radix system (``_chain``) in which
each block is one arithmetic progression per digit. Then two blocks meet digit by digit, and
all candidate pairs are solved together with NumPy; candidates come from a sort on the digit
that has the fewest. Blocks that are no such product are carved into blocks that are; what
resists even that goes to the exact solver pair by pair.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np

from .._limits import Budget, Limits
from ._solve import Digit, Solution, add, solve
from ._space import BoolArray, IntArray

WIDE = 1 << 31  # products of two values below this fit an int64


class Blocks(NamedTuple):
    """Strided blocks with payloads; one column per block.

    ``box`` and ``offset`` are ``[n]``, ``shape`` and ``strides`` ``[axes, n]``, ``pay_offset``
    ``[P, n]`` and ``pay_strides`` ``[P, axes, n]``. All extents are at least 1.
    """

    box: IntArray
    offset: IntArray
    shape: IntArray
    strides: IntArray
    pay_offset: IntArray
    pay_strides: IntArray

    def take(self, picked: IntArray) -> Blocks:
        return Blocks(*(x[..., picked] for x in self))


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
    a, b = _forward(a), _forward(b)
    parts = []
    for some_a, some_b, chain in _groups(a, b):
        parts += _meet_group(a.take(some_a), b.take(some_b), chain, some_a, some_b, limits, budget, bound)
    limits.hold(bound, sum(len(p.left) for p in parts))
    return _joined(parts, len(a.pay_offset), len(b.pay_offset))


def _forward(x: Blocks) -> Blocks:
    """Axes flipped so that no stride is negative."""
    back = x.strides < 0
    if not back.any():
        return x
    steps = np.where(back, x.shape - 1, 0)
    return x._replace(
        offset=x.offset + (x.strides * steps).sum(axis=0),
        strides=np.abs(x.strides),
        pay_offset=x.pay_offset + (x.pay_strides * steps).sum(axis=1),
        pay_strides=np.where(back, -x.pay_strides, x.pay_strides),
    )


# --- digits -------------------------------------------------------------------------------


def _groups(a: Blocks, b: Blocks) -> Iterator[tuple[IntArray, IntArray, list[int]]]:
    """Blocks of boxes that can share one chain of digits, with that chain."""
    if not len(a.box) or not len(b.box):
        return
    strides = _strides_by_box(a, b)
    chains = {box: tuple(_chain(found)) for box, found in strides.items()}
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


def _chain(strides: set[int]) -> list[int]:
    """The finest chain of divisors ``1 = c0 | c1 | ...`` the strides agree on: two that do not
    divide each other are replaced by their gcd."""
    live = sorted({1} | strides)
    k = 0
    while k + 1 < len(live):
        if live[k + 1] % live[k]:
            live = sorted({*live[:k], *live[k + 2 :], gcd(live[k], live[k + 1])})
            k = 0
        else:
            k += 1
    return live


class Digits(NamedTuple):
    """Blocks as one progression per digit; arrays ``[digits, n]``, payload ``[P, digits, n]``.

    ``product`` is False for blocks that are no such product. Free axes (stride 0) stay apart.
    """

    start: IntArray
    step: IntArray
    extent: IntArray
    payload: IntArray
    free_shape: IntArray
    free_payload: IntArray
    product: BoolArray


def chain_digits(x: Blocks, chain: list[int]) -> Digits:
    """Write each block in the mixed radix of the chain.

    An axis steps in the highest digit that divides its stride. There it *fits*, or it *wraps*: it starts in
    the first step and takes whole laps of the digit, and goes on in the digits above once per lap. An axis
    that does neither, or a second one in a digit, makes the block no product.
    """
    levels, n, width = len(chain), len(x.box), len(x.pay_offset)
    start = _digits_of(x.offset, chain)
    step, count = np.ones((levels, n), np.int64), np.ones((levels, n), np.int64)
    payload = np.zeros((width, levels, n), np.int64)
    product = np.ones(n, bool)
    for axis in range(len(x.shape)):
        stride, extent, pay = x.strides[axis], x.shape[axis], x.pay_strides[:, axis]
        left = np.where(stride > 0, extent, 1)  # extent still to be placed
        for k in range(levels):
            here = (left > 1) & (stride % chain[k] == 0)
            if k + 1 < levels:
                here &= stride < chain[k + 1]
            if not here.any():
                continue
            jump = np.where(here, stride // chain[k], 1)
            take = left
            if k + 1 < levels:
                radix = chain[k + 1] // chain[k]
                fits = start[k] + jump * (left - 1) < radix
                lap = radix // jump
                wraps = ~fits & (radix % jump == 0) & (start[k] < jump) & (left % np.maximum(lap, 1) == 0)
                take = np.where(wraps, lap, left)
                product &= ~here | fits | wraps
            product &= ~here | (count[k] == 1)  # one axis per digit
            step[k] = np.where(here, jump, step[k])
            payload[:, k] = np.where(here, pay, payload[:, k])
            count[k] = np.where(here, take, count[k])
            pay = np.where(here, pay * take, pay)
            stride = np.where(here, stride * take, stride)
            left = np.where(here, left // np.maximum(take, 1), left)
        product &= left == 1
    return Digits(start, step, count, payload, *_free_axes(x), product)


def _digits_of(offset: IntArray, chain: list[int]) -> IntArray:
    """``[digits, n]``: addresses in the mixed radix of the chain, its units first."""
    digits = np.empty((len(chain), len(offset)), np.int64)
    for k in range(len(chain) - 1, 0, -1):
        digits[k], offset = np.divmod(offset, chain[k])
    digits[0] = offset
    return digits


def _free_axes(x: Blocks) -> tuple[IntArray, IntArray]:
    """Extents and payload strides of the axes that stand still (stride 0) in some block."""
    moves = (x.strides > 0) | (x.shape == 1)
    free = np.flatnonzero(~moves.all(axis=1))
    return np.where(moves[free], 1, x.shape[free]), np.where(moves[free], 0, x.pay_strides[:, free])


Row = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def chain_boxes(x: Blocks, strides: tuple[int, ...], budget: Budget) -> Iterator[Row]:
    """Blocks of one row-major box as products of progressions along its axes.

    ``strides`` are the box's, outermost first. Yields ``(start, count, step, payload, payload
    strides)``, each but the payload a tuple over the axes, after cutting blocks where they wrap.
    Blocks that are no product even then, or repeat an address, are cut along their axes.
    """
    x = _forward(x)
    chain = sorted(set(strides) | {1})
    waiting = [x.take(np.arange(k, k + 1)) for k in range(len(x.box))]
    while waiting:
        one = waiting.pop(0)
        one, _, digits, _ = _products(one, chain, np.arange(1), budget)
        for k in range(len(one.box)):
            if digits.product[k] and (digits.free_shape[:, k] == 1).all():
                yield _row(one, digits, chain, strides, k)
            else:
                waiting += _points_of_axis(one, k, budget)


def _row(x: Blocks, d: Digits, chain: list[int], strides: tuple[int, ...], k: int) -> Row:
    """Block ``k`` along the axes; of axes that share a stride only the outermost is longer than 1."""
    level = {c: i for i, c in enumerate(chain)}
    first = {s: axis for axis, s in reversed(list(enumerate(strides)))}
    rows = []
    for axis, s in enumerate(strides):
        i = level[s] if first[s] == axis else None
        found = (0, 1, 1, 0) if i is None else (
            int(d.start[i, k]), int(d.extent[i, k]), int(d.step[i, k]), int(d.payload[0, i, k])
        )  # fmt: skip
        rows.append(found)
    start, count, step, pay = (tuple(r[i] for r in rows) for i in range(4))
    return start, count, step, int(x.pay_offset[0, k]), pay


def _points_of_axis(x: Blocks, k: int, budget: Budget) -> list[Blocks]:
    """Block ``k`` cut along an axis of stride 0, else along that of the largest, into single steps."""
    long = x.shape[:, k] > 1
    still = long & (x.strides[:, k] == 0)
    axis = int(np.argmax(still if still.any() else x.strides[:, k] * long))
    n = int(x.shape[axis, k])
    budget.spend(n)
    shape = x.shape[:, k : k + 1].copy()
    shape[axis] = 1
    one = x.take(np.arange(k, k + 1))
    return [
        one._replace(
            offset=one.offset + i * x.strides[axis, k],
            shape=shape,
            pay_offset=one.pay_offset + i * x.pay_strides[:, axis, k][:, None],
        )
        for i in range(n)
    ]


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
    a, name_a, da, hard_a = _products(a, chain, name_a, budget)
    b, name_b, db, hard_b = _products(b, chain, name_b, budget)
    parts = []
    easy_a, easy_b = (np.flatnonzero(d.product) for d in (da, db))
    if len(easy_a) and len(easy_b):
        parts.append(_meet_products(a, b, da, db, easy_a, easy_b, limits, bound))
    if len(hard_a):
        parts += _meet_hard(a, b, hard_a, np.arange(len(b.box)), limits, budget)
    if len(hard_b) and len(easy_a):
        parts += _meet_hard(a, b, easy_a, hard_b, limits, budget)
    return [p._replace(left=name_a[p.left], right=name_b[p.right]) for p in parts]


def _products(
    x: Blocks, chain: list[int], names: IntArray, budget: Budget
) -> tuple[Blocks, IntArray, Digits, IntArray]:
    """The blocks with those that are no product carved into products where that succeeds."""
    digits = chain_digits(x, chain)
    hard = np.flatnonzero(~digits.product)
    if not len(hard):
        return x, names, digits, hard
    carved = [_carve(x, int(k), chain, budget) for k in hard]
    blocks = [x.take(np.flatnonzero(digits.product)), *carved]
    origin = np.concatenate(
        [np.flatnonzero(digits.product), *(np.full(len(c.box), k) for c, k in zip(carved, hard))]
    )
    axes = max(len(y.shape) for y in blocks)
    x = _stack([_pad_axes(y, axes) for y in blocks])
    digits = chain_digits(x, chain)
    return x, names[origin], digits, np.flatnonzero(~digits.product)


def _pad_axes(x: Blocks, axes: int) -> Blocks:
    """Blocks with unit axes added up to ``axes``."""
    extra, n, width = axes - len(x.shape), len(x.box), len(x.pay_offset)
    if not extra:
        return x
    zeros = np.zeros((extra, n), np.int64)
    return x._replace(
        shape=np.concatenate([x.shape, zeros + 1]),
        strides=np.concatenate([x.strides, zeros]),
        pay_strides=np.concatenate([x.pay_strides, np.zeros((width, extra, n), np.int64)], axis=1),
    )


def _stack(parts: list[Blocks]) -> Blocks:
    return Blocks(*(np.concatenate(xs, axis=-1) for xs in zip(*parts)))


def _carve(x: Blocks, k: int, chain: list[int], budget: Budget) -> Blocks:
    """Block ``k`` cut where its addresses carry from one digit of the chain to the next.

    An axis that wraps around a digit is cut to whole laps: head, body and tail, so that a
    flat run through d nested digits becomes at most 2d - 1 blocks.
    """
    axes = list(zip(x.shape[:, k].tolist(), x.strides[:, k].tolist(), x.pay_strides[:, :, k].T.tolist()))
    free = [(n, tuple(p)) for n, s, p in axes if s == 0 and n > 1]
    live = [(n, s, tuple(p)) for n, s, p in axes if s and n > 1]
    start = (int(x.offset[k]), tuple(x.pay_offset[:, k].tolist()))
    done = []
    for offset, pay, parts in _laps(start[0], start[1], live, chain, budget):
        done.append((offset, pay, [(n, s, p) for n, s, p in parts] + [(n, 0, p) for n, p in free]))
    width, most = len(x.pay_offset), max((len(parts) for _, _, parts in done), default=0)
    count = len(done)
    shape, strides = np.ones((most, count), np.int64), np.zeros((most, count), np.int64)
    pay_strides = np.zeros((width, most, count), np.int64)
    for j, (_, _, parts) in enumerate(done):
        for i, (n, s, p) in enumerate(parts):
            shape[i, j], strides[i, j], pay_strides[:, i, j] = n, s, p
    return Blocks(
        np.full(count, x.box[k]),
        np.array([offset for offset, _, _ in done], np.int64),
        shape,
        strides,
        np.array([pay for _, pay, _ in done], np.int64).reshape(count, width).T,
        pay_strides,
    )


_Axis = tuple[int, int, tuple[int, ...]]  # extent, stride, payload per step
_Run = tuple[int, tuple[int, ...], list[_Axis]]  # offset, payload, axes


def _laps(
    offset: int, pay: tuple[int, ...], axes: list[_Axis], chain: list[int], budget: Budget
) -> list[_Run]:
    """Cut the axes, smallest stride first, at the laps of the digit each one runs in."""
    runs: list[_Run] = [(offset, pay, [])]
    for n, s, p in sorted(axes, key=lambda axis: axis[1]):
        runs = [
            (at, got, done + cut)
            for o, q, done in runs
            for at, got, cut in _cut_laps(o, q, n, s, p, chain, budget)
        ]
    return runs


def _cut_laps(
    offset: int, pay: tuple[int, ...], n: int, s: int, p: tuple[int, ...], chain: list[int], budget: Budget
) -> list[_Run]:
    budget.spend()
    above = next((c for c in chain if c > s), None)
    if n == 1:
        return [(offset, pay, [])]
    if above is None or offset % above + s * (n - 1) < above or above % s:
        return [(offset, pay, [(n, s, p)])]
    lap = above // s
    head = -(-(above - offset % above) // s) if offset % above >= s else 0
    runs: list[_Run] = []
    if head:
        runs.append((offset, pay, [(head, s, p)] if head > 1 else []))
    whole, tail = divmod(n - head, lap)
    if whole:
        at = head
        body = _cut_laps(
            offset + s * at, add(pay, p, at), whole, above, tuple(v * lap for v in p), chain, budget
        )
        runs += [(o, q, [*axes, (lap, s, p)]) for o, q, axes in body]
    if tail:
        at = head + whole * lap
        runs.append((offset + s * at, add(pay, p, at), [(tail, s, p)] if tail > 1 else []))
    return runs


# --- products: every digit at once --------------------------------------------------------


def _meet_products(
    a: Blocks,
    b: Blocks,
    da: Digits,
    db: Digits,
    easy_a: IntArray,
    easy_b: IntArray,
    limits: Limits,
    bound: str,
) -> Met:
    """The meetings of blocks that are products: those of their digits, outermost first, then the free
    axes of a and those of b."""
    left, right = _candidates(a, b, da, db, easy_a, easy_b, limits)
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


def _candidates(
    a: Blocks, b: Blocks, da: Digits, db: Digits, easy_a: IntArray, easy_b: IntArray, limits: Limits
) -> tuple[IntArray, IntArray]:
    """Pairs whose ranges overlap in the digit where the fewest do."""
    best: tuple[int, IntArray, IntArray, IntArray, IntArray] | None = None
    boxed = bool((a.box[easy_a] != a.box[easy_a[0]]).any() or (b.box[easy_b] != a.box[easy_a[0]]).any())
    for k in range(len(da.start) - 1, -1, -1):
        low_a, high_a = _range(da, k, easy_a)
        low_b, high_b = _range(db, k, easy_b)
        if boxed:
            reach = int(max(high_a.max(), high_b.max())) + 1
            most = int(max(a.box[easy_a].max(), b.box[easy_b].max())) + 1
            if reach < (1 << 62) // most:
                low_a, high_a = low_a + a.box[easy_a] * reach, high_a + a.box[easy_a] * reach
                low_b, high_b = low_b + b.box[easy_b] * reach, high_b + b.box[easy_b] * reach
        total = overlapping(low_a, high_a, low_b, high_b)
        if best is None or total < best[0]:
            best = (total, low_a, high_a, low_b, high_b)
        if total <= max(len(easy_a), len(easy_b)):
            break
    assert best is not None
    limits.hold("pairs", best[0])
    left, right = overlap_pairs(*best[1:], limits)
    left, right = easy_a[left], easy_b[right]
    if boxed:
        same = a.box[left] == b.box[right]
        if not same.all():
            left, right = left[same], right[same]
    return left, right


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
    limits.hold("pairs", int(counts.sum()))
    left = np.repeat(np.arange(len(low_a)), counts)
    first = np.cumsum(counts) - counts
    right = np.arange(len(left)) - np.repeat(first - begin, counts)
    nested = high[right] < low_a[left]
    if nested.any():
        left, right = left[~nested], right[~nested]
    return left, order[right]


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
    pairs, where = np.unique(np.stack([s, t]), axis=1, return_inverse=True)
    return np.array([pow(x, -1, y) for x, y in pairs.T.tolist()], np.int64)[where.reshape(-1)]


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
