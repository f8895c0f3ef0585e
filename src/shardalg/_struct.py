"""Frozen dataclasses that are optree pytrees in our namespace.

Geometry is *static*: it sits in the tree structure, is hashable, and no
``tree_map`` touches it. Tensors are *leaves*. Fields are static unless marked
with ``leaf()``. In optree's default namespace every value is one opaque leaf,
so a tree of layouts pairs with a tree of tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar, dataclass_transform

import optree

NAMESPACE = "shardalg"

T = TypeVar("T")


def leaf(**kwargs: Any) -> Any:
    """A dataclass field whose value is a subtree of tensors."""
    return dataclasses.field(metadata={"leaf": True}, **kwargs)


@dataclass_transform(frozen_default=True, field_specifiers=(dataclasses.field, leaf))
def struct(cls: type[T]) -> type[T]:
    """Make ``cls`` a frozen dataclass and an optree node in namespace ``"shardalg"``.

    Unflattening sets the fields directly: transforms put placeholders where
    tensors were, so ``__post_init__`` must not see them.

    >>> @struct
    ... class Pair:
    ...     name: str
    ...     value: object = leaf()
    >>> optree.tree_map(lambda x: x + 1, Pair("a", 1), namespace="shardalg")
    Pair(name='a', value=2)
    """
    node: Any = dataclasses.dataclass(frozen=True)(cls)
    fields = dataclasses.fields(node)
    leaves = tuple(f.name for f in fields if f.metadata.get("leaf"))
    statics = tuple(f.name for f in fields if not f.metadata.get("leaf") and f.init)

    def flatten(x: Any) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[str, ...]]:
        static = tuple(getattr(x, name) for name in statics)
        return tuple(getattr(x, name) for name in leaves), static, leaves

    def unflatten(static: Any, children: Any) -> Any:
        return _build(node, dict(zip(statics, static)) | dict(zip(leaves, children)))

    optree.register_pytree_node(node, flatten, unflatten, namespace=NAMESPACE)
    return node  # type: ignore[no-any-return]


def _build(cls: Any, values: dict[str, Any]) -> Any:
    """An instance with the given fields and defaults for the rest, no checks run."""
    made = object.__new__(cls)
    for f in dataclasses.fields(cls):
        object.__setattr__(made, f.name, values.get(f.name, f.default))
    return made


def tree_map(function: Callable[..., Any], tree: Any, *rests: Any) -> Any:
    """``optree.tree_map`` in our namespace: maps the tensors inside our values."""
    return optree.tree_map(function, tree, *rests, namespace=NAMESPACE)


def tree_leaves(tree: Any) -> list[Any]:
    """``optree.tree_leaves`` in our namespace: the tensors, never the geometry."""
    return optree.tree_leaves(tree, namespace=NAMESPACE)
