"""The planners we compare with, loaded from where ``make peers`` puts them.

DeepSpeed is installed; of Awex only the planner is loaded, since its package imports
inference engines that are not needed to plan.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import types
from pathlib import Path
from typing import Any

import torch

PEERS = Path(os.environ.get("SHARDALG_PEERS", Path(__file__).resolve().parent.parent / ".bench" / "peers"))


def awex() -> Any:
    """Awex's ``transfer_plan`` module."""
    if "awex.transfer.transfer_plan" in sys.modules:
        return sys.modules["awex.transfer.transfer_plan"]
    root = PEERS / "awex"
    if not root.is_dir():
        raise SystemExit(f"Awex is not at {root}: run `make peers`")
    _package("awex").logging = types.SimpleNamespace(getLogger=_quiet)  # type: ignore[attr-defined]
    for name in ("awex.meta", "awex.util", "awex.transfer", "awex.sharding"):
        _package(name)
    _package("awex.util.common").__dict__.update(
        _is_allowed_infer_only_alias=lambda *a: False, to_dict=lambda x: x
    )
    _load("awex.sharding.rank_info", root / "sharding" / "rank_info.py")
    _load("awex.sharding.param_sharding", root / "sharding" / "param_sharding.py")
    weights = _load("awex.meta.weight_meta", root / "meta" / "weight_meta.py")
    _package("awex.meta.meta_resolver").__dict__.update(vars(weights))
    return _load("awex.transfer.transfer_plan", root / "transfer" / "transfer_plan.py")


def _quiet(name: str) -> logging.Logger:
    logger = logging.getLogger(name)
    logger.setLevel(logging.ERROR)
    return logger


def _package(name: str) -> types.ModuleType:
    module = sys.modules.setdefault(name, types.ModuleType(name))
    module.__path__ = []
    return module


def _load(name: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def awex_parameter(
    name: str, shape: tuple[int, ...], boxes: list[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Any:
    """A parameter of one replica, cut into (offset, shape) boxes by rank, as Awex describes it."""
    awex()
    meta = sys.modules["awex.meta.weight_meta"]
    shards = [
        meta.ParameterShardMeta(
            tp_rank=r, attn_tp_rank=r, pp_rank=0, ep_rank=0, ep_tp_rank=0, global_rank=r,
            world_size=len(boxes), engine_rank=0, name=name, shape=its, numel=1, dtype=torch.float32,
            global_offset=offset,
        )
        for r, (offset, its) in enumerate(boxes)
    ]  # fmt: skip
    replica = meta.ParameterReplicaMeta(shards=shards)
    return meta.ParameterMeta(
        name=name, global_numel=1, global_shape=shape, dtype=torch.float32, shards=shards, replicas=[replica]
    )
