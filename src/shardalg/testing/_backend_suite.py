"""What every backend must do, as checks that run on any of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch

from .. import backends
from .._errors import ProvenanceError, ShardalgError, TransferError
from ..backends import Context
from ..maps import AffineMap
from ..ops import adjoint, extract, layout, plan, plan_tree, schedule
from ..placements import Cyclic, Experts, Replicate, Split

Check: TypeAlias = Callable[[Context], None]
World: TypeAlias = Callable[[int, Check], Any]

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.int16)


def backend_suite(world: World, *, sizes: tuple[int, ...] = (1, 2, 3)) -> tuple[str, ...]:
    """Prove a backend: every check on every size. The names of the checks that held.

    ``world(n, check)`` runs ``check(ctx)`` once per process of a world of n ranks, each time with
    contexts fresh from the backend, and raises what any of them raised. The checks are module-level
    functions, so they can be sent to other processes. Tensors are made on ``ctx.transport.device``.

    Raises ``AssertionError`` naming the check and the size that failed.

    >>> len(backend_suite(lambda n, check: check(backends.simulate(n)))) == len(CHECKS)
    True
    """
    for n in sizes:
        for check in CHECKS:
            try:
                world(n, check)
            except Exception as error:
                name = check.__name__
                raise AssertionError(f"{name} on {n} ranks: {type(error).__name__}: {error}") from error
    return tuple(check.__name__ for check in CHECKS)


# --- tools --------------------------------------------------------------------------------


def _layouts(ctx: Context) -> dict[str, AffineMap]:
    """Layouts of one tensor of shape (7, 6) on all ranks, by name."""
    n = len(ctx.peers)
    first = [7] + [0] * (n - 1)
    by_rank: dict[int, list[int]] = {r: list(range(6, -1, -1))[r::n] for r in range(n)}
    return {
        "rows": layout((7, 6), Split(0), ranks=n),
        "columns": layout((7, 6), Split(1), ranks=n),
        "whole": layout((7, 6), Replicate(), ranks=n),
        "cyclic": layout((7, 6), Cyclic(1, 2), ranks=n),
        "padded": layout((7, 6), Split(0, rule="pad"), ranks=n),
        "on the first": layout((7, 6), Split(0, sizes=tuple(first)), ranks=n),
        "experts": layout((7, 6), Experts(by_rank), ranks=n),
    }


def _full(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(1, 43).reshape(7, 6).to(dtype)


def _mine(ctx: Context, shards: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The shards of this process's ranks, on its device."""
    return {r: shards[r].to(ctx.transport.device) for r in ctx.ranks if r in shards}


def _require(found: Mapping[int, torch.Tensor], wanted: Mapping[int, torch.Tensor]) -> None:
    assert set(found) == set(wanted), (set(found), set(wanted))
    for rank, x in wanted.items():
        y = found[rank]
        assert y.shape == x.shape and y.dtype == x.dtype and y.device.type == x.device.type, (rank, y, x)
        assert torch.equal(y, x), f"rank {rank}: {y} is not {x}"


def _moved(ctx: Context, source: AffineMap, target: AffineMap, x: torch.Tensor, **options: Any) -> None:
    """One plan from binding to result."""
    bound = backends.bind(ctx, schedule(plan(source, target), **options))
    given = _mine(ctx, extract(source, x))
    before = {r: s.clone() for r, s in given.items()}
    _require(backends.run(ctx, bound, given), _mine(ctx, extract(target, x)))
    _require(given, before)


def _said(ctx: Context) -> int:
    """How often the context spoke to others."""
    return ctx.counters.gathers + ctx.counters.exchanges


def _refused(kind: type[Exception], act: Callable[[], Any]) -> str:
    """What ``act`` raises."""
    try:
        act()
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")


# --- checks -------------------------------------------------------------------------------


def ranks_are_known(ctx: Context) -> None:
    """A process holds some of the peers, and says where its tensors live."""
    assert ctx.ranks and set(ctx.ranks) <= set(ctx.peers) and len(set(ctx.peers)) == len(ctx.peers)
    assert isinstance(ctx.transport.device, torch.device)


