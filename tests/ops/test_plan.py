"""Plans against the oracle, and the transfer laws T1-T17.

A plan is read as a map from target slots to source slots. The oracle knows the homes of every
element and nothing of pieces; a selector's answer is worked out slot by slot.
"""

from __future__ import annotations

import json
import math
import pickle
from collections import defaultdict
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from laws import recut
from oracle import meaning

import shardalg as sa
from shardalg import (
    AffineMap,
    Cyclic,
    Experts,
    InvalidMapError,
    LimitError,
    Limits,
    Piece,
    Replicate,
    SelectionError,
    Side,
    Space,
    Split,
    TransferPlan,
    UnsupportedError,
    compose,
    domain,
    equivalent,
    extract,
    image,
    intersect,
    invert,
    layout,
    match,
    nest,
    plan,
    product,
    restrict,
    subtract,
    union,
)
from shardalg.ops import _boxes, _choose
from shardalg.testing import layout_pairs, layouts

MEMORYLESS = ("stay", "lowest")
NAMES = (*MEMORYLESS, "balanced")


def pairs(**kinds: object) -> st.SearchStrategy[tuple[AffineMap, AffineMap]]:
    return recut(layout_pairs(**kinds))


def homes(m: AffineMap) -> dict[object, list[tuple[int, object]]]:
    """element -> [(rank, slot)], slots ascending within a rank."""
    found: dict[object, list[tuple[int, object]]] = defaultdict(list)
    for slot, element, _ in sorted(meaning(m).triples, key=lambda t: (t[0][0][0], t[0][1])):
        found[element].append((slot[0][0], slot))
    return found


def chosen(source: AffineMap, target: AffineMap, select: str) -> set[tuple[object, object]]:
    """(target slot, source slot), one by one: the rule of a memoryless selector spelt out."""
    where, result = homes(source), set()
    for slot, element, _ in meaning(target).triples:
        held = where.get(element)
        if not held:
            continue
        ranks = sorted({r for r, _ in held})
        mine = slot[0][0]
        rank = ranks[0] if select == "lowest" else mine if mine in ranks else ranks[mine % len(ranks)]
        result.add((slot, next(s for r, s in held if r == rank)))
    return result


def slot_map(p: TransferPlan) -> set[tuple[object, object]]:
    return {(s, e) for s, e, _ in meaning(p.map).triples}


@pytest.mark.parametrize("select", MEMORYLESS)
@given(both=pairs())
def test_a_plan_is_the_selectors_rule_slot_by_slot(both, select):
    """T3, and the rule itself."""
    source, target = both
    assert slot_map(plan(source, target, select=select, missing="leave")) == chosen(source, target, select)


@pytest.mark.parametrize("select", NAMES)
@given(both=pairs())
def test_t3_single_valued_inside_the_match_and_defined_where_held(both, select):
    """T3: ``plan <= invert(match)``, single-valued, defined exactly where the source holds the element."""
    source, target = both
    p = plan(source, target, select=select, missing="leave")
    inside = invert(match(source, target))
    assert p.map.single_valued
    assert equivalent(intersect(p.map, inside), p.map)
    assert equivalent(domain(p.map), domain(inside))


@given(both=pairs())
def test_t1_and_t2_match_inverts_and_is_difunctional(both):
    """T1: ``invert(match(A, B)) = match(B, A)``; T2: ``M invert(M) M = M``."""
    source, target = both
    m = match(source, target)
    assert equivalent(invert(m), match(target, source))
    assert equivalent(compose(m, compose(invert(m), m)), m)


@pytest.mark.parametrize("select", NAMES)
@given(both=pairs())
def test_t4_reading_the_source_through_the_plan_gives_the_target(both, select):
    """T4: ``A . plan = B`` where the source holds the element. Scales cancel exactly."""
    source, target = both
    p = plan(source, target, select=select, missing="leave")
    assert equivalent(compose(source, p.map), restrict(target, domain(p.map)))


@given(one=recut(layouts()))
def test_t5_stay_moves_nothing_between_equal_layouts(one):
    """T5: ``plan(A, A)`` with "stay" crosses nothing."""
    p = plan(one, one)
    assert p.stats.elements_crossing == 0 == p.stats.lower_bound


