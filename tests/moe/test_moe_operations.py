"""Values, order of summation, counters and gradients of the four operations, equal on every backend."""

import functools
from functools import partial

import pytest
import torch
from groups import errors_on_threads, on_processes, on_threads
from hypothesis import given
from moe_oracle import INT32_MIN

from shardalg import InvalidMapError
from shardalg.moe import Buffer, combine, dispatch, geometry, plan_dispatch, prefetch, reduce_grad, simulate
from shardalg.testing import comm_plans
from shardalg.testing._moe import ROUTINGS, routing

W = ([[0, 1], [0, 0], [2, 0]], [[0, 1], [1, 3], [0, 2]])
RANKS = [1, 2, 3, 4]


def tensors(*lists, dtype=torch.int64):
    return [torch.tensor(x, dtype=dtype) for x in lists]


def slot_of(value, NvS):
    value = value if value >= 0 else ~value
    return value // NvS, value % NvS


def slow_dispatch(plans, hidden):
    """Row (d, offset) is the token of the route that says so."""
    rows = [torch.zeros(p.NvS, h.shape[1], dtype=h.dtype) for p, h in zip(plans, hidden)]
    for p, h in zip(plans, hidden):
        for i, v in enumerate(p.dst.tolist()):
            if v != INT32_MIN:
                d, offset = slot_of(v, p.NvS)
                rows[d][offset] = h[i // p.K]
    return rows


def slow_combine(plans, rows, accumulate="fp32", weights=None):
    """Per token: each destination's rows in ascending k, then those sums by ascending first k."""
    outs = []
    for p in plans:
        dtype = rows[0].dtype
        kind = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.zeros(p.S_r, rows[0].shape[1], dtype=dtype)
        for token in range(p.S_r):
            sums = {}
            for v in p.dst[token * p.K : (token + 1) * p.K].tolist():
                if v == INT32_MIN:
                    continue
                d, offset = slot_of(v, p.NvS)
                row = rows[d][offset].to(kind)
                row = row if weights is None else row * weights[d][offset].to(kind)
                sums[d] = sums[d] + row if d in sums else row
            if sums:
                parts = [s.to(dtype).to(kind) if accumulate == "two_level" else s for s in sums.values()]
                out[token] = functools.reduce(torch.add, parts).to(dtype)
        outs.append(out)
    return outs


def used_slots(plan):
    return [v if v >= 0 else ~v for v in plan.recv_slots.tolist()]


def same(xs, ys):
    """Equal bit for bit, list by list."""
    assert len(xs) == len(ys)
    for x, y in zip(xs, ys):
        assert x.dtype == y.dtype and x.shape == y.shape
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def noise(shape, dtype, seed):
    """Random values of mixed size, so that sums depend on their order."""
    made = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=made) * 10 ** torch.randint(-2, 3, shape, generator=made)).to(dtype)


def w_example(buffer, plan, hidden):
    """Rows, outputs of identity experts, and outputs of experts that multiply by e+1, two ways."""
    rows, weights = dispatch(buffer, plan, hidden)
    if buffer.transport.many:
        assert weights == (None, None)
        factors = [factors_of(p) for p in plan]
        scaled = [r * f[:, None] for r, f in zip(rows, factors)]
    else:
        assert weights is None
        factors = factors_of(plan)
        scaled = rows * factors[:, None]
    outs = [combine(buffer, plan, rows)[0], combine(buffer, plan, scaled)[0]]
    return rows, *outs, combine(buffer, plan, rows, route_weights=factors)[0]


def factors_of(plan):
    """e+1 on every row of expert e."""
    factors = torch.zeros(plan.NvS)
    for e, low, high in zip(plan.group_experts, [0, *plan.cu_seqlens], plan.cu_seqlens):
        factors[low:high] = e + 1
    return factors


@pytest.mark.parametrize("how", ["simulate", "gloo"])
def test_example_w_values(how):
    shape = dict(E=4, S=3, K=2, pad=2, H=1)
    hidden = tensors([[1], [2], [3]], [[10], [20], [30]], dtype=torch.float32)
    if how == "simulate":
        buffer = simulate(2, **shape)
        found = w_example(buffer, plan_dispatch(buffer, tensors(*W)), hidden)
    else:

        def work(group, rank):
            buffer = Buffer(group, **shape)
            return w_example(buffer, plan_dispatch(buffer, tensors(*W)[rank]), hidden[rank])

        found = zip(*on_threads(2, work))
    rows, identity, scaled, weighted = ([t.flatten().tolist() for t in its] for its in found)
    assert rows == [[1, 2, 2, 0, 1, 10, 20, 0, 0, 0], [3, 30, 20, 0, 3, 10, 30, 0, 0, 0]]
    assert identity == [[2, 4, 6], [20, 40, 60]]
    assert scaled == weighted == [[3, 4, 12], [30, 120, 120]]


