"""Plans as values: the copies that turn one layout into another, and what they move."""

from ._plan import Copy as Copy
from ._plan import Entry as Entry
from ._plan import TransferPlan as TransferPlan
from ._plan import TreePlan as TreePlan
from ._program import Message as Message
from ._program import Program as Program
from ._program import Round as Round
from ._stats import Stats as Stats
