"""Layout files say placements by pattern; what they cannot mean is refused with the nearest name."""

import re
from fractions import Fraction
from pathlib import Path

import pytest

import shardalg as sa
from shardalg import InvalidMapError
from shardalg.interop._arrangements import Logical, parts_of
from shardalg.interop._layout_files import (
    arrange,
    filled,
    match,
    matches,
    parse_layout_file,
    read_layout_file,
    shipped,
)

SPLIT = '{ kind = "Split", axis = 0 }'


def tensors(shapes, dtype="float32"):
    return {name: Logical(dtype, tuple(shape)) for name, shape in shapes.items()}


def arranged(text, shapes, ranks=2, **units):
    return arrange(parse_layout_file("format = 1\n" + text, "the file"), tensors(shapes), ranks, units)


def placed(written, shape, ranks=2, more="", **units):
    """The layout that one placement gives one tensor."""
    text = f'{more}\n[[tensor]]\nname = "w"\nplacement = {written}\n'
    return arranged(text, {"w": shape}, ranks, **units)["w"].layout


WRITTEN = {
    '"Replicate"': sa.Replicate(),
    '{ kind = "Replicate", scale = "1/2" }': sa.Replicate(Fraction(1, 2)),
    '{ kind = "Replicate", scale = 2 }': sa.Replicate(Fraction(2)),
    SPLIT: sa.Split(0),
    '{ kind = "Split", axis = 1, sizes = [4, 2] }': sa.Split(1, sizes=(4, 2)),
    '{ kind = "Split", axis = 0, rule = "balanced", unit = 2 }': sa.Split(0, rule="balanced", unit=2),
    '{ kind = "Split", axis = 0, unit = "2*head" }': sa.Split(0, unit=6),
    '{ kind = "Cyclic", axis = 0, block = 2 }': sa.Cyclic(0, 2),
    '{ kind = "StridedSplit", axis = 0, split_factor = 2 }': sa.StridedSplit(0, 2),
    '{ kind = "Flat", align = 4 }': sa.Flat(4),
    '{ kind = "Experts", by_rank = [[0, 3, 1], [2, 4, 5, 6, 7]] }': sa.Experts([[0, 3, 1], [2, 4, 5, 6, 7]]),
    '{ kind = "Experts", by_rank = { 1 = [1, 0], 0 = [2] } }': sa.Experts({0: [2], 1: [1, 0]}),
    '{ kind = "BlockGather", axis = 0, size = 4, by_rank = [[1], [0]] }': sa.BlockGather(0, 4, [[1], [0]]),
    f'{{ kind = "Segments", axis = 0, sizes = [6, 2], each = {SPLIT} }}': sa.Segments(
        0, ((6, sa.Split(0)), (2, sa.Split(0)))
    ),
    f'{{ kind = "Segments", axis = 0, equal = 2, each = {SPLIT} }}': sa.Segments(
        0, ((4, sa.Split(0)), (4, sa.Split(0)))
    ),
    f'{{ kind = "Segments", axis = 0, segments = [{{ size = 2, placement = "Replicate" }}, '
    f"{{ size = 6, placement = {SPLIT} }}] }}": sa.Segments(0, ((2, sa.Replicate()), (6, sa.Split(0)))),
}


@pytest.mark.parametrize("written", WRITTEN)
def test_a_placement_as_written_is_the_one_of_python(written):
    assert placed(written, (8, 6), head=3) == sa.layout((8, 6), WRITTEN[written], ranks=2)


def test_placements_on_a_mesh_are_lists():
    found = placed(f'["Replicate", {SPLIT}]', (8, 6), 4, more="mesh = { dp = 2, tp = 2 }")
    assert found == sa.layout((8, 6), [sa.Replicate(), sa.Split(0)], mesh={"dp": 2, "tp": 2})
    turned = placed(f"[{SPLIT}, {SPLIT}]", (5,), 4, more='mesh = { dp = 2, tp = 2 }\norder = ["tp", "dp"]')
    both = [sa.Split(0), sa.Split(0)]
    assert turned == sa.layout((5,), both, mesh={"dp": 2, "tp": 2}, order=("tp", "dp"))