def test_example_w_crosses_ranks_with_four_routes_and_three_rows():
    buffer = simulate(2, E=4, S=3, K=2, pad=2, H=1)
    plans = plan_dispatch(buffer, tensors(*W))
    assert sum(int(p.send_routes.sum() - p.send_routes[p.rank]) for p in plans) == 4
    before = buffer.transport.counters.bytes_sent
    dispatch(buffer, plans, [torch.zeros(3, 1)] * 2)
    assert buffer.transport.counters.bytes_sent - before == 3 * 4


def rounding_example(rank):
    """Routes and rows: destination 0 holds 1 and 2^-8, destination 1 holds 2^-8 and 2^-8."""
    topk = torch.tensor([[0, 0, 1, 1]])[: 1 - rank]
    return topk, [(1.0, 2.0**-8), (2.0**-8, 2.0**-8)][rank]


@pytest.mark.parametrize("how", ["simulate", "gloo"])
@pytest.mark.parametrize("accumulate, expected", [("two_level", 1.0078125), ("fp32", 1.015625)])
def test_example_rounding(how, accumulate, expected):
    shape = dict(E=2, S=1, K=4, H=1, policy="home", dtype=torch.bfloat16)
    topk, values = zip(*(rounding_example(rank) for rank in range(2)))

    def rows(rank, count):
        made = torch.zeros(count, 1, dtype=torch.bfloat16)
        made[:2, 0] = torch.tensor(values[rank])
        return made

    def work(group, rank):
        buffer = Buffer(group, **shape)
        given = rows(rank, buffer.geometry.NvS)
        return combine(buffer, plan_dispatch(buffer, topk[rank]), given, accumulate=accumulate)[0]

    if how == "gloo":
        out = on_threads(2, work)
    else:
        buffer = simulate(2, **shape)
        given = [rows(rank, buffer.geometry.NvS) for rank in range(2)]
        out = combine(buffer, plan_dispatch(buffer, topk), given, accumulate=accumulate)[0]
    assert out[0].item() == expected and out[1].shape == (0, 1)


@given(comm_plans())
def test_values_and_summation_order_equal_the_slow_reference(drawn):
    buffer, _, plans = drawn
    hidden = [noise((p.S_r, 2), torch.float64, p.rank) for p in plans]
    rows, _ = dispatch(buffer, plans, hidden)
    same(rows, slow_dispatch(plans, hidden))
    y = [noise((p.NvS, 2), torch.float64, 7 + p.rank) for p in plans]
    factors = [noise((p.NvS,), torch.float64, 9 + p.rank) for p in plans]
    kept = [t.clone() for t in y]
    same(combine(buffer, plans, y)[0], slow_combine(plans, y))
    same(combine(buffer, plans, y, route_weights=factors)[0], slow_combine(plans, y, weights=factors))
    same(y, kept)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("accumulate", ["fp32", "two_level"])
def test_low_precision_sums_equal_the_slow_reference(dtype, accumulate):
    buffer = simulate(3, E=6, S=5, K=4, pad=2, H=3, dtype=dtype)
    plans = plan_dispatch(buffer, routing("zipf", 3, buffer.geometry, [5, 4, 5]))
    assert int(plans[0].experts_to_copy.max()) >= 0
    hidden = [noise((p.S_r, 3), dtype, p.rank) for p in plans]
    same(dispatch(buffer, plans, hidden)[0], slow_dispatch(plans, hidden))
    rows = [noise((p.NvS, 3), dtype, 5 + p.rank) for p in plans]
    same(combine(buffer, plans, rows, accumulate=accumulate)[0], slow_combine(plans, rows, accumulate))
    factors = [noise((p.NvS,), torch.float32, p.rank) for p in plans]
    weighted = combine(buffer, plans, rows, accumulate=accumulate, route_weights=factors)[0]
    same(weighted, slow_combine(plans, rows, accumulate, factors))


