"""Pure operators on maps, placements and plans: one public function per idea.

Each refuses what is no map with ``InvalidMapError``, and where it takes ``limits=`` it raises ``LimitError``
before it would exceed them. Docstrings name the errors beyond these.
"""

from ..maps._fingerprint import fingerprint as fingerprint
from ._adjoint import adjoint as adjoint
from ._canonicalize import canonicalize as canonicalize
from ._compose import compose as compose
from ._concat import concat as concat
from ._divide import divide as divide
from ._equivalent import equivalent as equivalent
from ._explain import Difference as Difference
from ._explain import explain as explain
from ._flat_group import flat_group as flat_group
from ._holders import holders as holders
from ._invert import invert as invert
from ._layout import layout as layout
from ._match import match as match
from ._named_qkv import NAMED as NAMED
from ._named_qkv import grouped_query as grouped_query
from ._named_qkv import head_sizes as head_sizes
from ._named_qkv import named_qkv as named_qkv
from ._named_qkv import qkv_bigcode as qkv_bigcode
from ._named_qkv import qkv_by_block as qkv_by_block
from ._named_qkv import qkv_codegen as qkv_codegen
from ._named_qkv import qkv_per_head as qkv_per_head
from ._named_qkv import qkv_phi3 as qkv_phi3
from ._named_qkv import qkv_qwen as qkv_qwen
from ._named_qkv import shared_qk_value as shared_qk_value
from ._named_weights import block_cyclic as block_cyclic
from ._named_weights import context_parallel as context_parallel
from ._named_weights import expert_part as expert_part
from ._named_weights import gate_up as gate_up
from ._named_weights import packed_experts as packed_experts
from ._named_weights import padded_vocabulary as padded_vocabulary
from ._named_weights import predivided_bias as predivided_bias
from ._nest import nest as nest
from ._part import part as part
from ._permute import permute as permute
from ._plan import plan as plan
from ._plan_experts import expert_layouts as expert_layouts
from ._plan_experts import plan_experts as plan_experts
from ._plan_tree import plan_tree as plan_tree
from ._probe import probe as probe
from ._product import product as product
from ._questions import Answer as Answer
from ._questions import check as check
from ._questions import check_layout as check_layout
from ._questions import is_injective as is_injective
from ._questions import is_single_valued as is_single_valued
from ._questions import is_surjective as is_surjective
from ._questions import is_total as is_total
from ._questions import multiplicity as multiplicity
from ._regions import complement as complement
from ._regions import corestrict as corestrict
from ._regions import domain as domain
from ._regions import identity as identity
from ._regions import image as image
from ._regions import padding as padding
from ._regions import region as region
from ._regions import restrict as restrict
from ._regions import uncovered as uncovered
from ._relabel import relabel as relabel
from ._reshape import reshape as reshape
from ._scaled_by import scaled_by as scaled_by
from ._schedule import schedule as schedule
from ._select import SELECTORS as SELECTORS
from ._select import Request as Request
from ._select import cheapest as cheapest
from ._sets import intersect as intersect
from ._sets import merge as merge
from ._sets import subtract as subtract
from ._sets import union as union
from ._simplify import simplify as simplify
from ._syntax import install as _install
from ._tensors import extract as extract
from ._tensors import rebuild as rebuild
from ._tensors import sharded as sharded
from ._translate import translate as translate
from ._views import join as join
from ._views import section as section

_install()
