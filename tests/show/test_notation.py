"""What a map says of itself can be read back: as pairs, as text, as Python."""

from __future__ import annotations

import itertools
import re
from fractions import Fraction

import pytest
from hypothesis import assume, example, given

import shardalg as sa
from shardalg import AffineMap, Box, InvalidMapError, Piece, Side, Space, from_text, layout, to_text
from shardalg.show import _notation
from shardalg.show._notation import MOST_GROUPS, patterns, short
from shardalg.testing import affine_maps, layouts

BLOCK = re.compile(r"\[([^\]]*)\] -> \[([^\]]*)\](?: \(([^)]*)\))?(?: x (-?[\d/]+))?(?:, )?")


def pairs(m: AffineMap) -> set[tuple[int, int, int, Fraction]]:
    """(rank, slot, element, scale) of a layout, from its pieces one by one."""
    found = set()
    for p in m.pieces:
        for index in itertools.product(*map(range, p.shape)):
            slot, element = (
                s.offset + sum(i * t for i, t in zip(index, s.strides)) for s in (p.domain, p.codomain)
            )
            found.add((p.domain.rank, slot, element, p.scale))
    return found


def read(m: AffineMap, lines: list[str]) -> set[tuple[int, int, int, Fraction]]:
    """The same from the one-line notation, by expanding every slice, index and rank pattern."""
    return {pair for line in lines for pair in _group(m, line)}


def _group(m: AffineMap, line: str):
    label, blocks = line.split(":[", 1)
    for rank, digits in _ranks(label, m.ranks):
        at = 0
        for found in BLOCK.finditer("[" + blocks):
            assert found.start() == at, line
            at = found.end()
            left, right, indices, scale = found.groups()
            yield from _block(m, rank, digits, left, right, indices or "", Fraction(scale or 1))
        assert at == len(blocks) + 1, line


def _ranks(label: str, ranks):
    """The ranks that a label names, with the values of its letters."""
    name, _, what = label.partition("=")
    if name != "r":
        return [(int(name), {})]
    if not re.search("[a-z]", what.replace(" by ", "")):
        named = ranks if not what else _numbers(what)
        return [(r, {"r": r}) for r in named]
    what, _, bound = what.partition("<")
    weights = [(int(w or 1), letter) for w, letter in re.findall(r"(\d*)([a-z])", what)]
    first = int((re.findall(r"\+(\d+)$", what) or [0])[0])
    some = [r for r in ranks if first <= r < int(bound or r + 1) and (r - first) % weights[-1][0] == 0]
    return [(r, _digits(r - first, weights)) for r in some]


def _numbers(text: str) -> list[int]:
    if ".." not in text:
        return [int(n) for n in text.split(",")]
    first, last, *step = map(int, re.split(r"\.\.| by ", text))
    return list(range(first, last + 1, *step))


def _digits(rank: int, weights) -> dict[str, int]:
    found = {}
    for weight, letter in weights:
        found[letter], rank = divmod(rank, weight)
    return found


def _block(m, rank, digits, left, right, indices, scale):
    bounds = [part.split("<") for part in indices.split(", ") if part]
    shapes = m.shard_shape(rank), m.logical_shape
    for values in itertools.product(*(range(int(n)) for _, n in bounds)):
        known = digits | dict(zip((name for name, _ in bounds), values))
        slots, elements = (_addresses(side, shape, known) for side, shape in zip((left, right), shapes))
        assert len(slots) == len(elements)
        yield from ((rank, s, e, scale) for s, e in zip(slots, elements))


def _addresses(side: str, shape, known) -> list[int]:
    """The flat addresses of one side, in row-major order of its slices."""
    if side.startswith("@"):
        return [_value(side[1:], known)]
    axes = [_axis(part, known) for part in side.split(", ")] if side else []
    assert len(axes) == len(shape)
    strides = [1] * len(shape)
    for k in range(len(shape) - 2, -1, -1):
        strides[k] = strides[k + 1] * shape[k + 1]
    return [sum(i * t for i, t in zip(index, strides)) for index in itertools.product(*axes)]


