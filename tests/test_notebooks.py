"""Stored notebooks, executed afresh, give the outputs they are stored with.

``python tests/test_notebooks.py`` executes all of them and stores what they give.
"""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the notebook tools themselves
    import nbclient
    import nbformat
    from jupyter_client import AsyncKernelManager
    from jupyter_client.kernelspec import KernelSpecManager

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
SECONDS = 120
LINE = 88  # characters of code that a page shows without scrolling


class OwnKernel(AsyncKernelManager):
    """Kernels of the Python that runs the tests, whatever else is installed for this user."""

    def __init__(self, **options: Any) -> None:
        super().__init__(kernel_spec_manager=KernelSpecManager(kernel_dirs=[]), **options)


def execute(notebook: nbformat.NotebookNode, folder: Path) -> nbformat.NotebookNode:
    """A copy of ``notebook`` with what its cells give when run in ``folder``; raises where one does."""
    fresh = nbformat.from_dict(json.loads(json.dumps(notebook)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resources = {"metadata": {"path": str(folder)}}
        nbclient.NotebookClient(
            fresh, coalesce_streams=True, timeout=SECONDS, kernel_manager_class=OwnKernel, resources=resources
        ).execute()
    for cell in fresh.cells:
        cell.metadata = {}
    return fresh


def seen(outputs: list[dict[str, Any]]) -> list[Any]:
    """What a reader sees of a cell's outputs: no counters, lines joined, printed text in one piece."""
    found: list[Any] = []
    for output in outputs:
        kind, text = output["output_type"], text_of(output.get("text", ""))
        if kind == "stream" and found and found[-1][:2] == (kind, output["name"]):
            text = found.pop()[2] + text
        data = {mime: text_of(value) for mime, value in output.get("data", {}).items()}
        found.append((kind, output.get("name", ""), text, data))
    return found


def text_of(value: Any) -> Any:
    return "".join(value) if isinstance(value, list) else value


def difference(stored: nbformat.NotebookNode, fresh: nbformat.NotebookNode) -> str | None:
    """The first cell whose outputs differ, or None."""
    for number, (old, new) in enumerate(zip(stored.cells, fresh.cells, strict=True)):
        if old.cell_type == "code":
            before, after = seen(old.outputs), seen(new.outputs)
            if before != after:
                return f"cell {number}:\n{old.source}\n{apart(str(before), str(after))}"
    return None


def apart(stored: str, fresh: str, width: int = 200) -> str:
    """Two texts from shortly before the place where they part."""
    at = next((k for k, (a, b) in enumerate(zip(stored, fresh)) if a != b), min(len(stored), len(fresh)))
    start = max(0, at - width // 4)
    return f"stored: ...{stored[start : at + width]}...\nfresh:  ...{fresh[start : at + width]}..."


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_gives_what_it_stores(path):
    stored = read(path)
    nbformat.validate(stored)
    found = difference(stored, execute(stored, path.parent))
    assert found is None, found


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_code_fits_on_the_page(path):
    lines = [
        line for cell in read(path).cells if cell.cell_type == "code" for line in cell.source.splitlines()
    ]
    assert [line for line in lines if len(line) > LINE] == []


def test_a_stale_output_and_a_failing_cell_are_seen(tmp_path):
    cells = [nbformat.v4.new_markdown_cell("# One"), nbformat.v4.new_code_cell("print('x')\n1 + 1")]
    fresh = execute(nbformat.v4.new_notebook(cells=cells), tmp_path)
    assert difference(fresh, fresh) is None
    stale = nbformat.from_dict(json.loads(json.dumps(fresh)))
    stale.cells[1].outputs[-1].data["text/plain"] = "3"
    assert "cell 1" in (difference(stale, fresh) or "")
    failing = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(failing, tmp_path)


def store() -> None:
    for path in [Path(name) for name in sys.argv[1:]] or NOTEBOOKS:
        fresh = execute(read(path), path.parent)
        fresh.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
        nbformat.write(fresh, path)


if __name__ == "__main__":
    store()
