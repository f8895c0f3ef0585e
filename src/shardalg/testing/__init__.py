"""The test kit: strategies for property tests of your own layouts, and the laws' helpers."""

from ._resplit import resplit as resplit
from ._strategies import affine_maps as affine_maps
from ._strategies import chains as chains
from ._strategies import layout_pairs as layout_pairs
from ._strategies import layouts as layouts
from ._strategies import parallels as parallels
from ._strategies import pieces as pieces
from ._strategies import placements as placements
from ._strategies import scales as scales
from ._strategies import shapes as shapes
from ._strategies import spaces as spaces
from ._strategies import stretches as stretches
