"""Axes of the boxes of one side in another order."""

from __future__ import annotations

from typing import Any

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Piece, Space
from ..maps._map import require_map
from ..maps._space import Shape, as_int, describe_key, listed, row_major
from ._sides import bijection, boxes_as, by_box, moved, side_of


def permute(
    m: AffineMap, *, domain: Any = None, codomain: Any = None, limits: Limits = Limits()
) -> AffineMap:
    """``m`` with the axes of the boxes of one or both sides in another order, as ``torch.permute``:
    axis k of the new box is axis ``axes[k]`` of the old one.

    Axes for every box of the side, or ``{rank, name or (rank, name): axes}``. A group action:
    ``permute(permute(m, p), q)`` is the permutation by ``p[q[0]], p[q[1]], ...``.

    Raises ``InvalidMapError`` for axes that are no order of a box's axes, and for keys without a box.

    Cost: that of ``compose``.

    >>> from shardalg import Split, equivalent, layout
    >>> rows = layout((4, 4), Split(0), ranks=2)
    >>> equivalent(permute(rows, domain=(1, 0), codomain=(1, 0)), layout((4, 4), Split(1), ranks=2))
    True
    """
    require_map(m, "permute: m")
    return moved(m, _permutation(m.domain, domain), _permutation(m.codomain, codomain), limits)


def _permutation(space: Space, given: Any) -> AffineMap | None:
    """The bijection from a space to the one with permuted axes."""
    if given is None:
        return None
    orders = [_order(b, axes) for b, axes in zip(space.boxes, by_box(space, given))]
    target = boxes_as(space, [tuple(b.shape[k] for k in axes) for b, axes in zip(space.boxes, orders)])
    return bijection(space, target, [_piece(b, c, p) for b, c, p in zip(space.boxes, target.boxes, orders)])


def _order(box: Box, axes: Any) -> Shape:
    if axes is None:
        return tuple(range(len(box.shape)))
    order = tuple(as_int(k, "an axis") for k in listed(axes, "axes"))
    if sorted(order) != list(range(len(box.shape))):
        raise InvalidMapError(
            f"axes {order} are no order of the {len(box.shape)} axes of {describe_key(box.key)}"
            f" of shape {box.shape}"
        )
    return order


def _piece(old: Box, new: Box, axes: Shape) -> Piece:
    strides = row_major(old.shape)
    return Piece(
        new.shape, side_of(old, 0, [strides[k] for k in axes]), side_of(new, 0, row_major(new.shape))
    )