def test_the_first_match_wins_and_the_default_takes_the_rest():
    text = (
        f'default = "Replicate"\n[[tensor]]\nname = "a.*"\nplacement = {SPLIT}\n'
        '[[tensor]]\nname = "*.x"\nplacement = "Replicate"'
    )
    found = arranged(text, {"a.x": (4,), "b.x": (4,), "c": (4,)})
    assert {n: s.layout.shard_shape(0) for n, s in found.items()} == {"a.x": (2,), "b.x": (4,), "c": (4,)}


def test_a_join_takes_the_place_of_its_parts():
    text = (
        f'default = {SPLIT}\n[[join]]\nname = "*.qk"\nparts = ["*.q", "*.k"]\n'
        f'[[tensor]]\nname = "*.qk"\nplacement = {{ kind = "Segments", axis = 0, each = {SPLIT} }}'
    )
    found = arranged(text, {"0.q": (4, 2), "0.k": (2, 2), "1.q": (4, 2), "1.k": (2, 2), "n": (4,)})
    assert sorted(found) == ["0.qk", "1.qk", "n"]
    assert parts_of("1.qk", found["1.qk"]) == {"1.k": (2, 2), "1.q": (4, 2)}
    halves = sa.Segments(0, ((4, sa.Split(0)), (2, sa.Split(0))))
    assert found["0.qk"].layout == sa.layout((6, 2), halves, ranks=2)


def test_joins_stack_and_interleave():
    shapes = {"e.0": (4, 2), "e.1": (4, 2)}
    stacked = arranged(
        'default = "Replicate"\n[[join]]\nname = "e"\nparts = ["e.0", "e.1"]\nstack = true', shapes
    )
    assert stacked["e"].layout.logical_shape == (2, 4, 2)
    mixed = arranged(
        'default = "Replicate"\n[[join]]\nname = "e"\nparts = ["e.0", "e.1"]\ninterleave = 2', shapes
    )
    assert mixed["e"].joined == sa.join(shapes, axis=0, interleave=2)


def test_patterns_say_what_their_stars_stand_for():
    assert match("*.layer.*.w", "m.layer.10.w") == ("m", "10")
    assert match("a.b", "axb") is None
    assert filled("*.fused.*", ("m", "10")) == "m.fused.10"


# --- the files that ship ------------------------------------------------------------------

LLAMA = {
    "model.embed_tokens.weight": (13, 8), "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.self_attn.k_proj.weight": (4, 8), "model.layers.0.self_attn.o_proj.weight": (8, 8),
    "model.layers.0.mlp.gate_proj.weight": (12, 8), "model.layers.0.mlp.down_proj.weight": (8, 12),
    "model.layers.0.input_layernorm.weight": (8,), "lm_head.weight": (13, 8),
}  # fmt: skip
GPT2 = {
    "wte.weight": (13, 8), "h.0.attn.c_attn.weight": (8, 24), "h.0.attn.c_attn.bias": (24,),
    "h.0.attn.c_proj.weight": (8, 8), "h.0.mlp.c_fc.weight": (8, 32), "h.0.mlp.c_proj.weight": (32, 8),
    "h.0.ln_1.weight": (8,),
}  # fmt: skip
BERT = {
    "embeddings.word_embeddings.weight": (13, 8), "encoder.layer.0.attention.self.query.bias": (8,),
    "encoder.layer.0.attention.output.dense.weight": (8, 8), "encoder.layer.0.output.dense.weight": (8, 16),
    "encoder.layer.0.intermediate.dense.weight": (16, 8), "encoder.layer.0.output.LayerNorm.weight": (8,),
}  # fmt: skip
NEOX = {
    "gpt_neox.layers.0.attention.query_key_value.weight": (24, 8), "embed_out.weight": (13, 8),
    "gpt_neox.layers.0.attention.dense.weight": (8, 8), "gpt_neox.layers.0.mlp.dense_4h_to_h.weight": (8, 32),
}  # fmt: skip
WHOLE = ("layernorm", "ln_1", "LayerNorm")
BY_INPUTS = ("o_proj", "down_proj", "c_fc", "output.dense", "attention.dense", "4h_to_h", "c_attn.weight")


