"""docs/api.md names everything public exactly once, and nothing else; ``dir`` is a table of contents."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

import shardalg as sa

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
PARTS = ("backends", "interop", "moe", "testing")  # whose names are listed too
NAME = re.compile(r"`([A-Za-z0-9_.]+)(?:\([^`]*\))?`")


def named(page: str) -> Counter[str]:
    """How often each name stands in the first column of a table."""
    cells = [line.split("|")[1] for line in page.splitlines() if line.startswith("|")]
    return Counter(name for cell in cells for name in NAME.findall(cell))


def public(module: ModuleType) -> set[str]:
    """The names a module promises: what ``dir`` shows without modules and underscores."""
    names = {name for name in dir(module) if not name.startswith("_")}
    return {n for n in names if n == "laws" or not isinstance(getattr(module, n), ModuleType)}


def promised() -> set[str]:
    """All public names; those of a part that the package itself has too stand once, without the part."""
    ours = set(dir(sa))
    parts = {f"{part}.{name}" for part in PARTS for name in public(getattr(sa, part))}
    again = {f"backends.{name}" for name in ours if getattr(sa, name) is getattr(sa.backends, name, None)}
    return ours | parts - again


def test_every_public_name_is_on_the_page_once():
    found = named(PAGE.read_text())
    assert sorted(promised() - set(found)) == [], "not on docs/api.md"
    assert sorted(set(found) - promised()) == [], "on docs/api.md, but not public"
    assert [name for name, count in found.items() if count > 1] == [], "more than once on docs/api.md"


def section(page: str, title: str) -> str:
    """The text under one heading."""
    return page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_every_operator_has_its_law_on_the_page():
    """Whatever combines maps or answers about them stands in the table of docs/algebra.md."""
    api, laws = PAGE.read_text(), named((PAGE.parent / "algebra.md").read_text())
    names = [*named(section(api, "Combine maps")), *named(section(api, "Ask about maps"))]
    functions = [name for name in names if not isinstance(getattr(sa, name), type)]
    assert len(functions) > 30
    said = {name.partition("(")[0] for name in laws}
    assert sorted(set(functions) - said) == [], "not in the table of docs/algebra.md"


# Operators that need runs are tested with the backends.
ELSEWHERE = {"_adjoint": "backends/test_autograd.py", "_schedule": "backends/test_schedule.py"}


def test_every_operator_says_its_cost_and_has_a_test_of_its_name():
    """``ops/_name.py`` is tested by ``tests/ops/test_name.py``."""
    table = (PAGE.parent / "algebra.md").read_text().partition("| operator |")[2]
    operators = {name.partition("(")[0] for name in named("| operator |" + table)}
    functions = [getattr(sa, name) for name in operators if callable(getattr(sa, name, None))]
    assert len(functions) > 40
    for f in functions:
        assert "Cost: " in f.__doc__ and ">>> " in f.__doc__, f.__name__
        file = f.__module__.rpartition(".")[2]
        assert (Path(__file__).parent / ELSEWHERE.get(file, f"ops/test{file}.py")).exists(), file


@pytest.mark.parametrize("page, want", [("| `plan`, `run` | of `x` |\n| `plan` | |", {"plan": 2, "run": 1})])
def test_names_are_counted_in_the_first_column(page, want):
    assert named(page) == want


def test_the_package_lists_only_promises():
    """No helper, no standard module, none of the packages it is made of."""
    assert not {"Any", "annotations", "importlib", "maps", "ops", "placements", "plans"} & set(dir(sa))
    assert all(hasattr(sa, name) and not name.startswith("_") for name in dir(sa))


def test_the_kit_lists_its_names():
    assert {"laws", "layouts", "ReshardMachine", "backend_suite"} <= set(dir(sa.testing))
    assert not {"Any", "importlib", "hypothesis"} & set(dir(sa.testing))
