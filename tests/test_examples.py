"""The script on the README is the one in examples/, and it runs under torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = ROOT / "examples" / "trainer_to_engine.py"


def test_the_readme_shows_the_script():
    shown = re.search(r"```py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None and SCRIPT.read_text().endswith("\n" + shown[1])


def test_the_script_moves_the_weights_of_the_last_step():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    done = subprocess.run(
        [*command, str(SCRIPT)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    for line in ("rank 0 serves {}", "rank 1 serves {}", "rank 2 serves {2: 2.0}", "rank 3 serves {3: 2.1}"):
        assert line in done.stdout
