"""A drawn value: SVG with a text twin."""

from __future__ import annotations

from pathlib import Path

from .._struct import struct


@struct
class Picture:
    """An SVG document and the same thing said in text.

    ``str(picture)`` and ``repr(picture)`` are the text, so a terminal shows it as a notebook
    shows the SVG. Both are functions of what was drawn: no random ids, no dates.

    >>> from shardalg import layout, show, Split
    >>> print(show(layout((4, 4), Split(0), ranks=2)).text.splitlines()[0])
    [2 ranks x (2, 4) -> (4, 4)]  r:[0:2, 0:4] -> [2r:2r+2, 0:4]
    """

    svg: str
    text: str

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return self.text

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | Path) -> None:
        """Write the SVG, or the text where the name ends in ``.txt``."""
        path = Path(path)
        path.write_text(self.text + "\n" if path.suffix == ".txt" else self.svg, encoding="utf-8")
