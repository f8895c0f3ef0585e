"""``shardalg reshard`` with real processes: what comes out is what went in, or nothing is left at all."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoints import assert_same, read_plain, tensors, write_plain, write_sharded
from safetensors.torch import load_file, save_file

import shardalg as sa
from shardalg import InvalidMapError, TransferError
from shardalg.cli import main
from shardalg.cli._prepare import Options, Request
from shardalg.cli._reshard import Writing, reshard
from shardalg.interop._arrangements import elements_of
from shardalg.interop._checkpoints import load, open_checkpoint
from shardalg.interop._safetensors import SIZES

FUSED = """
format = 1
default = "Replicate"
[[join]]
name = "*.qkv_proj.weight"
parts = ["*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight"]
[[tensor]]
name = "*.qkv_proj.weight"
placement = { kind = "Segments", axis = 0, each = { kind = "Split", axis = 0, unit = "head" } }
[[tensor]]
name = ["embed_tokens.weight", "extra.float*"]
placement = { kind = "Split", axis = 1, sizes = [SIZES] }
[[tensor]]
name = ["*.o_proj.weight", "extra.int*", "extra.bool"]
placement = { kind = "Cyclic", axis = 0, block = 2 }
"""
SMALL = Options(group_bytes=1200, max_bytes=256, timeout=60)  # several groups and many rounds


def run(source, destination, to, processes):
    return reshard(Request(str(source), to, processes, options=SMALL), Writing(str(destination)))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return write_plain(tmp_path_factory.mktemp("reshard") / "plain")


@pytest.fixture(scope="module")
def fused(tmp_path_factory):
    path = tmp_path_factory.mktemp("layouts") / "fused.toml"
    text = FUSED.replace('"embed_tokens.weight", "extra.float*"', '"embed_tokens.weight"')
    path.write_text(text.replace("SIZES", "7, 0, 13"))
    return str(path)


def assert_ranks(path, count):
    """Every rank's file holds what the layout says of the original."""
    checkpoint = open_checkpoint(path)
    assert checkpoint.ranks == tuple(range(count))
    for rank in checkpoint.ranks:
        found = load(checkpoint, dict(checkpoint.stored), rank)
        for name, stored in checkpoint.stored:
            m = elements_of(name, stored)
            wanted = sa.extract(m, {b.name: tensors()[b.name] for b in m.codomain.boxes}, rank)
            assert_same({name: found[name]}, {name: wanted})


def test_a_chain_of_layouts_comes_back_bit_for_bit(plain, fused, tmp_path):
    """Plain -> tensor-parallel on 2 -> fused on 3 -> plain, each step by live processes."""
    two, three, back = (str(tmp_path / n) for n in ("two", "three", "back"))
    first = run(plain, two, "transformer-tp", 2)
    assert (first.tensors, first.wire_bytes, first.rounds) == (len(tensors()), 0, 0)
    assert_ranks(two, 2)
    second = run(two, three, fused, 3)
    assert second.wire_bytes == second.lower_bound > 0 and second.rounds > 3
    assert_ranks(three, 3)
    third = run(three, back, "full", 2)
    assert third.wire_bytes == third.lower_bound
    assert_same(read_plain(tmp_path / "back"), tensors())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["back", "three", "two"]


def test_a_plain_source_can_be_loaded_in_a_layout_and_moved(plain, fused, tmp_path):
    """The result is that of reading the target's slices directly."""
    moved, direct = tmp_path / "moved", tmp_path / "direct"
    code = main([
        "reshard", str(plain), str(moved), "--to", fused, "--processes", "3",
        "--from", "transformer-tp", "--from-processes", "2",
    ])  # fmt: skip
    assert code == 0
    assert main(["reshard", str(plain), str(direct), "--to", fused, "--processes", "3"]) == 0
    assert_ranks(moved, 3)
    for file in direct.iterdir():
        assert (moved / file.name).read_bytes() == file.read_bytes()


def test_plain_files_with_an_index(tmp_path, capfd):
    source, target = write_sharded(tmp_path / "source"), tmp_path / "target"
    arguments = ["--to", "full", "--processes", "2", "--file-bytes", "1000"]
    assert main(["reshard", str(source), str(target), *arguments]) == 0
    assert_same(read_plain(target), tensors())
    index = json.loads((target / "model.safetensors.index.json").read_text())
    total = sum(t.numel() * SIZES[str(t.dtype)[6:]] for t in tensors().values())
    assert index["metadata"]["total_size"] == total
    said = capfd.readouterr().out
    assert f"{len(tensors())} tensors" in said and "nothing crossed between ranks" in said


