"""Pictures say what is so: grids against every element, counts against plans, golden texts."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given

import shardalg as sa
from shardalg import InvalidMapError, Picture, Side, UnsupportedError, layout, show
from shardalg.show import _svg as svg
from shardalg.show._grid import MIXED, Stored, _runs, ownership, storage
from shardalg.show._legend import ranks_text
from shardalg.testing import affine_maps, layout_pairs, layouts

QKV = sa.Segments(0, ((32, sa.Split(0)), (16, sa.Replicate())))
MESH = {"dp": 64, "tp": 64}


def pictured() -> dict[str, object]:
    """One of everything that has a picture, sizes from nothing to thousands of ranks."""
    two, four = (layout((48, 8), QKV, ranks=n) for n in (2, 4))
    plan = sa.plan(two, four)
    rows, columns = layout((4096, 512), sa.Split(0), ranks=256), layout((4096, 512), sa.Split(1), ranks=64)
    tree = sa.plan_tree({"a": two, "b": two}, {"a": four, "b": four})
    return {
        "replicas": four,
        "padded": layout((13, 4), sa.Split(0, rule="pad"), ranks=4),
        "flat": layout((7, 3), sa.Flat(4), ranks=4),
        "many ranks": layout((4096, 4096), [sa.Split(0), sa.Split(1)], mesh=MESH),
        "too fine": layout((4096, 4096), sa.Cyclic(0, 2), ranks=512),
        "uneven cells": layout((4099, 1000), sa.Flat(16), ranks=64),
        "panels": layout((6, 4, 6), sa.Experts({0: [3, 1], 1: [0, 5], 2: [], 3: [2, 1]})),
        "many panels": layout((40, 3, 4, 2), sa.Split(1), ranks=3),
        "empty": layout((0, 4), sa.Split(0), ranks=2),
        "scalar": layout((), sa.Replicate(), ranks=2),
        "twice": layout((8,), sa.Replicate(sa.Piece((), Side(0, ()), Side(0, ())).scale * 3), ranks=9),
        "join": sa.join({"q": (8, 4), "k": (2, 4), "<&>": (2, 4)}, axis=0),
        "inverse": sa.invert(four),
        "big relation": sa.invert(rows),
        "nothing": sa.subtract(four, four),
        "plan": plan,
        "big plan": sa.plan(rows, columns),
        "still plan": sa.plan(two, two),
        "other ranks": sa.plan(two, two, source_ranks=[0, 1], target_ranks=[2, 3]),
        "tree": tree,
        "program": sa.schedule(tree, max_bytes=1024, dtypes="float32"),
        "still program": sa.schedule(sa.plan(two, two)),
        "experts": sa.Experts({0: [3, 1], 1: [0, 5, 4], 2: [], 3: [2, 1]}),
        "many experts": sa.Experts.uniform(4096, 64),
        "difference": sa.explain(two, layout((48, 8), sa.Split(0), ranks=2)),
        "no difference": sa.explain(two, two),
        "other spaces": sa.explain(two, layout((48, 8), sa.Split(0), ranks=3)),
        "wide heads": sa.plan(
            layout((4096,), sa.Split(0), ranks=2048), layout((4096,), sa.Split(0), ranks=1024)
        ),
        "long names": sa.flat_group({f"a.long.name.of.a.parameter.{i}": (3, 3) for i in range(9)}, 4, 2),
    }


PICTURED = pictured()


@pytest.mark.parametrize("name", PICTURED)
def test_every_picture_is_sound(name):
    picture = show(PICTURED[name])
    assert isinstance(picture, Picture)
    sound(picture)
    assert picture == show(PICTURED[name])


def texts(at: ElementTree.Element, x: float = 0.0) -> Iterator[tuple[float, float, str]]:
    """Where each line of text starts and ends at the least, and what it says."""
    for e in at:
        if e.tag.endswith("}g"):
            yield from texts(e, x + float(e.get("transform")[len("translate(") :].split()[0]))
        elif e.tag.endswith("}text"):
            size = len(e.text) * float(e.get("font-size")) * (0.6 if e.get("font-family") else 0.45)
            low = (
                x
                + float(e.get("x"))
                - size * {"start": 0, "middle": 0.5, "end": 1}[e.get("text-anchor", "start")]
            )
            yield low, low + size, e.text


def apart(root: ElementTree.Element) -> None:
    """No two lines of text of one part of a picture lie on one another."""
    for g in root.iter():
        rows: dict[str, list[tuple[float, float, str]]] = {}
        for e in g.findall("{http://www.w3.org/2000/svg}text"):
            alone = ElementTree.Element("g")
            alone.append(e)
            rows.setdefault(e.get("y"), []).extend(texts(alone))
        for row in rows.values():
            for (_, end, a), (start, _, b) in itertools.pairwise(sorted(row)):
                assert end <= start, (a, b)


def sound(picture: Picture) -> None:
    """Well-formed, inside its card, with every reference defined, no text on another, and not large."""
    root = ElementTree.fromstring(picture.svg)
    space = "{http://www.w3.org/2000/svg}"
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert len(ids) == len(set(ids))
    fills = {e.get("fill") for e in root.iter()}
    assert {f[5:-1] for f in fills if f and f.startswith("url(#")} <= set(ids)
    width, height = float(root.get("width")), float(root.get("height"))
    for shape in root.iter(space + "rect"):
        assert 0 <= float(shape.get("width")) <= width and 0 <= float(shape.get("height")) <= height
    assert all(low >= 0 and high <= width for low, high, _ in texts(root))
    apart(root)
    assert "nan" not in picture.svg and "inf" not in picture.svg.replace("information", "")
    assert len(picture.svg) < 200_000
    assert len(picture.text.splitlines()) < 200
    assert max(map(len, picture.text.splitlines())) < 200


def test_an_unsound_picture_is_seen():
    fine = show(PICTURED["plan"])
    with pytest.raises(ElementTree.ParseError):
        sound(Picture(fine.svg.replace("</svg>", ""), ""))
    striped = show(PICTURED["replicas"])
    with pytest.raises(AssertionError):
        sound(Picture(re.sub("<defs>.*</defs>", "", striped.svg), striped.text))
    with pytest.raises(AssertionError):
        sound(Picture(fine.svg.replace("sends</text>", "sends" * 40 + "</text>"), fine.text))
    heads = re.findall(r'<text x="([^"]*)"[^>]*>[01]</text>', fine.svg)
    with pytest.raises(AssertionError):
        sound(Picture(fine.svg.replace(f'x="{heads[1]}"', f'x="{heads[0]}"'), fine.text))


@given(layouts())
def test_small_grids_hold_exactly_the_owners(m):
    grid = ownership(m, 0, svg.COLOURS)
    owners: dict[int, set[int]] = {}
    for p in m.pieces:
        for index in np.ndindex(*p.shape):
            element = p.codomain.offset + sum(i * s for i, s in zip(index, p.codomain.strides))
            owners.setdefault(element, set()).add(p.domain.rank)
    for element, held in enumerate(grid.held.reshape(-1).tolist()):
        assert {r for k in grid.classes[held] for r in grid.groups[k]} == owners.get(element, set())


@given(layouts())
def test_the_storage_view_holds_exactly_the_elements(m):
    for box, b in enumerate(m.domain.boxes):
        held: dict[int, int] = {}
        for p in m.pieces_of(b.rank):
            for index in np.ndindex(*p.shape):
                slot, element = (
                    s.offset + sum(i * t for i, t in zip(index, s.strides)) for s in (p.domain, p.codomain)
                )
                held[slot] = element
        cells = storage(m, box)
        assert [c.first for c in cells] == [held.get(slot) for slot in range(b.size)]


@pytest.mark.parametrize("cut", [sa.Split(0), sa.Split(1), sa.Cyclic(0, 100), sa.Flat(1)], ids=repr)
def test_block_cells_agree_with_their_elements(cut):
    """Cells that are not mixed have one owner: looked up at random elements, not at the samples."""
    m = layout((700, 300), cut, ranks=7)
    grid = ownership(m, 0, svg.COLOURS)
    random = np.random.default_rng(0)
    seen = set()
    for _ in range(300):
        at = [int(random.integers(n)) for n in m.logical_shape]
        cell = tuple(np.searchsorted(c.edges, i, side="right") - 1 for c, i in zip(grid.cuts, at))
        found = grid.classes[grid.held[cell]]
        seen.add(found)
        if found != MIXED:
            held = sa.holders(m, at[0] * 300 + at[1])
            assert tuple(r for k in found for r in grid.groups[k]) == held
    assert len(seen) > 3


@given(layout_pairs())
def test_traffic_in_the_picture_adds_up(pair):
    a, b = pair
    plan = sa.plan(a, b, missing="leave")
    text = show(plan).text
    assert re.search(rf"\b{plan.stats.elements} slots? written", text)
    assert f"{plan.stats.elements_crossing} elements cross ranks" in text


@given(affine_maps())
def test_any_map_has_a_picture(m):
    sound(show(m))


def test_what_nobody_holds_is_counted():
    assert "; nobody holds 24 elements" in show(PICTURED["panels"]).svg  # one expert of 4 x 6
    assert "; nobody holds 384 elements" in show(PICTURED["nothing"]).svg
    assert "nobody" not in show(PICTURED["padded"]).svg
    assert "; nobody holds 1 element" in show(sa.subtract(PICTURED["scalar"], PICTURED["scalar"])).svg


def test_a_long_reason_is_told_to_its_end():
    drawn = ElementTree.fromstring(show(PICTURED["other spaces"]).svg)
    said = " ".join(text for _, _, text in texts(drawn))
    assert PICTURED["other spaces"].reason in said and "pairs" not in said


def test_one_is_not_plural():
    one = sa.plan(*[layout((1,), sa.Split(0), ranks=1)] * 2)
    assert show(one).text.startswith("plan: 1 -> 1 ranks, 1 copy\n  1 slot written from 2 pieces\n")
    tree = sa.plan_tree({"a": one.source}, {"a": one.target})
    assert show(tree).text.startswith("plan of 1 tensor: 1 -> 1 ranks, 1 copy\n")


def test_pictures_do_not_depend_on_the_hash_seed():
    code = (
        "import hashlib, shardalg as sa\n"
        "m = sa.layout((48, 8), sa.Segments(0, ((32, sa.Split(0)), (16, sa.Replicate()))), ranks=4)\n"
        "p = sa.show(sa.plan(m, sa.layout((48, 8), sa.Split(1), ranks=3)))\n"
        "print(hashlib.sha256((sa.show(m).svg + p.svg + p.text).encode()).hexdigest())"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


@pytest.mark.parametrize("name", ["many ranks", "too fine", "uneven cells", "big plan", "many experts"])
def test_thousands_of_ranks_take_no_time(name):
    start = time.process_time()
    show(PICTURED[name])
    assert time.process_time() - start < 2


def test_cells_can_be_written_on():
    m = layout((4, 4), sa.Split(0), ranks=2)
    assert ">15</text>" in show(m, cells="element").svg
    assert show(m, cells="rank").svg.count(">1</text>") > show(m).svg.count(">1</text>")
    with pytest.raises(InvalidMapError, match="cells must be"):
        show(m, cells="slot")


def test_what_has_no_picture_says_what_to_do():
    with pytest.raises(UnsupportedError, match="no picture of int"):
        show(3)
    with pytest.raises(UnsupportedError, match=r"show\(layout\("):
        show(sa.Split(0))


def test_values_draw_themselves_in_notebooks():
    for value in (
        PICTURED["plan"],
        PICTURED["replicas"],
        PICTURED["program"],
        PICTURED["experts"],
        PICTURED["tree"],
    ):
        assert value._repr_mimebundle_() == {"image/svg+xml": show(value).svg, "text/plain": show(value).text}


def test_a_picture_is_saved_as_what_the_name_says(tmp_path):
    picture = show(PICTURED["replicas"])
    picture.save(tmp_path / "a.svg")
    picture.save(tmp_path / "a.txt")
    assert (tmp_path / "a.svg").read_text() == picture.svg == picture._repr_svg_()
    assert (tmp_path / "a.txt").read_text() == str(picture) + "\n" == repr(picture) + "\n"


def test_ranks_are_named_in_few_characters():
    assert ranks_text([3]) == "3"
    assert ranks_text([0, 1, 2, 3, 7, 8]) == "0-3,7,8"
    assert ranks_text(range(0, 40, 2)) == "0,2,4,6,8,... (20)"


def test_text_is_readable_on_every_colour():
    """Contrast of at least 4.5 (WCAG AA) for the text on each hue."""
    for k, hue in enumerate(svg.HUES):
        ink = svg.on(k).split('"')[1]
        lights = sorted((svg.luminance(hue), svg.luminance(ink)))
        assert (lights[1] + 0.05) / (lights[0] + 0.05) >= 4.5, hue


GOLDEN = {
    "padded": """\
