"""Moving between arrangements is moving the logical tensors: joins, splits and ranges say where they sit."""

import pytest
import torch
from checkpoints import assert_same, noise
from hypothesis import given, settings
from hypothesis import strategies as st

import shardalg as sa
from shardalg import InvalidMapError
from shardalg.interop._arrangements import (
    Logical,
    Stored,
    components,
    elements_of,
    even,
    logical_tensors,
    transfer,
)

SHAPES = {"q": (8, 3), "k": (2, 3), "v": (2, 3), "n": (5,), "step": (), "none": (0, 2)}
DTYPES = {"step": "int64", "none": "bool"}


def rows(name, ranks):
    shape = SHAPES[name]
    placement = sa.Split(0, rule="balanced") if shape else sa.Replicate()
    return Stored(DTYPES.get(name, "bfloat16"), sa.layout(shape, placement, ranks=ranks))


def joined(names, ranks, axis=0):
    whole = sa.join({n: SHAPES[n] for n in names}, axis=axis)
    parts = tuple((SHAPES[n][0], sa.Split(0)) for n in names)
    return Stored("bfloat16", sa.layout(whole.codomain.boxes[0].shape, sa.Segments(0, parts), ranks), whole)


def plain(ranks):
    return {n: rows(n, ranks) for n in SHAPES}


def fused(ranks):
    return {n: rows(n, ranks) for n in ("n", "step", "none")} | {"qkv": joined("qkv", ranks)}


def half_fused(ranks):
    return {n: rows(n, ranks) for n in ("n", "step", "none", "v")} | {"kq": joined("kq", ranks)}


def ranges(ranks):
    return even({n: Logical(DTYPES.get(n, "bfloat16"), s) for n, s in SHAPES.items()}, ranks)


ARRANGEMENTS = [plain, fused, half_fused, ranges]
FULL = {n: noise(s, DTYPES.get(n, "bfloat16"), k) for k, (n, s) in enumerate(SHAPES.items())}


def shards_of(arrangement):
    """What every rank holds, straight from the meaning of layouts."""
    found = {}
    for name, stored in arrangement.items():
        m = elements_of(name, stored)
        found[name] = sa.extract(m, {b.name: FULL[b.name] for b in m.codomain.boxes})
    return found


@pytest.mark.parametrize("source", ARRANGEMENTS)
@pytest.mark.parametrize("target", ARRANGEMENTS)
@settings(max_examples=4)
@given(ranks=st.tuples(st.integers(1, 4), st.integers(1, 4)))
def test_a_transfer_gives_what_the_target_holds(source, target, ranks):
    a, b = source(ranks[0]), target(ranks[1])
    ctx = sa.backends.simulate(max(ranks))
    out = sa.run(ctx, sa.bind(ctx, transfer(a, b)), shards_of(a))
    wanted = shards_of(b)
    assert sorted(out) == sorted(wanted)
    for name, its in wanted.items():
        assert_same(out[name], its)


@pytest.mark.parametrize("made", ARRANGEMENTS)
def test_nothing_moves_to_the_same_arrangement(made):
    assert transfer(made(3), made(3)).stats.elements_crossing == 0


@pytest.mark.parametrize("made", ARRANGEMENTS)
def test_every_arrangement_has_the_same_logical_tensors(made):
    assert logical_tensors(made(2)) == logical_tensors(plain(3))


def test_ranges_are_consecutive_bytes_of_the_tensor():
    found = {n: list(its.values()) for n, its in shards_of(ranges(3)).items()}
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), FULL[name].reshape(-1))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_components_are_what_must_move_together():
    found = {frozenset(here): frozenset(there) for here, there in components(fused(2), half_fused(2))}
    assert found[frozenset({"qkv"})] == {"kq", "v"}
    assert found[frozenset({"n"})] == {"n"}
    assert len(found) == 4


def test_names_on_one_side_are_listed():
    a, b = plain(2), plain(2)
    b["m"] = b.pop("n")
    with pytest.raises(InvalidMapError, match=r"source alone has \['n'\], the target alone \['m'\]"):
        transfer(a, b)


def test_another_logical_shape_or_dtype_is_refused():
    for other in (
        Stored("bfloat16", sa.layout((6,), sa.Split(0), ranks=2)),
        Stored("int64", rows("n", 2).layout),
    ):
        with pytest.raises(InvalidMapError, match=r"'n' is bfloat16 of shape \(5,\) in the source"):
            transfer(plain(2), plain(2) | {"n": other})


def test_a_tensor_stored_twice_is_refused():
    with pytest.raises(InvalidMapError, match="'q' is stored twice"):
        logical_tensors({"q": rows("q", 2), "qkv": joined("qkv", 2)})
