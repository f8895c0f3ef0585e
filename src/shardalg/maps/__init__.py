"""Values: spaces, pieces and affine maps, and the arithmetic of piece tables."""

from ._map import AffineMap as AffineMap
from ._piece import Piece as Piece
from ._piece import Side as Side
from ._sharded import Sharded as Sharded
from ._space import Box as Box
from ._space import Space as Space
