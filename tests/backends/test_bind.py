"""Binding: all ranks raise the same error where any of them differs, before anything moves."""

import dataclasses

import pytest
from cases import COLUMNS, ROWS, columns, full, messages, own, require, rows

import shardalg as sa
from shardalg.maps._table import PieceTable

PLAN = sa.plan(ROWS, COLUMNS)


def one_stride_off(plan):
    """The same question with another answer: one stride of one copy is different."""
    table = plan.map.table.rows.copy()
    table[-1, 0] += 1
    return dataclasses.replace(plan, map=dataclasses.replace(plan.map, table=PieceTable(table)))


DIFFERENT = {
    "plan": lambda: sa.plan(ROWS, ROWS),
    "shape": lambda: sa.plan(rows(4, (8, 7)), columns(4, (8, 7))),
    "selector": lambda: sa.plan(ROWS, COLUMNS, select="lowest"),
    "one stride": lambda: one_stride_off(PLAN),
    "bound": lambda: sa.schedule(PLAN, max_bytes=64),
    "dtypes": lambda: sa.schedule(PLAN, dtypes="bfloat16"),
    "a tree": lambda: sa.plan_tree({"x": ROWS}, {"x": COLUMNS}),
    "ranks out of reach": lambda: sa.plan(rows(6), columns(4)),
    "no plan": lambda: "plan",
    "only one side": lambda: sa.plan(ROWS, COLUMNS, source_ranks=[4, 5, 6, 7]),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_a_rank_that_differs_stops_all_alike(world, what):
    def rank(ctx):
        given = DIFFERENT[what]() if ctx.ranks == (2,) else PLAN
        with pytest.raises(sa.TransferError) as refused:
            sa.bind(ctx, given)
        bound = sa.bind(ctx, PLAN)  # the context is as good as before
        x = full(ROWS)
        require(sa.run(ctx, bound, own(ctx, sa.extract(ROWS, x))), own(ctx, sa.extract(COLUMNS, x)))
        return str(refused.value)

    said = world(4, rank).good()
    assert len(set(said)) == 1 and "rank" in said[0] and "2" in said[0], said


def tree_of(count, changed=None, **options):
    """A tree of alike tensors, one of which may be laid out otherwise."""
    names = [f"w{k}" for k in range(count)]
    target = {name: ROWS if name == changed else COLUMNS for name in names}
    return sa.schedule(sa.plan_tree(dict.fromkeys(names, ROWS), target), **options)


BFLOAT = {f"w{k}": "bfloat16" if k == 4 else "float32" for k in range(6)}
SAID = {
    "a tensor laid out otherwise": (
        tree_of(6), lambda: tree_of(6, "w4"),
        ("plans", "ranks [0, 1, 3] hold 6 tensors, 72 copies, 216 elements between ranks in 1 round;"
         " ranks [2] hold 6 tensors, 64 copies, 180 elements", "The first tensor that differs: 'w4', Space",
         "TransferPlan of 12 copies", " against 'w4', Space", "TransferPlan of 4 copies"),
    ),
    "a tensor less": (tree_of(6), lambda: tree_of(5), ("ranks [2] hold 5 tensors", "'w5'", "against none")),
    "one dtype": (
        tree_of(6, dtypes="float32"), lambda: tree_of(6, dtypes=BFLOAT),
        ("dtypes", "864 bytes", "792 bytes", "'w4'", "float32 -> float32", "bfloat16 -> bfloat16"),
    ),
    "a bound": (tree_of(1), lambda: tree_of(1, max_bytes=64), ("max_bytes", "ranks [2]", "max_bytes=64")),
    "relay": (tree_of(1), lambda: tree_of(1, relay=True), ("different programs", "in 1 round, relay")),
    "one stride": (PLAN, lambda: one_stride_off(PLAN), ("copies of one plan", "against")),
}  # fmt: skip


@pytest.mark.parametrize("what", SAID)
def test_the_error_says_which_rank_differs_and_how(world, what):
    most, other, words = SAID[what]

    def rank(ctx):
        with pytest.raises(sa.TransferError) as refused:
            sa.bind(ctx, other() if ctx.ranks == (2,) else most)
        sa.bind(ctx, PLAN)
        return str(refused.value)

    said = world(4, rank).good()
    assert len(set(said)) == 1
    at = [said[0].find(word) for word in words]
    assert -1 not in at and at == sorted(at), said[0]
    if what == "one stride":  # the question is the same, the copies are not
        a, b = said[0].split("against")
        assert a.split("digest ")[1][:8] == b.split("digest ")[1][:8]
        assert a.split("copies ")[-1][:8] != b.split("copies ")[-1][:8]


def test_three_kinds_of_plans_are_told_apart(world):
    def rank(ctx):
        with pytest.raises(sa.TransferError) as refused:
            sa.bind(ctx, tree_of(1 + ctx.ranks[0] % 3))
        return str(refused.value)

    (said,) = set(world(4, rank).good())
    for words in ("ranks [0, 3] hold 1 tensor,", "ranks [1] hold 2 tensors", "ranks [2] hold 3 tensors"):
        assert words in said


def test_dtypes_are_part_of_the_agreement(world):
    def rank(ctx):
        with pytest.raises(sa.TransferError, match="dtypes") as refused:
            sa.bind(ctx, PLAN, dtypes="float32" if ctx.ranks[0] else "float64")
        return str(refused.value)

    assert len(set(world(3 + 1, rank).good())) == 1


def test_binding_gathers_once_and_moves_nothing(world):
    def rank(ctx):
        sa.bind(ctx, PLAN)
        return ctx.counters.gathers, ctx.counters.exchanges, ctx.counters.payload_bytes

    assert world(4, rank).good() == [(1, 0, 0)] * 4


def test_one_process_raises_its_own_error():
    with sa.backends.simulate(2) as ctx:
        with pytest.raises(sa.InvalidMapError, match="str"):
            sa.bind(ctx, "plan")
        with pytest.raises(sa.InvalidMapError, match="ranks"):
            sa.bind(ctx, PLAN)
        with pytest.raises(sa.InvalidMapError, match="schedule"):
            sa.bind(ctx, sa.schedule(sa.plan(rows(2), columns(2))), dtypes="float32")
    with pytest.raises(sa.ProvenanceError, match="context"):
        sa.bind("ctx", PLAN)


def test_ranks_that_planned_only_their_own_part(world):
    """Each rank plans alone; ranks with nothing to do take part, too."""
    source = sa.layout((8, 6), sa.Split(0, sizes=(4, 4, 0)), ranks=3)
    target = sa.layout((8, 6), sa.Split(0, sizes=(2, 6, 0)), ranks=3)
    x = full(source)

    def rank(ctx):
        mine = sa.plan(source, target, rank=ctx.ranks[0])
        bound = sa.bind(ctx, mine)
        for verify in (False, True):
            out = sa.run(ctx, bound, own(ctx, sa.extract(source, x)), verify=verify)
            require(out, own(ctx, sa.extract(target, x)))
        return ctx.last_report.rounds

    assert world(4, rank).good() == [1, 1, 1, 1]


def test_parts_that_do_not_fit_are_refused(world):
    target, wrong = columns(4), sa.layout((8, 6), sa.Split(1, sizes=(0, 2, 2, 2)), ranks=4)

    def rank(ctx):
        (r,) = ctx.ranks
        mine = sa.plan(ROWS, target, rank=r)
        if r == 3:  # the right question, the wrong copies
            mine = dataclasses.replace(mine, map=sa.plan(ROWS, wrong, rank=r).map)
        with pytest.raises(sa.TransferError, match="rank 3") as refused:
            sa.bind(ctx, mine)
        return str(refused.value)

    assert len(set(world(4, rank).good())) == 1


def test_messages_are_counted(world):
    assert world(2, lambda ctx: (sa.bind(ctx, sa.plan(rows(2), columns(2))), messages(ctx))[1]).good() == [
        1,
        1,
    ]
