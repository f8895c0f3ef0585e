"""What Hypothesis loads to know our types: ``st.from_type(AffineMap)`` and its like."""

from __future__ import annotations

from hypothesis import strategies as st

from ..maps import AffineMap, Piece, Space
from ..placements import Placement
from ._strategies import affine_maps, pieces, placements, spaces


def register() -> None:
    """Register a strategy for each of our value types. Called by Hypothesis on import, through
    the entry point group ``hypothesis``."""
    st.register_type_strategy(Space, spaces())
    st.register_type_strategy(Piece, pieces())
    st.register_type_strategy(AffineMap, affine_maps())
    st.register_type_strategy(Placement, placements())
