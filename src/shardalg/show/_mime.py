"""Rich display on the value classes, installed from here so that data knows nothing of display.

This is the one place that reaches left along the line of imports and changes what it finds, a
named exception: ``str`` of a map becomes its one-line form, and notebooks draw maps, plans,
programs, expert placements and differences. ``repr`` stays as it is. Modules right of this one that
register a picture call ``draws_itself`` too.
"""

from __future__ import annotations

from typing import Any

from ..maps import AffineMap
from ..ops import Difference
from ..placements import Experts
from ..plans import Program, TransferPlan, TreePlan
from ._notation import short
from ._show import show

DRAWN = (AffineMap, Difference, Experts, Program, TransferPlan, TreePlan)


def _bundle(self: Any, include: Any = None, exclude: Any = None) -> dict[str, str]:
    """What a notebook shows: the picture, and its text where there are no pictures."""
    picture = show(self)
    return {"image/svg+xml": picture.svg, "text/plain": picture.text}


def _svg(self: Any) -> str:
    return show(self).svg


def install(cls: type, name: str, method: Any) -> None:
    """Give a class a method that it does not have itself."""
    assert name not in cls.__dict__, f"{cls.__name__} has its own {name}"
    setattr(cls, name, method)


def draws_itself(cls: type) -> None:
    """Let notebooks show values of a class as their picture; ``show`` must know the class."""
    install(cls, "_repr_mimebundle_", _bundle)
    install(cls, "_repr_svg_", _svg)


for _cls in DRAWN:
    draws_itself(_cls)
install(AffineMap, "__str__", short)
