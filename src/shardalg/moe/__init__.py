"""MoE communication plans: balanced expert parallelism as pure functions over a live ``Buffer``."""

from . import _show as _show
from ._buffer import Buffer as Buffer
from ._buffer import simulate as simulate
from ._geometry import Geometry as Geometry
from ._geometry import geometry as geometry
from ._operations import Handle as Handle
from ._operations import combine as combine
from ._operations import dispatch as dispatch
from ._operations import prefetch as prefetch
from ._operations import reduce_grad as reduce_grad
from ._plan import CommPlan as CommPlan
from ._planning import plan_dispatch as plan_dispatch
from ._policy import Policy as Policy
from ._policy import max_copies as max_copies
from ._report import Report as Report
from ._report import placements as placements
from ._report import report as report
from ._transport import Counters as Counters
from ._transport import Transport as Transport
from ._verify import verify as verify
