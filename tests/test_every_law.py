"""Every law of the algebra has a test whose docstring names it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

LAWS = (
    "C1 C2 C3 C4 C5 C6 C7 C8 C9 C11 R1 R2 R3 R4 R5 R6 R7 R8 R9 R11 P1 P2 P4 P5 N1 N2 N4 V1 V2 D2"
    " T1 T2 T3 T4 T5 T7 T8 T9 T10 T12a T12b T13 T14 T15 T16 T17 K1 K2 K3 K4 K5 K6 K8 K9"
).split()


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
