"""The script on the README is the one in examples/, and it runs under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "trainer_to_engine.py"


README = (ROOT / "README.md").read_text()


def under_torchrun(script):
    """The finished run of a script in four processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    return subprocess.run(
        [*command, str(script)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_the_readme_shows_the_script():
    _, shown = re.findall(r"```py\n(.*?)```", README, re.DOTALL)
    assert SCRIPT.read_text().endswith("\n" + shown)


def test_the_first_lines_of_the_readme_run_between_processes(tmp_path):
    """The code of its first block, and what it says to go on with."""
    first = re.search(r"```pycon\n(.*?)```", README, re.DOTALL)[1]
    typed = [line[4:] for line in first.splitlines() if line.startswith((">>> ", "... "))]
    there = re.search(r"```py\n(.*?)```", README, re.DOTALL)[1]
    seen = "print(f'{sorted(moved)} compared\\n', end='')\n"
    (tmp_path / "script.py").write_text("\n".join([*typed, there, seen]))
    done = under_torchrun(tmp_path / "script.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n")[:-1]) == [f"[{rank}] compared" for rank in range(4)]


def test_the_script_moves_the_weights_of_the_last_step():
    done = under_torchrun(SCRIPT)
    assert done.returncode == 0, done.stderr
    for line in ("rank 0 serves {}", "rank 1 serves {}", "rank 2 serves {2: 2.0}", "rank 3 serves {3: 2.1}"):
        assert line in done.stdout
