"""Worlds for the backend tests: ``world`` in threads, ``team`` in processes kept for the session."""

import pytest
import worlds


@pytest.fixture
def world():
    """``world(n, fn)``: ``fn(ctx)`` on n ranks in threads over gloo; ``results`` and ``errors`` by rank."""
    return worlds.world


@pytest.fixture(scope="session")
def team():
    """Four worker processes: ``team.run(fn, ...)`` does ``fn(ctx, ...)`` on each, on a fresh context."""
    made = worlds.Team(4)
    yield made
    made.close()
