"""``shardalg convert``: DeepSpeed shards of one degree become those of another, moments as their weights."""

import json
import math
import re
import zipfile
from fractions import Fraction

import pytest
import torch
from safetensors.torch import load_file, save_file

import shardalg as sa
from shardalg.cli import main
from shardalg.cli._convert import convert, read_maps
from shardalg.cli._replicas import require_agreement, same
from shardalg.interop import deepspeed

KINDS = ("", "exp_avg", "exp_avg_sq")
QKV = sa.Attention(kv_heads=16)


def layouts(ranks):
    """A fused qkv, a column- and a row-parallel weight, experts, and a bias added on every rank."""
    return {
        "h.0.qkv": sa.named_qkv("CodeGenBlock")((96, 4), QKV, ranks),
        "h.0.up": sa.layout((10, 4), sa.Split(0), ranks=ranks),
        "h.0.down": sa.layout((4, 10), sa.Split(1, rule="balanced"), ranks=ranks),
        "experts": sa.layout((8, 3, 2), sa.Experts.uniform(8, ranks)),
    }


def bias(ranks):
    return {"h.0.bias": sa.layout((4,), sa.Replicate(Fraction(1, ranks)), ranks=ranks)}


def tensors(maps, kinds=KINDS):
    g = torch.Generator().manual_seed(7)
    return {
        (kind, name): torch.randn(m.logical_shape, generator=g) for name, m in maps.items() for kind in kinds
    }


def stored_name(kind, name):
    return f"{name}.{kind}" if kind else name


def write(folder, maps, full, ranks, form):
    """The shards in files of one kind, and the maps beside them."""
    folder.mkdir()
    for rank in range(ranks):
        shards = {key: sa.extract(maps[key[1]], x, rank) for key, x in full.items()}
        if form == "safetensors":
            named = {stored_name(*key): x for key, x in shards.items()}
            save_file(named | {"norm": torch.ones(3)}, folder / f"tp_{rank:02d}.safetensors")
        else:
            tree = {"step": 5, "module": {n: x for (k, n), x in shards.items() if not k}}
            tree |= {kind: {n: x for (k, n), x in shards.items() if k == kind} for kind in KINDS[1:]}
            torch.save(tree, folder / f"tp_{rank:02d}.pt")
    params = {name: deepspeed.to_map(m) for name, m in maps.items()}
    (folder / "maps.json").write_text(json.dumps({"affine_map": {"version": 1, "params": params}}))
    return str(folder / "maps.json")


def read(folder, rank, form):
    if form == "safetensors":
        return load_file(folder / f"rank-{rank:05d}.safetensors")
    tree = torch.load(folder / f"rank-{rank:05d}.pt", weights_only=True)
    assert tree["step"] == 5
    found = {stored_name(kind, n): x for kind in KINDS[1:] for n, x in tree.get(kind, {}).items()}
    return found | tree["module"]


@pytest.mark.parametrize("form", ["safetensors", "pt"])
@pytest.mark.parametrize("before, after", [(2, 4), (4, 1)])
def test_every_shard_is_what_the_new_maps_say(tmp_path, form, before, after, capfd):
    old, new = layouts(before), layouts(after)
    full = tensors(old)
    maps = write(tmp_path / "old", old, full, before, form)
    to = write(tmp_path / "new", new, full, after, form)
    arguments = ["convert", tmp_path / "old", tmp_path / "out", "--map", maps, "--to", to]
    assert main([*map(str, arguments), "--json", "--progress"]) == 0
    said = capfd.readouterr()
    made = json.loads(said.out)
    assert said.err.endswith(f"{after}/{after} ranks\n")
    assert (made["source_ranks"], made["target_ranks"]) == (before, after)
    assert (made["tensors"], made["moments"]) == (3 * len(old), 2 * len(old))
    for rank in range(after):
        found = read(tmp_path / "out", rank, form)
        for (kind, name), x in full.items():
            assert found[stored_name(kind, name)].equal(sa.extract(new[name], x, rank)), (kind, name)
    again = deepspeed.from_container(json.loads((tmp_path / "out" / "affine_map.json").read_text()))
    assert all(sa.equivalent(again[name], m) for name, m in new.items())


