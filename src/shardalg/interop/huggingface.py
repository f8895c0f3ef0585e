"""Hugging Face's tensor-parallel plans: which axis of a weight a style cuts, and into what.

A plan is ``{pattern: style}``, as a model's config states it (``base_model_tp_plan``); ``*`` stands for the
number of a layer. The package is not needed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import Any

from .._errors import InvalidMapError, UnsupportedError
from ..maps import AffineMap
from ..maps._space import Shape, as_shape
from ..ops import layout
from ..placements import Placement, Replicate, Segments, Split

# What a style does to a weight. Styles that differ only in what happens to activations are alike:
# ``_rep``, ``_gather_output`` and ``_split_input`` gather or cut those, ``local_`` keeps plain tensors, and
# those of modules (``moe_tp_experts``, ``ep_dispatch_experts``, ...) leave their tensors to other patterns.
# Transformers 4.52 to 5.24 know these.
CUTS = {
    "colwise": -2, "colwise_rep": -2, "colwise_gather_output": -2, "local_colwise": -2,
    "rowwise": -1, "rowwise_rep": -1, "rowwise_split_input": -1, "local_rowwise": -1,
    "embedding_rowwise": 0, "vocab_parallel_rowwise": 0, "embedding_colwise": 1, "grouped_gemm": 0,
}  # fmt: skip
PACKED = {"packed_colwise": -2, "packed_rowwise": -1, "local_packed_rowwise": -1}
WHOLE = (
    "replicate", "replicated_with_grad_allreduce", "sequence_parallel", "gather", "local", "all_reduce",
    "ep_router", "ep_dispatch_experts", "moe_tp_experts", "moe_identity_expert", "mla_kv_a_proj",
    "megamoe_router", "megamoe_experts", "local_params",
)  # fmt: skip
STYLES = (*CUTS, *PACKED, *WHOLE)
PARTS = 2  # tensors in a packed one: gate and up


def layouts_from_tp_plan(
    plan: Mapping[str, str], shapes: Mapping[str, Any], ranks: Any
) -> dict[str, AffineMap]:
    """The layout of each tensor ``{name: shape}`` under a plan ``{pattern: style}`` on ``ranks`` ranks.

    A tensor goes by the pattern that equals its name, or its module's name, with every number between
    dots written ``*``; one that none names is on every rank. Cuts are chunks, packed weights two halves that
    are cut alike. Biases of row-wise layers are whole. A tensor of one axis is never packed, as in
    Transformers: column-wise it is cut like any other, row-wise it is whole. Raises ``InvalidMapError`` where
    packed halves or experts do not come out even, and where a plan cuts something and matches no tensor.

    >>> plan = {"layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise"}
    >>> shapes = {"layers.0.mlp.up.weight": (6, 4), "layers.0.mlp.down.weight": (4, 6), "norm.weight": (4,)}
    >>> found = layouts_from_tp_plan(plan, shapes, ranks=2)
    >>> [m.shard_shape(0) for m in found.values()]
    [(3, 4), (4, 3), (4,)]
    """
    for key, word in plan.items():
        _require_known(key, word)
    patterns = {name: pattern_of(name, plan) for name in shapes}
    _require_matches(plan, patterns)
    made: dict[Any, AffineMap] = {}
    found = {}
    for name, pattern in patterns.items():
        style = plan[pattern] if pattern is not None else "replicate"
        shape = as_shape(shapes[name], f"the shape of {name!r}")
        same = (style, name.rpartition(".")[2] == "bias", shape)
        if same not in made:
            made[same] = _layout(name, pattern, style, shape, ranks)
        found[name] = made[same]
    return found


def _require_known(pattern: str, style: Any) -> None:
    if style not in STYLES:
        near = difflib.get_close_matches(str(style), STYLES, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(STYLES)}"
        raise UnsupportedError(f"{pattern!r} has the unknown style {style!r}; {hint}")


def _require_matches(plan: Mapping[str, str], found: Mapping[str, str | None]) -> None:
    """Raise where a plan that cuts something cuts no tensor: it is for other names."""
    cutting = [p for p, style in plan.items() if style not in WHOLE]
    if cutting and found and not set(cutting) & set(found.values()):
        near = difflib.get_close_matches(cutting[0], map(generic, found), n=1, cutoff=0.0)
        raise InvalidMapError(
            f"none of the {len(cutting)} patterns that cut something matches any of {len(found)} tensors;"
            f" the first is {cutting[0]!r}, the nearest name {near[0]!r}; is a prefix missing?"
        )


def pattern_of(name: str, plan: Mapping[str, str]) -> str | None:
    """The pattern of a plan that a tensor goes by: its own name's, else its module's; else None.

    >>> pattern_of("model.layers.3.up.weight", {"model.layers.*.up": "colwise"})
    'model.layers.*.up'
    """
    whole = generic(name)
    for candidate in (name, whole, name.rpartition(".")[0], whole.rpartition(".")[0]):
        if candidate in plan:
            return candidate
    return None


def generic(name: str) -> str:
    """A name with every number between dots, or after the last one, written ``*``.

    >>> generic("layers.0.experts.11.w1.weight")
    'layers.*.experts.*.w1.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)


def _layout(name: str, pattern: str | None, style: str, shape: Shape, ranks: Any) -> AffineMap:
    try:
        return layout(shape, _placement(name.rpartition(".")[2], style, shape), ranks)
    except InvalidMapError as error:
        raise InvalidMapError(f"{name!r} is {style!r} by {pattern!r}: {error}") from error


def _placement(kind: str, style: str, shape: Shape) -> Placement:
    """What a style makes of a tensor of a module: of its ``weight``, ``bias``, or whatever ``kind`` is."""
    axis = None if style in WHOLE else (CUTS | PACKED)[style]
    vector = len(shape) == 1
    if axis is None or (axis == -1 and (kind == "bias" or (vector and style in PACKED))):
        return Replicate()
    axis = _axis(kind, axis, shape)
    if style not in PACKED or vector:
        return Split(axis, rule="exact" if style == "grouped_gemm" else "chunk")
    if shape[axis] % PARTS:
        raise InvalidMapError(f"axis {axis} of shape {shape} is no {PARTS} equal parts: {shape[axis]} is odd")
    return Segments(axis, ((shape[axis] // PARTS, Split(axis, rule="exact")),) * PARTS)


def _axis(kind: str, axis: int, shape: Shape) -> int:
    """The axis that is cut, from the front. A bias, as any tensor of one axis, has only one."""
    if not -len(shape) <= axis < len(shape) and len(shape) != 1:
        raise InvalidMapError(f"there is no axis {axis} in shape {shape}")
    if kind == "bias" or len(shape) == 1:
        return len(shape) - 1
    return axis % len(shape)
