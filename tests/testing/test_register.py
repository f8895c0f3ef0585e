"""Hypothesis knows our types once shardalg is installed, in whatever order things are imported."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from hypothesis import strategies as st

from shardalg.testing._register import TYPES, register

ROOT = Path(__file__).parent.parent.parent
POINTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["hypothesis"]
ORDERS = ["hypothesis", "shardalg.testing", "shardalg.testing.laws", "shardalg.testing._strategies"]


@pytest.fixture
def installed(tmp_path):
    """A folder with the entry points of an installed package."""
    info = tmp_path / "kit-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kit\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in POINTS.items()]
    (info / "entry_points.txt").write_text("\n".join(["[hypothesis]", *lines, ""]))
    return tmp_path


@pytest.mark.parametrize("first", ORDERS)
def test_types_are_known_after_any_import(installed, first):
    loads_torch = first == "shardalg.testing.laws"
    code = (
        f"import sys, {first}, hypothesis.strategies as st, shardalg as sa\n"
        "st.from_type(sa.TransferPlan).validate()\n"
        "assert repr(st.from_type(sa.AffineMap)) == 'affine_maps()'\n"
        f"sys.exit(('torch' in sys.modules) != {loads_torch})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), str(ROOT / "src")])}
    assert subprocess.run([sys.executable, "-W", "error", "-c", code], env=env, check=False).returncode == 0


def test_every_type_has_its_strategy():
    register()
    for kind, strategy in TYPES.items():
        assert repr(st.from_type(kind)) == repr(strategy)