def test_a_layout_file_says_the_target(tmp_path):
    old = {"up": sa.layout((12, 4), sa.Split(0), ranks=2)}
    full = tensors(old)
    maps = write(tmp_path / "old", old, full, 2, "safetensors")
    layout = tmp_path / "l.toml"
    layout.write_text('format = 1\n[[tensor]]\nname = "up"\nplacement = { kind = "Split", axis = 1 }')
    made = convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, str(layout), processes=4)
    assert made.target_ranks == 4
    new = sa.layout((12, 4), sa.Split(1), ranks=4)
    for rank in range(4):
        found = load_file(tmp_path / "out" / f"rank-{rank:05d}.safetensors")
        assert found["up.exp_avg"].equal(sa.extract(new, full["exp_avg", "up"], rank))
        assert found["norm"].equal(torch.ones(3))


def test_no_full_tensor_is_built(tmp_path, monkeypatch):
    """The most elements that anything made here has are those of one shard."""
    old, new = ({"w": sa.layout((64, 8), sa.Split(axis), ranks=4)} for axis in (0, 1))
    full = tensors(old, [""])
    maps, to = (write(tmp_path / name, m, full, 4, "safetensors") for name, m in (("old", old), ("new", new)))
    seen = []
    zeros = sa.cli._convert.zeros
    monkeypatch.setattr(
        sa.cli._convert, "zeros", lambda like, shape: seen.append(math.prod(shape)) or zeros(like, shape)
    )
    convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, to)
    assert seen == [64 * 8 // 4] * 4


def test_force_replaces_an_earlier_conversion_and_never_the_source(tmp_path, capfd):
    old = {"up": sa.layout((12, 4), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old), 2, "safetensors")
    new = {"up": sa.layout((12, 4), sa.Split(1), ranks=2)}
    to = write(tmp_path / "new", new, tensors(new), 2, "safetensors")
    arguments = ["convert", str(tmp_path / "old"), str(tmp_path / "out"), "--map", maps, "--force", "--to"]
    assert main([*arguments, maps]) == main([*arguments, to]) == 0
    assert load_file(tmp_path / "out" / "rank-00000.safetensors")["up"].shape == (12, 2)
    assert main([*arguments[:2], str(tmp_path / "old"), *arguments[3:], to]) == 1
    assert "would remove what is read" in capfd.readouterr().err
    assert (tmp_path / "old" / "tp_00.safetensors").exists()


# --- scales and refusals --------------------------------------------------------------------


def scaled(tmp_path):
    """A checkpoint with a bias over a scale that changes, and the maps of both sides."""
    old, new = bias(2), bias(3)
    full = tensors(old)
    maps = write(tmp_path / "old", old, full, 2, "safetensors")
    to = write(tmp_path / "new", new, full, 3, "safetensors")
    return full, ["convert", str(tmp_path / "old"), str(tmp_path / "out"), "--map", maps, "--to", to]


def test_moments_over_a_scale_would_resume_wrongly_and_are_refused(tmp_path, capfd):
    """Case 5."""
    _, arguments = scaled(tmp_path)
    assert main(arguments) == 1
    said = capfd.readouterr().err
    assert "h.0.bias.exp_avg" in said and "2/3" in said and "learning rate and epsilon" in said
    assert not (tmp_path / "out").exists()


def test_without_moments_the_parameter_moves_by_the_exact_ratio(tmp_path, capfd):
    full, arguments = scaled(tmp_path)
    assert main([*arguments, "--without-moments"]) == 0
    for rank in range(3):
        found = load_file(tmp_path / "out" / f"rank-{rank:05d}.safetensors")
        assert sorted(found) == ["h.0.bias", "norm"]
        torch.testing.assert_close(found["h.0.bias"], full["", "h.0.bias"] / 3)


def change(folder, rank, edit):
    file = folder / f"tp_{rank:02d}.safetensors"
    held = load_file(file)
    edit(held)
    save_file(held, file)


@pytest.mark.parametrize(
    "edit, words",
    [
        (lambda held: held.pop("up"), "'up': its map names rank 1, whose file does not hold it"),
        (lambda held: held.update(up=held["up"].double()), "dtypes .* on different ranks"),
        (lambda held: held.update(up=held["up"][:3].clone()), r"shape \(3, 4\), the layout says \(6, 4\)"),
        (
            lambda held: held.update(norm=torch.zeros(3)),
            "'norm' has no map and is not the same",
        ),
        (lambda held: held.update({"momentum.up": held["up"].clone()}), "'momentum.up' has no map"),
    ],
)
def test_files_that_are_not_what_the_maps_say_are_refused(tmp_path, edit, words):
    old = {"up": sa.layout((12, 4), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "safetensors")
    change(tmp_path / "old", 1, edit)
    with pytest.raises(sa.InvalidMapError, match=words):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, maps)
    assert not (tmp_path / "out").exists()


def test_maps_of_other_tensors_are_refused(tmp_path):
    old = {"up": sa.layout((12, 4), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "safetensors")
    new = {"down": old["up"]}
    to = write(tmp_path / "new", new, tensors(new, [""]), 2, "safetensors")
    with pytest.raises(sa.InvalidMapError, match=r"alone has \['up'\], the target alone \['down'\]"):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, to)
    with pytest.raises(sa.InvalidMapError, match="no file holds 'down', which has a map; there "):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), to, to)
    with pytest.raises(sa.InvalidMapError, match="pass --processes"):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, "transformer-tp")
    for source, words in ((tmp_path, r"found \[\]"), (maps, "this is a file"), ("no", "this does not exist")):
        with pytest.raises(sa.InvalidMapError, match=words):
            convert(str(source), str(tmp_path / "out"), maps, maps)


