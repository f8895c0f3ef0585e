"""The command line: what it prints, the codes it ends with; the demo's comparison sees one flipped byte."""

import json
import os
import subprocess
import sys

import pytest
from checkpoints import tensors, write_plain

from shardalg.cli import demo, main
from shardalg.cli._inspect import WIDEST, say_bytes
from shardalg.cli._prepare import Request
from shardalg.cli._reshard import Writing, reshard


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("command") / "plain")


def test_inspect_lists_every_tensor(plain, capfd):
    assert main(["inspect", str(plain)]) == 0
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith(f"{plain}: plain, {len(tensors())} tensors") and said[0].endswith("in 1 file")
    assert "  format: pt" in said
    for name, t in tensors().items():
        (line,) = (x for x in said if x.split()[0] == name)
        assert line.split()[1] == str(t.dtype)[6:] and line.endswith(str(tuple(t.shape)))


def test_inspect_says_how_tensors_are_stored(plain, tmp_path, capfd):
    layout = tmp_path / "l.toml"
    layout.write_text(
        'format = 1\ndefault = "Replicate"\n[[join]]\nname = "*.kv"\n'
        'parts = ["*.k_proj.weight", "*.v_proj.weight"]\n'
        '[[tensor]]\nname = "embed*"\nplacement = { kind = "Split", axis = 0 }'
    )
    reshard(Request(str(plain), str(layout), 2), Writing(str(tmp_path / "two")))
    assert main(["inspect", str(tmp_path / "two")]) == 0
    said = capfd.readouterr().out
    assert "on 2 ranks" in said and "(13, 20) as (7, 20) (6, 20)" in said
    assert "joined from layer.0.self_attn.k_proj.weight, layer.0.self_attn.v_proj.weight" in said
    assert main(["inspect", str(tmp_path / "two"), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["ranks"], found["files"], found["tensors"]) == (2, 2, len(tensors()))
    held = {h["name"]: h for h in found["held"]}
    assert held["embed_tokens.weight"]["shards"] == [[0, [7, 20]], [1, [6, 20]]]
    assert held["layer.0.self_attn.kv"]["joined"][1] == "layer.0.self_attn.v_proj.weight"


def test_inspect_is_read_by_machines(plain, capfd):
    assert main(["inspect", str(plain), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert (found["path"], found["ranks"], found["files"]) == (str(plain), 0, 1)
    assert {h["name"]: (h["dtype"], tuple(h["shape"])) for h in found["held"]} == {
        name: (str(t.dtype)[6:], tuple(t.shape)) for name, t in tensors().items()
    }


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ('{"format": "other"}', "expected plain data of format 'shardalg.checkpoint', got 'other'"),
        ('{"format": "shardalg.checkpoint", "version": 99}', "version 99 cannot be read"),
        ('{"format": "shardalg.checkpoint", "version": 1}', "not a layout that this tool wrote"),
    ],
)
def test_a_bad_layout_is_named_with_its_path(tmp_path, capfd, text, words):
    (tmp_path / "layout.json").write_text(text)
    assert main(["inspect", str(tmp_path)]) == 1
    said = capfd.readouterr().err
    assert said.startswith(f"shardalg: {tmp_path / 'layout.json'}: ") and words in said


def named(tmp_path, *names):
    """A file of one-byte tensors of these names, its free text over two lines."""
    fields = {n: {"dtype": "U8", "shape": [1], "data_offsets": [k, k + 1]} for k, n in enumerate(names)}
    header = json.dumps({"__metadata__": {"note": "one\ntwo"}, **fields}).encode()
    file = tmp_path / "named.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(len(names)))
    return str(file)


def test_any_name_takes_one_line_and_moves_no_other(tmp_path, capfd):
    file = named(tmp_path, "w", "a\nb", "\ud800", "x" * 3000, "é")
    assert main(["inspect", file]) == 0
    said = capfd.readouterr().out.splitlines()
    assert [line.split()[0] for line in said[2:]] == ["a\\nb", "w", "x" * 3000, "é", "\\ud800"]
    assert said[1] == "  note: one\\ntwo" and len(said) == 7
    assert [len(line) for line in said[2:]] == [82, 82, 82 + 3000 - WIDEST, 82, 82]
    assert main(["plan", file, "--to", "full", "--processes", "1"]) == 0


def test_a_stream_that_cannot_write_a_name_gets_it_escaped(tmp_path):
    file = named(tmp_path, "é")
    command = [sys.executable, "-m", "shardalg.cli", "inspect", file]
    out = subprocess.run(
        command, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=True
    )
    assert b"\n  \\xe9" in out.stdout


def test_inspect_refuses(tmp_path, capfd):
    assert main(["inspect", str(tmp_path / "nowhere")]) == 1
    assert capfd.readouterr().err == f"shardalg: {tmp_path / 'nowhere'}: there is no such file or folder\n"


@pytest.mark.parametrize(
    "arguments", [[], ["reshard"], ["inspect"], ["reshard", "a", "b", "--to", "full"], ["x"]]
)
def test_no_command_ends_with_2(arguments, capfd):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: shardalg" in capfd.readouterr().err


def test_the_installed_command_runs():
    out = subprocess.run(
        [sys.executable, "-m", "shardalg.cli", "--help"], capture_output=True, text=True, check=True
    )
    assert "reshard" in out.stdout and "inspect" in out.stdout


def test_the_help_says_what_full_writes(capfd):
    with pytest.raises(SystemExit):
        main(["reshard", "--help"])
    said = " ".join(capfd.readouterr().out.split())
    assert "with --to full a folder with whole tensors in model.safetensors" in said
    assert "where DST ends in .safetensors, that one file" in said


@pytest.mark.parametrize("count, word", [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (5 * 10**9, "5.0 GB")])
def test_bytes_as_people_write_them(count, word):
    assert say_bytes(count) == word


# --- the demo -----------------------------------------------------------------------------


def test_the_demo_runs_on_the_made_up_model(tmp_path, monkeypatch, capfd):
    model = demo.made_up(tmp_path / "model", vocabulary=103, width=48, layers=1)
    monkeypatch.setattr(demo, "fetched", lambda folder: model)
    assert demo.demo(tmp_path) == 0
    said = capfd.readouterr().out
    assert "15 of 15 tensors equal bit for bit" in said
    assert "2 -> 4 processes" in said and "4 -> 3 processes" in said and "peak memory" in said


def test_one_flipped_bit_anywhere_is_seen(tmp_path):
    model = demo.made_up(tmp_path / "model", vocabulary=11, width=12, layers=1)
    copy = tmp_path / "copy.safetensors"
    whole = model.read_bytes()
    copy.write_bytes(whole)
    assert demo.differences(model, copy) == []
    for e in demo.read_header(model).entries:
        for at in (e.begin, (e.begin + e.end) // 2, e.end - 1):
            copy.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            assert demo.differences(model, copy) == [e.name]


def test_the_demo_fails_where_a_byte_differs(tmp_path, monkeypatch, capfd):
    model = demo.made_up(tmp_path / "model", vocabulary=103, width=48, layers=1)
    monkeypatch.setattr(demo, "fetched", lambda folder: model)
    back = demo.reshard

    def flipping(*arguments):
        back(*arguments)
        path = tmp_path / "runs" / "back" / "model.safetensors"
        whole = bytearray(path.read_bytes())
        whole[-1] ^= 128
        path.write_bytes(whole)

    monkeypatch.setattr(demo, "reshard", flipping)
    assert demo.demo(tmp_path) == 1
    said = capfd.readouterr().out
    assert "DIFFERS: " in said and "14 of 15 tensors equal bit for bit" in said
