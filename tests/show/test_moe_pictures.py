"""MoE plans are drawn as loads before and after balancing."""

from __future__ import annotations

from xml.etree import ElementTree

import torch

from shardalg import show
from shardalg.moe import placements, plan_dispatch, report, simulate


def plans(ranks: int, experts: int) -> list:
    routing = [torch.arange(8).reshape(4, 2) % (2 + rank) for rank in range(ranks)]
    return plan_dispatch(simulate(ranks, E=experts, S=4, K=2, H=1), routing)


def test_the_bars_are_the_loads_of_the_report():
    found = report(plans(4, 8))
    picture = show(found)
    ElementTree.fromstring(picture.svg)
    lines = picture.text.splitlines()
    assert [int(x.split()[-1]) for x in lines if "  routed " in x] == list(found.loads_before)
    assert [int(x.split()[-1]) for x in lines if "  computed " in x and "=" in x] == [
        n for n in found.loads_after if n
    ]
    assert max(x.count("-") for x in lines if " routed " in x) == 40
    assert str(found).splitlines()[1] in lines
    copied = [f"to rank {rank}: {ids[0]}" for rank, ids in enumerate(found.copied) if ids]
    assert copied and all("  " + line in lines and f">{line}</text>" in picture.svg for line in copied)


def test_the_copied_experts_are_those_of_the_placements():
    one = plans(4, 8)[0]
    home, held = placements(one)
    own, now = dict(home.by_rank), dict(held.by_rank)
    assert report(one).copied == tuple(now[r][len(own[r]) :] for r in sorted(own))


def test_a_plan_is_drawn_as_its_report():
    one = plans(2, 4)[0]
    assert show(one) == show(report(one))


def test_they_draw_themselves_in_notebooks():
    one = plans(2, 4)[0]
    for value in (one, report(one)):
        assert value._repr_svg_() == show(value).svg
        assert value._repr_mimebundle_() == {"image/svg+xml": show(value).svg, "text/plain": show(value).text}


def test_many_ranks_are_drawn_together():
    picture = show(report(plans(64, 64)))
    assert "the largest of each 2 ranks" in picture.text
    assert "ranks 62,63" in picture.text