def test_the_two_accumulations_differ_somewhere():
    """The twin that shows the test above can tell them apart."""
    buffer = simulate(3, E=6, S=5, K=4, pad=2, H=3, dtype=torch.bfloat16)
    plans = plan_dispatch(buffer, routing("zipf", 3, buffer.geometry, [5, 4, 5]))
    rows = [noise((p.NvS, 3), torch.bfloat16, 5 + p.rank) for p in plans]
    a, b = (combine(buffer, plans, rows, accumulate=x)[0] for x in ("fp32", "two_level"))
    assert not all(torch.equal(x, y) for x, y in zip(a, b))


def test_minus_zero_nan_and_infinity_travel():
    buffer = simulate(2, E=2, S=2, K=1, H=4)
    plans = plan_dispatch(buffer, tensors([[1], [1]], [[0], [0]]))
    hidden = [torch.tensor([[-0.0, float("nan"), float("inf"), -float("inf")]] * 2) for _ in plans]
    rows, _ = dispatch(buffer, plans, hidden)
    same(rows, slow_dispatch(plans, hidden))
    same(combine(buffer, plans, rows)[0], hidden)


def test_padding_rows_are_zero_and_never_read():
    buffer = simulate(2, E=4, S=3, K=2, pad=4, H=2)
    plans = plan_dispatch(buffer, tensors(*W))
    rows, _ = dispatch(buffer, plans, [torch.ones(3, 2)] * 2)
    for p, r in zip(plans, rows):
        used = set(used_slots(p))
        assert all((r[i] == (i in used)).all() for i in range(p.NvS))
        r[[i for i in range(p.NvS) if i not in used]] = float("nan")
    assert all(torch.equal(o, torch.full((3, 2), 2.0)) for o in combine(buffer, plans, rows)[0])


@given(comm_plans())
def test_adjoint_and_identity(drawn):
    """<D x, y> = <x, D^T y>, and D^T D multiplies a token by its number of real routes (K if all are)."""
    buffer, topk, plans = drawn
    x = [torch.randint(-9, 9, (p.S_r, 2)).double() for p in plans]
    y = [torch.randint(-9, 9, (p.NvS, 2)).double() for p in plans]
    rows, back = dispatch(buffer, plans, x)[0], combine(buffer, plans, y)[0]
    assert sum((a * b).sum() for a, b in zip(rows, y)) == sum((a * b).sum() for a, b in zip(x, back))
    for t, a, b in zip(topk, x, combine(buffer, plans, rows)[0]):
        assert torch.equal(b, a * (t >= 0).sum(1, keepdim=True))


@given(comm_plans())
def test_weights_go_to_their_slots_and_back(drawn):
    buffer, topk, plans = drawn
    hidden = [torch.zeros(p.S_r, 2, dtype=torch.float64) for p in plans]
    weights = [1 + torch.rand(p.S_r, p.K, dtype=torch.float64) for p in plans]
    _, there = dispatch(buffer, plans, hidden, weights)
    for p, w in zip(plans, weights):
        for i, v in enumerate(p.dst.tolist()):
            if v != INT32_MIN:
                d, offset = slot_of(v, p.NvS)
                assert there[d][offset] == w.flatten()[i]
    for p, w in zip(plans, there):
        assert int((w != 0).sum()) == len(p.recv_slots)
    _, back = combine(buffer, plans, [torch.zeros(p.NvS, 2, dtype=torch.float64) for p in plans], there)
    for t, w, b in zip(topk, weights, back):
        assert torch.equal(b, torch.where(t >= 0, w, 0.0))


def test_dropped_routes_contribute_nothing():
    buffer = simulate(2, E=2, S=3, K=2, H=2)
    plans = plan_dispatch(buffer, tensors([[-1, -1], [0, -5], [1, 0]], [[-1, 1], [0, 0], [-1, -1]]))
    x = [torch.ones(3, 2, requires_grad=True) for _ in plans]
    w = [torch.ones(3, 2, requires_grad=True) for _ in plans]
    rows, there = dispatch(buffer, plans, x, w)
    out, back = combine(buffer, plans, rows, there, route_weights=there)
    assert [o[:, 0].tolist() for o in out] == [[0, 1, 2], [1, 2, 0]]
    assert [b.tolist() for b in back] == [[[0, 0], [1, 0], [1, 1]], [[0, 1], [1, 1], [0, 0]]]
    sum(o.sum() for o in (*out, *back)).backward()
    assert [t.grad[:, 0].tolist() for t in x] == [[0, 1, 2], [1, 2, 0]]
    assert [t.grad.tolist() for t in w] == [[[0, 0], [3, 0], [3, 3]], [[0, 3], [3, 3], [0, 0]]]