[4 ranks x (4, 4) -> (13, 4)]  r=0..2:[0:4, 0:4] -> [4r:4r+4, 0:4]; 3:[0, 0:4] -> [12, 0:4]

who holds (13, 4): one cell per element
     0 1 2 3
   0 0 0 0 0
   1 0 0 0 0
   2 0 0 0 0
   3 0 0 0 0
   4 1 1 1 1
   5 1 1 1 1
   6 1 1 1 1
   7 1 1 1 1
   8 2 2 2 2
   9 2 2 2 2
  10 2 2 2 2
  11 2 2 2 2
  12 3 3 3 3
0  rank 0, 16 elements
1  rank 1, 16 elements
2  rank 2, 16 elements
3  rank 3, 4 elements

storage: the elements of each shard (. is padding, 12 slots)
  rank 0  0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15
  rank 1  16 17 18 19 20 21 22 23 24 25 26 27 28 29 30 31
  rank 2  32 33 34 35 36 37 38 39 40 41 42 43 44 45 46 47
  rank 3  48 49 50 51 . . . . . . . . . . . .""",
    "plan": """\
plan: 2 -> 4 ranks, 7 copies
  768 slots written from 9 pieces
  448 elements cross ranks; no plan could move fewer
  rank 1 sends most, 256; rank 2 gets most, 192

