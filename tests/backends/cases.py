"""Small plans and tensors that the backend tests share."""

import torch

import shardalg as sa

ROWS = sa.layout((8, 6), sa.Split(0), ranks=4)
COLUMNS = sa.layout((8, 6), sa.Split(1), ranks=4)
WHOLE = sa.layout((8, 6), sa.Replicate(), ranks=4)


def rows(ranks, shape=(8, 6)):
    """The tensor cut by rows."""
    return sa.layout(shape, sa.Split(0), ranks=ranks)


def columns(ranks, shape=(8, 6)):
    """The tensor cut by columns."""
    return sa.layout(shape, sa.Split(1), ranks=ranks)


def full(layout, dtype=torch.float32):
    """A tensor whose elements are all different."""
    count = 1
    for n in layout.logical_shape:
        count *= n
    return torch.arange(1, count + 1).to(dtype).reshape(layout.logical_shape)


def own(ctx, shards):
    """The shards that this process holds."""
    return {r: x for r, x in shards.items() if r in ctx.ranks}


def move(ctx, source, target, **options):
    """Bind and run one plan on an extracted tensor; check the result; give the result."""
    x = full(source)
    bound = sa.bind(ctx, sa.plan(source, target))
    out = sa.run(ctx, bound, own(ctx, sa.extract(source, x)), **options)
    require(out, own(ctx, sa.extract(target, x)))
    return out


def require(found, wanted):
    """Raise unless both hold the same tensors."""
    assert set(found) == set(wanted)
    for rank, x in wanted.items():
        assert found[rank].dtype == x.dtype and torch.equal(found[rank], x), (rank, found[rank], x)


def messages(ctx):
    """How often the context spoke to others."""
    return ctx.counters.gathers + ctx.counters.exchanges


def random_layouts(draw, ranks):
    """Two layouts of one tensor, from a ``random.Random``: even and uneven cuts, replicas, chunks."""
    shape = (draw.randint(1, 9), draw.randint(1, 9))
    return tuple(sa.layout(shape, random_placement(draw, shape, ranks), ranks=ranks) for _ in range(2))


def random_placement(draw, shape, ranks):
    axis = draw.randrange(2)
    cuts = sorted(draw.randint(0, shape[axis]) for _ in range(ranks - 1))
    sizes = tuple(b - a for a, b in zip([0, *cuts], [*cuts, shape[axis]]))
    return draw.choice(
        [sa.Split(axis), sa.Split(axis, sizes=sizes), sa.Replicate(), sa.Cyclic(axis, draw.randint(1, 3))]
    )
