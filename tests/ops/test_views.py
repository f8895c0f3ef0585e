"""join and section against NumPy's own concatenate, stack and indexing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardalg import InvalidMapError, equivalent, extract, identity, invert, is_total, join, relabel, section
from shardalg.ops._layout import layout
from shardalg.placements import Replicate


def applied(view, tensors):
    """A map between logical tensors, run as if its codomain were a shard."""
    storage = relabel(invert(view), domain={(None, ""): (0, "")})
    return extract(storage, tensors if set(tensors) != {""} else tensors[""])[0]


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    rest=st.lists(st.integers(1, 3), max_size=2),
    axis=st.integers(0, 2),
)
def test_join_is_concatenate(sizes, rest, axis):
    axis %= len(rest) + 1
    shapes = {f"p{k}": (*rest[:axis], n, *rest[axis:]) for k, n in enumerate(sizes)}
    tensors, start = {}, 0
    for name, shape in shapes.items():
        tensors[name] = np.arange(start, start + np.prod(shape)).reshape(shape)
        start += tensors[name].size
    view = join(shapes, axis)
    assert np.array_equal(applied(view, tensors), np.concatenate(list(tensors.values()), axis))
    assert bool(is_total(view)) and equivalent(view @ invert(view), identity(view.codomain))


@pytest.mark.parametrize("axis", [0, 1, 2, -1])
def test_join_with_stack_is_stack(axis):
    tensors = {n: np.random.default_rng(k).normal(size=(2, 3)) for k, n in enumerate("abc")}
    view = join(dict.fromkeys("abc", (2, 3)), axis, stack=True)
    assert np.array_equal(applied(view, tensors), np.stack(list(tensors.values()), axis))


@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_interleave_alternates_blocks(size):
    """Gate and up rows in blocks of ``size``."""
    tensors = {"gate": np.arange(24).reshape(6, 4), "up": np.arange(24, 48).reshape(6, 4)}
    view = join(dict.fromkeys(tensors, (6, 4)), interleave=size)
    blocks = [t.reshape(6 // size, size, 4) for t in tensors.values()]
    assert np.array_equal(applied(view, tensors), np.stack(blocks, 1).reshape(12, 4))


SLICES = st.builds(
    slice, *[st.none() | st.integers(-6, 6)] * 2, st.none() | st.sampled_from([-2, -1, 1, 2, 3])
)


@given(index=st.tuples(SLICES | st.integers(-4, 3), SLICES))
def test_section_is_indexing(index):
    full = np.arange(20).reshape(4, 5)
    view = section((4, 5), index)
    assert np.array_equal(applied(view, {"": full}), full[index])


def test_a_section_of_a_join_is_the_part():
    parts = {"q": (8, 4), "k": (2, 4), "v": (2, 4)}
    back = section((12, 4), slice(8, 10)) @ join(parts)
    whole = layout((2, 4), Replicate(), ranks=1)
    assert back.pieces[0].domain.name == "k" and back.size == whole.size


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: join({"a": (2, 3), "b": (2, 4)}, 0), r"'b' has shape \(2, 4\), the first part \(2, 3\)"),
        (lambda: join({"a": (2,)}, 3), "axis 3"),
        (lambda: join([], 0), "one or more named parts"),
        (lambda: join(["a", "a"]), "repeat a name"),
        (lambda: join({"a": (5,), "b": (5,)}, interleave=2), r"5 = 2\*2 \+ 1"),
        (lambda: join(["a"], stack=True, interleave=2), "exclude each other"),
        (lambda: section((4,), (0, 0)), "2 indices"),
        (lambda: section((4,), 9), "index 9 is outside axis 0"),
    ],
)
def test_views_that_cannot_be_are_refused(call, words):
    with pytest.raises(InvalidMapError, match=words):
        call()


def test_parts_and_tensors_are_named_by_strings():
    for parts in ({1: (2,), "1": (3,)}, {1: (2,)}):
        with pytest.raises(InvalidMapError, match="parts are named by strings"):
            join(parts)
    with pytest.raises(InvalidMapError, match="must be a str, got 1"):
        section({1: (4,)}, slice(0, 2))
