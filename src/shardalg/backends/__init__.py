"""Backends run programs: one process that plays all ranks, or many over torch.distributed."""

from . import _torch_pytree as _torch_pytree
from ._bind import bind as bind
from ._bound import Bound as Bound
from ._context import Context as Context
from ._cpu import cpu as cpu
from ._cuda import cuda as cuda
from ._gather import gather_layouts as gather_layouts
from ._registry import BACKENDS as BACKENDS
from ._registry import auto as auto
from ._registry import backend as backend
from ._report import RunReport as RunReport
from ._run import Handle as Handle
from ._run import run as run
from ._run import run_async as run_async
from ._simulate import simulate as simulate
from ._strategies import STRATEGIES as STRATEGIES
from ._xpu import xpu as xpu
