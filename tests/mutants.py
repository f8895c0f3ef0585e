"""Telling lines of ops/, each changed by hand, and the test that catches it: ``make mutants``.

Each line is changed in a copy of the tree, one at a time; the named tests must then fail. A change that
lives on is a hole in the tests.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent


class Mutant(NamedTuple):
    """A line of ``src/shardalg/ops``, what it becomes, and the test file that notices."""

    file: str
    line: str
    becomes: str
    test: str


MUTANTS = [
    Mutant(
        "_compose.py",
        "if not (listed_once or decided(f, DOMAIN, limits) or decided(g, CODOMAIN, limits)):",
        "if False:",
        "test_compose.py",
    ),
    Mutant(
        "_invert.py",
        "c._replace(numerator=numerator, denominator=denominator)",
        "c",
        "test_invert.py",
    ),
    Mutant("_sets.py", "minus(b.table, a.table, limits", "minus(a.table, b.table, limits", "test_sets.py"),
    Mutant("_nest.py", "width = 1 + max(", "width = max(", "test_nest.py"),
    Mutant("_relabel.py", "return keys[rank], name", "return rank, name", "test_relabel.py"),
    Mutant("_regions.py", "start * stride", "start", "test_regions.py"),
    Mutant("_product.py", "width = 1 + max(b.ranks", "width = max(b.ranks", "test_product.py"),
    Mutant(
        "_divide.py",
        "largest if equivalent(made, m, limits=limits) else",
        "largest if True else",
        "test_divide.py",
    ),
    Mutant("_equivalent.py", "if sizes[0] != sizes[1]:", "if False:", "test_equivalent.py"),
    Mutant(
        "_equivalent.py",
        "limits, Budget(limits)) == sizes[0]",
        "limits, Budget(limits)) >= 0",
        "test_equivalent.py",
    ),
    Mutant("_folding.py", "if not len(families) < tiles <= most:", "if True:", "test_simplify.py"),
    Mutant(
        "_folding.py",
        "if count % n or not (n == count or _repeats(points, heads, n, step)):",
        "if count % n:",
        "test_simplify.py",
    ),
    Mutant("_folding.py", "(x + n * s, y + n * e) in starts or", "", "test_simplify.py"),
    Mutant("_concat.py", "rows[k + 1] += shift[rows[k]]", "rows[k + 1] += 0", "test_concat.py"),
    Mutant("_holders.py", "tangled = bool(waiting) and", "tangled = False and", "test_holders.py"),
    Mutant("_holders.py", "if not lower.all():", "if False:", "test_holders.py"),
    Mutant(
        "_lower.py",
        "first = (position - placement.first) % ranks",
        "first = position % ranks",
        "test_layout.py",
    ),
    Mutant(
        "_lower.py",
        "chunks, even = (-(-units // ranks),) * ranks,",
        "chunks, even = (units // ranks,) * ranks,",
        "test_layout.py",
    ),
    Mutant(
        "_layout.py",
        "current = _cut_again(current, placements[axis]",
        "current = _cut_again(current, placements[0]",
        "test_layout.py",
    ),
    Mutant("_select.py", "r.flat[r.start + r.target % r.count]", "r.flat[r.start]", "test_plan.py"),
    Mutant("_select.py", "np.where(_own(r), r.target, spread)", "spread", "test_plan.py"),
    Mutant(
        "_choose.py",
        "down = reciprocal((s.numerator[met.left], s.denominator[met.left]))",
        "down = (s.numerator[met.left], s.denominator[met.left])",
        "test_plan.py",
    ),
    Mutant("_plan.py", 'if missing == "error":', "if False:", "test_plan.py"),
    Mutant("_balance.py", "flow[holders, via] -= amount", "flow[holders, via] -= 0", "test_balance.py"),
    Mutant("_boxes.py", "offset_a += (low - la) * sa", "offset_a += 0", "test_plan.py"),
    Mutant("_grid.py", "step[extent == 1] = 0", "step[extent == 2] = 0", "test_plan.py"),
    Mutant("_views.py", "at += 1 if stack else shape[axis]", "at += 1", "test_views.py"),
    Mutant(
        "_tensors.py",
        "scaled(stored, s.scale[1], s.scale[0])",
        "scaled(stored, s.scale[0], s.scale[1])",
        "test_tensors.py",
    ),
    Mutant("_plan_tree.py", "if key not in made:", "if True:", "test_plan_tree.py"),
    Mutant("_plan_experts.py", "    _check_packed(source, packed)", "    pass", "test_plan_experts.py"),
]


def main() -> int:
    """Run the test of each mutant in a copy; 1 if any lives."""
    alive = []
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        for part in ("src", "tests"):
            shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", tree)
        for m in MUTANTS:
            path = tree / "src" / "shardalg" / "ops" / m.file
            text = path.read_text()
            if text.count(m.line) < 1:
                raise SystemExit(f"{m.file} has no line with {m.line!r}: bring this list up to date")
            path.write_text(text.replace(m.line, m.becomes, 1))
            caught = fails(tree, m.test)
            path.write_text(text)
            print(f"{'caught' if caught else 'ALIVE '}  {m.file}: {m.line}  ->  {m.becomes}", flush=True)
            alive += [] if caught else [m]
    print(f"{len(MUTANTS) - len(alive)} of {len(MUTANTS)} changed lines were caught")
    return 1 if alive else 0


def fails(tree: Path, test: str) -> bool:
    """Whether a test file fails in the changed tree."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    command += ["--hypothesis-profile=mutants", f"tests/ops/{test}"]
    paths = [str(tree / p) for p in ("src", "tests")]
    done = subprocess.run(
        command,
        cwd=tree,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
        capture_output=True,
        timeout=1800,
    )
    return done.returncode == 1


if __name__ == "__main__":
    sys.exit(main())
