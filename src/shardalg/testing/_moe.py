"""Hypothesis strategies for MoE geometries, routings, buffers and plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ..moe import Buffer, CommPlan, Geometry, geometry, plan_dispatch, simulate

Draw = Callable[[np.random.Generator, int, int, int, int], Any]


def _uniform(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return rng.integers(0, E, (tokens, K))


def _zipf(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    weights = 1 / np.arange(1, E + 1)
    return rng.choice(E, (tokens, K), p=weights / weights.sum())


def _one_expert(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return np.full((tokens, K), E - 1)


def _hot_home(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return rng.integers(0, E // R, (tokens, K))


def _repeats(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return np.repeat(rng.integers(0, E, (tokens, 1)), K, 1)


def _drops(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return rng.integers(-E // 2, E, (tokens, K))


def _balanced(rng: np.random.Generator, tokens: int, K: int, E: int, R: int) -> Any:
    return np.arange(tokens * K).reshape(tokens, K) % E


ROUTINGS: dict[str, Draw] = {
    "balanced": _balanced,
    "uniform": _uniform,
    "zipf": _zipf,
    "one_expert": _one_expert,
    "hot_home": _hot_home,
    "repeats": _repeats,
    "drops": _drops,
}


def routing(kind: str, seed: int, g: Geometry, tokens: list[int]) -> list[torch.Tensor]:
    """One routing [S_r, K] per rank of a named kind, the same for the same seed."""
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(ROUTINGS[kind](rng, n, g.K, g.E, g.R).astype(np.int64)) for n in tokens]


@st.composite
def geometries(draw: DrawFn, *, max_ranks: int = 4, max_experts: int = 3, max_tokens: int = 5) -> Geometry:
    """Geometries of at most ``max_experts`` experts per rank, both layouts. Shrinks towards one rank and
    one token."""
    ranks, epn = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_experts))
    copies = draw(st.sampled_from([None, epn]))
    tokens, K, pad = draw(st.integers(1, max_tokens)), draw(st.integers(1, 4)), draw(st.integers(1, 8))
    policy = draw(st.sampled_from(["exact", "home", "max_copies"]))
    return geometry(ranks, E=ranks * epn, S=tokens, K=K, B=copies, pad=pad, policy=policy)


@st.composite
def routings(draw: DrawFn, g: Geometry) -> list[torch.Tensor]:
    """A routing per rank of ``g``: uniform, skewed, repeated or dropped, with uneven and empty ranks.
    Shrinks towards balanced and full."""
    kind, seed = draw(st.sampled_from(list(ROUTINGS))), draw(st.integers(0, 2**16))
    missing = [draw(st.integers(0, g.S)) if draw(st.booleans()) else 0 for _ in range(g.R)]
    return routing(kind, seed, g, [g.S - m for m in missing])


@st.composite
def moe_buffers(draw: DrawFn, *, H: int = 2, dtype: torch.dtype = torch.float64) -> Buffer:
    """Simulated buffers of a drawn geometry. Shrinks as ``geometries``."""
    g = draw(geometries())
    copies = g.B if g.layout == "slots" else None
    return simulate(
        g.R, E=g.E, S=g.S, K=g.K, B=copies, pad=g.pad, policy=g.policy, H=H, dtype=dtype, weight_dtype=dtype
    )


@st.composite
def comm_plans(draw: DrawFn) -> tuple[Buffer, list[torch.Tensor], tuple[CommPlan, ...]]:
    """A simulated buffer, a routing and its plans by rank. Shrinks as ``routings``."""
    buffer = draw(moe_buffers())
    topk = draw(routings(buffer.geometry))
    return buffer, topk, plan_dispatch(buffer, topk)
