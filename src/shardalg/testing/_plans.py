"""Hypothesis strategies for plans and programs."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from ..ops import SELECTORS, plan, plan_tree, schedule
from ..plans import Program, TransferPlan, TreePlan
from ._strategies import layout_pairs

DTYPES = ("uint8", "bfloat16", "float32", "complex128")
WIDEST = 16  # bytes of an element of DTYPES
NAMES = ("a", "b", "c")


@st.composite
def plans(
    draw: DrawFn, *, max_ranks: int = 3, max_size: int = 6, scaled: bool = True, complete: bool = False
) -> TransferPlan:
    """Plans between two layouts of one tensor, by any named selector; ``complete``: the source holds every
    element. Slots whose element nobody holds are left. Shrinks towards a plan that keeps one
    element on rank 0."""
    pairs = layout_pairs(max_ranks=max_ranks, max_size=max_size, scaled=scaled, complete=complete)
    source, target = draw(pairs)
    return plan(source, target, select=draw(st.sampled_from(list(SELECTORS))), missing="leave")


@st.composite
def tree_plans(draw: DrawFn, *, max_tensors: int = 3, max_ranks: int = 3, max_size: int = 6) -> TreePlan:
    """Plans of up to ``max_tensors`` tensors moved together, without scales. Shrinks towards one
    tensor."""
    pairs = layout_pairs(max_ranks=max_ranks, max_size=max_size, scaled=False)
    found = dict(zip(NAMES, draw(st.lists(pairs, min_size=1, max_size=min(max_tensors, len(NAMES))))))
    sources, targets = ({name: pair[side] for name, pair in found.items()} for side in (0, 1))
    return plan_tree(sources, targets, missing="leave")


@st.composite
def programs(draw: DrawFn, *, max_tensors: int = 3, max_ranks: int = 3, max_size: int = 6) -> Program:
    """Programs of drawn trees: dtypes of 1 to 16 bytes, no memory bound or one of a few elements,
    forwarded by receivers or not. Shrinks towards one tensor of bytes in one round."""
    tree = draw(tree_plans(max_tensors=max_tensors, max_ranks=max_ranks, max_size=max_size))
    bound = draw(st.none() | st.integers(WIDEST, 16 * WIDEST))
    return schedule(tree, max_bytes=bound, dtypes=draw(st.sampled_from(DTYPES)), relay=draw(st.booleans()))