def test_what_crossed_is_said(plain, tmp_path, capfd):
    arguments = ["--to", "full", "--processes", "2", "--from", "transformer-tp"]
    assert main(["reshard", str(plain), str(tmp_path / "target"), *arguments]) == 0
    assert re.search(r"on the wire, lower bound \d.*, 1 round\n", capfd.readouterr().out)


def test_one_plain_file(plain, tmp_path):
    target = tmp_path / "one.safetensors"
    assert main(["reshard", str(plain), str(target), "--to", "full", "--processes", "2"]) == 0
    assert_same(read_plain(tmp_path), tensors())
    assert [p.name for p in tmp_path.iterdir()] == ["one.safetensors"]


# --- refusals -----------------------------------------------------------------------------


def refused(arguments, capfd, tmp_path, code=1):
    """What a run that must be refused says; nothing is left of it."""
    before = sorted(tmp_path.rglob("*"))
    assert main(["reshard", *map(str, arguments)]) == code
    assert sorted(tmp_path.rglob("*")) == before
    return capfd.readouterr().err


def test_what_exists_is_not_written_over(plain, tmp_path, capfd):
    (tmp_path / "out").mkdir()
    said = refused([plain, tmp_path / "out", "--to", "full", "--processes", 2], capfd, tmp_path)
    assert "exists and nothing is written over" in said


def test_a_layout_on_ranks_needs_a_folder(plain, tmp_path, capfd):
    target = tmp_path / "out.safetensors"
    said = refused([plain, target, "--to", "transformer-tp", "--processes", 2], capfd, tmp_path)
    assert "is written to a folder, not to out.safetensors" in said


def test_a_missing_source_and_a_missing_layout(plain, tmp_path, capfd):
    said = refused(
        [tmp_path / "nothing", tmp_path / "out", "--to", "full", "--processes", 2], capfd, tmp_path
    )
    assert "no such file or folder" in said
    said = refused([plain, tmp_path / "out", "--to", "x.toml", "--processes", 2], capfd, tmp_path)
    assert "no layout file 'x.toml'" in said and "transformer-tp" in said


def test_sizes_that_do_not_add_up(plain, tmp_path, capfd):
    layout = tmp_path / "l.toml"
    layout.write_text(FUSED.replace("SIZES", "7, 7"))
    said = refused([plain, tmp_path / "out", "--to", layout, "--processes", 2], capfd, tmp_path)
    assert "'embed_tokens.weight' of shape (13, 20)" in said and "20" in said and "(7, 7)" in said


def test_an_unknown_unit(tmp_path, capfd):
    source = write_plain(tmp_path / "plain", config=False)
    arguments = [source, tmp_path / "out", "--to", "transformer-tp", "--processes", 2]
    assert "--unit head=SIZE" in refused(arguments, capfd, tmp_path)


def test_a_source_on_ranks_says_its_own_layout(plain, tmp_path, capfd):
    run(plain, tmp_path / "two", "transformer-tp", 2)
    arguments = [
        tmp_path / "two",
        tmp_path / "out",
        "--to",
        "full",
        "--processes",
        2,
        "--from",
        "transformer-tp",
    ]
    assert "leave out --from transformer-tp" in refused(arguments, capfd, tmp_path)
    alone = [*arguments[:6], "--from-processes", 2]
    assert "leave out --from-processes" in refused(alone, capfd, tmp_path)
    path = tmp_path / "two" / "rank-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    assert "truncated" in refused(arguments[:6], capfd, tmp_path)


@pytest.mark.parametrize("command", ["plan", "reshard"])
def test_a_count_of_ranks_to_read_in_no_layout(plain, tmp_path, capfd, command):
    files = [plain, tmp_path / "out"][: 1 + (command == "reshard")]
    given = [command, *files, "--to", "full", "--processes", 2, "--from-processes", 3]
    assert main(list(map(str, given))) == 1
    assert "--from-processes 3 says on how many ranks" in capfd.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("count", ["0", "-1", "two", "1.5"])
