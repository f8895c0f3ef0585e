"""What people read: the names of errors, defaults and types in signatures."""

import inspect
import pickle
import traceback

import pytest

import shardalg as sa


def test_every_error_is_named_and_found_in_the_package():
    """What a traceback prints is what ``except`` takes, and errors travel between processes."""
    classes = [x for x in map(sa.__dict__.get, dir(sa)) if isinstance(x, type) and issubclass(x, Exception)]
    assert len(classes) == 7
    for c in classes:
        error = c("why")
        assert traceback.format_exception_only(error) == [f"shardalg.{c.__name__}: why\n"]
        assert type(pickle.loads(pickle.dumps(error))) is c


def test_limits_print_what_is_not_usual():
    """A signature with the default stays on one line."""
    assert repr(sa.Limits()) == "Limits()" and "limits: 'Limits' = Limits()" in str(
        inspect.signature(sa.plan)
    )
    changed = sa.Limits(steps=10, plan_bytes=7)
    assert repr(changed) == "Limits(steps=10, plan_bytes=7)" and eval(repr(changed), vars(sa)) == changed


@pytest.mark.parametrize("f", [sa.layout, sa.gate_up, sa.qkv_per_head, sa.probe, sa.context_parallel])
def test_signatures_say_what_a_shape_and_ranks_are(f):
    parameters = inspect.signature(f).parameters
    assert "Sequence[int]" in parameters["shape"].annotation and "Sequence" in parameters["ranks"].annotation
