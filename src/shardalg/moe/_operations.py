"""dispatch, combine, prefetch, reduce_grad: what a plan is for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import optree
import torch

from .._errors import InvalidMapError
from .._struct import NAMESPACE
from ..backends._eager import eager
from ._buffer import Buffer, admit, per_rank, returned
from ._linear import Collect, Operator, Spread, Tensors, apply, summing
from ._notice import WORDS, as_words, raise_first
from ._plan import Seal

ACCUMULATE = ("fp32", "two_level")
Stage = tuple[Operator, list[torch.Tensor]]


class Handle:
    """An operation whose exchange has begun; ``wait()`` completes it and gives its result."""

    def __init__(self, complete: Callable[[], Any]) -> None:
        self._complete: Callable[[], Any] | None = complete
        self._result: Any = None

    def wait(self) -> Any:
        if self._complete is not None:
            self._result, self._complete = self._complete(), None
        return self._result


@eager
def dispatch(buffer: Buffer, plan: Any, hidden: Any, weights: Any = None, *, async_op: bool = False) -> Any:
    """``(rows [NvS, H], row_weights [NvS] or None)``: every token in the slots of its experts.

    A token's row travels once to each rank that wants it, its weights once per route. Padding rows
    and the tail are zero. ``hidden`` is [S_r, H], ``weights`` [S_r, K] or None on all ranks alike.
    The gradient of ``rows`` comes back as ``combine`` does it. With ``async_op`` a ``Handle``.

    Raises ``ProvenanceError`` for a plan that is not this buffer's own and unchanged, ``InvalidMapError``
    for a tensor of another shape, dtype or device, ``TransferError`` where the exchange fails.

    Cost: one exchange, a row per distinct (token, rank), and a pass over the rows.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> buffer = simulate(2, E=4, S=2, K=1, H=1)
    >>> plans = plan_dispatch(buffer, [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])])
    >>> hidden = [torch.tensor([[1.0], [2.0]]), torch.tensor([[3.0], [4.0]])]
    >>> rows, _ = dispatch(buffer, plans, hidden)
    >>> [x.flatten().tolist() for x in rows]
    [[4.0, 1.0], [2.0, 3.0]]
    """
    seals = admit(buffer, plan)
    hiddens = _tensors(buffer, seals, hidden, "hidden", ("S_r", "H"), buffer.dtype)
    stages: list[Stage] = [(Spread(buffer, plan, "payload"), hiddens)]
    if weights is not None:
        given = _tensors(buffer, seals, weights, "weights", ("S_r", "K"), buffer.weight_dtype)
        stages.append((Spread(buffer, plan, "routes"), [w.reshape(-1) for w in given]))
    return _run(stages, lambda outs: _pairs(buffer, outs), async_op)


@eager
def combine(
    buffer: Buffer,
    plan: Any,
    rows: Any,
    row_weights: Any = None,
    *,
    route_weights: Any = None,
    accumulate: str = "fp32",
    async_op: bool = False,
) -> Any:
    """``(out [S_r, H], weights [S_r, K] or None)``: each token's rows added, the transpose of dispatch.

    A rank adds a token's rows in ascending k in promote(float32, dtype) and sends the sum in that type
    (``"fp32"``) or rounded to the dtype first (``"two_level"``, fewer bytes); the token's rank adds
    those sums by ascending first k and rounds once. ``route_weights`` [NvS] multiplies each row before that.
    ``row_weights`` [NvS] are brought back to their routes. Dropped routes contribute 0. Errors and cost as
    ``dispatch``.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> buffer = simulate(2, E=4, S=2, K=1, H=1)
    >>> plans = plan_dispatch(buffer, [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])])
    >>> rows = [torch.tensor([[40.0], [10.0]]), torch.tensor([[20.0], [30.0]])]
    >>> [out.flatten().tolist() for out in combine(buffer, plans, rows)[0]]
    [[10.0, 20.0], [30.0, 40.0]]
    """
    seals = admit(buffer, plan)
    given = _tensors(buffer, seals, rows, "rows", ("NvS", "H"), buffer.dtype)
    if accumulate not in ACCUMULATE:
        raise InvalidMapError(f"accumulate must be one of {ACCUMULATE}, got {accumulate!r}")
    if route_weights is not None:
        factors = _tensors(buffer, seals, route_weights, "route_weights", ("NvS",), buffer.weight_dtype)
        given = [_weighted(x, w) for x, w in zip(given, factors)]
    wire = buffer.dtype if accumulate == "two_level" else None
    stages: list[Stage] = [(Collect(buffer, plan, "payload", (buffer.dtype,) * len(given), wire), given)]
    if row_weights is not None:
        weights = _tensors(buffer, seals, row_weights, "row_weights", ("NvS",), buffer.weight_dtype)
        stages.append((Collect(buffer, plan, "routes", (buffer.weight_dtype,) * len(weights)), weights))
    return _run(stages, lambda outs: _pairs(buffer, outs, buffer.geometry.K), async_op)


@eager
def prefetch(buffer: Buffer, plan: Any, experts: Any, *, async_op: bool = False) -> Any:
    """The tree of copied experts [B, ...] from the tree of this rank's own [epn, ...]; unused slots zero.

    Any tree of tensors of any dtypes, the same on all ranks: a difference is the same error
    everywhere, before the payload. It is the transfer from the home placement to home + slots, see
    ``placements``. Cost: one gather of words and one exchange, an expert per copy.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> buffer = simulate(2, E=4, S=2, K=1, H=1)
    >>> plans = plan_dispatch(buffer, [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])])
    >>> [x.tolist() for x in prefetch(buffer, plans, [torch.tensor([0, 10]), torch.tensor([20, 30])])]
    [[30, 0], [0, 0]]
    """
    admit(buffer, plan)
    trees = per_rank(buffer, experts, "tree")
    flats = [optree.tree_flatten(tree, namespace=NAMESPACE) for tree in trees]
    epn = buffer.geometry.epn
    _agree(buffer, [_tree_problem(leaves, epn, "experts") for leaves, _ in flats], flats)
    stage: Stage = (Spread(buffer, plan, "copies"), [x for leaves, _ in flats for x in leaves])
    return _run([stage], lambda outs: _trees(buffer, outs[0], [spec for _, spec in flats]), async_op)


@eager
def reduce_grad(
    buffer: Buffer, plan: Any, slot_grads: Any, local_grads: Any, *, async_op: bool = False
) -> Any:
    """``local_grads`` [epn, ...] plus the gradients of the experts' copies, the transpose of ``prefetch``.

    Sums are made in promote(float32, dtype), starting from the local value, in ascending (rank, slot), and
    rounded once to the local dtype. Inputs are not changed. Cost as ``prefetch``.

    >>> from shardalg.moe import plan_dispatch, simulate
    >>> buffer = simulate(2, E=4, S=2, K=1, H=1)
    >>> plans = plan_dispatch(buffer, [torch.tensor([[3], [3]]), torch.tensor([[3], [0]])])
    >>> slots, own = [torch.tensor([5.0, 0.0]), torch.zeros(2)], [torch.ones(2), torch.ones(2)]
    >>> [x.tolist() for x in reduce_grad(buffer, plans, slots, own)]
    [[1.0, 1.0], [1.0, 6.0]]
    """
    admit(buffer, plan)
    g = buffer.geometry
    slots = [optree.tree_flatten(t, namespace=NAMESPACE) for t in per_rank(buffer, slot_grads, "tree")]
    locals_ = [optree.tree_flatten(t, namespace=NAMESPACE) for t in per_rank(buffer, local_grads, "tree")]
    problems = [_grad_problem(a, b, g.B, g.epn) for a, b in zip(slots, locals_)]
    _agree(buffer, problems, [(a[0] + b[0], (a[1], b[1])) for a, b in zip(slots, locals_)])
    dtypes = tuple(x.dtype for leaves, _ in locals_ for x in leaves)
    xs = [x for (a, _), (b, _) in zip(slots, locals_) for x in (*a, *b)]
    stage: Stage = (Collect(buffer, plan, "copies", dtypes, based=True), xs)
    return _run([stage], lambda outs: _trees(buffer, outs[0], [spec for _, spec in locals_]), async_op)


def _run(stages: list[Stage], assemble: Callable[[list[Tensors]], Any], async_op: bool) -> Any:
    if not async_op:
        return assemble([apply(operator, xs) for operator, xs in stages])
    with torch.no_grad():
        begun = [operator.start(xs) if xs else None for operator, xs in stages]
    return Handle(lambda: assemble([apply(op, xs, finish) for (op, xs), finish in zip(stages, begun)]))


def _pairs(buffer: Buffer, outs: list[Tensors], K: int | None = None) -> Any:
    """(rows, weights) per rank, weights as [S_r, K] where ``K`` is given."""
    weights: Sequence[Any] = outs[1] if len(outs) > 1 else [None] * len(outs[0])
    shaped = [w if w is None or K is None else w.view(-1, K) for w in weights]
    return returned(buffer, outs[0]), returned(buffer, shaped)


def _trees(buffer: Buffer, leaves: Tensors, specs: Sequence[Any]) -> Any:
    each = len(leaves) // len(specs)
    return returned(
        buffer, [optree.tree_unflatten(s, leaves[i * each : (i + 1) * each]) for i, s in enumerate(specs)]
    )


def _weighted(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    kind = summing(rows.dtype)
    return rows.to(kind) * weights.to(kind)[:, None]


def _tensors(
    buffer: Buffer, seals: Sequence[Seal], value: Any, what: str, axes: Sequence[str], dtype: torch.dtype
) -> list[torch.Tensor]:
    """The per-rank tensors, refused here and now where one is not what the plan needs."""
    found = per_rank(buffer, value, what)
    for s, x in zip(seals, found):
        shape = tuple(s.scalar(name) for name in axes)
        if not isinstance(x, torch.Tensor):
            raise InvalidMapError(f"{what} must be a tensor {shape}, got {type(x).__name__}")
        if tuple(x.shape) != shape or x.dtype != dtype or x.device != buffer.device:
            raise InvalidMapError(
                f"{what} must be [{', '.join(axes)}] = {shape} of {dtype} on {buffer.device},"
                f" got {tuple(x.shape)} of {x.dtype} on {x.device}"
            )
    return found


def _agree(buffer: Buffer, problems: Sequence[str], flats: Sequence[tuple[list[Any], Any]]) -> None:
    """One gather: the same error on every rank unless all bring fitting trees of one form."""
    if buffer.geometry.R == 1:
        return raise_first([as_words(p) for p in problems])
    rows = [[*as_words(p), 0 if p else _form(leaves, spec)] for p, (leaves, spec) in zip(problems, flats)]
    said = buffer.transport.all_gather(rows)
    raise_first([row[:WORDS] for row in said])
    for rank, row in enumerate(said):
        if row[-1] != said[0][-1]:
            raise InvalidMapError(f"ranks 0 and {rank} pass trees of different structure, shapes or dtypes")


def _form(leaves: Sequence[torch.Tensor], spec: Any) -> int:
    text = f"{spec} {[(tuple(x.shape), x.dtype) for x in leaves]}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _tree_problem(leaves: Sequence[Any], count: int, what: str) -> str:
    for i, x in enumerate(leaves):
        if not isinstance(x, torch.Tensor):
            return f"leaf {i} of the {what} is no tensor but {type(x).__name__}"
        if x.dim() == 0 or len(x) != count:
            found = "no axis" if x.dim() == 0 else f"{len(x)}"
            return f"leaf {i} of the {what} must be [{count}, ...], one entry per expert, it has {found}"
    return ""


def _grad_problem(slots: tuple[list[Any], Any], local: tuple[list[Any], Any], B: int, epn: int) -> str:
    problem = _tree_problem(slots[0], B, "slot gradients") or _tree_problem(local[0], epn, "local gradients")
    if problem:
        return problem
    if slots[1] != local[1]:
        return "slot gradients and local gradients are trees of different structure"
    for i, (a, b) in enumerate(zip(slots[0], local[0])):
        if a.shape[1:] != b.shape[1:] or not (a.dtype.is_floating_point and b.dtype.is_floating_point):
            slot, home = (f"{x.dtype} {tuple(x.shape)}" for x in (a, b))
            return f"leaf {i}: slot gradient {slot} does not fit local {home}"
    return ""
