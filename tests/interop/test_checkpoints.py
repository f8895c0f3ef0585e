"""Checkpoints are opened by their headers alone, and refused where their parts do not fit together."""

import json
import os
import shutil

import pytest
import torch
from checkpoints import assert_same, tensors, write_plain, write_sharded
from safetensors.torch import load_file, save_file

import shardalg as sa
from shardalg import InvalidMapError
from shardalg.interop._arrangements import elements_of
from shardalg.interop._checkpoints import Home, load, open_checkpoint
from shardalg.interop._layout_files import arrange, parse_layout_file, read_layout_file
from shardalg.interop._outputs import appearing, finish, plain_output, prepare, rank_output, save
from shardalg.interop._safetensors import Entry, header_bytes, lay_out, write_at

FUSED = """
format = 1
default = "Replicate"
[units]
head = 4
[[join]]
name = "*.qkv_proj.weight"
parts = ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]
[[tensor]]
name = "*.qkv_proj.weight"
placement = { kind = "Segments", axis = 0, each = { kind = "Split", axis = 0, unit = "head" } }
[[tensor]]
name = "embed_tokens.weight"
placement = { kind = "Split", axis = 0, rule = "pad" }
[[tensor]]
name = "*.o_proj.weight"
placement = { kind = "Split", axis = 1, sizes = [13, 7] }
"""


@pytest.fixture
def plain(tmp_path):
    return write_plain(tmp_path / "plain")


def write_ranks(plain, target, text=FUSED):
    """A folder of per-rank files, written by this process alone."""
    checkpoint = open_checkpoint(plain)
    arrangement = arrange(parse_layout_file(text, "fused"), checkpoint.logical, 2)
    with appearing(target) as folder:
        output = rank_output(folder, arrangement, 2, dict(checkpoint.metadata), dict(checkpoint.units))
        prepare(output)
        for rank in range(2):
            save(output, rank, load(checkpoint, arrangement, rank))
        finish(output)
    return target


@pytest.fixture
def ranks(plain, tmp_path):
    return write_ranks(plain, tmp_path / "ranks")


def expected(arrangement, rank):
    found = {}
    for name, stored in arrangement.items():
        m = elements_of(name, stored)
        found[name] = sa.extract(m, {b.name: tensors()[b.name] for b in m.codomain.boxes}, rank)
    return found


def test_slices_of_a_plain_checkpoint(plain):
    checkpoint = open_checkpoint(plain)
    for file in (parse_layout_file(FUSED, "fused"), read_layout_file("transformer-tp")):
        arrangement = arrange(file, checkpoint.logical, 2, dict(checkpoint.units))
        for rank in range(2):
            assert_same(load(checkpoint, arrangement, rank), expected(arrangement, rank))


def test_one_file_a_folder_and_an_index_hold_the_same(plain, tmp_path):
    sharded = write_sharded(tmp_path / "sharded")
    paths = [plain, plain / "model.safetensors", sharded, sharded / "model.safetensors.index.json"]
    first, *rest = (open_checkpoint(p) for p in paths)
    for other in rest:
        assert other.logical == first.logical and other.units == first.units == (("head", 4),)


def test_only_the_slices_of_a_rank_are_read(tmp_path):
    """A file of 64 GiB of holes: reading anything but the rows of the rank would take minutes."""
    file = lay_out(tmp_path / "x.safetensors", [("w", "int64", (1 << 20, 1 << 13))])
    with open(file.path, "wb") as out:
        out.write(header_bytes(file))
        out.truncate(file.size)
    write_at(file.path, file.entries[0].begin + (3 << 16), torch.arange(1 << 13))
    checkpoint = open_checkpoint(file.path)
    text = '[[tensor]]\nname = "w"\nplacement = { kind = "Split", axis = 0, sizes = [2, 2, 1048572] }'
    arrangement = arrange(parse_layout_file(f"format = 1\n{text}", "rows"), checkpoint.logical, 3)
    found = load(checkpoint, arrangement, 1)["w"]
    assert torch.equal(found, torch.stack([torch.zeros(1 << 13, dtype=torch.int64), torch.arange(1 << 13)]))


