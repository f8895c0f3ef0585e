"""Tensor-parallel plans: the layouts are the slices that the styles are defined by."""

import math

import numpy as np
import pytest

from shardalg import InvalidMapError, Split, UnsupportedError, equivalent, extract, layout, rebuild
from shardalg import Replicate as Whole
from shardalg.interop import huggingface
from shardalg.interop.huggingface import layouts_from_tp_plan

PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.self_attn.sinks": "local_rowwise",
    "model.layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "model.layers.*.mlp.experts.gate_up_proj_t": "local_packed_rowwise",
    "model.layers.*.mlp.experts.down_proj": "grouped_gemm",
    "model.layers.*.mlp": "gather",
    "model.layers.1.self_attn.q_proj": "replicate",
    "model.embed_tokens": "vocab_parallel_rowwise",
    "lm_head": "colwise_rep",
}
SHAPES = {
    "model.layers.0.self_attn.q_proj.weight": (10, 4), "model.layers.0.self_attn.q_proj.bias": (10,),
    "model.layers.0.self_attn.o_proj.weight": (4, 10), "model.layers.0.self_attn.o_proj.bias": (4,),
    "model.layers.0.self_attn.sinks": (7,), "model.layers.0.mlp.experts.gate_up_proj": (3, 12, 5),
    "model.layers.0.mlp.experts.gate_up_proj_t": (3, 5, 12),
    "model.layers.0.mlp.experts.down_proj": (6, 5, 4),
    "model.layers.1.self_attn.q_proj.weight": (10, 4), "model.embed_tokens.weight": (13, 4),
    "model.norm.weight": (4,), "lm_head.weight": (13, 4),
}  # fmt: skip
AXES = {  # name -> (axis, halves), as the styles are written down; the rest is whole
    "model.layers.0.self_attn.q_proj.weight": (0, 1), "model.layers.0.self_attn.q_proj.bias": (0, 1),
    "model.layers.0.self_attn.o_proj.weight": (1, 1), "model.layers.0.self_attn.sinks": (0, 1),
    "model.layers.0.mlp.experts.gate_up_proj": (1, 2), "model.layers.0.mlp.experts.gate_up_proj_t": (2, 2),
    "model.layers.0.mlp.experts.down_proj": (0, 1), "model.embed_tokens.weight": (0, 1),
    "lm_head.weight": (0, 1),
}  # fmt: skip


def sliced(full, rank, ranks, axis, halves):
    """One rank's part: ceil(n / ranks) of each half, in order."""
    size = full.shape[axis] // halves
    each = math.ceil(size / ranks)
    picked = [range(h * size + rank * each, h * size + min((rank + 1) * each, size)) for h in range(halves)]
    return np.take(full, [i for its in picked for i in its], axis)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_layouts_are_the_slices_the_styles_say(ranks):
    found = layouts_from_tp_plan(PLAN, SHAPES, ranks)
    assert list(found) == list(SHAPES)
    for name, m in found.items():
        full = np.arange(math.prod(SHAPES[name])).reshape(SHAPES[name])
        for rank, shard in extract(m, full).items():
            wanted = sliced(full, rank, ranks, *AXES[name]) if name in AXES else full
            assert np.array_equal(shard, wanted), name
        assert np.array_equal(rebuild(m, extract(m, full)), full)


def test_one_axis_is_never_packed():
    """As in Transformers, whose packed styles treat a bias as their plain ones do."""
    plan = {"up": "packed_colwise", "down": "packed_rowwise"}
    found = layouts_from_tp_plan(plan, {"up.bias": (8,), "down.bias": (8,), "down.scale": (8,)}, 2)
    assert equivalent(found["up.bias"], layout((8,), Split(0), ranks=2))
    assert all(
        equivalent(found[name], layout((8,), Whole(), ranks=2)) for name in ("down.bias", "down.scale")
    )


def test_a_style_of_a_module_leaves_its_tensors_to_their_own():
    plan = {"layers.*.attn": "local_params", "layers.*.attn.sinks": "colwise"}
    shapes = {"layers.0.attn.sinks": (8,), "layers.0.attn.other": (8,)}
    found = layouts_from_tp_plan(plan, shapes, 2)
    assert [m.shard_shape(1) for m in found.values()] == [(4,), (8,)]


def test_a_tensor_that_no_pattern_names_is_everywhere():
    found = layouts_from_tp_plan(PLAN, SHAPES, 2)
    assert equivalent(found["model.norm.weight"], layout((4,), Whole(), ranks=2))


def test_an_exact_name_goes_before_a_pattern():
    found = layouts_from_tp_plan(PLAN, SHAPES, 2)
    assert found["model.layers.1.self_attn.q_proj.weight"].shard_shape(0) == (10, 4)


@pytest.mark.parametrize("style", huggingface.STYLES)
def test_every_style_has_a_meaning(style):
    m = layouts_from_tp_plan({"layers.*.x": style}, {"layers.7.x.weight": (4, 8)}, 2)["layers.7.x.weight"]
    cut = [n for n, (whole, shard) in enumerate(zip((4, 8), m.shard_shape(0))) if whole != shard]
    assert cut == ([] if style in huggingface.WHOLE else [(huggingface.CUTS | huggingface.PACKED)[style] % 2])


@pytest.mark.parametrize(
    "plan, shapes, ranks, words",
    [
        ({"a": "packed_colwise"}, {"a.weight": (5, 4)}, 2, "no 2 equal parts: 5 is odd"),
        (
            {"a": "packed_colwise"},
            {"a.weight": (6, 4)},
            2,
            r"'a.weight' is 'packed_colwise' by 'a'.*3 = 2\*1 \+ 1",
        ),
        ({"a": "grouped_gemm"}, {"a": (5, 4, 4)}, 2, r"5 = 2\*2 \+ 1"),
        ({"a": "colwise"}, {"a.weight": ()}, 2, r"there is no axis -2 in shape \(\)"),
        (
            {"layers.*.up": "colwise"},
            {"model.layers.0.up.weight": (4, 4)},
            2,
            "none of the 1 patterns that cut something matches any of 1 tensors.*is a prefix missing",
        ),
    ],
)
def test_what_does_not_come_out_even_or_matches_nothing_is_refused(plan, shapes, ranks, words):
    with pytest.raises(InvalidMapError, match=words):
        layouts_from_tp_plan(plan, shapes, ranks)


def test_an_unknown_style_is_refused_with_the_nearest():
    with pytest.raises(UnsupportedError, match="'a' has the unknown style 'colwize'; did you mean 'colwise'"):
        layouts_from_tp_plan({"a": "colwize"}, {"a.weight": (4, 4)}, 2)
