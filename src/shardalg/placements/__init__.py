"""Placements: the words in which people say a layout."""

from ._attention import Attention as Attention
from ._placements import BlockGather as BlockGather
from ._placements import Custom as Custom
from ._placements import Cyclic as Cyclic
from ._placements import Experts as Experts
from ._placements import Flat as Flat
from ._placements import Placement as Placement
from ._placements import Replicate as Replicate
from ._placements import Segments as Segments
from ._placements import Split as Split
from ._placements import StridedSplit as StridedSplit
