"""Parts of a picture placed one under the other: headings, notes, legends."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from typing import NamedTuple

from . import _svg as svg

MARGIN, WIDTH = 16, 720
MOST_WRAPPED = 4  # lines that one fact or one line of notation may take
_INDEX, _FIRM = re.compile(r"\[[^\]]*\]"), "\xa0"


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


def wrapped(text: str, width: float, size: float, *, mono: bool = False) -> list[str]:
    """The text in lines that fit, the last one cut with an ellipsis where they are too many.

    Notation (``mono``) is not broken within an index.

    >>> wrapped("0:[0:8, 0:8] -> [0:8, 0:8], [8:24, 0:8] -> [32:48, 0:8]", 250, 11, mono=True)
    ['0:[0:8, 0:8] -> [0:8, 0:8],', '    [8:24, 0:8] -> [32:48, 0:8]']
    """
    most = int(width / svg.wide("x", size, mono=mono))
    whole = _INDEX.sub(lambda found: found[0].replace(" ", _FIRM), text) if mono else text
    lead = "    " if mono else ""
    lines = textwrap.wrap(whole, most, subsequent_indent=lead, break_on_hyphens=False)
    lines = [line.replace(_FIRM, " ") for line in lines]
    if len(lines) <= MOST_WRAPPED:
        return lines
    return [*lines[: MOST_WRAPPED - 1], lines[MOST_WRAPPED - 1][: most - 3].rstrip() + "..."]


def heading(title: str, *lines: str, notation: str = "") -> Drawing:
    """The top of a picture: a bold title, a map's notation in fixed width, lines of facts."""
    room = WIDTH - 2 * MARGIN
    shapes = [svg.words(0, 13, clipped(title, room, 15), size=14, bold=True)]
    y = 13.0
    for text, mono in (*((t, True) for t in notation.splitlines()), *((line, False) for line in lines)):
        for line in wrapped(text, room, 11, mono=mono):
            y += 18
            shapes.append(svg.words(0, y, line, svg.themed("dim"), size=11, mono=mono))
    return Drawing(shapes, room, y + 6)


def heat(value: float, most: float) -> tuple[str, str]:
    """The fill for a share of the most, light to dark, and the colour of text on it."""
    part = value / most if most else 0.0
    ends = ((222, 235, 247), (33, 113, 181))
    colour = "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(*ends))
    return f'fill="{colour}"', f'fill="{"#111111" if svg.luminance(colour) > 0.19 else "#ffffff"}"'


def count_text(n: int) -> str:
    """A count in at most five characters: ``640``, ``12.3k``, ``1.05G``.

    >>> [count_text(n) for n in (9999, 12345, 2 * 10**9)]
    ['9999', '12.3k', '2G']
    """
    if abs(n) < 10000:
        return str(n)
    for unit, size in (("k", 10**3), ("M", 10**6), ("G", 10**9), ("T", 10**12), ("P", 10**15)):
        if abs(n) < 1000 * size:
            return f"{n / size:.3g}{unit}"
    return f"{n:.1e}"


def many(n: int, word: str) -> str:
    """``1 piece``, ``2 pieces``, ``2 copies``."""
    if n == 1:
        return f"1 {word}"
    return f"{n} {word.removesuffix('y')}ies" if word.endswith("y") else f"{n} {word}s"


def byte_text(n: int) -> str:
    """A number of bytes in binary units.

    >>> byte_text(1536), byte_text(64 << 20)
    ('1.5 KiB', '64 MiB')
    """
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if n >= size:
            return f"{n / size:.4g} {unit}"
    return f"{n} bytes"


def lines_drawing(title: str, lines: Sequence[str]) -> Drawing:
    """Lines of fixed width, under a quiet title where there is one."""
    room, top = WIDTH - 2 * MARGIN, 18 if title else 0
    shapes = [svg.dim(0, 11, title, size=11.5)] if title else []
    for i, line in enumerate(lines):
        text = clipped(line, room, 10.5, mono=True)
        shapes.append(svg.words(0, top + 11 + 16 * i, text, size=10.5, mono=True))
    return Drawing(shapes, room, top + 16 * len(lines))


def stacked(drawings: Sequence[Drawing], gap: float = 14) -> tuple[list[str], float]:
    """Drawings one under the other inside the margin, and the height of the picture."""
    shapes, y = [], float(MARGIN)
    for d in drawings:
        shapes.append(moved(d, MARGIN, y))
        y += d.height + gap
    return shapes, y - gap + MARGIN


def note(text: str) -> Drawing:
    return Drawing([svg.dim(0, 11, text)], svg.wide(text), 14)


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
        shapes.append(svg.rect(x, y, 13, 13, f'fill="none" rx="2" {svg.themed("soft")} stroke-width="0.5"'))
        shapes.append(svg.words(x + 19, y + 10.5, clipped(text, wide - 22, 11)))
    return Drawing(shapes, room, -(-len(entries) // across) * 18.0)