@pytest.mark.parametrize("model", [LLAMA, GPT2, BERT, NEOX])
def test_transformer_tp_places_the_common_names(model):
    found = arrange(read_layout_file("transformer-tp"), tensors(model), 2, {"head": 2})
    for name, stored in found.items():
        whole, shard = model[name], stored.layout.shard_shape(0)
        cut = [axis for axis, (n, m) in enumerate(zip(whole, shard)) if n != m]
        wanted = [] if any(w in name for w in WHOLE) else [int(any(w in name for w in BY_INPUTS))]
        assert cut == wanted, name
        assert sa.is_total(stored.layout) and sa.is_surjective(stored.layout)


def test_gpt2_queries_keys_and_values_are_cut_each():
    found = arrange(read_layout_file("transformer-tp"), tensors(GPT2), 2, {"head": 2})
    third = (8, sa.Split(1))
    assert sa.equivalent(
        found["h.0.attn.c_attn.weight"].layout, sa.layout((8, 24), sa.Segments(1, (third,) * 3), ranks=2)
    )


@pytest.mark.parametrize("name", shipped())
def test_every_file_that_ships_parses(name):
    assert read_layout_file(name).rules


# --- refusals -----------------------------------------------------------------------------

ONE = 'default = "Replicate"\n[[tensor]]\nname = "w"\nplacement = '
JOIN = 'default = "Replicate"\n[[join]]\n'