def test_a_padded_tensor_is_refused_by_name(tmp_path):
    """DeepSpeed's maps have no padding."""
    old = {"up": sa.layout((10, 4), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "safetensors")
    layout = tmp_path / "l.toml"
    layout.write_text(
        'format = 1\n[[tensor]]\nname = "up"\nplacement = { kind = "Split", axis = 0, rule = "pad" }'
    )
    with pytest.raises(sa.UnsupportedError, match=r"^'up': rank 3 holds 4 elements in 12 slots"):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, str(layout), processes=4)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("form", ["safetensors", "pt"])
def test_a_folder_of_ranks_is_sent_to_convert(tmp_path, form):
    old = {"up": sa.layout((12, 4), sa.Split(0), ranks=2)}
    write(tmp_path / "old", old, tensors(old), 2, form)
    with pytest.raises(sa.InvalidMapError, match=r"2 files of ranks .* shardalg convert --map"):
        sa.interop.open_checkpoint(tmp_path / "old")


# --- what several ranks hold ----------------------------------------------------------------

SHARED = {
    "replicated": sa.layout((4, 3), sa.Replicate(), ranks=3),
    "replicated at a scale": sa.layout((4, 3), sa.Replicate(Fraction(1, 3)), ranks=3),
    "on an axis of a mesh": sa.layout((4, 3), (sa.Split(0), sa.Replicate()), 4, mesh={"tp": 2, "dp": 2}),
    "some of its rows": sa.layout((4, 3), sa.BlockGather(0, 1, {0: (0, 1), 1: (1, 2), 2: (3, 1)}), ranks=3),
}


