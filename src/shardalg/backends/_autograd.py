"""Gradients of a run: its backward is the run of the adjoint plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .._errors import UnsupportedError
from ._context import Context
from ._job import Job, Key, bare
from ._ready import Ready

if TYPE_CHECKING:
    from ._run import Performed


class Past(NamedTuple):
    """What the backward of a run needs: no tensor's values, since a run is linear."""

    ctx: Context
    ready: Ready
    number: int
    shards: dict[Key, torch.Tensor]
    results: dict[Key, torch.Tensor]

    @classmethod
    def of(cls, ctx: Context, ready: Ready, job: Job, number: int) -> Past:
        """The past of a run that is about to move its tensors."""
        if ctx.others:
            _check_all_reached(ctx, ready)
        return cls(ctx, ready, number, dict(job.shards), job.results)


def wants_gradients(job: Job) -> bool:
    """Whether an input of this process requires gradients that this run would pass on."""
    return job.out is None and any(x.requires_grad for x in job.shards.values())


def _check_all_reached(ctx: Context, ready: Ready) -> None:
    """Raise on every rank where some rank gets nothing that has a gradient: nobody would call its part
    of the backward."""
    entries = ready.program.plan.entries
    plans = {id(e.plan): e.plan for k, e in enumerate(entries) if _has_gradients(ready.dtype_of(k))}.values()
    reached = {p.global_target(r) for p in plans for r in p.target.ranks}
    idle = [r for r in ctx.peers if r not in reached]
    if idle and ready.rounds:
        raise UnsupportedError(
            f"an input requires gradients, but ranks {idle[:8]} get no tensor that has any, so their part of"
            " the backward would never run: detach the inputs, run under torch.no_grad(), or run"
            " adjoint(plan) yourself; nothing was written"
        )


Back = Callable[[Past, Any], "Performed"]


def recorded(past: Past, back: Back) -> dict[Key, torch.Tensor]:
    """The results of a run, remembered by autograd."""
    with torch.inference_mode(False), torch.enable_grad():  # also where the run was in the background
        anchor = torch.empty(0, requires_grad=True, device=past.ctx.transport.device)
        results = _Run.apply(past, back, anchor, *past.shards.values())  # type: ignore[no-untyped-call]
    return dict(zip(past.results, results))


class _Run(torch.autograd.Function):
    """The identity on results that are there already. ``anchor`` requires gradients, so that this
    rank takes part in the backward even if no input of its own does."""

    @staticmethod
    def forward(fn: Any, past: Past, back: Back, anchor: torch.Tensor, *shards: torch.Tensor) -> Any:
        fn.past, fn.back = past._replace(results=dict.fromkeys(past.results)), back  # type: ignore[arg-type]
        fn.past = fn.past._replace(shards={k: x.new_empty(0) for k, x in past.shards.items()})
        results = tuple(past.results.values())
        fn.mark_non_differentiable(*(x for x in results if not _has_gradients(x.dtype)))
        return results

    @staticmethod
    def backward(fn: Any, *gradients: torch.Tensor) -> Any:
        past: Past = fn.past
        held: list[dict[int | None, dict[str, Any]]] = [{} for _ in past.ready.program.plan.entries]
        for (k, b), x in zip(past.results, gradients):
            held[k].setdefault(b.rank, {})[b.name] = x
        given = {str(k): bare(its) for k, its in enumerate(held)}
        performed = fn.back(past, given)
        found = _results_of(performed, fn.back)
        its = (found[k] if _has_gradients(x.dtype) else None for k, x in past.shards.items())
        return (None, None, None, *its)


def _results_of(performed: Performed, back: Back) -> Mapping[Key, torch.Tensor]:
    return performed.job.results if performed.past is None else recorded(performed.past, back)


def _has_gradients(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex
