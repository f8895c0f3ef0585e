"""The command line: ``shardalg reshard`` and ``shardalg inspect``."""

from ._main import main as main