def test_rank_files_hold_their_shards_as_the_package_reads_them(ranks):
    checkpoint = open_checkpoint(ranks)
    arrangement = dict(checkpoint.stored)
    for rank in range(2):
        assert_same(load_file(ranks / f"rank-{rank:05d}.safetensors"), expected(arrangement, rank))
        assert_same(load(checkpoint, arrangement, rank), expected(arrangement, rank))


def test_a_folder_of_ranks_says_what_it_was(plain, ranks):
    checkpoint = open_checkpoint(ranks)
    assert checkpoint.ranks == (0, 1)
    assert checkpoint.logical == open_checkpoint(plain).logical
    assert checkpoint.metadata == (("format", "pt"),) and checkpoint.units == (("head", 4),)
    assert open_checkpoint(ranks / "layout.json") == checkpoint


# --- damage: plain ------------------------------------------------------------------------


def change(path, edit):
    data = json.loads(path.read_text())
    edit(data)
    path.write_text(json.dumps(data))


def drop_file(folder):
    (folder / "b.safetensors").unlink()


def move_a_name(folder):
    change(
        folder / "model.safetensors.index.json",
        lambda d: d["weight_map"].update({"extra.bool": "b.safetensors"}),
    )


def add_a_name(folder):
    change(
        folder / "model.safetensors.index.json", lambda d: d["weight_map"].update({"ghost": "a.safetensors"})
    )


def forget_a_name(folder):
    change(folder / "model.safetensors.index.json", lambda d: d["weight_map"].pop("extra.bool"))


def leave_the_folder(folder):
    change(
        folder / "model.safetensors.index.json", lambda d: d["weight_map"].update({"x": "../a.safetensors"})
    )


def give_twice(folder):
    its = load_file(folder / "b.safetensors")
    save_file(its | {"extra.bool": tensors()["extra.bool"]}, folder / "b.safetensors")


def no_map(folder):
    change(folder / "model.safetensors.index.json", lambda d: d.pop("weight_map"))


def not_json(folder):
    (folder / "model.safetensors.index.json").write_text("{")


def cut_a_file(folder):
    whole = (folder / "b.safetensors").read_bytes()
    (folder / "b.safetensors").write_bytes(whole[:-3])


PLAIN_DAMAGE = {
    drop_file: "names the file 'b.safetensors', which is missing; 11 of 23 tensors",
    move_a_name: "'extra.bool': the index has it in b.safetensors, the files in a.safetensors",
    add_a_name: "'ghost': the index has it in a.safetensors, the files in None",
    forget_a_name: "'extra.bool': the index has it in None, the files in a.safetensors",
    leave_the_folder: "'../a.safetensors' is not the name of a file beside the index",
    give_twice: "'extra.bool' is in both .*a.safetensors and .*b.safetensors",
    no_map: "an index has a weight_map",
    not_json: "not JSON",
    cut_a_file: "truncated",
}


@pytest.mark.parametrize("damage", PLAIN_DAMAGE, ids=lambda f: f.__name__)
def test_a_damaged_plain_checkpoint_is_refused(tmp_path, damage):
    folder = write_sharded(tmp_path / "sharded")
    open_checkpoint(folder)
    damage(folder)
    with pytest.raises(InvalidMapError, match=PLAIN_DAMAGE[damage]):
        open_checkpoint(folder)