@pytest.mark.parametrize("select", MEMORYLESS)
@given(both=layout_pairs(), again=st.data())
def test_t5_a_plan_depends_on_the_relations_alone(both, again, select):
    """T5: re-cut layouts give the same slot map."""
    source, target = both
    a, b = again.draw(recut(st.just(both)))
    one, two = (plan(*x, select=select, missing="leave") for x in ((source, target), (a, b)))
    assert equivalent(one.map, two.map)


def test_t5_needs_a_memoryless_selector():
    """``balanced`` looks at all requests: the same request is answered otherwise in other company."""
    source = layout((4,), Replicate(), ranks=2)
    whole = layout((4,), Split(0), ranks=[2, 3])
    part = restrict(whole, {2: slice(None)})
    alone = plan(source, part, select="balanced").map
    together = plan(source, whole, select="balanced").map
    assert not equivalent(restrict(together, {2: slice(None)}), alone)


@given(both=pairs(), third=st.data())
def test_t7_two_steps_give_the_values_of_one(both, third):
    """T7: A -> B -> C gives what A -> C gives, on slots that both reach."""
    a, b = both
    c = third.draw(recut(layouts(shape=a.logical_shape)))
    ab, bc, ac = (plan(x, y, missing="leave") for x, y in ((a, b), (b, c), (a, c)))
    two = compose(ab.map, bc.map)
    assert equivalent(compose(a, two), restrict(compose(a, ac.map), domain(two)))


@given(both=pairs(), third=st.data())
def test_t8_and_the_same_slots_where_the_source_has_no_replicas(both, third):
    """T8: needs A injective; then both are the same slot map."""
    a, b = both
    assume(a.injective)
    c = third.draw(recut(layouts(shape=a.logical_shape)))
    ab, bc, ac = (plan(x, y, missing="leave") for x, y in ((a, b), (b, c), (a, c)))
    two = compose(ab.map, bc.map)
    assert equivalent(two, restrict(ac.map, domain(two)))


def test_t8_needs_a_source_without_replicas():
    a = layout((2,), Replicate(), ranks=2)
    b, c = layout((2,), Split(0), ranks=[1]), layout((2,), Split(0), ranks=[0])
    two = compose(plan(a, b).map, plan(b, c).map)
    assert not equivalent(two, plan(a, c).map)


@given(both=pairs(scaled=False))
def test_t9_stay_reaches_the_bound(both):
    """T9: crossings are at least the distinct (rank, element) pairs of B not in A; stay reaches it."""
    source, target = both
    have = {(s[0][0], e) for s, e, _ in meaning(source).triples}
    held = {e for _, e in have}
    want = {(s[0][0], e) for s, e, _ in meaning(target).triples if e in held}
    bound = len(want - have)
    for select in NAMES:
        stats = plan(source, target, select=select, missing="leave").stats
        assert stats.lower_bound == bound <= stats.elements_crossing
        assert sum(n for _, n in stats.sent) == sum(n for _, n in stats.received) == stats.elements_crossing
        if select != "lowest":
            assert stats.elements_crossing == bound


def test_t9_counting_slots_misses_the_bound():
    """A rank that wants an element in two slots gets it once."""
    source = layout((4,), Replicate(), ranks=1)
    twice = AffineMap.from_pieces(
        Space.shards({1: (2, 4)}), Space.logical((4,)), [Piece((2, 4), Side(0, (4, 1), 1), Side(0, (0, 1)))]
    )
    stats = plan(source, twice).stats
    assert (stats.elements, stats.elements_crossing, stats.lower_bound) == (8, 4, 4)


@given(both=pairs(scaled=False, max_size=5), third=st.data())
def test_t10_traffic_obeys_a_triangle_inequality(both, third):
    """T10: the bound of A -> C is at most that of A -> B plus that of B -> C, where all is held."""
    a, b = both
    c = third.draw(layouts(shape=a.logical_shape, scaled=False))
    assume(all(sa.is_surjective(m) for m in (a, b)))
    bound = [plan(x, y).stats.lower_bound for x, y in ((a, c), (a, b), (b, c))]
    assert bound[0] <= bound[1] + bound[2]


