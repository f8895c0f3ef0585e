"""The layout of a black-box partition function."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from .._errors import InvalidMapError
from .._limits import Limits, require_limits
from .._torch import torch
from ..maps import AffineMap, Space
from ..maps._map import remember
from ..maps._piece import as_scale
from ..maps._ratio import simplest_ratio
from ..maps._reading import one_of
from ..maps._space import IntArray, Shape, as_int, as_shape
from ..maps._table import concatenate
from ._families import families_in
from ._folding import simplified, table_of
from ._layout import rank_ids

Values: TypeAlias = npt.NDArray[Any]
Shards: TypeAlias = dict[int, Values]

# Bits of the integers that a type holds exactly; markers carry fewer, by SPARE.
EXACT = {
    "float64": 53, "float32": 24, "bfloat16": 8, "float16": 11,
    "int64": 63, "int32": 31, "int16": 15, "int8": 7,
}  # fmt: skip
SPARE = 6
EXPONENTS = {"float64": 1024, "float32": 128, "bfloat16": 128, "float16": 16}  # of the largest values
MARKERS = {"torch": ("float32", "int64"), "numpy": ("float64", "int64")}
ULPS = 4


def probe(
    partition: Callable[..., Any],
    shape: int | Sequence[int],
    ranks: int | Sequence[int],
    *,
    like: str = "torch",
    dtype: str | None = None,
    seed: int = 0,
    limits: Limits = Limits(),
) -> AffineMap:
    """The layout that a partition function really has, learnt from marked data and proved on other data.

    ``partition(full, rank)`` returns one shard (None: the rank has none), or ``partition(full)``
    returns all of them (``{rank: shard}``, or a sequence whose positions are those of ``ranks``). It
    receives torch tensors, or NumPy arrays with ``like="numpy"``, and may keep, move, repeat, drop and
    scale elements by constants, and pad with constants. ``dtype`` is the type of the data, by default
    float32 (float64 for NumPy), and int64 where the function refuses that.

    ``probe(lambda full, r: extract(L, full, r), ...)`` is ``equivalent`` to L. Raises
    ``InvalidMapError`` with rank, slot and values for what is not a view of the tensor: sums, choices
    that depend on the data, other types. No test of a function is complete: a choice by one value, such as
    ``full[0] == 7``, is not found. Errors of the function itself pass through; ``LimitError`` where the
    marked tensor alone would take more than ``limits.plan_bytes``.

    Cost: eight calls of the function per rank, a few more for large tensors or types of few bits.

    >>> probe(lambda full, rank: full[rank::2], (6,), 2, like="numpy").pieces
    (Piece((3,), Side(0, (1,), rank=0), Side(0, (2,))), Piece((3,), Side(0, (1,), rank=1), Side(1, (2,))))
    """
    shape = as_shape(shape)
    labels = rank_ids(ranks)
    require_limits(limits)
    if not callable(partition):
        raise InvalidMapError(f"probe takes a function of (full, rank) or of (full), got {partition!r}")
    seed = as_int(seed, "probe: seed")
    if seed < 0:
        raise InvalidMapError(f"probe: seed must be at least 0, got {seed}")
    one_of(like, tuple(MARKERS), "probe: like")
    if dtype is not None:
        one_of(dtype, tuple(EXACT), "probe: dtype")
    limits.hold("plan_bytes", 8 * math.prod(shape))
    ask, low = asker(partition, shape, labels, like, dtype)
    learnt = _learn(ask, low, math.prod(shape))
    _prove(ask, learnt, math.prod(shape), np.random.default_rng(seed))
    return _as_map(learnt, shape, ask.dtype, limits)


# --- asking -------------------------------------------------------------------------------


class Ask(NamedTuple):
    """A partition function with all that is needed to call it on flat data."""

    partition: Callable[..., Any]
    shape: Shape
    ranks: tuple[int, ...]
    like: str
    dtype: str
    per_rank: bool

    @property
    def integral(self) -> bool:
        return self.dtype.startswith("int")

    def __call__(self, values: Values) -> Shards:
        """The shards of a tensor that holds ``values``."""
        found = self.answers(values)
        if found and all(shard is None for shard in found.values()):
            raise InvalidMapError("the partition returned None for every rank: did it forget to return?")
        return {rank: self.array(rank, shard) for rank, shard in found.items() if shard is not None}

    def answers(self, values: Values) -> dict[int, Any]:
        full = self.tensor(values)
        if self.per_rank:  # each call gets its own copy: it may write on it
            return {rank: self.partition(self.copy(full), rank) for rank in self.ranks}
        return self.by_rank(self.partition(full))

    def by_rank(self, found: Any) -> dict[int, Any]:
        if isinstance(found, Mapping):
            unknown = [r for r in found if r not in self.ranks]
            if unknown:
                raise InvalidMapError(
                    f"the partition returned a shard for rank {unknown[0]!r}, not among {self.ranks}"
                )
            return {int(r): found[r] for r in sorted(found)}
        if not isinstance(found, Sequence):
            raise InvalidMapError(
                f"partition(full) must return {{rank: shard}} or a sequence of shards, got"
                f" {type(found).__name__};"
                " a function of one rank takes two arguments: partition(full, rank)"
            )
        if len(found) != len(self.ranks):
            raise InvalidMapError(f"the partition returned {len(found)} shards for {len(self.ranks)} ranks")
        return dict(zip(self.ranks, found))

    def tensor(self, values: Values) -> Any:
        """A fresh tensor of the logical shape."""
        array = values.reshape(self.shape)
        if self.like == "numpy":
            return array.astype(self.dtype)
        return torch().from_numpy(array).to(getattr(torch(), self.dtype), copy=True)

    def copy(self, full: Any) -> Any:
        return full.copy() if self.like == "numpy" else full.clone()

    def stored(self, values: Values) -> Values:
        """``values`` as the tensor really holds them."""
        return _plain(self.tensor(values)).reshape(-1)

    def array(self, rank: int, shard: Any) -> Values:
        """A shard as an array in which arithmetic is exact enough."""
        name = str(getattr(shard, "dtype", "")).removeprefix("torch.")
        if not name or not hasattr(shard, "shape"):
            raise InvalidMapError(f"rank {rank} got a {type(shard).__name__}, not a tensor")
        if not _keeps(self.dtype, name):
            hint = f'; probe with dtype="{name}"' if name in EXACT else ""
            raise InvalidMapError(
                f"rank {rank} returns {name} for a {self.dtype} tensor, which cannot hold its values:"
                f" that is a conversion, not a view{hint}"
            )
        try:
            return _plain(shard)
        except (TypeError, NotImplementedError, RuntimeError) as error:  # no storage, sparse, quantized
            raise InvalidMapError(
                f"rank {rank} returns a tensor whose values cannot be read: {error}"
            ) from error


def _keeps(have: str, got: str) -> bool:
    """Whether a type holds every value of another."""
    return (got in EXACT and have[:3] == got[:3] and EXACT[got] >= EXACT[have]) or have == got


def _plain(x: Any) -> Values:
    """A tensor as float32, float64 or int64, its values unchanged."""
    if hasattr(x, "detach"):
        x = x.detach().to("cpu")
        narrow = x.is_floating_point() and x.element_size() < 4
        x = (x.float() if narrow else x).numpy()
    x = np.asarray(x)
    wanted = np.int64 if x.dtype.kind == "i" else np.float32 if x.itemsize < 4 else x.dtype
    return np.asarray(x, wanted)


def asker(
    partition: Callable[..., Any], shape: Shape, ranks: tuple[int, ...], like: str, dtype: str | None
) -> tuple[Ask, Shards]:
    """How to call a partition function, and its shards of a constant tensor."""
    names = MARKERS[like] if dtype is None else (dtype,)
    per_rank = _takes_rank(partition)
    first = Ask(partition, shape, ranks, like, names[0], per_rank)
    if len(names) == 1:
        return first, first(_constant(first, 0))
    try:
        return first, first(_constant(first, 0))
    except (TypeError, IndexError, RuntimeError) as refusal:
        second = first._replace(dtype=names[1])
        try:
            return second, second(_constant(second, 0))
        except Exception:
            raise refusal from None


def _takes_rank(partition: Callable[..., Any]) -> bool:
    """Whether a function must be given a rank: its second positional argument is called so or has no
    default."""
    try:
        parameters = inspect.signature(partition).parameters.values()
    except (TypeError, ValueError):
        return True
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = any(p.default is p.empty or p.name == "rank" for p in places[1:2])
    return second or any(p.kind is p.VAR_POSITIONAL for p in parameters)


# --- learning -----------------------------------------------------------------------------


class Learnt(NamedTuple):
    """What each slot of a shard holds: ``element * scale``, or the constant ``fill`` where the element is
    -1. ``scales`` is 0-d where one factor serves all slots."""

    elements: IntArray
    scales: Values
    fill: Values


def _least(ask: Ask) -> int:
    """The least marker: integers may be used as indices, so they begin at 0."""
    return 0 if ask.integral else 1


def _constant(ask: Ask, step: int) -> Values:
    """The tensor that holds the least marker plus ``step`` everywhere."""
    return np.full(math.prod(ask.shape), _least(ask) + step)


def _learn(ask: Ask, low: Shards, size: int) -> dict[int, Learnt]:
    high = _same_form(low, ask(_constant(ask, 1)))
    scales = {rank: _scales(rank, low[rank], high[rank], _least(ask)) for rank in low}
    elements = {rank: np.zeros(x.shape, np.int64) for rank, x in low.items()}
    for place in range(digits_needed(size, ask.dtype)):
        answer = _same_form(low, ask(markers(np.arange(size), place, ask.dtype)))
        for rank, found in answer.items():
            elements[rank] += _digits(ask, rank, found, scales[rank]) << (place * digit_bits(ask.dtype))
    for rank, its in elements.items():
        if not scales[rank].all():
            its[...] = np.where(scales[rank] == 0, -1, its)
        _require_elements(rank, its, size)
    return {rank: Learnt(elements[rank], scales[rank], low[rank]) for rank in low}


def _require_elements(rank: int, elements: IntArray, size: int) -> None:
    _refuse_where(
        elements >= size, rank, lambda i: f"the marks of element {elements[i]}, of {size}: elements are mixed"
    )


def _scales(rank: int, low: Values, high: Values, least: int) -> Values:
    """The factor of each slot, 0 where it holds a constant, from tensors that are ``least`` and one more
    everywhere."""
    constant = (low == high) | (np.isnan(low) & np.isnan(high))
    with np.errstate(invalid="ignore"):
        scales = np.where(constant, low.dtype.type(0), high - low)
    _refuse_where(
        ~constant & (low != scales * least),
        rank,
        lambda i: (
            f"{low[i]} where all elements are {least} and {high[i]} where all are {least + 1}:"
            " that is no element times a constant"
        ),
    )
    first = scales.reshape(-1)[:1]
    return first.reshape(()) if scales.size and (scales == first).all() else scales


def digit_bits(dtype: str) -> int:
    """Bits of the element's index that one probe carries: few enough that a digit survives the
    roundings of a scale."""
    return 31 if dtype == "int64" else EXACT[dtype] - min(SPARE, EXACT[dtype] // 2)


def digits_needed(size: int, dtype: str) -> int:
    """Probes needed to tell ``size`` elements apart."""
    return -(-(size - 1).bit_length() // digit_bits(dtype)) if size > 1 else 0


def markers(elements: IntArray, place: int, dtype: str) -> IntArray:
    """The mark of each element in one probe: a digit of its index, plus 1 for floats.

    Small enough to be exact in the type, however large the index.

    >>> markers(np.array([0, 5, 2**60 + 5]), 0, "float32"), markers(np.array([2**60]), 3, "float32")
    (array([1, 6, 6]), array([65]))
    """
    bits = digit_bits(dtype)
    return (elements >> (place * bits) & ((1 << bits) - 1)) + (not dtype.startswith("int"))


def _digits(ask: Ask, rank: int, found: Values, scales: Values) -> IntArray:
    """The digits that the marks in a shard carry."""
    live = scales != 0
    finite = found if live.all() and ask.integral else np.where(live & np.isfinite(found), found, 0)
    marks = np.rint(finite if (scales == 1).all() else finite / np.where(live, scales, 1)).astype(np.int64)
    digits = marks - _least(ask)
    wrong = ~_close(found, marks, scales, ask.dtype) | (digits >> digit_bits(ask.dtype) != 0)
    _refuse_where(
        wrong & live,
        rank,
        lambda i: (
            f"{found[i]}, which is no mark of one element times {_ratio(scales, i, ask.dtype)}: elements"
            f" are mixed, chosen by their values, or too large for {ask.dtype} once scaled"
        ),
    )
    return digits if live.all() else np.where(live, digits, 0)


def _close(found: Values, elements: Values, scales: Values, dtype: str) -> npt.NDArray[np.bool_]:
    """Whether values are elements times their scales: exactly where that needs no rounding, else up to
    roundings."""
    if (scales == 1).all():
        return np.asarray(found == elements)
    if np.issubdtype(found.dtype, np.integer):
        return np.asarray(found == elements * scales)
    with np.errstate(invalid="ignore"):
        wanted = elements * np.asarray(scales, np.float64)
        error = np.abs(found - wanted)
    slack = np.where(np.abs(np.frexp(scales)[0]) == 0.5, 0, ULPS * 2.0 ** -EXACT[dtype])
    return np.asarray(error <= slack * np.abs(wanted))


def _same_form(first: Shards, other: Shards) -> Shards:
    """``other``, if it has the ranks and shapes of ``first``."""
    forms = [{rank: x.shape for rank, x in shards.items()} for shards in (first, other)]
    if forms[0] != forms[1]:
        rank = next(r for r in [*first, *other] if forms[0].get(r) != forms[1].get(r))
        was, now = (form.get(rank, "no shard") for form in forms)
        raise InvalidMapError(
            f"not a view: rank {rank} got {was} and, for other data of the same shape, {now}"
        )
    return other


def _refuse_where(wrong: npt.NDArray[np.bool_], rank: int, holds: Callable[[Any], str]) -> None:
    """Refuse the partition if any slot is wrong, naming the first."""
    if not wrong.any():
        return
    slot = int(np.flatnonzero(wrong)[0])
    index = tuple(int(i) for i in np.unravel_index(slot, wrong.shape))
    at = f" (index {index})" if len(index) > 1 else ""
    raise InvalidMapError(f"not a view: rank {rank}, slot {slot}{at} holds {holds(index)}")


# --- proving ------------------------------------------------------------------------------


def _prove(ask: Ask, learnt: Mapping[int, Learnt], size: int, rng: np.random.Generator) -> None:
    """Compare the shards of independent data with what the layout says they are."""
    for data in proofs(ask.dtype, size, _factors(learnt), rng):
        values = ask.stored(data)
        answer = ask(values)
        _same_form({rank: x.elements for rank, x in learnt.items()}, answer)
        for rank, found in answer.items():
            _compare(ask, rank, learnt[rank], found, values)


def proofs(dtype: str, size: int, factors: tuple[float, float], rng: np.random.Generator) -> list[Values]:
    """The data of a proof, made so that a choice by values goes another way at least once.

    The second data falls where the first rises, has the other sign and is much larger: a choice by order,
    sign, sum or size. The next two have equal neighbours and a few zeros, the one also very large and very
    small values, the other (of integers) no zeros. The last is zero everywhere. ``factors`` are the least and
    the greatest that the partition scales by: no product leaves the type. Integers stay indices.
    """
    half = max(1, -(-size // 2))
    if dtype.startswith("int"):
        bound = max(2, min(size, int((2 ** EXACT[dtype] - 1) // max(1.0, factors[1]))))
        first = np.resize(rng.permutation(bound), size)
        second = bound - 1 - first
        some, none = (np.resize(1 + rng.permutation(bound - 1), half) for _ in range(2))
    else:
        first = _random(rng, size)
        second = -256 * first
        some, none = _random(rng, half), _some_zero(_extreme(dtype, half, factors, rng), rng)
    twins, others = _in_twos(_some_zero(some, rng), size, 0), _in_twos(none, size, 1)
    return [first, second, twins, others, np.zeros_like(first)]


def _factors(learnt: Mapping[int, Learnt]) -> tuple[float, float]:
    """The least and the greatest size of a factor, 1 among them."""
    sizes = np.abs(np.concatenate([np.ones(1), *(np.ravel(x.scales).astype(float) for x in learnt.values())]))
    live = sizes[(sizes > 0) & np.isfinite(sizes)]
    return float(live.min()), float(live.max())


def _random(rng: np.random.Generator, size: int) -> Values:
    """Values of both signs and several magnitudes, all digits in use."""
    return np.ldexp(rng.standard_normal(size), rng.integers(-4, 5, size, dtype=np.int32))


def _extreme(dtype: str, size: int, factors: tuple[float, float], rng: np.random.Generator) -> Values:
    """Values of both signs near the largest and the smallest of their type, even after scaling."""
    reach = EXPONENTS[dtype] - EXPONENTS[dtype] // 8 - 3
    most, least = reach - math.frexp(factors[1])[1], -reach - math.frexp(factors[0])[1]
    mantissas = rng.choice([-1, 1], size) * rng.uniform(0.5, 1, size)
    found: Values = np.ldexp(mantissas, rng.choice(np.array([max(most, 0), min(least, 0)], np.int32), size))
    return found


def _some_zero(values: Values, rng: np.random.Generator) -> Values:
    """The values, every eighth of them 0 and at least one."""
    values[rng.integers(min(8, len(values))) :: 8] = 0
    return values


def _in_twos(values: Values, size: int, shift: int) -> Values:
    """``size`` data, each two neighbours of one value; shifted by one, so are the last and the first."""
    return values[(np.arange(size) + shift) % max(size, 1) // 2]


def _compare(ask: Ask, rank: int, learnt: Learnt, found: Values, values: Values) -> None:
    elements, scales, fill = learnt
    data = values[elements] if values.size else np.zeros(elements.shape, values.dtype)
    agrees = _close(found, data, scales, ask.dtype)
    if not scales.all():
        agrees = np.where(elements < 0, (found == fill) | (np.isnan(found) & np.isnan(fill)), agrees)

    def holds(i: tuple[int, ...]) -> str:
        if elements[i] < 0:
            return f"{found[i]} on random data, but the constant {fill[i]} on marked data"
        element = tuple(int(k) for k in np.unravel_index(int(elements[i]), ask.shape))
        exact = _ratio(scales, i, ask.dtype)
        scaled = "" if exact == 1 else f" times {exact}"
        return f"{found[i]} on random data, where element {element} is {data[i]}{scaled}"

    _refuse_where(~agrees, rank, holds)


# --- the map ------------------------------------------------------------------------------


def _as_map(learnt: Mapping[int, Learnt], shape: Shape, dtype: str, limits: Limits) -> AffineMap:
    storage = Space.shards({rank: x.elements.shape for rank, x in learnt.items()})
    tables = []
    for rank, (elements, scales, _) in learnt.items():
        box = storage.index(rank)
        for scale in np.unique(scales[scales != 0]):
            whole = scales.ndim == 0 and elements.ndim
            families = families_in(elements if whole else np.where(scales == scale, elements, -1))
            if not families:
                continue
            limits.hold("pieces", len(families))
            exact = _ratio(np.asarray(scale), (), dtype)
            tables.append(table_of(families, [box, 0, 0, 0, exact.numerator, exact.denominator]))
    table = simplified(concatenate(tables))
    limits.hold("pieces", len(table))
    return remember(AffineMap(storage, Space.logical(shape), table), single_valued=True)


def _ratio(scales: Values, index: tuple[int, ...], dtype: str) -> Fraction:
    """A scale found in data as an exact fraction, at the precision of the data."""
    scale = scales[index if scales.ndim else ()].item()
    return as_scale(Fraction(scale) if isinstance(scale, int) else simplest_ratio(scale, EXACT[dtype]))