def test_what_is_no_checkpoint_is_refused(tmp_path, plain):
    with pytest.raises(InvalidMapError, match="no such file or folder"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(InvalidMapError, match="found none; is it a checkpoint"):
        open_checkpoint(tmp_path)
    shutil.copy(plain / "model.safetensors", plain / "other.safetensors")
    with pytest.raises(
        InvalidMapError, match=r"found \['model.safetensors', 'other.safetensors'\]; give the path"
    ):
        open_checkpoint(plain)


# --- damage: one file per rank ------------------------------------------------------------


def layout_edit(edit):
    return lambda folder: change(folder / "layout.json", edit)


def rank_edit(edit):
    def damage(folder):
        path = folder / "rank-00001.safetensors"
        its = load_file(path)
        edit(its)
        save_file({n: t.contiguous() for n, t in its.items()}, path)

    return damage


EMBED = "embed_tokens.weight"
RANK_DAMAGE = {
    "a missing file": (lambda f: (f / "rank-00001.safetensors").unlink(), "of rank 1, which is missing"),
    "a shard of another shape": (
        rank_edit(lambda s: s.update({EMBED: s[EMBED][:-1]})),
        r"rank 1 is bfloat16 of shape \(6, 20\), its layout says bfloat16 of shape \(7, 20\)",
    ),
    "a shard of another dtype": (
        rank_edit(lambda s: s.update({EMBED: s[EMBED].float()})),
        "is float32 .* its layout says bfloat16",
    ),
    "a shard that is missing": (
        rank_edit(lambda s: s.update({"embed": s.pop(EMBED)})),
        f"shard of '{EMBED}' of rank 1 is missing",
    ),
    "a shard too many": (
        rank_edit(lambda s: s.update({"ghost": torch.ones(1)})),
        "'ghost' is in the file but not in the layout",
    ),
    "a rank without a file": (layout_edit(lambda d: d["files"].pop("1")), r"ranks \[1\], which have no file"),
    "a file elsewhere": (layout_edit(lambda d: d["files"].update({"1": "../x"})), "'../x' of rank 1"),
    "a newer format": (layout_edit(lambda d: d.update(version=2)), "version 2 cannot be read"),
    "another kind": (layout_edit(lambda d: d.update(format="x")), "got 'x'"),
    "a missing field": (
        layout_edit(lambda d: d.pop("layouts")),
        "not a layout that this tool wrote: .*layouts",
    ),
    "a layout that is not there": (
        layout_edit(lambda d: d["tensors"][EMBED].update(layout=99)),
        "'embed_tokens.weight' has the layout 99 of",
    ),
    "another logical shape": (
        layout_edit(
            lambda d: d["tensors"]["layer.0.self_attn.qkv_proj.weight"].update(
                layout=d["tensors"][EMBED]["layout"]
            )
        ),
        "of another logical shape",
    ),
    "a tensor stored twice": (
        layout_edit(
            lambda d: d["tensors"].update({"again": d["tensors"]["layer.0.self_attn.qkv_proj.weight"]})
        ),
        "'layer.0.self_attn.k_proj.weight' is stored twice",
    ),
    "a piece outside its shard": (
        layout_edit(lambda d: d["layouts"][0]["pieces"][0].__setitem__(1, 10**6)),
        "covers domain addresses",
    ),
    "a piece with a broken row": (
        layout_edit(lambda d: d["layouts"][0]["pieces"][0].pop()),
        "a piece row has",
    ),
}


@pytest.mark.parametrize("what", RANK_DAMAGE)
def test_a_damaged_folder_of_ranks_is_refused(ranks, what):
    damage, words = RANK_DAMAGE[what]
    open_checkpoint(ranks)
    damage(ranks)
    with pytest.raises(InvalidMapError, match=words):
        open_checkpoint(ranks)


# --- outputs ------------------------------------------------------------------------------


def test_plain_files_stay_within_their_bound(plain, tmp_path):
    checkpoint = open_checkpoint(plain)
    with appearing(tmp_path / "out") as folder:
        output = plain_output(folder, checkpoint.logical, 2, {}, 600)
        prepare(output)
        finish(output)
    again = open_checkpoint(tmp_path / "out")
    assert again.logical == checkpoint.logical
    by_file = {}
    for h in again.homes:
        by_file.setdefault(h.path, []).append(h.entry.nbytes)
    assert len(by_file) > 2 and all(sum(its) <= 600 or len(its) == 1 for its in by_file.values())


def test_an_output_appears_only_when_complete(tmp_path):
    target = tmp_path / "out"
    with pytest.raises(ZeroDivisionError), appearing(target) as folder:
        (folder / "half").write_text("done")
        assert not target.exists()
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    with appearing(target) as folder:
        (folder / "all").write_text("done")
    assert [p.name for p in target.iterdir()] == ["all"] and list(tmp_path.iterdir()) == [target]


def test_nothing_is_written_over(tmp_path):
    (tmp_path / "out").mkdir()
    with (
        pytest.raises(InvalidMapError, match="out exists and nothing is written over"),
        appearing(tmp_path / "out"),
    ):
        raise AssertionError
    with pytest.raises(InvalidMapError, match="exists"), appearing(tmp_path / "late"):
        (tmp_path / "late").write_text("mine")
    assert (tmp_path / "late").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["late", "out"]


def watched(monkeypatch, target):
    """The calls, as they are made, after which there is nothing under a name."""
    absent = []
    for name in ("rename", "link", "unlink", "replace", "rmdir"):
        call = getattr(os, name)

        def seen(*arguments, call=call, name=name, **options):
            call(*arguments, **options)
            absent.extend([] if os.path.lexists(target) else [name])

        monkeypatch.setattr(os, name, seen)
    return absent


@pytest.mark.parametrize("at_once", [True, False], ids=["exchanged", "renamed"])
@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_with_force_the_old_goes_when_the_new_is_complete(tmp_path, monkeypatch, name, at_once):
    target = tmp_path / name
    held = target if target.suffix else target / "model.safetensors"
    held.parent.mkdir(exist_ok=True)
    held.write_text("old")
    if not at_once:
        monkeypatch.setattr("shardalg.interop._outputs.NO_EXCHANGE", (*range(200),))
        monkeypatch.setattr("shardalg.interop._outputs.EXCHANGE", 64)  # a flag that no system knows
    with pytest.raises(ZeroDivisionError), appearing(target, force=True):
        raise ZeroDivisionError
    assert held.read_text() == "old"
    absent = watched(monkeypatch, target)
    with appearing(target, force=True) as folder:
        (folder / "model.safetensors").write_text("new")
        assert held.read_text() == "old"
    assert held.read_text() == "new" and list(tmp_path.iterdir()) == [target]
    assert absent == ([] if at_once else ["rename"])


def test_force_replaces_a_link_and_not_what_it_points_to(tmp_path):
    there = tmp_path / "there"
    there.mkdir()
    (there / "model.safetensors").write_text("old")
    (tmp_path / "out").symlink_to(there)
    with appearing(tmp_path / "out", force=True) as folder:
        (folder / "model.safetensors").write_text("new")
    assert (there / "model.safetensors").read_text() == "old"
    assert (tmp_path / "out" / "model.safetensors").read_text() == "new"
    assert not (tmp_path / "out").is_symlink() and len(list(tmp_path.iterdir())) == 2


def test_two_runs_do_not_share_an_output(tmp_path):
    with appearing(tmp_path / "out") as folder:
        (folder / "all").write_text("first")
        with pytest.raises(InvalidMapError, match="written by another run"), appearing(tmp_path / "out"):
            raise AssertionError
        assert (folder / "all").exists()
    assert (tmp_path / "out" / "all").read_text() == "first"


def test_what_a_killed_run_left_is_taken_over(tmp_path):
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "lock").touch()
    (left / "half").write_text("old")
    with appearing(tmp_path / "out") as folder:
        assert [p.name for p in folder.iterdir()] == ["lock"]
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_a_missing_parent_is_named(tmp_path):
    with (
        pytest.raises(InvalidMapError, match=r"no folder .*deep to write it in"),
        appearing(tmp_path / "deep" / "out"),
    ):
        raise AssertionError


def test_a_home_is_where_a_shard_lies(ranks):
    (home,) = (h for h in open_checkpoint(ranks).homes if h.rank == 1 and h.name == EMBED)
    assert home == Home(EMBED, 1, str(ranks / "rank-00001.safetensors"), home.entry)
    assert isinstance(home.entry, Entry) and home.entry.shape == (7, 20)
