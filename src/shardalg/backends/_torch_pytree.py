"""Registration of tensor-carrying values in ``torch.utils._pytree``: the one place for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.utils._pytree as torch_pytree

from ..maps import AffineMap, Sharded


def register_in_torch(
    cls: type, flatten: Callable[[Any], tuple[Any, Any]], unflatten: Callable[[Any, Any], Any]
) -> None:
    """Make ``cls`` a node of torch's trees; ``flatten`` gives (leaves, context), which ``unflatten`` takes
    as (context, leaves).

    The same functions as for optree, so both kinds of tree agree on leaves and on what is lost.
    """
    torch_pytree.register_pytree_node(
        cls,
        lambda x: (list(flatten(x)[0]), flatten(x)[1]),
        lambda leaves, context: unflatten(context, leaves),
        serialized_type_name=f"shardalg.{cls.__name__}",
    )


def _flat(x: Sharded) -> tuple[list[Any], AffineMap]:
    return [x.shards], x.layout


def _whole(layout: AffineMap, leaves: Any) -> Sharded:
    (shards,) = leaves
    return Sharded(shards, layout)


register_in_torch(Sharded, _flat, _whole)
