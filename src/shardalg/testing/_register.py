"""What Hypothesis loads to know our types: ``st.from_type(AffineMap)`` and its like."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from ..maps import AffineMap, Piece, Sharded, Space
from ..placements import Experts, Placement
from ..plans import Program, TransferPlan, TreePlan
from ._plans import plans, programs, tree_plans
from ._strategies import affine_maps, expert_placements, pieces, placements, sharded, spaces

TYPES: dict[type, SearchStrategy[Any]] = {
    AffineMap: affine_maps(),
    Experts: expert_placements(),
    Piece: pieces(),
    Placement: placements(),
    Program: programs(),
    Sharded: sharded(),
    Space: spaces(),
    TransferPlan: plans(),
    TreePlan: tree_plans(),
}


def register() -> None:
    """Register a strategy for each of our value types. Called by Hypothesis on import, through
    the entry point group ``hypothesis``."""
    for kind, strategy in TYPES.items():
        st.register_type_strategy(kind, strategy)
