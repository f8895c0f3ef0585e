"""The code on README.md and docs/*.md runs: ``python`` blocks as programs, ``pycon`` blocks as doctests.

The blocks of one page share their names, in order, as a reader would type them.
"""

import doctest
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(python|pycon)[ ]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def blocks(text: str) -> list[tuple[str, str, int]]:
    """Kind, code and first line of every block that is to run."""
    return [(m[1], m[2], text[: m.start(2)].count("\n")) for m in BLOCK.finditer(text)]


def run_program(code: str, name: str, line: int, names: dict[str, object]) -> None:
    exec(compile("\n" * line + code, name, "exec"), names)


def run_session(code: str, name: str, line: int, names: dict[str, object]) -> None:
    test = doctest.DocTestParser().get_doctest(code, {}, name, name, line)
    test.globs = names
    doctest.DebugRunner(optionflags=FLAGS).run(test, clear_globs=False)


def run_page(text: str, name: str) -> int:
    """Run all blocks of a page; the number of blocks."""
    names: dict[str, object] = {"__name__": "__page__"}
    found = blocks(text)
    for kind, code, line in found:
        (run_program if kind == "python" else run_session)(code, name, line, names)
    return len(found)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_code_on_the_page_runs(page):
    text = page.read_text()
    assert run_page(text, str(page)) == len(re.findall(r"^```(?:python|pycon)\b", text, re.MULTILINE))


def test_the_readme_has_code():
    assert blocks(PAGES[0].read_text())


@pytest.mark.parametrize(
    "text, error",
    [
        ("```python\nassert 1 == 2\n```\n", AssertionError),
        ("```pycon\n>>> 1 + 1\n3\n```\n", doctest.DocTestFailure),
        ("```python\nx = 1\n```\ntext\n```pycon\n>>> x\n2\n```\n", doctest.DocTestFailure),
    ],
)
def test_a_wrong_block_is_seen(text, error):
    with pytest.raises(error):
        run_page(text, "page")