def test_a_count_of_processes_that_is_none(plain, tmp_path, capfd, count):
    with pytest.raises(SystemExit) as ended:
        main(["reshard", str(plain), str(tmp_path / "out"), "--to", "full", f"--processes={count}"])
    assert ended.value.code == 2
    assert "is not a count of at least 1" in capfd.readouterr().err


def test_zero_processes_in_python(plain, tmp_path):
    with pytest.raises(InvalidMapError, match="at least 1, got 0"):
        run(plain, tmp_path / "out", "full", 0)


# --- failures of a run --------------------------------------------------------------------


def test_a_source_that_vanishes_ends_the_run(plain, tmp_path, monkeypatch):
    """Opened, planned, and gone before the workers read: they say so and nothing is left."""
    source = write_plain(tmp_path / "plain")
    checkpoint = open_checkpoint(source)
    (source / "model.safetensors").unlink()
    monkeypatch.setattr("shardalg.cli._prepare.open_checkpoint", lambda _: checkpoint)
    with pytest.raises(TransferError, match="FileNotFoundError"):
        run(source, tmp_path / "out", "full", 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["plain"]


BIG = 64  # tensors of 1 MiB


def command(*arguments):
    return [sys.executable, "-m", "shardalg.cli", *map(str, arguments)]


def wait_for(condition, seconds=60):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def descendants(pid):
    """All live processes below one, by /proc."""
    below, found = {}, []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            below.setdefault(int(fields[1]), []).append(int(entry))
    pending = [pid]
    while pending:
        pending += (children := below.get(pending.pop(), []))
        found += children
    return found


def made(path):
    """Whether the output is begun: the workers may not have started."""
    return path.exists()


def half_written(path):
    """Whether tensors are being written: elements that are not 0 are in the file."""
    if not path.exists() or path.stat().st_size < BIG << 20:
        return False
    with open(path, "rb") as file:
        file.seek(path.stat().st_size // 4)
        return any(file.read(8))


@pytest.mark.parametrize(
    "how, code, moment",
    [(signal.SIGKILL, -9, half_written), (signal.SIGTERM, 143, half_written), (signal.SIGTERM, 143, made)],
)
def test_a_run_killed_half_way_leaves_nothing_under_the_name(tmp_path, how, code, moment):
    """The output is absent, no process is left, and the same command then succeeds."""
    source, target = tmp_path / "plain", tmp_path / "out"
    source.mkdir()
    big = {f"w{k}": torch.full((1 << 9, 1 << 9), k).float() for k in range(BIG)}
    save_file(big, source / "model.safetensors")
    arguments = ["reshard", source, target, "--to", "full", "--processes", 2, "--group-bytes", 1 << 20]
    partial = tmp_path / ".out.partial" / "model.safetensors"
    with subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        wait_for(lambda: moment(partial))
        below = descendants(run.pid)
        assert not target.exists() and below
        run.send_signal(how)
        assert run.wait(timeout=60) == code
    assert not target.exists()
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below))
    assert partial.exists() == (how == signal.SIGKILL)
    assert main(list(map(str, arguments))) == 0
    assert_same(load_file(target / "model.safetensors"), big)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "plain"]


@pytest.mark.parametrize("seconds", [0, 0.05, 0.2, 1])
def test_ctrl_c_is_one_line_however_early_the_workers_are(tmp_path, seconds):
    """It goes to all processes of the terminal; only the first speaks."""
    code = (
        "import sys, time; from shardalg.cli import _reshard, main; warm_up = _reshard.warm_up\n"
        "def then_say(): warm_up(); print('warm', flush=True); time.sleep(60)\n"
        "_reshard.warm_up = then_say; sys.exit(main(sys.argv[1:]))"
    )
    arguments = [
        "reshard",
        write_plain(tmp_path / "plain"),
        tmp_path / "out",
        "--to",
        "full",
        "--processes",
        "2",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    ) as run:  # fmt: skip
        assert run.stdout.readline() == "warm\n"
        time.sleep(seconds)
        below = descendants(run.pid)
        os.killpg(run.pid, signal.SIGINT)
        assert run.stderr.read() == "shardalg: interrupted\n"  # to the end: nobody is left who writes
        assert run.wait(timeout=60) == 130 and below
    wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in below))
