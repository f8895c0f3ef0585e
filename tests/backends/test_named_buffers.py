"""A tensor whose shards lie in named buffers is a source like any other, also in a view of several."""

import pytest
import torch

import shardalg as sa
from shardalg import AffineMap, Box, InvalidMapError, Piece, Side, Space

FULL = torch.arange(12.0)
BUFFERS = AffineMap.from_pieces(
    Space((Box((4,), 0, "lo"), Box((3,), 0, "hi"), Box((1,), 1, "hi"))),
    Space.logical((8,)),
    [
        Piece((4,), Side(0, (1,), 0, "lo"), Side(0, (1,))),
        Piece((3,), Side(0, (1,), 0, "hi"), Side(4, (1,))),
        Piece((1,), Side(0, (1,), 1, "hi"), Side(7, (1,))),
    ],
)
OTHER = sa.layout((4,), sa.Split(0), ranks=2)
TARGET = sa.layout((12,), sa.Split(0), ranks=2)


def joined(names):
    layouts = {"w": BUFFERS, "k": OTHER}
    return sa.plan_tree(layouts, {"f": TARGET}, views={"f": sa.join(names)})


@pytest.mark.parametrize("names", [["w", "k"], ["k", "w"]])
def test_a_view_of_several_reads_named_buffers_and_gives_back_to_them(names):
    sizes = {"w": 8, "k": 4}
    parts = dict(zip(names, FULL.split([sizes[name] for name in names])))
    shards = {"w": sa.extract(BUFFERS, parts["w"]), "k": sa.extract(OTHER, parts["k"])}
    tree = joined(names)
    with sa.backends.simulate(2) as ctx:
        out = sa.run(ctx, sa.bind(ctx, tree), shards)
        assert all(out["f"][r].equal(x) for r, x in sa.extract(TARGET, FULL).items())
        back = sa.run(ctx, sa.bind(ctx, sa.adjoint(tree)), out)
    assert sorted(back["w"][0]) == ["hi", "lo"] and list(back["w"][1]) == ["hi"]
    assert sa.rebuild(BUFFERS, back["w"]).equal(parts["w"]) and sa.rebuild(OTHER, back["k"]).equal(parts["k"])


def test_a_source_that_two_targets_read_gets_both_back():
    tree = sa.plan_tree(
        {"w": BUFFERS, "k": OTHER}, {"f": TARGET, "w": BUFFERS}, views={"f": sa.join(["w", "k"])}
    )
    ones = {"f": sa.extract(TARGET, FULL * 0 + 1), "w": sa.extract(BUFFERS, FULL[:8] * 0 + 2)}
    with sa.backends.simulate(2) as ctx:
        back = sa.run(ctx, sa.bind(ctx, sa.adjoint(tree)), ones)
    assert sa.rebuild(BUFFERS, back["w"]).equal(FULL[:8] * 0 + 3)


def test_a_missing_buffer_is_named_as_its_layout_names_it():
    with sa.backends.simulate(2) as ctx:
        bound = sa.bind(ctx, joined(["w", "k"]))
        shards = {"w": sa.extract(BUFFERS, FULL[:8]), "k": sa.extract(OTHER, FULL[8:])}
        del shards["w"][0]["lo"]
        with pytest.raises(InvalidMapError, match=r"\['w'\]\[0\] has no tensor 'lo'; it has \['hi'\]"):
            sa.run(ctx, bound, shards)


def one_element(*names):
    """Rank 0 holds the one element of a tensor in a box for each name."""
    logical = sa.Space.logical((1,))
    pieces = [sa.Piece((), sa.Side(0, (), 0, name), sa.Side(0, ())) for name in names]
    return sa.AffineMap.from_pieces(sa.Space.shards({0: dict.fromkeys(names, (1,))}), logical, pieces)


def test_a_shard_beside_named_tensors_has_the_empty_name():
    both, alone = one_element("", "b"), one_element("")
    ctx = sa.backends.simulate(1)
    x = torch.tensor([3.0], requires_grad=True)
    found = sa.run(ctx, sa.bind(ctx, sa.plan(alone, both)), {0: x})
    assert {name: t.item() for name, t in found[0].items()} == {"": 3.0, "b": 3.0}
    (found[0][""] * 2 + found[0]["b"]).backward()
    assert x.grad.item() == 3
    back = sa.run(ctx, sa.bind(ctx, sa.plan(both, alone)), {0: {n: t.detach() for n, t in found[0].items()}})
    assert back[0].item() == 3
    with pytest.raises(InvalidMapError, match=r"tensors \['c'\]; the layout has \['', 'b'\]"):
        sa.run(ctx, sa.bind(ctx, sa.plan(both, alone)), {0: {"c": x, "": x, "b": x}})


def test_two_single_elements_of_one_rank_add_up():
    """An adjoint whose copies have no axes."""
    plan = sa.plan(one_element(""), one_element("a", "b"))
    ctx = sa.backends.simulate(1)
    shards = {0: {"a": torch.tensor([1.0]), "b": torch.tensor([2.0])}}
    assert sa.run(ctx, sa.bind(ctx, sa.adjoint(plan)), shards)[0].item() == 3
