"""Backends run programs: one process that plays all ranks, or many over torch.distributed."""

from ._context import Bound as Bound
from ._context import Context as Context
from ._context import bind as bind
from ._cpu import cpu as cpu
from ._run import run as run
from ._simulate import simulate as simulate
