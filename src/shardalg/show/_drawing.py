"""Parts of a picture placed one under the other: headings, notes, legends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from . import _svg as svg

MARGIN, WIDTH = 16, 720


class Drawing(NamedTuple):
    """Shapes, and the width and height they take from the origin."""

    shapes: list[str]
    width: float
    height: float


def moved(d: Drawing, x: float, y: float) -> str:
    return f'<g transform="translate({svg.number(x)} {svg.number(y)})">\n' + "\n".join(d.shapes) + "\n</g>"


def clipped(text: str, width: float, size: float, *, mono: bool = False) -> str:
    """The text, cut with an ellipsis to fit."""
    most = int(width / svg.wide("x", size, mono=mono))
    return text if len(text) <= most else text[: max(most - 3, 0)] + "..."


def heading(title: str, detail: str, note: str = "") -> Drawing:
    """The top of a picture: a bold title, a detail in fixed width, a note."""
    room = WIDTH - 2 * MARGIN
    shapes = [svg.words(0, 13, clipped(title, room, 15), size=14, bold=True)]
    y = 13.0
    for text, mono in ((detail, True), (note, False)):
        if text:
            y += 18
            shapes.append(
                svg.words(0, y, clipped(text, room, 11, mono=mono), svg.themed("dim"), size=11, mono=mono)
            )
    return Drawing(shapes, room, y + 6)


def stacked(drawings: Sequence[Drawing], gap: float = 14) -> tuple[list[str], float]:
    """Drawings one under the other inside the margin, and the height of the picture."""
    shapes, y = [], float(MARGIN)
    for d in drawings:
        shapes.append(moved(d, MARGIN, y))
        y += d.height + gap
    return shapes, y - gap + MARGIN


def note(text: str) -> Drawing:
    return Drawing([svg.words(0, 11, text, svg.themed("dim"))], svg.wide(text), 14)


def swatches(entries: Sequence[tuple[str, str]]) -> Drawing:
    """A legend: (look, words) pairs in columns."""
    if not entries:
        return Drawing([], 0, 0)
    room = WIDTH - 2 * MARGIN
    wide = min(max(svg.wide(text) for _, text in entries) + 26, room)
    across = max(1, int(room / wide))
    shapes = []
    for i, (look, text) in enumerate(entries):
        x, y = (i % across) * wide, (i // across) * 18.0
        shapes.append(svg.rect(x, y, 13, 13, f'{look} rx="2"'))
        shapes.append(svg.words(x + 19, y + 10.5, clipped(text, wide - 22, 11)))
    return Drawing(shapes, room, -(-len(entries) // across) * 18.0)
