"""The real partition functions that named layouts are proved against: DeepSpeed 0.19.8, which ``make
setup`` installs. A missing package fails the tests that need it; nothing is skipped."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

from deepspeed.module_inject import fusedqkv_utils
from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list
from deepspeed.moe.ep_repack import repack_expert_weights

from shardalg import Attention

REFUSALS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError, ZeroDivisionError)


def meta(attention: Attention) -> AutoTPMeta:
    """Our facts about a model in DeepSpeed's words."""
    return AutoTPMeta(
        num_kv_heads=attention.kv_heads,
        num_attention_heads=attention.heads,
        n_embd=attention.hidden,
        tp_grain_size=attention.grain,
    )


def fused_qkv(block: str, attention: Attention, ranks: int) -> Callable[[Any, int], Any]:
    """DeepSpeed's partition of a fused qkv weight of a block type, as (full, rank) -> shard."""

    def partition(full: Any, rank: int) -> Any:
        return fusedqkv_utils.prepare_tp_fused_qkvw(f"{block}()", full, ranks, rank, meta(attention))

    return partition


def shared_qk(attention: Attention, ranks: int, axis: int) -> Callable[[Any, int], Any]:
    """DeepSpeed's partition of Yuan's v_proj (axis 0) or o_proj (axis 1) weight."""

    def partition(full: Any, rank: int) -> Any:
        return fusedqkv_utils.shard_value_with_share_qk(full, None, rank, ranks, axis == 0, meta(attention))[
            0
        ]

    return partition


def shard_sizes(total: int, ranks: int, attention: Attention, name: str | None = None) -> list[int]:
    return get_shard_size_list(total, ranks, meta(attention), name)


def repacked(gate_up: Any, down: Any, rank: int, ranks: int) -> dict[str, Any]:
    """DeepSpeed's packed weights of one expert-parallel rank from a fused gate-up and a down tensor."""
    source = SimpleNamespace(gate_up=gate_up, down=down)
    spec = SimpleNamespace(
        num_experts=gate_up.shape[0],
        expert_storage="fused_3d",
        expert_w1_name="gate_up",
        expert_w2_name="down",
        expert_w3_name=None,
    )
    w1, w2, w3 = repack_expert_weights(source, spec, rank, ranks)
    return {"gate": w1, "down": w2, "up": w3}
