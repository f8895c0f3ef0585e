"""The error classes are named as they are caught."""

import pickle
import traceback

import shardalg as sa


def test_every_error_is_named_and_found_in_the_package():
    """What a traceback prints is what ``except`` takes, and errors travel between processes."""
    classes = [x for x in map(sa.__dict__.get, dir(sa)) if isinstance(x, type) and issubclass(x, Exception)]
    assert len(classes) == 7
    for c in classes:
        error = c("why")
        assert traceback.format_exception_only(error) == [f"shardalg.{c.__name__}: why\n"]
        assert type(pickle.loads(pickle.dumps(error))) is c