def distinct_pairs(topk, plans):
    """(token, rank) pairs whose rank is not the token's own."""
    pairs = set()
    for p in plans:
        for i, v in enumerate(p.dst.tolist()):
            if v != INT32_MIN and slot_of(v, p.NvS)[0] != p.rank:
                pairs.add((p.rank, i // p.K, slot_of(v, p.NvS)[0]))
    return len(pairs)


@pytest.mark.parametrize("kind", ROUTINGS)
def test_a_row_travels_once_per_token_and_rank(kind):
    """Exact counters: bytes on the wire are the distinct (token, rank) pairs, in one exchange each."""
    buffer = simulate(4, E=8, S=9, K=6, H=5, dtype=torch.bfloat16)
    topk = routing(kind, 1, buffer.geometry, [9, 8, 9, 3])
    plans = plan_dispatch(buffer, topk)
    pairs = distinct_pairs(topk, plans)
    assert sum(int(p.send_rows.sum() - p.send_rows[p.rank]) for p in plans) == pairs
    routes = sum(int(p.send_routes.sum() - p.send_routes[p.rank]) for p in plans)
    counters = buffer.transport.counters
    hidden = [torch.zeros(p.S_r, 5, dtype=torch.bfloat16) for p in plans]
    weights = [torch.zeros(p.S_r, 6) for p in plans]

    def spent(call):
        before = counters.exchanges, counters.bytes_sent, counters.gathers
        result = call()
        assert counters.gathers == before[2]
        return counters.exchanges - before[0], counters.bytes_sent - before[1], result

    *cost, (rows, _) = spent(lambda: dispatch(buffer, plans, hidden))
    assert cost == [1, pairs * 5 * 2]
    *cost, (_, there) = spent(lambda: dispatch(buffer, plans, hidden, weights))
    assert cost == [2, pairs * 5 * 2 + routes * 4]
    assert spent(lambda: combine(buffer, plans, rows))[:2] == (1, pairs * 5 * 4)
    assert spent(lambda: combine(buffer, plans, rows, accumulate="two_level"))[:2] == (1, pairs * 5 * 2)
    assert spent(lambda: combine(buffer, plans, rows, there))[:2] == (2, pairs * 5 * 4 + routes * 4)


@pytest.mark.parametrize("kind", [k for k in ROUTINGS if k != "drops"])
def test_the_busiest_rank_computes_its_capacity(kind):
    buffer = simulate(4, E=8, S=9, K=2, H=1)
    plans = plan_dispatch(buffer, routing(kind, 1, buffer.geometry, [9] * 4))
    assert plans[0].alloc.sum(0).tolist() == [18] * 4


def everything(buffer, plan, inputs):
    """All operations and their gradients on per-rank inputs, as one flat list; lists where ``many``."""
    x, w, y, f, experts, grads = inputs
    many = buffer.transport.many
    listed = (lambda v: list(v)) if many else (lambda v: [v])
    leaves = [
        t.requires_grad_() for v in (x, w, y, f, experts["w"], grads["w"]) for t in (v if many else [v])
    ]
    rows, there = dispatch(buffer, plan, x, w)
    out, back = combine(buffer, plan, y, there, route_weights=f)
    rounded, _ = combine(buffer, plan, y, accumulate="two_level")
    slots = prefetch(buffer, plan, _trees(experts, many))
    total = reduce_grad(buffer, plan, slots, _trees(grads, many))
    flat = [t for tree in (slots, total) for one in listed(tree) for t in one.values()]
    results = [t for v in (rows, there, out, back, rounded) for t in listed(v)] + flat
    loss = sum((t.double() ** 2).sum() for t in results if t.dtype.is_floating_point)
    gradients = torch.autograd.grad(loss, leaves)
    return [t.detach() for t in (*results, *gradients)]


def _trees(tree, many):
    return [dict(zip(tree, v)) for v in zip(*tree.values())] if many else tree


def inputs_of(rank, topk, rows, dtype):
    """Everything that ``everything`` takes on one rank, the same each time."""
    tokens = len(topk[rank])
    return (
        noise((tokens, 3), dtype, rank),
        noise((tokens, 3), torch.float32, rank),
        noise((rows, 3), dtype, 10 + rank),
        noise((rows,), torch.float32, rank),
        {"w": noise((2, 4), dtype, 20 + rank)},
        {"w": noise((2, 4), torch.float32, 30 + rank)},
    )


def of_all_ranks(topk, rows, dtype):
    """The same for a simulated buffer: lists by rank, inside the trees too."""
    each = [inputs_of(r, topk, rows, dtype) for r in range(len(topk))]
    return [list(v) for v in zip(*(i[:4] for i in each))] + [{"w": [i[k]["w"] for i in each]} for k in (4, 5)]


def shape_of(R, dtype):
    return dict(E=2 * R, S=5, K=3, pad=2, H=3, dtype=dtype)


def routings_of(R):
    g = geometry(R, E=2 * R, S=5, K=3)
    return [routing(kind, R, g, [5, 0, 4, 5][:R]) for kind in ROUTINGS]


def on_one_rank(group, rank, dtype):
    """All operations and gradients on every kind of routing, as one rank of a group."""
    R = group.size()
    buffer = Buffer(group, **shape_of(R, dtype))
    inputs = [inputs_of(rank, t, buffer.geometry.NvS, dtype) for t in routings_of(R)]
    return [everything(buffer, plan_dispatch(buffer, t[rank]), i) for t, i in zip(routings_of(R), inputs)]


def check_ranks(results, R, dtype):
    """Each rank's results are the simulated ones, bit for bit."""
    buffer = simulate(R, **shape_of(R, dtype))
    for k, topk in enumerate(routings_of(R)):
        inputs = of_all_ranks(topk, buffer.geometry.NvS, dtype)
        expected = everything(buffer, plan_dispatch(buffer, topk), inputs)
        for rank, found in enumerate(results):
            same(found[k], expected[rank::R])


@pytest.mark.parametrize("R", RANKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_gloo_equals_simulated_bit_for_bit(R, dtype):
    check_ranks(on_threads(R, lambda group, rank: on_one_rank(group, rank, dtype)), R, dtype)


def test_real_processes_equal_simulated_bit_for_bit():
    check_ranks(on_processes(3, on_one_rank, torch.bfloat16), 3, torch.bfloat16)


def test_all_ranks_empty():
    def work(group, rank):
        buffer = Buffer(group, E=4, S=2, K=2, H=3)
        plan = plan_dispatch(buffer, torch.empty(0, 2, dtype=torch.int32))
        x = torch.empty(0, 3, requires_grad=True)
        rows, there = dispatch(buffer, plan, x, torch.empty(0, 2))
        out, back = combine(buffer, plan, rows, there)
        (out.sum() + rows.sum()).backward()
        slots = prefetch(buffer, plan, [torch.ones(2, 3)])
        return (
            rows.abs().sum().item(),
            tuple(out.shape),
            tuple(back.shape),
            tuple(x.grad.shape),
            slots[0].sum().item(),
        )

    assert on_threads(2, work) == [(0, (0, 3), (0, 2), (0, 3), 0)] * 2


@pytest.mark.parametrize("sizes", [(1, 1, 1, 1), (1, 1, 2, 1), (1, 3, 1, 3), (3, 1, 1, 1)])
def test_smallest_groups(sizes):
    """N = 1, 2, 3 with one expert per rank."""
    R, epn, S, K = sizes
    buffer = simulate(R, E=R * epn, S=S, K=K, H=2)
    plans = plan_dispatch(buffer, [torch.zeros(S, K, dtype=torch.int64)] * R)
    hidden = [noise((S, 2), torch.float32, r) for r in range(R)]
    rows, _ = dispatch(buffer, plans, hidden)
    same(rows, slow_dispatch(plans, hidden))
    same(combine(buffer, plans, rows)[0], slow_combine(plans, rows))


@pytest.mark.parametrize("R", [1, 2, 3])
def test_gradients_of_the_token_path(R):
    """gradcheck and double backward in fp64: rows, router weights and route weights."""
    buffer = simulate(R, E=2 * R, S=2, K=2, pad=2, H=2, dtype=torch.float64, weight_dtype=torch.float64)
    plans = plan_dispatch(buffer, routing("hot_home", 2, buffer.geometry, [2, 1, 2][:R]))
    tokens = [p.S_r for p in plans]
    x = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in tokens]
    w = [torch.randn(n, 2, dtype=torch.float64, requires_grad=True) for n in tokens]

    def layer(*inputs):
        rows, there = dispatch(buffer, plans, inputs[:R], inputs[R:])
        out, back = combine(buffer, plans, [r**2 for r in rows], there, route_weights=[t**2 for t in there])
        return (*out, *back)

    assert torch.autograd.gradcheck(layer, x + w)
    assert torch.autograd.gradgradcheck(layer, x + w)
    out, pull = torch.func.vjp(layer, *(t.detach() for t in x + w))
    expected = torch.autograd.grad(layer(*x, *w), x + w, out)
    assert all(torch.equal(a, b) for a, b in zip(pull(out), expected))


def copying(R, **shape):
    """A simulated buffer and plans that really copy experts."""
    buffer = simulate(R, **shape)
    plans = plan_dispatch(buffer, routing("hot_home", 2, buffer.geometry, [buffer.geometry.S] * R))
    assert int((plans[0].experts_to_copy >= 0).sum()) > 0
    return buffer, plans


def test_gradients_of_the_expert_path():
    buffer, plans = copying(3, E=6, S=3, K=2, H=1, dtype=torch.float64)
    leaf = lambda *s: torch.randn(*s, dtype=torch.float64, requires_grad=True)
    experts, grads = [leaf(2, 2) for _ in plans], [leaf(2, 2) for _ in plans]

    def there_and_back(*inputs):
        slots = prefetch(buffer, plans, [{"w": t} for t in inputs[:3]])
        total = reduce_grad(
            buffer, plans, [{"w": t["w"] ** 2} for t in slots], [{"w": t} for t in inputs[3:]]
        )
        return (*(t["w"] for t in slots), *(t["w"] for t in total))

    assert torch.autograd.gradcheck(there_and_back, experts + grads)
    assert torch.autograd.gradgradcheck(there_and_back, experts + grads)
    y = [
        torch.randint(-9, 9, t["w"].shape).double()
        for t in prefetch(buffer, plans, [{"w": t} for t in experts])
    ]
    x = [torch.randint(-9, 9, (2, 2)).double() for _ in plans]
    slots = prefetch(buffer, plans, [[t] for t in x])
    home = reduce_grad(buffer, plans, [[t] for t in y], [[torch.zeros(2, 2).double()]] * 3)
    assert sum((a[0] * b).sum() for a, b in zip(slots, y)) == sum((a * b[0]).sum() for a, b in zip(x, home))


def test_prefetch_brings_any_tree_of_any_dtypes():
    buffer, plans = copying(4, E=8, S=6, K=2, H=1)
    dtypes = [
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int16,
        torch.bool,
        torch.uint8,
        torch.complex64,
    ]

    def tree(rank):
        ids = torch.arange(2) + 2 * rank
        return {str(d): ids.view(2, 1, 1).expand(2, 3, 2).to(d) for d in dtypes} | {
            "bias": ids.float(),
            "none": torch.empty(2, 0),
        }

    before = buffer.transport.counters.exchanges
    slots = prefetch(buffer, plans, [tree(r) for r in range(4)])
    assert buffer.transport.counters.exchanges == before + 1
    for p, got in zip(plans, slots):
        for slot, e in enumerate(p.experts_to_copy[p.rank].tolist()):
            for d in dtypes:
                expected = torch.full((3, 2), max(e, 0)).to(d)
                same([got[str(d)][slot]], [expected])
            assert got["bias"][slot] == max(e, 0)
        assert got["none"].shape == (2, 0)


def test_reduce_grad_adds_in_order_of_ranks_from_the_local_value():
    buffer, plans = copying(4, E=4, S=4, K=1, H=1)
    copies = plans[0].experts_to_copy
    assert copies.flatten().tolist() == [-1, 0, 0, 0]
    parts = [1.0, 2.0**-24, 2.0**-24, 2.0**-23]  # in fp32 another order gives another sum
    slots = [[torch.tensor([[parts[r]]])] for r in range(4)]
    local = [[torch.tensor([[1.0 if r == 0 else 0.0]])] for r in range(4)]
    kept = [t[0].clone() for t in slots + local]
    total = reduce_grad(buffer, plans, slots, local)
    expected = functools.reduce(torch.add, [torch.tensor(p) for p in parts])
    assert [t[0].item() for t in total] == [expected.item(), 0, 0, 0]
    assert expected != functools.reduce(torch.add, [torch.tensor(p) for p in reversed(parts)])
    same([t[0] for t in slots + local], kept)
    halves = [[t[0].bfloat16()] for t in slots]
    assert reduce_grad(buffer, plans, halves, local)[0][0].dtype == torch.float32


def refused_everywhere(call, message):
    """``call(buffer, plan, rank)`` raises one message on both ranks, before any payload."""

    def work(group, rank):
        buffer = Buffer(group, E=4, S=2, K=1, H=2)
        plan = plan_dispatch(buffer, torch.tensor([[3], [3]]))
        before = buffer.transport.counters.exchanges
        try:
            call(buffer, plan, rank)
        finally:
            assert buffer.transport.counters.exchanges == before

    errors = errors_on_threads(2, work)
    assert len({str(e) for e in errors}) == 1
    with pytest.raises(InvalidMapError, match=message):
        raise errors[1]


def test_trees_that_do_not_fit_are_the_same_error_on_every_rank():
    two, one, wide = torch.zeros(2, 3), torch.zeros(1, 3), torch.zeros(2, 4)
    cases = [
        (
            {"a": two, "b": one},
            {"a": two, "b": two},
            r"rank 0: leaf 1 of the experts must be \[2, ...\].*it has 1",
        ),
        ({"a": two, "b": 3}, {"a": two, "b": two}, "rank 0: leaf 1 of the experts is no tensor but int"),
        ({"a": torch.tensor(1.0)}, {"a": two}, "rank 0: leaf 0 of the experts.*it has no axis"),
        ({"a": two}, {"b": two}, "ranks 0 and 1 pass trees of different structure"),
        ({"a": wide}, {"a": two}, "ranks 0 and 1 pass trees"),
        ({"a": two.double()}, {"a": two}, "ranks 0 and 1 pass trees"),
    ]
    for zero, other, message in cases:
        trees = (zero, other)
        refused_everywhere(partial(lambda trees, b, p, r: prefetch(b, p, trees[r]), trees), message)
    bad = [
        (([one], [two]), r"leaf 0 of the slot gradients must be \[2"),
        (([two], [one]), r"leaf 0 of the local gradients must be \[2"),
        (([two], [two, two]), "trees of different structure"),
        (([wide], [two]), r"slot gradient torch.float32 \(2, 4\) does not fit local"),
        (([two.int()], [two]), "slot gradient torch.int32"),
    ]
    for wrong, message in bad:
        trees = (([two], [two]), wrong)
        call = partial(lambda trees, b, p, r: reduce_grad(b, p, *trees[r]), trees)
        refused_everywhere(call, "rank 1: .*" + message)


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda b, p: dispatch(b, p, torch.zeros(3, 2)),
            r"hidden must be \[S_r, H\] = \(2, 2\).*got \(3, 2\)",
        ),
        (lambda b, p: dispatch(b, p, torch.zeros(2, 3)), "hidden must be"),
        (lambda b, p: dispatch(b, p, torch.zeros(2, 2).double()), "got .* of torch.float64"),
        (lambda b, p: dispatch(b, p, None), "hidden must be a tensor .*, got NoneType"),
        (lambda b, p: dispatch(b, p, torch.zeros(2, 2, device="meta")), "on cpu, got .* on meta"),
        (lambda b, p: dispatch(b, p, torch.zeros(2, 2), torch.zeros(2, 3)), r"weights must be \[S_r, K\]"),
        (lambda b, p: combine(b, p, torch.zeros(3, 2)), r"rows must be \[NvS, H\]"),
        (lambda b, p: combine(b, p, torch.zeros(p.NvS, 2), torch.zeros(1)), "row_weights must be"),
        (
            lambda b, p: combine(b, p, torch.zeros(p.NvS, 2), route_weights=torch.zeros(1)),
            "route_weights must be",
        ),
        (lambda b, p: combine(b, p, torch.zeros(p.NvS, 2), accumulate="fp16"), "accumulate must be one of"),
    ],
)
def test_a_wrong_tensor_is_refused_on_this_rank_before_anything_is_sent(call, message):
    def work(group, rank):
        buffer = Buffer(group, E=4, S=2, K=1, H=2)
        plan = plan_dispatch(buffer, torch.tensor([[3], [3]]))
        before = buffer.transport.counters.exchanges
        if rank == 0:
            with pytest.raises(InvalidMapError, match=message):
                call(buffer, plan)
        assert buffer.transport.counters.exchanges == before
        return dispatch(buffer, plan, torch.ones(2, 2))[0].sum().item()

    assert on_threads(2, work) == [4, 4]


