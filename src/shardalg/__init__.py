"""The algebra of sharded tensors: layouts are affine maps, transfers are compositions.

``import shardalg as sa`` loads no torch; ``sa.backends``, ``sa.moe``, ``sa.interop``, ``sa.testing``, and
the functions that need live processes load on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._errors import InvalidMapError as InvalidMapError
from ._errors import LimitError as LimitError
from ._errors import ProvenanceError as ProvenanceError
from ._errors import SelectionError as SelectionError
from ._errors import ShardalgError as ShardalgError
from ._errors import TransferError as TransferError
from ._errors import UnsupportedError as UnsupportedError
from ._limits import Limits as Limits
from ._struct import tree_leaves as tree_leaves
from ._struct import tree_map as tree_map
from .maps import AffineMap as AffineMap
from .maps import Box as Box
from .maps import Piece as Piece
from .maps import Sharded as Sharded
from .maps import Side as Side
from .maps import Space as Space
from .ops import NAMED as NAMED
from .ops import SELECTORS as SELECTORS
from .ops import Answer as Answer
from .ops import Difference as Difference
from .ops import Request as Request
from .ops import adjoint as adjoint
from .ops import block_cyclic as block_cyclic
from .ops import canonicalize as canonicalize
from .ops import cheapest as cheapest
from .ops import check as check
from .ops import check_layout as check_layout
from .ops import complement as complement
from .ops import compose as compose
from .ops import concat as concat
from .ops import context_parallel as context_parallel
from .ops import corestrict as corestrict
from .ops import divide as divide
from .ops import domain as domain
from .ops import equivalent as equivalent
from .ops import expert_layouts as expert_layouts
from .ops import expert_part as expert_part
from .ops import explain as explain
from .ops import extract as extract
from .ops import fingerprint as fingerprint
from .ops import flat_group as flat_group
from .ops import gate_up as gate_up
from .ops import grouped_query as grouped_query
from .ops import head_sizes as head_sizes
from .ops import holders as holders
from .ops import identity as identity
from .ops import image as image
from .ops import intersect as intersect
from .ops import invert as invert
from .ops import is_injective as is_injective
from .ops import is_single_valued as is_single_valued
from .ops import is_surjective as is_surjective
from .ops import is_total as is_total
from .ops import join as join
from .ops import layout as layout
from .ops import match as match
from .ops import merge as merge
from .ops import multiplicity as multiplicity
from .ops import named_qkv as named_qkv
from .ops import nest as nest
from .ops import packed_experts as packed_experts
from .ops import padded_vocabulary as padded_vocabulary
from .ops import padding as padding
from .ops import part as part
from .ops import permute as permute
from .ops import plan as plan
from .ops import plan_experts as plan_experts
from .ops import plan_tree as plan_tree
from .ops import predivided_bias as predivided_bias
from .ops import probe as probe
from .ops import product as product
from .ops import qkv_bigcode as qkv_bigcode
from .ops import qkv_by_block as qkv_by_block
from .ops import qkv_codegen as qkv_codegen
from .ops import qkv_per_head as qkv_per_head
from .ops import qkv_phi3 as qkv_phi3
from .ops import qkv_qwen as qkv_qwen
from .ops import rebuild as rebuild
from .ops import region as region
from .ops import relabel as relabel
from .ops import reshape as reshape
from .ops import restrict as restrict
from .ops import scaled_by as scaled_by
from .ops import schedule as schedule
from .ops import section as section
from .ops import sharded as sharded
from .ops import shared_qk_value as shared_qk_value
from .ops import simplify as simplify
from .ops import subtract as subtract
from .ops import translate as translate
from .ops import uncovered as uncovered
from .ops import union as union
from .placements import Attention as Attention
from .placements import BlockGather as BlockGather
from .placements import Custom as Custom
from .placements import Cyclic as Cyclic
from .placements import Experts as Experts
from .placements import Flat as Flat
from .placements import Placement as Placement
from .placements import Replicate as Replicate
from .placements import Segments as Segments
from .placements import Split as Split
from .placements import StridedSplit as StridedSplit
from .plans import Copy as Copy
from .plans import Entry as Entry
from .plans import Message as Message
from .plans import Program as Program
from .plans import Round as Round
from .plans import Stats as Stats
from .plans import TransferPlan as TransferPlan
from .plans import TreePlan as TreePlan
from .show import Picture as Picture
from .show import from_text as from_text
from .show import show as show
from .show import to_text as to_text

# Loaded on first use, since they need torch, hypothesis or the file system.
_MODULES = ("backends", "cli", "interop", "moe", "testing")
_BACKENDS = ("Bound", "Context", "RunReport", "bind", "gather_layouts", "run", "run_async")
_FUNCTIONS = dict.fromkeys(_BACKENDS, "backends")
_INSIDE = {"Any", "annotations", "importlib", "maps", "ops", "placements", "plans"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f".{name}", __name__)
    if name in _FUNCTIONS:
        return getattr(importlib.import_module(f".{_FUNCTIONS[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """The table of contents: what is promised, not what it is made of."""
    names = {*globals(), *_MODULES, *_FUNCTIONS} - _INSIDE
    return sorted(name for name in names if not name.startswith("_"))
