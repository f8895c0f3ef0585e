"""Programs drawn: how many bytes each rank holds in buffers in each round."""

from __future__ import annotations

from typing import NamedTuple

from ..plans import Program
from . import _svg as svg
from ._drawing import WIDTH, Drawing, byte_text, heading, heat, many, moved, stacked, swatches
from ._grid import rank_groups
from ._legend import rank_word
from ._picture import Picture
from ._show import show

MOST_RANKS, MOST_ROUNDS, MOST_LINES = 24, 40, 16
BAR = 46.0  # the longest bar, in pixels


class Staging(NamedTuple):
    """The most buffer bytes of any rank of a group (rows) in any round of a group (columns)."""

    ranks: tuple[tuple[int, ...], ...]
    rounds: tuple[tuple[int, ...], ...]
    bytes: list[list[int]]

    @classmethod
    def of(cls, program: Program) -> Staging:
        plans = program.plan.plans.values()
        named = {p.global_source(r) for p in plans for r in p.source.ranks}
        named |= {p.global_target(r) for p in plans for r in p.target.ranks}
        ranks = rank_groups(sorted(named), MOST_RANKS)
        rounds = rank_groups(range(len(program.rounds)), MOST_ROUNDS)
        row = {r: i for i, g in enumerate(ranks) for r in g}
        held = [[0] * len(rounds) for _ in ranks]
        for j, g in enumerate(rounds):
            for k in g:
                for rank, n in program.rounds[k].staging.items():
                    held[row[rank]][j] = max(held[row[rank]][j], n)
        return cls(ranks, rounds, held)


@show.register(Program)
def _show_program(program: Program) -> Picture:
    """Rounds across, ranks down, and the bytes each holds in send and receive buffers."""
    title = f"program: {many(len(program.rounds), 'round')}, {_wire(program)}"
    said = _said(program)
    staging = Staging.of(program)
    text = [title, *("  " + line for line in said), "", *_round_lines(program)]
    parts = [heading(title, *said)]
    parts += [_drawing(program, staging)] if program.rounds else []
    shapes, height = stacked(parts)
    return Picture(svg.document(WIDTH, height, shapes, title=title, about="; ".join(said)), "\n".join(text))


def _wire(program: Program) -> str:
    return f"{byte_text(program.wire_bytes)} between ranks"


def _said(program: Program) -> list[str]:
    """What the program promises, in words."""
    said = []
    if program.lower_bound is not None:
        same = program.lower_bound == program.wire_bytes
        said.append(
            "no program could send less"
            if same
            else f"the least possible is {byte_text(program.lower_bound)}"
        )
    bound = "no bound" if program.max_bytes is None else f"bound {byte_text(program.max_bytes)}"
    said.append(f"at most {byte_text(program.peak_staging)} in the buffers of a rank ({bound})")
    said += ["counted at 8 bytes an element until dtypes are known"] if program.dtypes is None else []
    return said


def _round_lines(program: Program) -> list[str]:
    lines = []
    for k, r in enumerate(program.rounds[:MOST_LINES]):
        size, peak = sum(m.size for m in r.messages), max(r.staging.values(), default=0)
        count = many(len(r.messages), "message")
        lines.append(f"  round {k}: {count}, {byte_text(size)}, buffers up to {byte_text(peak)}")
    left = len(program.rounds) - MOST_LINES
    return lines + ([f"  ... {left} more rounds"] if left > 0 else []) or ["  nothing moves between ranks"]


def _drawing(program: Program, staging: Staging) -> Drawing:
    """The grid of buffer bytes with the totals of each round above it."""
    most = max(program.max_bytes or 0, program.peak_staging)
    sides = [rank_word(g) for g in staging.ranks]
    left = max(map(svg.wide, sides), default=0) + 8
    w = min(54.0, (WIDTH - 60 - left) / len(staging.rounds))
    h, top = (20 if len(sides) <= 12 else 13), 92.0
    shapes = [svg.dim(0, 11, _caption(staging), size=11.5)]
    totals = [max(sum(m.size for m in program.rounds[k].messages) for k in g) for g in staging.rounds]
    free = 0.0
    for j, (g, total) in enumerate(zip(staging.rounds, totals)):
        x = left + j * w
        words = f"round {g[0]}" if len(g) == 1 else f"rounds {g[0]}-{g[-1]}"
        shapes += _bar(total, max(*totals, 1), x, top - 16, w, words)
        if x >= free:
            shapes.append(svg.dim(x + w / 2, top - 4, str(g[0]), size=10, anchor="middle"))
            free = x + svg.wide(str(g[0]), 10) + 4
        shapes += [_cell(staging, i, j, most, x, top + i * h, w, h, words) for i in range(len(sides))]
    for i, side in enumerate(sides):
        shapes.append(svg.words(left - 6, top + (i + 0.5) * h + 3.8, side, size=10.5, anchor="end"))
    right, bottom = left + w * len(staging.rounds), top + h * len(sides)
    shapes.append(svg.rect(left, top, right - left, bottom - top, f'fill="none" {svg.themed("line")}'))
    named = "max_bytes" if program.max_bytes == most else "the peak"
    legend = swatches(
        [
            (f'fill="{svg.HUES[0]}"', "bytes sent in the round"),
            (heat(0, 1)[0], "buffers nearly empty"),
            (heat(1, 1)[0], f"buffers at {named}, {byte_text(most)}"),
        ]
    )
    shapes.append(moved(legend, 0, bottom + 12))
    return Drawing(shapes, right, bottom + 12 + legend.height)


def _bar(total: int, longest: int, x: float, y: float, w: float, words: str) -> list[str]:
    """The bytes of a round as a bar that stands on ``y``, with their number where it fits."""
    bar = BAR * total / longest
    look = f'fill="{svg.HUES[0]}"'
    shapes = [svg.rect(x + 1, y - bar, w - 2, bar, look, tip=f"{words}: {total} bytes")]
    if svg.wide(_few(total), 9.5) <= w - 2:
        shapes.append(svg.dim(x + w / 2, y - 3 - bar, _few(total), size=9.5, anchor="middle"))
    return shapes


def _few(n: int) -> str:
    """A number of bytes in few characters: ``512``, ``1.5K``."""
    return byte_text(n).replace(" bytes", "").replace("iB", "").replace(" ", "")


def _caption(staging: Staging) -> str:
    together = (
        "" if all(len(g) == 1 for g in (*staging.ranks, *staging.rounds)) else "; the most of each group"
    )
    return f"bytes in buffers, ranks down, rounds across{together}"


def _cell(
    staging: Staging, i: int, j: int, most: int, x: float, y: float, w: float, h: float, words: str
) -> str:
    n = staging.bytes[i][j]
    fill, ink = heat(n, most) if n else (svg.themed("void"), "")
    shape = svg.rect(x, y, w, h, fill, tip=f"{rank_word(staging.ranks[i])}, {words}: {n} bytes")
    shape += svg.rect(x, y, w, h, f'fill="none" {svg.themed("soft")} stroke-width="0.5"')
    text = _few(n)
    if not n or svg.wide(text, 9.5) > w - 2 or h < 14:
        return shape
    return shape + svg.words(x + w / 2, y + h / 2 + 3.4, text, ink, size=9.5, anchor="middle")