def test_two_plans_in_flight_finish_in_any_order():
    def work(group, rank):
        buffer = Buffer(group, E=4, S=3, K=2, H=2)
        one = plan_dispatch(buffer, torch.tensor(W[rank]))
        two = plan_dispatch(buffer, torch.tensor(W[1 - rank]))
        x = noise((3, 2), torch.float32, rank).requires_grad_()
        first = dispatch(buffer, one, x, torch.rand(3, 2), async_op=True)
        second = dispatch(buffer, two, x * 2, async_op=True)
        third = prefetch(buffer, one, {"w": x[:2]}, async_op=True)
        assert "w" in third.wait()
        b, a = second.wait(), first.wait()
        assert first.wait() is a
        same(
            [a[0].detach(), b[0].detach()],
            [dispatch(buffer, p, y)[0].detach() for p, y in ((one, x), (two, x * 2))],
        )
        back = combine(buffer, two, b[0], async_op=True)
        out = combine(buffer, one, a[0])[0]
        (out.sum() + back.wait()[0].sum()).backward()
        return x.grad

    for grad in on_threads(2, work):
        assert torch.equal(grad, torch.full((3, 2), 2 + 4.0))


def test_operations_are_pure_in_any_order_and_recompute_reuses_the_plan():
    buffer, plans = copying(2, E=4, S=4, K=2, H=2)
    x = [noise((4, 2), torch.float32, r).requires_grad_() for r in range(2)]

    def block(a, b):
        rows = dispatch(buffer, plans, [a, b])[0]
        return combine(buffer, plans, [torch.sin(r) for r in rows])[0]

    plain = torch.autograd.grad(sum(o.sum() for o in block(*x)), x)
    before = buffer.transport.counters.gathers
    again = torch.utils.checkpoint.checkpoint(block, *x, use_reentrant=False)
    same(torch.autograd.grad(sum(o.sum() for o in again), x), plain)
    assert buffer.transport.counters.gathers == before
    same(block(*x), block(*x))


