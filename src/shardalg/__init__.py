"""shardalg"""

from ._errors import *
from ._limits import Limits as Limits
from ._struct import tree_leaves as tree_leaves
from ._struct import tree_map as tree_map
from .maps import *
from .ops import *
from .placements import *
from .plans import *
