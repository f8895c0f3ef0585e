"""shardalg"""

from ._errors import *
from ._limits import Limits as Limits
from ._struct import tree_map, tree_leaves
from .maps import *
from .placements import *
from .ops import *