@given(both=pairs())
def test_t12a_there_and_back_is_the_identity_on_the_target(both):
    """T12a: ``plan(A, B) . plan(B, A)`` back to B is the identity on B's covered slots. Needs B injective."""
    a, b = both
    assume(b.injective)
    there, back = plan(a, b, missing="leave"), plan(b, a, missing="leave")
    both_ways = compose(back.map, there.map)
    assert equivalent(both_ways, domain(there.map))


def test_t12a_needs_a_target_without_replicas():
    a, b = layout((2,), Split(0), ranks=[0]), layout((2,), Replicate(), ranks=2)
    both_ways = compose(plan(b, a).map, plan(a, b).map)
    assert not equivalent(both_ways, domain(both_ways))


@given(both=pairs(), select=st.sampled_from(NAMES))
def test_t12b_there_and_back_restores_the_source(both, select):
    """T12b: A -> B and then B -> A bring every covered slot of A its own element, from its own slot
    where A is injective."""
    a, b = both
    there, back = (plan(x, y, missing="leave", select=select) for x, y in ((a, b), (b, a)))
    restored = compose(there.map, back.map)
    assert equivalent(compose(a, restored), restrict(a, domain(back.map)))
    if a.injective:
        assert equivalent(restored, domain(back.map))


def test_t12b_needs_a_source_without_replicas_or_replicas_that_agree():
    """B injective is not enough: rank 1 gets back what rank 0 held."""
    a, b = layout((2,), Replicate(), ranks=2), layout((2,), Split(0), ranks=[0])
    restored = compose(plan(a, b).map, plan(b, a).map)
    assert b.injective and not equivalent(restored, domain(a))


@pytest.mark.parametrize("select", MEMORYLESS)
@given(both=pairs(), pick=st.integers(0, 5))
def test_t14_a_rank_may_plan_alone(both, pick, select):
    """T14: what one rank plans for itself is its part of the whole plan."""
    source, target = both
    ranks = sorted(set(source.ranks) | set(target.ranks))
    rank = ranks[pick % len(ranks)]
    whole = plan(source, target, select=select, missing="leave")
    part = plan(source, target, select=select, missing="leave", rank=rank)
    mine = {(t, s) for t, s in slot_map(whole) if rank in (t[0][0], s[0][0])}
    assert slot_map(part) == mine
    assert part.digest == whole.digest


@pytest.mark.parametrize("select", MEMORYLESS)
@given(both=pairs(), cut=st.integers(0, 6))
def test_t14_and_t15_restricting_first_or_afterwards_and_disjoint_targets(both, cut, select):
    """T14: restricting the target first or the plan afterwards is the same; T15: plans of disjoint targets
    add up to the plan of both. Memoryless selectors."""
    source, target = both
    slots = sorted(s for s, _, _ in meaning(target).triples)[:cut]
    points = [Piece((), Side(a, (), *key), Side(a, (), *key)) for key, a in slots]
    here = AffineMap.from_pieces(target.domain, target.domain, points)
    first, second = restrict(target, here), subtract(target, restrict(target, here))
    whole, one, two = (plan(source, t, select=select, missing="leave").map for t in (target, first, second))
    assert equivalent(one, restrict(whole, here))
    assert equivalent(union(one, two), whole)


@given(one=pairs(max_size=3, max_ranks=2), two=pairs(max_size=3, max_ranks=2))
def test_t16_match_of_products_is_the_product_of_matches(one, two):
    """T16: ``match(A1 x A2, B1 x B2) = match(A1, B1) x match(A2, B2)``."""
    assume(all(len(m.codomain) == 1 for m in (*one, *two)))
    (a1, b1), (a2, b2) = one, two
    width = 1 + max(*a2.ranks, *b2.ranks)
    ranks_agree = max(a2.ranks) == max(b2.ranks)
    assume(ranks_agree and width)
    left = match(product(a1, a2), product(b1, b2))
    right = product(match(a1, b1), match(a2, b2))
    assert equivalent(left, right)


