"""The one entrance to pictures."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

from .._errors import UnsupportedError
from ._picture import Picture


@singledispatch
def show(x: Any, **options: Any) -> Picture:
    """A picture of a layout, map, plan, program, placement or difference, with a text twin.

    Later modules add their values with ``show.register``. Options depend on the value:
    ``cells="rank"`` or ``"element"`` writes into the cells of a layout. Raises ``UnsupportedError`` for a
    value that nobody has registered. Cost: bounded, whatever the size: large axes are drawn in blocks.

    >>> from shardalg import layout, show, Split
    >>> print(show(layout((8,), Split(0), ranks=2)))
    [2 ranks x (4,) -> (8,)]  r:[0:4] -> [4r:4r+4]
    <BLANKLINE>
    who holds (8,): one cell per element
      0 1 2 3 4 5 6 7
      0 0 0 0 1 1 1 1
    0  rank 0, 4 elements
    1  rank 1, 4 elements
    <BLANKLINE>
    storage: the elements of each shard
      rank 0  0 1 2 3
      rank 1  4 5 6 7
    """
    raise UnsupportedError(
        f"there is no picture of {type(x).__name__}: show draws layouts, maps, plans, programs, Experts"
        " and differences; register others with show.register"
    )