def _axis(part: str, known) -> range:
    bounds = [_value(e, known) for e in part.split(":")]
    return range(*bounds) if len(bounds) > 1 else range(bounds[0], bounds[0] + 1)


def _value(text: str, known) -> int:
    return eval(re.sub(r"(\d)([a-z])", r"\1*\2", text), {"__builtins__": {}}, dict(known))


def every_other_rank():
    """Ranks 1 and 3 of four hold the one element."""
    pieces = [Piece((), Side(0, (), rank), Side(0, ())) for rank in (1, 3)]
    return AffineMap.from_pieces(Space.shards(dict.fromkeys(range(4), (1,))), Space.logical(()), pieces)


@given(layouts())
@example(every_other_rank())
def test_the_patterns_say_exactly_the_pairs(m):
    """Where none is left out for brevity."""
    said = patterns(m)
    assume(not any(" more" in line for line in said))
    assert read(m, said) == pairs(m)


@pytest.mark.parametrize("shape", [(6, 4), (12,), (2, 3, 4)])
@pytest.mark.parametrize(
    "placement",
    [
        sa.Split(0),
        sa.Split(-1),
        sa.Cyclic(0, 1),
        sa.StridedSplit(0, 2),
        sa.Flat(5),
        sa.Replicate(Fraction(1, 3)),
    ],
    ids=lambda p: type(p).__name__,
)
def test_the_patterns_say_exactly_the_pairs_of_every_placement(shape, placement):
    for m in (layout(shape, placement, ranks=4), layout(shape, [placement, sa.Split(0)], mesh=[3, 2])):
        assert read(m, patterns(m)) == pairs(m)


def test_reading_patterns_sees_a_wrong_number():
    m = layout((32,), sa.Split(0), ranks=4)
    assert read(m, patterns(m)) == pairs(m)
    assert read(m, ["r:[0:8] -> [4r:4r+8]"]) != pairs(m)


@given(affine_maps())
def test_text_reads_back(m):
    assert from_text(to_text(m)) == m


@given(affine_maps())
def test_repr_evaluates(m):
    names = {c.__name__: c for c in (AffineMap, Box, Fraction, Piece, Side, Space)}
    assert eval(repr(m), names) == m


@given(affine_maps())
def test_the_short_form_of_any_map_is_one_line(m):
    assert "\n" not in short(m)
    assert str(m) == short(m)


def test_names_with_anything_in_them_read_back():
    names = ["q", 'a "b" \\ c', "rank 3", "é\n->\t", "tensor"]
    space = Space.logical(dict.fromkeys(names, (2,)))
    m = sa.identity(space)
    assert from_text(to_text(m)) == m