@st.composite
def cut_again(draw: st.DrawFn) -> tuple[AffineMap, AffineMap, AffineMap, tuple[int, int]]:
    """A layout, its shards laid out in two ways, and the ranks that each way has room for per shard."""
    outer = draw(recut(layouts(max_ranks=2)))
    inner = [{r: draw(layouts(outer.shard_shape(r), max_ranks=2)) for r in outer.ranks} for _ in range(2)]
    widths = tuple(1 + max(i for m in its.values() for i in m.ranks) for its in inner)
    return outer, *(nest(outer, its) for its in inner), widths


@given(drawn=cut_again(), select=st.sampled_from(NAMES))
def test_t17_resharding_inside_a_layout_stays_inside(drawn, select):
    """T17: what was cut out of one shard of the outer layout goes to that shard's ranks alone. Needs
    the outer layout injective."""
    outer, before, after, (here, there) = drawn
    assume(outer.injective)
    for c in plan(before, after, select=select, missing="leave").copies:
        assert c.source.rank // here == c.target.rank // there


def test_t17_needs_an_outer_layout_without_replicas():
    outer, cut = layout((2,), Replicate(), ranks=2), layout((2,), Split(0), ranks=2)
    before, after = nest(outer, [cut, cut]), nest(outer, [layout((2,), Replicate(), ranks=1)] * 2)
    copies = plan(before, after, select="lowest").copies
    assert any(c.source.rank // 2 != c.target.rank for c in copies)


@pytest.mark.parametrize("select", NAMES)
@given(both=pairs())
def test_running_a_plan_on_numbers_gives_the_targets_shards(both, select):
    """``run(plan(A, B), extract(A, x)) = extract(B, x)``, checked here by reading the slot map."""
    source, target = both
    assume(sa.is_surjective(source))
    full = np.arange(1, 1 + int(np.prod(target.logical_shape))).reshape(target.logical_shape) * 36.0
    have, want = extract(source, full), extract(target, full)
    p = plan(source, target, select=select)
    got = {r: np.zeros_like(x) for r, x in want.items()}
    for t, s, scale in meaning(p.map).triples:
        value = have[s[0][0]].reshape(-1)[s[1]]
        got[t[0][0]].reshape(-1)[t[1]] = value * scale.numerator / scale.denominator
    for r in want:
        np.testing.assert_allclose(got[r], want[r])


# --- the short way and the general way ------------------------------------------------------


@given(both=layout_pairs(scaled=False, max_ranks=5, max_size=24))
def test_plain_boxes_are_planned_the_same_way_as_everything_else(both):
    source, target = both
    fast = plan(source, target, missing="leave").map
    short = _choose.box_copies
    _choose.box_copies = lambda *_: None
    try:
        assert plan(source, target, missing="leave").map == fast
    finally:
        _choose.box_copies = short


@pytest.mark.parametrize("ranks", [(2, 3), (8, 16), (16, 40)])
@pytest.mark.parametrize("axes", [(0, 0), (0, 1), (1, 1), (2, 0)])
def test_the_loop_the_broadcast_and_the_general_way_agree(ranks, axes, monkeypatch):
    shape = (48, 40, 6)
    source, target = (layout(shape, Split(a), ranks=n) for a, n in zip(axes, ranks))
    fast = plan(source, target).map
    monkeypatch.setattr(_choose, "box_copies", lambda *_: None)
    assert plan(source, target).map == fast


GRIDS = {
    "mesh": lambda: layout((48, 40, 6), [Split(0), Split(1)], mesh=(16, 8)),
    "other mesh": lambda: layout((48, 40, 6), [Split(1), Split(0, rule="balanced")], mesh=(5, 20)),
    "uneven": lambda: layout((48, 40, 6), [Split(0, sizes=(1, 0, 40, 7)), Split(2)], mesh=(4, 6)),
    "rows": lambda: layout((48, 40, 6), Split(0), ranks=100),
    "columns": lambda: layout((48, 40, 6), Split(1), ranks=64),
    "padded": lambda: layout((48, 40, 6), [Split(1, rule="pad"), Split(2)], mesh=(13, 6)),
}


@pytest.mark.parametrize("source", GRIDS)
@pytest.mark.parametrize("target", GRIDS)
def test_products_of_axes_are_the_same_plans(source, target, monkeypatch):
    """Plans in product form know their counts before their copies are written."""
    a, b = GRIDS[source](), GRIDS[target]()
    monkeypatch.setattr(_boxes, "SOME", 0)
    product_form = plan(a, b)
    counts = len(product_form), product_form.map.size
    monkeypatch.setattr(_choose, "box_copies", lambda *_: None)
    general = plan(a, b)
    assert counts == (len(general), general.map.size)
    assert product_form.map == general.map and product_form.stats == general.stats


def test_a_plan_in_product_form_writes_its_copies_when_asked():
    a, b = layout((512, 512), Split(0), ranks=512), layout((512, 512), Split(1), ranks=512)
    p = plan(a, b)
    assert (len(p), p.map.size) == (512 * 512, 512 * 512) and p.map.table._rows is None
    assert p.copies[5].shape == () and p.map.table._rows is not None
    with pytest.raises(LimitError, match="262144 copies"):
        plan(a, b, limits=Limits(copies=1000))
    assert pickle.loads(pickle.dumps(plan(a, b))).map.size == 512 * 512


# --- numbers --------------------------------------------------------------------------------


def test_rows_to_columns_by_the_book():
    p = plan(layout((8, 8), Split(0), ranks=2), layout((8, 8), Split(1), ranks=4))
    assert [(c.shape, c.source.strides, c.target.strides) for c in p.copies] == [((4, 2), (8, 1), (2, 1))] * 8
    for c in p.copies:
        assert (c.source.offset, c.target.offset) == (2 * c.target.rank, 8 * c.source.rank)


QKV = sa.Segments(0, ((32, Split(0)), (16, Replicate())))


def test_replicated_rows_by_lowest_and_by_half():
    source, target = (layout((48, 8), QKV, ranks=n) for n in (2, 4))
    lowest = plan(source, target, select="lowest")
    read = defaultdict(int)
    for s, _, n in lowest.traffic:
        read[s] += n
    assert len(lowest) == 7 and dict(read) == {0: 640, 1: 128}
    half = plan(source, target, select=lambda r: r.target // 2 if len(r.candidates) > 1 else r.candidates[0])
    assert len(half) == 6
    assert {s: sum(n for a, _, n in half.traffic if a == s) for s in (0, 1)} == {0: 384, 1: 384}


@pytest.mark.parametrize(
    ("source", "target", "total", "largest"),
    [
        ([(0, "y"), (1, "x")], [(0, "y")], 128, 32),
        ([(0, "x"), (1, "y")], [(0, "y"), (1, "x")], 64, 32),
    ],
)
def test_minimum_traffic_on_a_mesh(source, target, total, largest):
    """Numbers of ALGEBRA.md: 16x8 elements on a 2x2 mesh."""

    def on_mesh(cuts):
        by_axis = {name: Split(axis) for axis, name in cuts}
        return layout((16, 8), [by_axis.get(n, Replicate()) for n in "xy"], mesh={"x": 2, "y": 2})

    stats = plan(on_mesh(source), on_mesh(target)).stats
    assert stats.elements_crossing == stats.lower_bound == total
    assert max(n for _, n in stats.received) == largest


def test_minimum_traffic_on_a_cube_and_from_replicas():
    mesh = {"x": 2, "y": 2, "z": 2}
    cube = layout((16, 8), [Split(0)] * 3, mesh=mesh)
    stats = plan(cube, layout((16, 8), [Split(0), Replicate(), Replicate()], mesh=mesh)).stats
    assert (stats.elements_crossing, max(n for _, n in stats.received)) == (384, 48)
    everywhere = layout((16, 8), [Replicate()] * 3, mesh=mesh)
    assert (
        plan(everywhere, layout((16, 8), [Split(0), Split(1), Split(1)], mesh=mesh)).stats.elements_crossing
        == 0
    )


@pytest.mark.parametrize("vocabulary", [13, 32, 100, 50257])
@pytest.mark.parametrize("ranks", [(4, 2), (1, 8), (8, 4), (2, 2), (8, 8), (4, 1)])
def test_padded_vocabularies_need_few_copies(vocabulary, ranks):
    """Cases 1 and 2: at most source + target ranks copies; padding is neither read nor written."""
    source, target = (layout((vocabulary, 4), Split(0, rule="pad"), ranks=n) for n in ranks)
    p = plan(source, target)
    assert len(p) <= sum(ranks)
    assert p.map.size == vocabulary * 4
    assert equivalent(compose(source, image(p.map)), source)


def test_2048_blocks_and_512_by_512_are_not_refused():
    blocks = layout((4096, 4), sa.BlockGather(0, 2, [range(r, 2048, 2) for r in (0, 1)]), ranks=2)
    rows = layout((4096, 4), Split(0), ranks=2)
    assert plan(rows, blocks).map.size == 4096 * 4
    wide, tall = (layout((512, 512), Split(a), ranks=512) for a in (0, 1))
    assert len(plan(wide, tall)) == 512 * 512


# --- balanced -------------------------------------------------------------------------------


@given(both=pairs(scaled=False, max_ranks=4))
def test_balanced_has_the_least_largest_sender(both):
    """No bound below the largest sender is possible: every set of ranks that alone holds some wanted
    elements must send them (Hall's condition, checked over all subsets)."""
    source, target = both
    p = plan(source, target, select="balanced", missing="leave")
    where = {e: frozenset(r for r, _ in its) for e, its in homes(source).items()}
    have = {(s[0][0], e) for s, e, _ in meaning(source).triples}
    wanted = {(s[0][0], e) for s, e, _ in meaning(target).triples if e in where} - have
    ranks = sorted({r for its in where.values() for r in its})
    best = 0
    for mask in range(1, 1 << len(ranks)):
        some = {r for k, r in enumerate(ranks) if mask >> k & 1}
        forced = sum(where[e] <= some for _, e in wanted)
        best = max(best, -(-forced // len(some)))
    assert max((n for _, n in p.stats.sent), default=0) == best


# --- ranks, selectors, limits, missing ------------------------------------------------------


def test_the_bound_counts_an_element_once_whoever_gives_it():
    source = layout((3, 3), Replicate(), ranks=[1, 5, 6])
    target = layout((3, 3), Experts([[2, 0, 0]]))
    assert {plan(source, target, select=s).stats.lower_bound for s in ("stay", "lowest", "balanced")} == {6}


def test_equal_numbers_may_be_other_processes():
    """Case 47: every byte crosses where the groups number other processes alike."""
    rows = layout((8,), Split(0), ranks=2)
    assert plan(rows, rows).stats.elements_crossing == 0
    p = plan(rows, rows, source_ranks=[0, 1], target_ranks={0: 2, 1: 3})
    assert p.stats.elements_crossing == 8
    assert p.traffic == ((0, 2, 4), (1, 3, 4))


def test_absent_ranks_are_no_error():
    """Case 50: pipeline stages hold other tensors."""
    stages = {"a": layout((4,), Split(0), ranks=[0, 1]), "b": layout((4,), Split(0), ranks=[2, 3])}
    moved = {"a": layout((4,), Split(0), ranks=[2, 3]), "b": layout((4,), Split(0), ranks=[0])}
    assert sa.plan_tree(stages, moved).stats.elements_crossing == 8


def test_a_selector_must_answer_with_a_holder():
    source, target = layout((4,), Replicate(), ranks=2), layout((4,), Split(0), ranks=4)
    with pytest.raises(SelectionError, match=r"chose 7 for target rank 0, but the holders are \(0, 1\)"):
        plan(source, target, select=lambda request: 7)
    asked = []
    plan(source, target, select=lambda r: asked.append(r) or r.candidates[-1])
    assert [r.target for r in asked] == [0, 1, 2, 3]
    assert {r.candidates for r in asked} == {(0, 1)} and asked[0].region.size == 4


def test_cheapest_by_matrix_and_by_function():
    source, target = layout((4,), Replicate(), ranks=2), layout((4,), Split(0), ranks=4)
    near = [[0, 5, 0, 5], [5, 0, 5, 0]]
    by_matrix = plan(source, target, select=sa.cheapest(near))
    by_function = plan(source, target, select=sa.cheapest(lambda s, t: near[s][t], key="near"))
    assert {(s, t) for s, t, _ in by_matrix.traffic} == {(0, 0), (1, 1), (0, 2), (1, 3)}
    assert by_matrix.map == by_function.map and by_matrix.digest != by_function.digest


def test_limits_refuse_before_building():
    """Case 28: stripes against stripes."""
    rows, columns = (layout((128, 128), Split(a), ranks=128) for a in (0, 1))
    assert len(plan(rows, columns)) == 16384
    with pytest.raises(LimitError, match=r"16384 copies would exceed Limits\(copies=1000\)"):
        plan(rows, columns, limits=Limits(copies=1000))
    with pytest.raises(LimitError, match="plan_bytes"):
        plan(rows, columns, limits=Limits(plan_bytes=1000))


def test_missing_elements_are_named_or_left():
    part = AffineMap.from_pieces(
        Space.shards({0: (4,)}), Space.logical((6,)), [Piece((4,), Side(0, (1,), 0), Side(0, (1,)))]
    )
    target = layout((6,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match=r"element 4 .* slot 1 of rank 1; 2 target slots"):
        plan(part, target)
    assert plan(part, target, missing="leave").map.size == 4
    with pytest.raises(InvalidMapError, match="missing="):
        plan(part, target, missing="ignore")


@pytest.mark.parametrize("rank", ["0", 0.0, True, -1])
def test_what_is_no_rank_plans_nothing(rank):
    m = layout((4,), Split(0), ranks=2)
    with pytest.raises(InvalidMapError, match="rank must be"):
        plan(m, m, rank=rank)


def test_layouts_of_other_tensors_and_other_shapes_are_refused():
    with pytest.raises(InvalidMapError, match=r"shape \(4,\) and .* shape \(5,\)"):
        plan(layout((4,), Split(0), ranks=2), layout((5,), Split(0), ranks=2))
    twice = AffineMap.from_pieces(
        Space.shards({0: (1,)}), Space.logical((4,)), [Piece((2,), Side(0, (0,), 0), Side(0, (1,)))]
    )
    with pytest.raises(
        InvalidMapError, match="the source of a plan is no layout: slot 0 of rank 0 has the two elements"
    ):
        plan(twice, layout((4,), Split(0), ranks=2))


def test_a_bias_moves_with_its_ratio_and_its_moments_do_not():
    """Case 5."""
    source, target = (layout((6,), Replicate(Fraction(1, n)), ranks=n) for n in (2, 3))
    assert {c.scale for c in plan(source, target).copies} == {Fraction(2, 3)}
    with pytest.raises(UnsupportedError, match=r"ratio 2/3.*learning rate and epsilon"):
        plan(source, target, holds="moments")
    assert plan(source, target, holds="rescaled moments").map == plan(source, target).map
    assert plan(source, source, holds="moments").stats.copies == 2


def test_stored_plans_come_back_and_forgeries_do_not():
    source, target = (layout((48, 8), QKV, ranks=n) for n in (2, 4))
    p = plan(source, target)
    assert TransferPlan.from_dict(json.loads(json.dumps(p.to_dict()))) == p
    assert pickle.loads(pickle.dumps(p)) == p
    with pytest.raises(LimitError, match="7 copies"):
        TransferPlan.from_dict(p.to_dict(), limits=Limits(copies=6))
    data = p.to_dict()
    data["version"] = 2
    with pytest.raises(InvalidMapError, match="version 2"):
        TransferPlan.from_dict(data)


@pytest.mark.parametrize("change", ["fewer", "none", "elsewhere"])
def test_a_stored_plan_that_does_not_do_its_job_is_refused(change):
    """Case 29: no copies for a non-empty target, half the bytes, or copies of something else."""
    source, target = (layout((8,), Split(0), ranks=n) for n in (2, 4))
    data = plan(source, target).to_dict()
    pieces = data["map"]["pieces"]
    if change == "fewer":
        data["map"]["pieces"] = pieces[::2]
    elif change == "none":
        data["map"]["pieces"] = []
    else:
        pieces[0][3] += 1
    with pytest.raises(InvalidMapError):
        TransferPlan.from_dict(data)


def test_the_digest_names_the_question():
    source, target = (layout((48, 8), QKV, ranks=n) for n in (2, 4))
    p = plan(source, target)
    others = [
        plan(source, target, select="lowest"),
        plan(target, source),
        plan(source, target, source_ranks=[4, 5]),
        plan(source, target, missing="leave"),
    ]
    assert len({p.digest, *(q.digest for q in others)}) == 5
    assert {plan(source, target, rank=r).digest for r in range(4)} == {p.digest}


# --- found by attack ------------------------------------------------------------------------


def test_balanced_gives_an_element_that_a_rank_wants_twice_from_one_holder():
    source, target = layout((3, 3), Replicate(), ranks=[1, 5, 6]), layout((3, 3), Experts([[2, 0, 0]]))
    stats = plan(source, target, select="balanced").stats
    assert (stats.elements, stats.elements_crossing, stats.lower_bound) == (9, 6, 6)
    assert max(n for _, n in stats.sent) == 2


@given(both=pairs(scaled=False))
def test_balanced_reaches_the_bound(both):
    """Also where ranks want elements twice: each (element, rank) crosses once."""
    stats = plan(*both, select="balanced", missing="leave").stats
    assert stats.elements_crossing == stats.lower_bound


def test_a_dict_of_layouts_belongs_to_plan_tree():
    with pytest.raises(InvalidMapError, match="use plan_tree"):
        plan({"a": 1}, {"a": 1})


def test_a_schedule_of_more_blocks_than_can_be_listed_is_refused():
    huge = plan(*(layout((2**40,), Split(0), ranks=r) for r in ([0, 1], [1, 0])))
    with pytest.raises(LimitError, match="raise max_bytes"):
        sa.schedule(huge, max_bytes=1000, dtypes="float32")


@pytest.mark.parametrize("price", [math.nan, None, "x", [1, 2], 10**400])
def test_a_cost_that_is_no_number_is_refused_whichever_holder_it_is_of(price):
    both, one = layout((4,), Replicate(), ranks=2), layout((4,), Replicate(), ranks=[5])
    for odd in (0, 1):
        with pytest.raises(InvalidMapError, match="a cost must be a number, got"):
            plan(both, one, select=sa.cheapest(lambda s, t, odd=odd: price if s == odd else 1))


def test_what_a_program_has_counted_cannot_be_written_on():
    program = sa.schedule(
        plan(layout((8,), Split(0), ranks=2), layout((8,), Split(0), ranks=4)), dtypes="int8"
    )
    said = program.sent, program.rounds[0].staging, program.wire_bytes
    for counts in (program.sent, program.received, *(r.staging for r in program.rounds)):
        counts.clear()
    for numbers in (program.parcel_bytes, program.wire_sizes):
        with pytest.raises(ValueError, match="read-only"):
            numbers[...] = 7
    assert (program.sent, program.rounds[0].staging, program.wire_bytes) == said and program.sent


def test_cyclic_on_two_axes_needs_no_solver():
    """Prime extents and cuts that do not divide each other: what shares a digit is cut along it."""
    shape = (997, 809)
    source = layout(shape, [Cyclic(0, 32), Cyclic(1, 48)], mesh=(8, 6))
    target = layout(shape, [Cyclic(0, 24), Cyclic(1, 64)], mesh=(4, 9))
    found = [plan(source, target, select=s, limits=Limits(steps=40_000)) for s in ("stay", "balanced")]
    assert found[0].map == found[1].map and found[0].map.size == shape[0] * shape[1]
    wanted = compose(invert(source), target, limits=Limits(steps=40_000))
    assert equivalent(found[0].map, wanted)
