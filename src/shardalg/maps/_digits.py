"""Strided blocks in a mixed radix: every address as digits, a block as one progression per digit.

The strides in use determine the finest *chain* of divisors ``1 | c1 | c2 | ...`` they agree on. In that
radix most blocks are a product: one arithmetic progression for each digit. A block that runs through
several digits is carved where its addresses carry, into blocks that are products.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple, TypeAlias

import numpy as np

from .._limits import Budget
from ._solve import add
from ._space import BoolArray, IntArray


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


def forward(x: Blocks) -> Blocks:
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


def finest_chain(strides: set[int]) -> list[int]:
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


def long_chain(strides: set[int]) -> list[int]:
    """A chain that keeps long strides where the finest one loses them: of two that do not divide each
    other the shorter is dropped, unless their gcd reaches down to the next one only.

    >>> long_chain({48, 100, 3200, 9600, 25600}), finest_chain({48, 100, 3200, 9600, 25600})
    ([1, 100, 3200], [1, 4, 3200])
    """
    kept: list[int] = []
    waiting = sorted({1} | strides)
    while waiting:
        low = waiting.pop()
        if not kept or kept[-1] % low == 0:
            kept.append(low)
        elif (both := gcd(kept[-1], low)) >= waiting[-1] > 1:
            kept.pop()
            waiting += [both] * (both > waiting[-1])
    return kept[::-1]


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


# --- blocks that are no product ------------------------------------------------------------


def products(
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
    x = stack([pad_axes(y, axes) for y in blocks])
    digits = chain_digits(x, chain)
    return x, names[origin], digits, np.flatnonzero(~digits.product)


def spare_axis(x: Blocks, picked: IntArray, chain: list[int]) -> tuple[IntArray, IntArray]:
    """The axis to cut picked blocks along that are no product, and its extent: the shortest of those that
    fit no digit or share one, else the shortest that moves; every block has one."""
    strides, extents = x.strides[:, picked], x.shape[:, picked]
    level = np.searchsorted(chain, strides, "right") - 1
    level = np.where((extents > 1) & (strides > 0), level, -1)
    shared = (level[:, None] == level).sum(axis=1) > 1
    spare = shared | (strides % np.array(chain)[level] != 0)
    most = np.iinfo(np.int64).max
    moving = np.where(level >= 0, extents, most)
    best = np.where(spare, moving, most)
    best = np.where((best == most).all(axis=0), moving, best)
    return best.argmin(axis=0), best.min(axis=0)


def sliced(x: Blocks, picked: IntArray, along: IntArray, budget: Budget) -> tuple[Blocks, IntArray]:
    """Blocks, the picked ones cut into the single steps of one axis each; and which one each is of."""
    axis, times = np.zeros(len(x.box), np.int64), np.ones(len(x.box), np.int64)
    axis[picked], times[picked] = along, x.shape[along, picked]
    budget.spend(len(picked))
    of, index = repeated(times)
    x, k, here = x.take(of), axis[of], np.arange(len(of))
    shape = x.shape.copy()
    shape[k, here] = np.where(times[of] > 1, 1, shape[k, here])
    offset = x.offset + index * x.strides[k, here]
    return x._replace(
        offset=offset, shape=shape, pay_offset=x.pay_offset + index * x.pay_strides[:, k, here]
    ), of


def repeated(times: IntArray) -> tuple[IntArray, IntArray]:
    """Each position as often as said, and which of its copies this is."""
    of = np.repeat(np.arange(len(times)), times)
    return of, np.arange(len(of)) - np.repeat(np.cumsum(times) - times, times)


def pad_axes(x: Blocks, axes: int) -> Blocks:
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


def stack(parts: list[Blocks]) -> Blocks:
    """The blocks of all parts, which have as many axes."""
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


_Axis: TypeAlias = tuple[int, int, tuple[int, ...]]  # extent, stride, payload per step
_Run: TypeAlias = tuple[int, tuple[int, ...], list[_Axis]]  # offset, payload, axes


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
    """One axis as a head, whole laps (an axis of the digit above, cut in turn) and a tail."""
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
        step = tuple(v * lap for v in p)
        body = _cut_laps(offset + s * head, add(pay, p, head), whole, above, step, chain, budget)
        runs += [(o, q, [*axes, (lap, s, p)]) for o, q, axes in body]
    if tail:
        at = head + whole * lap
        runs.append((offset + s * at, add(pay, p, at), [(tail, s, p)] if tail > 1 else []))
    return runs


# --- boxes ---------------------------------------------------------------------------------


Row: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]


def chain_boxes(x: Blocks, strides: tuple[int, ...], budget: Budget) -> Iterator[Row]:
    """Blocks of one row-major box as products of progressions along its axes.

    ``strides`` are the box's, outermost first. Yields ``(start, count, step, payload, payload
    strides)``, each but the payload a tuple over the axes, after cutting blocks where they wrap.
    Blocks that are no product even then, or repeat an address, are cut along their axes.
    """
    x = forward(x)
    chain = sorted(set(strides) | {1})
    waiting = [x.take(np.arange(k, k + 1)) for k in range(len(x.box))]
    while waiting:
        one = waiting.pop(0)
        one, _, digits, _ = products(one, chain, np.arange(1), budget)
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
