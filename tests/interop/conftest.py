"""Processes for what needs torch's default group."""

import pytest
import worlds


@pytest.fixture(scope="session")
def team():
    """Four worker processes: ``team.run(fn, ...)`` does ``fn(ctx, ...)`` on each, on a fresh context."""
    made = worlds.Team(4)
    yield made
    made.close()
