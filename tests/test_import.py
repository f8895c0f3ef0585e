"""Importing is light, and imports point left along the line of docs/design.md."""

import ast
import graphlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).parent.parent / "src" / "shardalg"
LINE = (
    "_errors", "_struct", "_limits", "_torch", "maps", "placements", "plans", "ops", "show", "", "backends",
    "moe", "interop", "cli", "testing",
)  # fmt: skip
LAZY = {"_torch"}  # the one file that may import inside a function
SECONDS = 0.15
NUMPY = 0.06  # of them numpy's own, on an idle machine
TRIES = 4


def module_names(path: Path) -> tuple[str, ...]:
    """``("ops", "_compose")`` for ``src/shardalg/ops/_compose.py``; ``()`` for the package itself."""
    parts = path.relative_to(SRC).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def targets(
    node: ast.AST, package: tuple[str, ...], modules: set[tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    """Our modules that one import statement loads, as paths from the package."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            head, *rest = alias.name.split(".")
            if head == "shardalg":
                yield tuple(rest)
    elif isinstance(node, ast.ImportFrom):
        named = tuple(node.module.split(".")) if node.module else ()
        if node.level:
            base = (*package[: len(package) - node.level + 1], *named)
        elif named[:1] == ("shardalg",):
            base = named[1:]
        else:
            return
        for alias in node.names:
            yield (*base, alias.name) if (*base, alias.name) in modules else base


def is_typing_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports(tree: ast.AST) -> Iterator[tuple[ast.AST, bool]]:
    """Every import with whether it stands inside a function; what only a type checker runs is left out."""
    pending = [(tree, False)]
    while pending:
        node, inside = pending.pop()
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, inside
        children = node.orelse if is_typing_guard(node) else ast.iter_child_nodes(node)
        inside = inside or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        pending += [(child, inside) for child in children]


def faults(sources: dict[tuple[str, ...], tuple[str, bool]]) -> list[str]:
    """What breaks the line in ``{module: (text, whether it is a package)}``."""
    found = []
    graph: dict[tuple[str, ...], set[tuple[str, ...]]] = {name: set() for name in sources}
    for name, (text, is_package) in sources.items():
        place = name[0] if name else ""
        if place not in LINE:
            found.append(f"{'.'.join(name)} has no place on the line {LINE}")
            continue
        for node, inside in imports(ast.parse(text)):
            where = f"{'.'.join(name) or '__init__'}:{node.lineno}"
            if inside and place not in LAZY:
                found.append(f"{where} imports inside a function")
            for target in targets(node, name if is_package else name[:-1], set(sources)):
                to = target[0] if target else ""
                if LINE.index(to) > LINE.index(place):
                    found.append(f"{where} imports {to or 'shardalg'}, which stands to the right of {place}")
                if target != name:
                    graph[name].add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append(f"a cycle of imports: {[' '.join(step) for step in error.args[1]]}")
    return found


def test_imports_point_left():
    sources = {module_names(p): (p.read_text(), p.name == "__init__.py") for p in sorted(SRC.rglob("*.py"))}
    assert faults(sources) == []


@pytest.mark.parametrize(
    "text, word",
    [
        ("from ..ops import compose", "right"),
        ("from shardalg import compose", "right"),
        ("import shardalg.testing", "right"),
        ("def f():\n    from .._limits import Limits", "inside"),
        ("from ._b import x", "cycle"),
    ],
)
def test_each_fault_is_seen(text, word):
    names = ["_errors", "_limits", "ops", "testing"]
    sources = {(name,): ("", True) for name in names} | {(): ("", True), ("maps",): ("", True)}
    sources |= {("maps", "_a"): (text, False), ("maps", "_b"): ("from ._a import y", False)}
    assert any(word in fault for fault in faults(sources))


def test_a_file_off_the_line_is_seen():
    assert "no place" in faults({("utils",): ("", False)})[0]


def import_alone(cache: Path) -> tuple[float, float, str]:
    """Processor seconds to import shardalg in a process of its own, those of them that numpy took, and
    whether torch came with it or with the command line."""
    program = (
        "import sys, time; t = time.process_time(); import numpy; n = time.process_time(); import shardalg; "
        "s = time.process_time(); import shardalg.cli; print(s - t, n - t, 'torch' in sys.modules)"
    )
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(cache)}  # as users run it
    seconds, numpy, torch = subprocess.check_output(
        [sys.executable, "-c", program], text=True, env=env
    ).split()
    return float(seconds), float(numpy), torch


def test_importing_is_quick_and_loads_no_torch(tmp_path):
    best = float("inf")
    for _ in range(TRIES):  # byte code may have to be written first
        seconds, numpy, torch = import_alone(tmp_path)
        assert torch == "False"
        best = min(best, seconds * NUMPY / max(numpy, NUMPY))  # a busy machine slows both alike
        if best <= SECONDS:
            return
    raise AssertionError(f"import shardalg took {best:.3f} s at best, more than {SECONDS} s")


def test_interop_loads_its_modules_on_use():
    """As ``sa.backends`` and ``sa.moe`` do; nothing has to be imported by hand."""
    code = """
import sys, shardalg as sa
assert "torch" not in sys.modules
for name in ("deepspeed", "dtensor", "dcp", "huggingface"):
    assert name in dir(sa.interop) and getattr(sa.interop, name).__name__ == f"shardalg.interop.{name}"
try:
    sa.interop.nonsense
except AttributeError as error:
    assert "no attribute 'nonsense'" in str(error)
else:
    raise SystemExit("no error")
"""
    subprocess.run([sys.executable, "-c", code], check=True)
