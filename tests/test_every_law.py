"""Every law of the algebra has a test whose docstring names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

NUMBERS = {
    "C": [*range(1, 10), 11],
    "R": [*range(1, 10), 11],
    "P": [1, 2, 4, 5],
    "N": [1, 2, 4],
    "V": [1, 2],
    "D": [2],
    "T": [1, 2, 3, 4, 5, 7, 8, 9, 10, "12a", "12b", 13, 14, 15, 16, 17],
    "K": [1, 2, 3, 4, 5, 6, 8, 9],
}
LAWS = [f"{letter}{number}" for letter, numbers in NUMBERS.items() for number in numbers]


def named() -> set[str]:
    """The laws that docstrings of tests name, ranges spelt out."""
    found: set[str] = set()
    for file in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                words = ast.get_docstring(node) or ""
                found |= set(re.findall(r"\b[A-Z]\d+[ab]?\b", words))
                for letter, first, last in re.findall(r"\b([A-Z])(\d+) to \1(\d+)\b", words):
                    found |= {f"{letter}{k}" for k in range(int(first), int(last) + 1)}
    return found


@pytest.fixture(scope="module")
def laws() -> set[str]:
    return named()


@pytest.mark.parametrize("law", LAWS)
def test_a_test_names_the_law(laws, law):
    assert law in laws