def words_are_gathered(ctx: Context) -> None:
    """Byte strings of any length, also empty ones, reach every rank as they are."""
    for length in (0, 1, 5, 300):
        words = {r: bytes([r % 251]) * (length * (r % 3)) for r in ctx.peers}
        assert ctx.gather({r: words[r] for r in ctx.ranks}) == words


def layouts_of_every_kind_move(ctx: Context) -> None:
    """The result is what extraction from the whole tensor gives; inputs stay."""
    layouts = list(_layouts(ctx).values())
    for shift in (1, 3):
        for source, target in zip(layouts, layouts[shift:] + layouts[:shift]):
            _moved(ctx, source, target, _full())


def every_dtype_moves(ctx: Context) -> None:
    layouts = _layouts(ctx)
    for dtype in DTYPES:
        _moved(ctx, layouts["rows"], layouts["columns"], _full(dtype))


def rounds_stay_within_their_bound(ctx: Context) -> None:
    layouts = _layouts(ctx)
    for bound in (64, 1 << 20):
        _moved(ctx, layouts["rows"], layouts["whole"], _full(), max_bytes=bound, dtypes="float32")
        assert ctx.last_report is not None and ctx.last_report.peak_staging <= bound


def small_and_empty_tensors_move(ctx: Context) -> None:
    n = len(ctx.peers)
    for shape in ((), (0, 3), (1,)):
        x = torch.ones(shape)
        _moved(ctx, layout(shape, Replicate(), ranks=1), layout(shape, Replicate(), ranks=n), x)


def large_tensors_move(ctx: Context) -> None:
    """Two megabytes, in one go and in rounds."""
    n, shape = len(ctx.peers), (512, 1024)
    x = torch.arange(512 * 1024, dtype=torch.int32).reshape(shape)
    a, b = layout(shape, Split(0), ranks=n), layout(shape, Split(1), ranks=n)
    for bound in (None, 1 << 18):
        _moved(ctx, a, b, x, max_bytes=bound)


def later_runs_prepare_nothing(ctx: Context) -> None:
    """From the second run on: no planning, no agreement, no allocation; the same result."""
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["columns"]))
    given, wanted = (_mine(ctx, extract(layouts[k], _full())) for k in ("rows", "columns"))
    out = {r: torch.zeros_like(x) for r, x in wanted.items()}
    backends.run(ctx, bound, given, out)
    c = ctx.counters
    before = (c.gathers, c.preparations, c.allocations)
    for step in range(3):
        for x in out.values():
            x.zero_()
        assert backends.run(ctx, bound, given, out, tag=step) is out
        _require(out, wanted)
    assert (c.gathers, c.preparations, c.allocations) == before


def equal_layouts_send_nothing(ctx: Context) -> None:
    rows = _layouts(ctx)["rows"]
    _moved(ctx, rows, rows, _full())
    assert ctx.counters.payload_bytes == 0


def trees_move_together(ctx: Context) -> None:
    layouts = _layouts(ctx)
    tree = plan_tree(
        {"a": layouts["rows"], "b": layouts["whole"]}, {"a": layouts["cyclic"], "b": layouts["rows"]}
    )
    given = {"a": _mine(ctx, extract(layouts["rows"], _full()))}
    given["b"] = _mine(ctx, extract(layouts["whole"], _full(torch.int64)))
    out = backends.run(ctx, backends.bind(ctx, tree), given)
    _require(out["a"], _mine(ctx, extract(layouts["cyclic"], _full())))
    _require(out["b"], _mine(ctx, extract(layouts["rows"], _full(torch.int64))))


def copies_can_be_verified(ctx: Context) -> None:
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["columns"]))
    given = _mine(ctx, extract(layouts["rows"], _full()))
    _require(backends.run(ctx, bound, given, verify=True), _mine(ctx, extract(layouts["columns"], _full())))