@pytest.mark.parametrize("what", SHARED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.bfloat16, torch.complex128])
def test_one_other_byte_of_a_replica_is_refused(what, dtype):
    """Every slot in turn: refused exactly where another rank holds its element, which is named."""
    layout = SHARED[what]
    shards = {r: torch.ones(layout.shard_shape(r), dtype=dtype) for r in layout.ranks}
    require_agreement(layout, shards)
    for rank in layout.ranks:
        for slot in range(shards[rank].numel()):
            element = int(layout(slot, rank=rank))
            other = dict(shards) | {rank: shards[rank].clone()}
            other[rank].view(-1)[slot] = 0
            if len(sa.holders(layout, element)) == 1:
                require_agreement(layout, other)
                continue
            with pytest.raises(
                sa.InvalidMapError, match=rf"replicas differ: .*\b{rank}\b.* element {element} "
            ):
                require_agreement(layout, other)


def test_replicas_of_different_scales_are_not_compared():
    pieces = [
        sa.Piece((2,), sa.Side(0, (1,), r), sa.Side(0, (1,)), Fraction(1, n))
        for r, n in ((0, 1), (1, 2), (2, 2))
    ]
    layout = sa.AffineMap.from_pieces(
        sa.Space.shards(dict.fromkeys(range(3), (2,))), sa.Space.logical((2,)), pieces
    )
    shards = {r: torch.full((2,), 1 / n) for r, n in ((0, 1), (1, 2), (2, 2))}
    require_agreement(layout, shards)
    shards[2][1] = 1
    with pytest.raises(sa.InvalidMapError, match="ranks 1 and 2 hold the same element 1 "):
        require_agreement(layout, shards)


def test_a_checkpoint_whose_replicas_differ_is_not_mixed(tmp_path, capfd):
    old = {"w": sa.layout((4, 3), sa.Replicate(), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "safetensors")
    change(tmp_path / "old", 1, lambda held: held["w"].view(-1)[7:].add_(1))
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "out"), "--map", maps, "--to", maps]) == 1
    said = capfd.readouterr().err
    assert said == (
        "shardalg: 'w': replicas differ: the map says that ranks 0 and 1 hold the same element 7"
        " (index (2, 1)), and they store other bytes for it\n"
    )
    assert not (tmp_path / "out").exists()


def test_what_has_no_map_is_compared_as_bytes(tmp_path):
    old = {"w": sa.layout((4, 3), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "safetensors")
    nan = torch.full((3,), math.nan)
    for rank in range(2):
        change(tmp_path / "old", rank, lambda held: held.update(norm=nan))
    convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, maps)
    assert load_file(tmp_path / "out" / "rank-00001.safetensors")["norm"].isnan().all()
    change(tmp_path / "old", 1, lambda held: held.update(norm=-nan))
    with pytest.raises(
        sa.InvalidMapError, match="'norm' has no map and is not the same on ranks 0 and 1: add"
    ):
        convert(str(tmp_path / "old"), str(tmp_path / "two"), maps, maps)
    change(tmp_path / "old", 0, lambda held: held.pop("norm"))
    with pytest.raises(sa.InvalidMapError, match="'norm' has no map and is on rank 1 and not on rank 0: add"):
        convert(str(tmp_path / "old"), str(tmp_path / "two"), maps, maps)


ONES = torch.ones(2)


@pytest.mark.parametrize(
    "a, b, equal",
    [
        ([ONES, {"k": ONES.clone()}], [ONES.clone(), {"k": ONES}], True),
        ([ONES, {"k": ONES}], [ONES, {"k": 2 * ONES}], False),
        ((ONES, 1), (ONES, 1, 2), False),
        ({}, {}, True),
        ({"k": ONES}, {"j": ONES}, False),
        (math.nan, float("nan"), True),
        (0.0, -0.0, False),
        (1, 1.0, False),
        (ONES, ONES.double(), False),
        (torch.zeros(2), -torch.zeros(2), False),
        (ONES.to_sparse(), ONES.to_sparse(), True),
        (ONES.to_sparse(), ONES, False),
        (ONES.to("meta"), ONES.to("meta"), True),
        (ONES.to("meta"), ONES, False),
        ([(ONES + 1j).conj()], [ONES - 1j], True),
        ([(ONES + 1j).conj()], [ONES + 1j], False),
        (ONES.to_sparse(), (2 * ONES).to_sparse(), False),
    ],
)
def test_values_are_the_same_where_their_bytes_are(a, b, equal):
    assert same(a, b) is equal


