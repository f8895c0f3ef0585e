"""MoE plans and their reports drawn: the load of each rank before and after balancing."""

from __future__ import annotations

from ..show import Picture, show
from ..show import _svg as svg
from ..show._drawing import WIDTH, Drawing, count_text, heading, lines_drawing, many, moved, stacked, swatches
from ..show._grid import rank_groups
from ..show._legend import rank_word, ranks_text, unshown
from ..show._mime import draws_itself
from ._plan import CommPlan
from ._report import Report, Row, report

MOST_RANKS = 32
BARS = 40  # characters of the longest bar of the text
MOST_COPIED = 8  # ranks whose copied experts are listed


@show.register(CommPlan)
def _show_plan(plan: CommPlan) -> Picture:
    """The report of one rank's plan."""
    return show(report(plan))


@show.register(Report)
def _show_report(r: Report) -> Picture:
    """Two bars per rank: the routes its experts were given, and those it computes."""
    groups = rank_groups(range(len(r.loads_before)), MOST_RANKS)
    before, after = (_largest(loads, groups) for loads in (r.loads_before, r.loads_after))
    title = (
        f"loads of {many(len(r.loads_before), 'rank')}:"
        f" max/mean {r.imbalance_before:.3f} -> {r.imbalance_after:.3f}"
    )
    caption = "tokens per rank as routed and as computed"
    caption += f"; the largest of each {len(groups[0])} ranks" if len(groups[0]) > 1 else ""
    words = [rank_word(g) for g in groups]
    said, copied = str(r).splitlines(), _copied_lines(r)
    parts = [heading(title, caption), _bars(words, before, after), lines_drawing("", said)]
    parts += [lines_drawing("experts copied", copied)] if copied else []
    shapes, height = stacked(parts)
    lists = ["", "experts copied:", *("  " + line for line in copied)] if copied else []
    text = "\n".join([title, caption, *_text_bars(words, before, after), "", *said, *lists])
    return Picture(svg.document(WIDTH, height, shapes, title=title, about=caption), text)


def _copied_lines(r: Report) -> list[str]:
    """The experts that each rank gets a copy of."""
    lines = [f"to rank {rank}: {ranks_text(experts)}" for rank, experts in enumerate(r.copied) if experts]
    return [*lines[:MOST_COPIED], *unshown(len(lines), MOST_COPIED, "ranks")]


def _largest(loads: Row, groups: tuple[tuple[int, ...], ...]) -> list[int]:
    return [max(loads[r] for r in g) for g in groups]


def _text_bars(words: list[str], before: list[int], after: list[int]) -> list[str]:
    most, width = max(*before, *after, 1), max(map(len, words))
    lines = []
    for word, a, b in zip(words, before, after):
        lines.append(f"  {word.ljust(width)}  routed   {'-' * round(BARS * a / most)} {a}")
        lines.append(f"  {' ' * width}  computed {'=' * round(BARS * b / most)} {b}")
    return lines


def _bars(words: list[str], before: list[int], after: list[int]) -> Drawing:
    """Routed over computed for each rank, with the mean as a line."""
    most, left = max(*before, *after, 1), max(map(svg.wide, words)) + 8
    room = WIDTH - 120 - left
    shapes = []
    for i, (word, a, b) in enumerate(zip(words, before, after)):
        y = i * 26.0
        shapes.append(svg.words(left - 6, y + 14, word, size=10.5, anchor="end"))
        for k, n, at in ((1, a, y), (4, b, y + 11)):
            shapes.append(
                svg.rect(left, at, room * n / most, 10, f'fill="{svg.HUES[k]}"', tip=f"{word}: {n}")
            )
            shapes.append(svg.dim(left + room * n / most + 4, at + 8.5, count_text(n), size=9))
    x, bottom = left + room * sum(after) / len(after) / most, 26.0 * len(words)
    line = f"M{svg.number(x)} -3V{svg.number(bottom)}"
    shapes.append(svg.path(line, f'{svg.themed("line")} stroke-dasharray="3 3"'))
    legend = swatches(
        [(f'fill="{svg.HUES[1]}"', "as routed"), (f'fill="{svg.HUES[4]}"', "as computed (dashed: mean)")]
    )
    return Drawing([*shapes, moved(legend, 0, bottom + 8)], WIDTH, bottom + 8 + legend.height)


draws_itself(CommPlan)
draws_itself(Report)
