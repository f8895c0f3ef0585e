"""shardalg"""
from ._limits import Limits as Limits
from .maps import *
from .maps import AffineMap, Space, Piece, Side, Box