elements from source ranks (down) to target ranks (across); in parentheses what a rank keeps
                to 0      1    2    3
  from rank 0  (192)     64  128    .
  from rank 1      .  (128)   64  192

largest copies:
  rank 1[8:32, 0:8] -> rank 3[0:24, 0:8]: 192 elements
  rank 0[16:32, 0:8] -> rank 0[8:24, 0:8]: 128 elements
  rank 1[16:32, 0:8] -> rank 1[8:24, 0:8]: 128 elements
  rank 0[16:32, 0:8] -> rank 2[8:24, 0:8]: 128 elements
  rank 0[0:8, 0:8] -> rank 0[0:8, 0:8]: 64 elements
  ... 2 more""",
    "experts": """\
6 experts on 4 ranks, packed order left to right; 1 held by several ranks (*)
  rank 0  3 1*
  rank 1  0 5 4
  rank 2  none
  rank 3  2 1*""",
}


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_texts(name):
    assert show(PICTURED[name]).text == GOLDEN[name]


def test_one_picture_says_elements_in_one_way():
    """A short shard beside long ones is written in runs and coordinates as they are."""
    text = show(layout((48, 8), sa.Split(0, sizes=(47, 1)), ranks=2)).text
    last = text.splitlines()[-2:]
    assert last == ["  rank 0  [0:376] (0,0)..(46,7)", "  rank 1  [0:8] (47,0)..(47,7)"]
    short = show(layout((3, 2), sa.Split(0, sizes=(2, 1)), ranks=2)).text.splitlines()[-2:]
    assert short == ["  rank 0  0 1 2 3", "  rank 1  4 5"]


def test_single_slots_join_into_runs():
    cells = [Stored(0, 1, 5, 5), Stored(1, 2, 6, 6), Stored(2, 3, None, None), Stored(3, 4, None, None)]
    runs = _runs([*cells, Stored(4, 5, 9, 9), Stored(5, 6, 8, 8)])
    assert [tuple(r) for r in runs] == [(0, 2, 5, 6), (2, 4, None, None), (4, 5, 9, 9), (5, 6, 8, 8)]
