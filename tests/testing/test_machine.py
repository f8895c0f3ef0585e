"""The machine that re-shards holds on the reference backend, and sees a backend that does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from shardalg import backends, testing

steps = settings(stateful_step_count=6, phases=[Phase.generate], report_multiple_bugs=False)

TestReshard = testing.ReshardMachine.TestCase
TestReshard.settings = settings(steps, max_examples=min(settings.default.max_examples // 2, 200))


class Messages(testing.ReshardMachine):
    """On packed messages instead of copies from shard to shard."""

    def context(self, ranks):
        return backends.simulate(ranks, messages=True)


TestMessages = Messages.TestCase
TestMessages.settings = TestReshard.settings


class Forgetful(testing.ReshardMachine):
    """On a backend that loses what it moved."""

    def _run(self, move, shards):
        return {r: torch.zeros_like(x) for r, x in super()._run(move, shards).items()}


def test_a_backend_that_loses_data_is_seen():
    with pytest.raises(AssertionError):
        run_state_machine_as_test(Forgetful, settings=settings(steps, print_blob=False))