REFUSED = {
    "not TOML": ("a = = b", "not TOML"),
    "an unknown key": ("defualt = 'Replicate'", r"unknown keys \['defualt'\].*known are"),
    "nothing placed": ("", "places nothing"),
    "tables written as a value": ("tensor = 3", r"under its own \[\[tensor\]\]"),
    "a rule without placement": ('[[tensor]]\nname = "w"', r"missing keys \['placement'\]"),
    "a name that is no text": ('[[tensor]]\nname = 3\nplacement = "Replicate"', "name patterns, got 3"),
    "an unknown kind": (ONE + '"Slice"', "kind 'Slice'; known are .*Split"),
    "no kind": (ONE + "{ axis = 0 }", "kind None"),
    "a placement that is a number": (ONE + "3", "got 3"),
    "an unknown field": (
        ONE + '{ kind = "Split", axis = 0, size = 2 }',
        r"Split: unknown keys \['size'\]; known are \['axis', 'sizes', 'rule', 'unit'\]$",
    ),
    "a field that is missing": (
        ONE + '{ kind = "Cyclic", axis = 0 }',
        r"Cyclic: missing keys \['block'\]; known",
    ),
    "a field of another type": (ONE + '{ kind = "Split", axis = 0, sizes = 3 }', "must be a sequence, got 3"),
    "experts by no rank": (ONE + '{ kind = "Experts", by_rank = 3 }', "a list by rank, got 3"),
    "experts by a name": (ONE + '{ kind = "Experts", by_rank = { a = [0] } }', "are ranks, got 'a'"),
    "sizes that do not add up": (
        ONE + '{ kind = "Split", axis = 0, sizes = [3, 3] }',
        r"'w' of shape \(8, 6\).*\(3, 3\).*6.*8",
    ),
    "a negative size": (ONE + '{ kind = "Split", axis = 0, sizes = [9, -1] }', "negative size"),
    "an axis that is not there": (ONE + '{ kind = "Split", axis = 2 }', r"axis 2.*\(8, 6\)"),
    "parts that are not equal": (
        ONE + '{ kind = "Split", axis = 0, rule = "exact", unit = 3 }', "cannot split axis 0 of shape",
    ),
    "an unknown unit": (
        ONE + '{ kind = "Split", axis = 0, unit = "haed" }', "'haed' is not known.*--unit haed=SIZE",
    ),
    "unequal segments": (
        ONE + '{ kind = "Segments", axis = 0, equal = 3, each = "Replicate" }', "not 3 equal segments",
    ),
    "segments of no join": (
        ONE + '{ kind = "Segments", axis = 0, each = "Replicate" }', "for joined tensors",
    ),
    "segments said twice": (
        ONE + '{ kind = "Segments", axis = 0, segments = [], each = "Replicate" }', "either segments",
    ),
    "torch's word for a split": (
        ONE + '{ kind = "Shard", axis = 0 }', "the kind 'Shard'; write kind = \"Split\"",
    ),
    "a mesh of another size": (
        "mesh = { dp = 2, tp = 2 }\n" + ONE + f"[{SPLIT}, {SPLIT}]", "tp 2 has 4 ranks.* --processes 4",
    ),
    "a list without a mesh": (ONE + f"[{SPLIT}, {SPLIT}]", "mesh"),
    "a pattern that matches nothing": (
        'default = "Replicate"\n[[tensor]]\nname = "wieght"\nplacement = "Replicate"',
        "'wieght' matches nothing, there are 'w'",
    ),
    "a tensor that nothing matches": (
        '[[tensor]]\nname = "q"\nplacement = "Replicate"', "2 of 3 tensors, the first is 'w'",
    ),
    "a join that matches nothing": (JOIN + 'name = "x"\nparts = ["y"]', "'y' matches nothing, there are 'w'"),
    "a join that lacks a part": (JOIN + 'name = "x"\nparts = ["w", "v"]', "needs 'v', there are 'w'"),
    "a part joined twice": (
        JOIN + 'name = "x"\nparts = ["q", "k"]\n[[join]]\nname = "y"\nparts = ["k"]',
        "'k' is joined in 'x' and in 'y'",
    ),
    "a join named like another tensor": (JOIN + 'name = "w"\nparts = ["q", "k"]', "has the name of another"),
    "a join of shapes that do not fit": (JOIN + 'name = "x"\nparts = ["q", "w"]', "'x': join along axis 0"),
    "a join of two names": (JOIN + 'name = ["x", "y"]\nparts = ["q"]', "one name, got 2"),
    "a default that is a number": ("default = 3", "default is the name of a placement.*got 3"),
    "a default that is a truth": ("default = true", "got True"),
    "a mesh that is a number": ('default = "Replicate"\nmesh = 3', "mesh is a table .* got 3"),
    "a mesh of words": ('default = "Replicate"\nmesh = { a = "x" }', "mesh is a table .* got {'a': 'x'}"),
    "units of none": ('default = "Replicate"\nunits = { a = 0 }', "units is a table .* got {'a': 0}"),
    "an order that is a number": ('default = "Replicate"\norder = 3', "order is a list .* got 3"),
    "optional as a number": ('default = "Replicate"\noptional = 3', "optional is true or false, got 3"),
    "an integer of 5000 digits": ("default = " + "9" * 5000, "not TOML"),
    "lists nested 20000 deep": ("default = " + "[" * 20000, "not TOML"),
    "lists nested 33 deep": ("default = " + "[" * 33 + "]" * 33, "nested more than 32 deep"),
    "tables nested 3000 deep": ("default." + ".".join("a" * 3000) + " = 1", "nested more than 32 deep"),
    "a count of units beyond 64 bits": (
        ONE + '{ kind = "Split", axis = 0, unit = "99999999999999999999*head" }\n[units]\nhead = 2',
        r"written as \"3\*head\", got '9+\*head'",
    ),
    "a count of units that is a word": (
        ONE + '{ kind = "Split", axis = 0, unit = "x*head" }\n[units]\nhead = 2', r"got 'x\*head'",
    ),
    "a unit whose padding is beyond 64 bits": (
        ONE + '{ kind = "Split", axis = 0, unit = 99999999999999999999, rule = "pad" }', "holds more than",
    ),
    "a scale that is not exact": (
        ONE + '{ kind = "Replicate", scale = 0.5 }', 'an exact ratio such as "1/3", got 0.5',
    ),
    "a scale over nothing": (ONE + '{ kind = "Replicate", scale = "1/0" }', "got '1/0'"),
    "a rank beyond all": (
        ONE + '{ kind = "Experts", by_rank = { ' + "9" * 5000 + " = [0] } }", "keys of by_rank are ranks",
    ),
    "segments along a word": (
        ONE + '{ kind = "Segments", axis = "a", each = "Replicate" }', "axis must be an integer, got 'a'",
    ),
    "segments of one size": (
        ONE + '{ kind = "Segments", axis = 0, sizes = 3, each = "Replicate" }', "must be a sequence, got 3",
    ),
    "segments in a word": (
        ONE + '{ kind = "Segments", axis = 0, equal = "a", each = "Replicate" }', "an integer, got 'a'",
    ),
    "segments that are no tables": (
        ONE + '{ kind = "Segments", axis = 0, segments = [3] }', "a segment is a table .* got 3",
    ),
    "stars that do not agree": (JOIN + 'name = "*.x"\nparts = ["*.*"]', r"\[1, 2\] stars"),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_layout_file_is_refused(what):
    text, words = REFUSED[what]
    with pytest.raises(InvalidMapError, match=words) as refusal:
        arranged(text, {"w": (8, 6), "q": (4, 2), "k": (2, 2)})
    assert "the file" in str(refusal.value)


def test_a_newer_format_is_refused():
    with pytest.raises(InvalidMapError, match="format 2; this release reads format 1"):
        parse_layout_file('format = 2\ndefault = "Replicate"', "the file")


def test_parts_of_different_dtypes_are_refused():
    file = parse_layout_file("format = 1\n" + JOIN + 'name = "x"\nparts = ["q", "k"]', "the file")
    with pytest.raises(InvalidMapError, match=r"different dtypes: .*int64"):
        arrange(file, {"q": Logical("float32", (2,)), "k": Logical("int64", (2,))}, 2)


def test_a_layout_that_does_not_exist_names_those_that_ship():
    with pytest.raises(InvalidMapError, match=r"no layout file 'nowhere.toml'.*transformer-tp"):
        read_layout_file("nowhere.toml")


def test_the_page_lists_the_patterns_that_ship():
    """Every pattern of transformer-tp stands in docs/checkpoints.md, and no other."""
    page = (Path(__file__).parents[2] / "docs" / "checkpoints.md").read_text()
    rows = page.partition("## The patterns of transformer-tp")[2].splitlines()
    cells = [row.split("|")[1] for row in rows if row.startswith("| `")]
    words = [word for cell in cells for word in re.findall(r"`([^`]+)`", cell) if word[0] != "."]
    ends = (".weight", ".bias")
    said = {name for w in words for name in ([w] if w.endswith(ends) else [w + end for end in ends])}
    assert said == {p for rule in read_layout_file("transformer-tp").rules for p in rule.patterns}


def test_a_file_of_which_nothing_matches_is_refused():
    file = read_layout_file("transformer-tp")
    with pytest.raises(InvalidMapError, match=r"transformer-tp: 0 of 1 tensors .* tensor is 'w'"):
        arrange(file, {"w": Logical("float32", (4,))}, 2)
    some = arrange(file, {"w": Logical("float32", (4,)), "lm_head.weight": Logical("float32", (4, 2))}, 2)
    met = matches(file, some)
    assert (met.stored, met.defaulted, met.default) == (2, ("w",), "Replicate")
    assert str(met) == "1 of 2 tensors match a pattern of transformer-tp, 1 by its default Replicate: 'w'"


def test_a_file_that_is_not_utf8_is_refused(tmp_path):
    (tmp_path / "l.toml").write_bytes(b"\xff")
    with pytest.raises(InvalidMapError, match=r"l\.toml: not TOML: 'utf-8' codec"):
        read_layout_file(str(tmp_path / "l.toml"))


def test_a_scale_is_written_as_a_ratio():
    assert sa.equivalent(
        placed('{ kind = "Replicate", scale = "-1/3" }', (4,)),
        sa.layout((4,), sa.Replicate(Fraction(-1, 3)), ranks=2),
    )


def test_a_unit_larger_than_its_axis_is_one_share():
    """However large: the numbers of a layout are not those of 64 bits."""
    for rule in ("chunk", "balanced"):
        written = f'{{ kind = "Split", axis = 0, unit = {10**20}, rule = "{rule}" }}'
        assert placed(written, (8,)) == sa.layout((8,), sa.Split(0, sizes=(8, 0)), ranks=2)


def test_the_default_of_a_mesh_is_called_by_its_kinds():
    split = '{ kind = "Split", axis = 0, rule = "chunk" }'
    text = f'format = 1\ndefault = [{split}, "Replicate"]\nmesh = {{ a = 1, b = 2 }}'
    assert matches(parse_layout_file(text, "f"), ["w"]).default == "Split, Replicate"