def test_lists_and_tables_of_tensors_without_a_map_are_kept(tmp_path):
    old = {"w": sa.layout((4, 3), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "pt")
    for rank in range(2):
        file = tmp_path / "old" / f"tp_{rank:02d}.pt"
        torch.save(torch.load(file) | {"seeds": [ONES, (ONES, {"k": math.nan})]}, file)
    convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, maps)
    assert torch.load(tmp_path / "out" / "rank-00001.pt")["seeds"][1][0].equal(ONES)


def legacy(file):
    torch.save({"w": ONES}, file, _use_new_zipfile_serialization=False)


def junk(file):
    file.write_bytes(b"junk")


def junk_in_a_zip(file):
    with zipfile.ZipFile(file, "w") as out:
        out.writestr("archive/data.pkl", b"junk")


def code(file):
    torch.save({"w": math.prod}, file)


@pytest.mark.parametrize(
    "write_it, words",
    [
        (legacy, "no torch file of the zip form, .* rewritten by torch.save"),
        (junk, "no torch file of the zip form"),
        (junk_in_a_zip, "torch cannot read it: "),
        (code, "torch cannot read it: UnpicklingError: "),
    ],
)
def test_a_torch_file_that_cannot_be_mapped_is_refused_in_one_line(tmp_path, write_it, words, capfd):
    old = {"w": sa.layout((4, 3), sa.Split(0), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "pt")
    write_it(tmp_path / "old" / "tp_01.pt")
    assert main(["convert", str(tmp_path / "old"), str(tmp_path / "out"), "--map", maps, "--to", maps]) == 1
    said = capfd.readouterr().err
    assert re.search(rf"^shardalg: .*tp_01.pt: {words}", said) and said.count("\n") == 1
    write_it(tmp_path / "maps.pt")
    with pytest.raises(sa.InvalidMapError):
        read_maps(str(tmp_path / "maps.pt"))


@pytest.mark.parametrize("text", [b"\xff", b"[" * 100_000, b"9" * 5000, b"{"])
def test_a_file_of_maps_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "maps.json").write_bytes(text)
    with pytest.raises(sa.InvalidMapError, match=r"maps\.json: not JSON: "):
        read_maps(str(tmp_path / "maps.json"))


@pytest.mark.parametrize("form", [torch.Tensor.to_sparse, lambda w: w.to("meta")])
def test_a_map_of_what_is_no_plain_tensor_is_refused(tmp_path, form):
    old = {"w": sa.layout((4, 3), sa.Replicate(), ranks=2)}
    maps = write(tmp_path / "old", old, tensors(old, [""]), 2, "pt")
    torch.save({"step": 5, "module": {"w": form(torch.ones(4, 3))}}, tmp_path / "old" / "tp_01.pt")
    with pytest.raises(sa.UnsupportedError, match=r"'module\.w' is sparse, .* without data on rank 1"):
        convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, maps)


def test_a_conjugation_still_to_be_applied_is_applied(tmp_path):
    old, new = ({"w": sa.layout((2, 2), p, ranks=2)} for p in (sa.Replicate(), sa.Split(1)))
    x = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])
    maps = write(tmp_path / "old", old, {("", "w"): x}, 2, "pt")
    to = write(tmp_path / "new", new, {("", "w"): x}, 2, "pt")
    for rank in range(2):
        torch.save({"step": 5, "module": {"w": x.conj()}}, tmp_path / "old" / f"tp_{rank:02d}.pt")
    convert(str(tmp_path / "old"), str(tmp_path / "out"), maps, to)
    assert read(tmp_path / "out", 1, "pt")["w"].equal(x.conj()[:, 1:])