def runs_in_the_background_keep_their_order(ctx: Context) -> None:
    layouts = _layouts(ctx)
    there = backends.bind(ctx, plan(layouts["rows"], layouts["columns"]))
    whole = backends.bind(ctx, plan(layouts["rows"], layouts["whole"]))
    given = _mine(ctx, extract(layouts["rows"], _full()))
    handles = [backends.run_async(ctx, bound, given) for bound in (there, whole, there)]
    wanted = [_mine(ctx, extract(layouts[k], _full())) for k in ("columns", "whole", "columns")]
    for handle, its in zip(handles, wanted):
        _require(handle.wait(), its)


def scatter_add_is_the_transpose(ctx: Context) -> None:
    """``<run(p, x), y> = <x, run(adjoint(p), y)>``: here with ones, so that counts come back."""
    layouts = _layouts(ctx)
    p = plan(layouts["rows"], layouts["whole"])
    ones = _mine(ctx, extract(layouts["whole"], torch.ones(7, 6, dtype=torch.int64)))
    found = backends.run(ctx, backends.bind(ctx, adjoint(p)), ones)
    counts = torch.full((7, 6), len(ctx.peers))
    _require(found, _mine(ctx, extract(layouts["rows"], counts)))


def a_wrong_tensor_stops_all_ranks(ctx: Context) -> None:
    """Before anything is written; and the context stays usable."""
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["whole"]))
    given = _mine(ctx, extract(layouts["rows"], _full()))
    first = ctx.peers[0]
    wrong = {r: x[:, :1] if r == first else x for r, x in given.items()}
    assert "shape" in _refused(ShardalgError, lambda: backends.run(ctx, bound, wrong))
    _require(backends.run(ctx, bound, given), _mine(ctx, extract(layouts["whole"], _full())))


def steps_do_not_mix(ctx: Context) -> None:
    if not ctx.others:
        return
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["whole"]))
    given = _mine(ctx, extract(layouts["rows"], _full()))
    tag = 8 if ctx.peers[0] in ctx.ranks else 7
    assert "tag" in _refused(TransferError, lambda: backends.run(ctx, bound, given, tag=tag))
    backends.run(ctx, bound, given, tag=8)


def different_plans_are_not_bound(ctx: Context) -> None:
    if not ctx.others:
        return
    layouts = _layouts(ctx)
    name = "columns" if ctx.peers[0] in ctx.ranks else "whole"
    _refused(TransferError, lambda: backends.bind(ctx, plan(layouts["rows"], layouts[name])))
    _moved(ctx, layouts["rows"], layouts["whole"], _full())


def only_its_own_plans_run(ctx: Context) -> None:
    """A copy is refused, and nobody hears of it."""
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["columns"]))
    given = _mine(ctx, extract(layouts["rows"], _full()))
    before = _said(ctx)
    for foreign in (copy.copy(bound), copy.deepcopy(bound), backends.Bound(bound.program)):
        _refused(ProvenanceError, partial(backends.run, ctx, foreign, given))
    assert _said(ctx) == before
    backends.run(ctx, bound.clone(), given)


def closing_ends_it(ctx: Context) -> None:
    layouts = _layouts(ctx)
    bound = backends.bind(ctx, plan(layouts["rows"], layouts["rows"]))
    ctx.close()
    ctx.close()
    given = _mine(ctx, extract(layouts["rows"], _full()))
    assert "closed" in _refused(ProvenanceError, lambda: backends.run(ctx, bound, given))


CHECKS: tuple[Check, ...] = (
    ranks_are_known,
    words_are_gathered,
    layouts_of_every_kind_move,
    every_dtype_moves,
    rounds_stay_within_their_bound,
    small_and_empty_tensors_move,
    large_tensors_move,
    later_runs_prepare_nothing,
    equal_layouts_send_nothing,
    trees_move_together,
    copies_can_be_verified,
    runs_in_the_background_keep_their_order,
    scatter_add_is_the_transpose,
    a_wrong_tensor_stops_all_ranks,
    steps_do_not_mix,
    different_plans_are_not_bound,
    only_its_own_plans_run,
    closing_ends_it,
)
