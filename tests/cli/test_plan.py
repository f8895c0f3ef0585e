"""``shardalg plan`` says what ``reshard`` then does; ``--json``, ``--force``, a bar, torchrun."""

import json
import os
import socket
import subprocess
import sys

import pytest
import torch
from checkpoints import assert_same, read_plain, tensors, write_plain
from safetensors.torch import load_file, save_file

from shardalg.cli import main
from shardalg.cli._progress import bar


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("plan") / "plain")


def said(capfd, *arguments):
    """The numbers that a command prints."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_a_plan_says_what_a_run_then_does(plain, tmp_path, capfd):
    options = ["--to", "transformer-tp", "--processes", 3, "--from", "transformer-tp", "--from-processes", 2]
    options += ["--max-bytes", 256, "--group-bytes", 1200]
    told = said(capfd, "plan", plain, *options)
    done = said(capfd, "reshard", plain, tmp_path / "out", *options)
    assert told["wire_bytes"] > 0 and told["copies"] > 0
    for key in ("tensors", "nbytes", "wire_bytes", "lower_bound", "rounds"):
        assert told[key] == done[key], key
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]


def test_a_plan_is_read_by_people(plain, capfd):
    options = ["--to", "transformer-tp", "--processes", "3", "--from", "full", "--from-processes", "2"]
    assert main(["plan", str(plain), *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith(f"{len(tensors())} tensors")
    assert " on the wire, lower bound " in lines[2] and lines[3].startswith("a rank sends at most ")
    assert any(line.startswith(f"plan of {len(tensors())} tensors: 2 -> 3 ranks") for line in lines)


def test_reading_in_slices_crosses_nothing(plain, capfd):
    told = said(capfd, "plan", plain, "--to", "transformer-tp", "--processes", 2)
    assert (told["copies"], told["wire_bytes"]) == (0, 0) and "nothing crosses" in told["picture"]


def test_a_plan_says_what_each_rank_will_hold(plain, tmp_path, capfd):
    """The lines and the bytes that ``inspect`` and the files then show."""
    options = ["--to", "transformer-tp", "--processes", "3"]
    told = said(capfd, "plan", plain, *options)
    assert main(["plan", str(plain), *options]) == 0
    lines = capfd.readouterr().out.splitlines()
    done = said(capfd, "reshard", plain, tmp_path / "out", *options)
    held = said(capfd, "inspect", tmp_path / "out")["held"]
    assert told["held"] == held
    found = [sum(t.nbytes for t in load_file(f).values()) for f in sorted((tmp_path / "out").glob("rank*"))]
    assert told["rank_bytes"] == found and len(set(found)) > 1
    assert any(line.startswith("then each of 3 ranks holds ") for line in lines)
    assert main(["inspect", str(tmp_path / "out")]) == 0
    listed = capfd.readouterr().out.splitlines()[-len(held) :]
    assert lines[-len(held) :] == listed and not any("0 copies" in x for x in lines)
    sizes = sum(f.stat().st_size for f in (tmp_path / "out").glob("*.safetensors"))
    assert (done["path"], done["files"], done["file_bytes"]) == (str(tmp_path / "out"), 3, sizes)


def test_a_run_says_what_it_wrote(plain, tmp_path, capfd):
    target = tmp_path / "one.safetensors"
    assert main(["reshard", str(plain), str(target), "--to", "full", "--processes", "2"]) == 0
    assert f"\nwrote {target}: 1 tensor file, " in capfd.readouterr().out


def test_patterns_that_place_nothing_are_refused(tmp_path, capfd):
    """A model of other names would be on every rank as a whole."""
    names = ("emb.weight", "l0.gate_up.weight")
    save_file({n: torch.zeros(4, 2) for n in names}, tmp_path / "x.safetensors")
    options = ["--to", "transformer-tp", "--processes", "64"]
    assert main(["plan", str(tmp_path / "x.safetensors"), *options]) == 1
    refusal = capfd.readouterr().err
    assert "transformer-tp: 0 of 2 tensors match one of its patterns" in refusal and "Replicate" in refusal


def test_tensors_left_to_the_default_are_counted_and_named(plain, tmp_path, capfd):
    options = ["--to", "transformer-tp", "--processes", "2"]
    for command in (["plan", plain], ["reshard", plain, tmp_path / "out"]):
        found = said(capfd, *command, *options)["matches"]
        assert found["stored"] == len(tensors()) and 0 < len(found["defaulted"]) < found["stored"]
    assert main(["plan", str(plain), *options]) == 0
    left, count = found["defaulted"], found["stored"]
    words = f"{count - len(left)} of {count} tensors match a pattern of transformer-tp, {len(left)} by its"
    assert f"{words} default Replicate: {left[0]!r}" in capfd.readouterr().out


def test_a_plan_refuses_as_a_run_does(plain, capfd):
    assert main(["plan", str(plain), "--to", "nowhere", "--processes", "2"]) == 1
    assert "no layout file 'nowhere'" in capfd.readouterr().err


def test_force_replaces_what_is_there_and_only_then(plain, tmp_path, capfd):
    target = tmp_path / "out"
    target.mkdir()
    (target / "old.safetensors").write_text("old")
    arguments = ["reshard", str(plain), str(target), "--to", "full", "--processes", "1"]
    assert main(arguments) == 1
    assert "pass --force" in capfd.readouterr().err and (target / "old.safetensors").exists()
    assert main([*arguments[:4], "nowhere", *arguments[5:], "--force"]) == 1
    assert (target / "old.safetensors").exists()
    assert main([*arguments, "--force"]) == 0
    assert not (target / "old.safetensors").exists()
    assert_same(read_plain(target), tensors())


def test_force_leaves_what_is_no_checkpoint(plain, tmp_path, capfd):
    target = tmp_path / "precious"
    target.mkdir()
    (target / "model.safetensors").write_text("old")
    (target / "thesis.txt").write_text("years")
    assert main(["reshard", str(plain), str(target), "--to", "full", "--processes", "1", "--force"]) == 1
    assert "more than a checkpoint ('thesis.txt')" in capfd.readouterr().err
    assert (target / "thesis.txt").read_text() == "years" and (target / "model.safetensors").exists()


def test_force_does_not_remove_the_source(plain, capfd):
    above = plain.parent
    assert main(["reshard", str(plain), str(above), "--to", "full", "--processes", "1", "--force"]) == 1
    assert "would remove what is read" in capfd.readouterr().err and plain.exists()


def start(arguments, rank, size, port):
    """A process as torchrun starts it."""
    env = {**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1"}
    command = [sys.executable, "-m", "shardalg.cli", *map(str, arguments)]
    env |= {"MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def joined(arguments, size):
    port = free_port()
    runs = [start(arguments, rank, size, port) for rank in range(size)]
    answers = [run.communicate(timeout=120) for run in runs]
    return [(run.returncode, *answer) for run, answer in zip(runs, answers)]


def test_processes_of_torchrun_do_the_work(plain, tmp_path):
    """The first speaks; what is written is what workers of our own would write."""
    options = ["--to", "transformer-tp", "--processes", "2", "--from", "full", "--from-processes", "2"]
    ran = joined(["reshard", plain, tmp_path / "out", *options, "--json", "--progress"], 2)
    assert [code for code, _, _ in ran] == [0, 0], ran
    assert json.loads(ran[0][1])["tensors"] == len(tensors()) and ran[1][1] == ""
    assert bar(1, 1, "steps").strip() in ran[0][2] and "steps" not in ran[1][2]
    assert main(["reshard", str(plain), str(tmp_path / "own"), *options]) == 0
    for file in (tmp_path / "own").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "own"]


def test_too_few_processes_of_torchrun_are_refused(plain, tmp_path):
    ((code, _, errors),) = joined(["reshard", plain, tmp_path / "out", "--to", "full", "--processes", "2"], 1)
    assert code == 1 and "the layouts have 2 ranks, torchrun started 1 processes" in errors
    assert not list(tmp_path.iterdir())