GOLDEN = {
    "[4 ranks x (8,) -> (32,)]  r:[0:8] -> [8r:8r+8]": layout((32,), sa.Split(0), ranks=4),
    "[3 ranks x (4, 8), 1 rank x (1, 8) -> (13, 8)]  r=0..2:[0:4, 0:8] -> [4r:4r+4, 0:8];"
    " 3:[0, 0:8] -> [12, 0:8]": layout((13, 8), sa.Split(0), ranks=4),
    "[8 ranks x (8, 2) -> (16, 8)]  r=4p+q:[0:8, 0:2] -> [8p:8p+8, 2q:2q+2]": layout(
        (16, 8), [sa.Split(0), sa.Split(1)], mesh={"dp": 2, "tp": 4}
    ),
    "[4 ranks x (2, 3) -> (2, 3)]  r:[0:2, 0:3] -> [0:2, 0:3] x 1/2": layout(
        (2, 3), sa.Replicate(Fraction(1, 2)), ranks=4
    ),
    "['k' (2, 4), 'q' (8, 4) -> (10, 4)]  'k'[0:2, 0:4] -> [8:10, 0:4]; 'q'[0:8, 0:4] -> [0:8, 0:4]": sa.join(
        {"q": (8, 4), "k": (2, 4)}, axis=0
    ),
    "[(3, 4) -> (4, 3)]  [i, j] -> [j, i] (i<3, j<4)": AffineMap.from_pieces(
        Space.logical((3, 4)), Space.logical((4, 3)), [Piece((3, 4), Side(0, (4, 1)), Side(0, (1, 3)))]
    ),
    "[2 ranks x (4,) -> (8,)]  r:[0:2] -> [2r:2r+2], [2:4] -> [2r+4:2r+6]": layout(
        (8,), sa.Cyclic(0, 2), ranks=2
    ),
    "[2 ranks x (8,) -> (4, 2, 2)]  r:[0:8] -> [2r:2r+2, 0:2, 0:2]": layout((4, 2, 2), sa.Flat(), ranks=2),
    "[2 ranks x (8,) -> (16,)]  r:[2i+j] -> [2r+4i+j] (i<4, j<2)": layout((16,), sa.Cyclic(0, 2), ranks=2),
    "[2 ranks x (10, 6) -> (20, 6)]  r:[0:5, 0:6] -> [5r:5r+5, 0:6],"
    " [5:10, 0:6] -> [5r+10:5r+15, 0:6]": sa.gate_up((20, 6), 2),
    "[(3,) -> (9,)]  [i] -> [-4i+8] (i<3)": AffineMap.from_pieces(
        Space.logical((3,)), Space.logical((9,)), [Piece((3,), Side(0, (1,)), Side(8, (-4,)))]
    ),
    "[2 ranks x (0, 4) -> (0, 4)]": layout((0, 4), sa.Split(0), ranks=2),
    "[4096 ranks x (1, 8) -> (4096, 8)]  r:[0, 0:8] -> [r, 0:8]": layout((4096, 8), sa.Split(0), ranks=4096),
}


@pytest.mark.parametrize("line", GOLDEN)
def test_golden(line):
    assert str(GOLDEN[line]) == line


def test_long_maps_are_cut_and_say_so(monkeypatch):
    order = [7, 3, 6, 1, 0, 5, 2, 4, 15, 9, 12, 8, 10, 14, 11, 13]
    m = layout((16,), sa.BlockGather(0, 1, [[i] for i in order]))
    assert len(patterns(m)) > MOST_GROUPS
    assert f"; ... {len(patterns(m)) - MOST_GROUPS} more" in short(m)
    monkeypatch.setattr(_notation, "MOST_PIECES", 3)
    assert short(m).endswith("16 pieces")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "found 'nothing'"),
        ("shardalg map 2", "starts with 'shardalg map 1'"),
        ("shardalg map 1\ndomain tensor: (4)\n", "no box for the tensor"),
        ("shardalg map 1\ndomain: (4)\n", "line 2 is neither"),
        ("shardalg map 1\ncodomain rank x: (4,)\n", "line 2 is neither"),
        ("shardalg map 1\ndomain tensor: (1-,)\n", "line 2 has a number that is none"),
        (f"shardalg map 1\ndomain tensor: ({'9' * 5000},)\n", "line 2 has a number that is none"),
        (f"shardalg map 1\ndomain rank {'9' * 5000}: (4,)\n", "line 2 has a key that is none"),
        ('shardalg map 1\ndomain "\\x": (4,)\n', "line 2 has a key that is none"),
        ("shardalg map 1\ndomain tensor: (4,)\ncodomain tensor: (4,)\n{}", "covers codomain addresses 2..5"),
        ("shardalg map 1\ndomain tensor: (4,)\ncodomain tensor: (4,)\n{} times 1/0", "denominator 0"),
    ],
)
def test_bad_text_is_refused(text, complaint):
    piece = "tensor: 0 + (1,) -> tensor: 2 + (1,) over (4,)"
    text = text.format(piece) if "codomain t" in text else text + piece
    if complaint == "found 'nothing'":
        text = ""
    with pytest.raises(InvalidMapError, match=re.escape(complaint)):
        from_text(text)