def test_results_never_alias_inputs():
    buffer, plans = copying(1 + 1, E=2, S=2, K=1, H=2)
    hidden = [torch.ones(2, 2) for _ in plans]
    rows, _ = dispatch(buffer, plans, hidden)
    pointers = {t.untyped_storage().data_ptr() for t in hidden}
    assert not pointers & {r.untyped_storage().data_ptr() for r in rows}
    kept = [r.clone() for r in rows]
    dispatch(buffer, plans, [h * 5 for h in hidden])
    same(rows, kept)


def test_non_contiguous_inputs():
    buffer, plans = copying(2, E=4, S=4, K=2, H=3)
    x = [noise((3, 4), torch.float32, r).T for r in range(2)]
    same(dispatch(buffer, plans, x)[0], dispatch(buffer, plans, [t.contiguous() for t in x])[0])
    y = [noise((3, p.NvS), torch.float32, 3).T for p in plans]
    same(combine(buffer, plans, y)[0], combine(buffer, plans, [t.contiguous() for t in y])[0])
    wide = [torch.ones(()).expand(p.NvS, 3) for p in plans]
    same(combine(buffer, plans, wide)[0], combine(buffer, plans, [t.contiguous() for t in wide])[0])


def test_one_rank_sends_nothing():
    buffer = Buffer(None, E=3, S=3, K=2, pad=4, H=2)
    plan = plan_dispatch(buffer, torch.tensor([[2, 0], [2, 2], [0, 2]]))
    rows, _ = dispatch(buffer, plan, torch.ones(3, 2))
    combine(buffer, plan, rows)
    slots = prefetch(buffer, plan, [torch.ones(3, 2)])
    reduce_grad(buffer, plan, slots, [torch.ones(3, 2)])
    assert buffer.transport.counters.gathers == buffer.transport.counters.exchanges == 0
    with pytest.raises(InvalidMapError, match="rank 0: leaf 0 of the experts must be"):
        prefetch(buffer, plan, [torch.ones(2, 2)])
