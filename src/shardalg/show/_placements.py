"""Expert placements drawn, and differences in words."""

from __future__ import annotations

from collections import Counter

from .._errors import UnsupportedError
from ..ops import Difference
from ..placements import Experts, Placement
from . import _svg as svg
from ._drawing import MARGIN, WIDTH, Drawing, heading, many, moved, note, stacked, swatches
from ._legend import unshown
from ._picture import Picture
from ._show import show

MOST_RANKS, MOST_POSITIONS = 32, 24
PAIRS = (("same", 2), ("moved", 1), ("missing", 5), ("extra", 6))  # counts of a difference, colours


@show.register(Placement)
def _show_placement(placement: Placement) -> Picture:
    raise UnsupportedError(
        f"{placement!r} has no shape yet, so there is nothing to draw:"
        " show(layout(shape, placement, ranks=...)) draws what it does to a tensor"
    )


@show.register(Experts)
def _show_experts(placement: Experts) -> Picture:
    """One row per rank: the experts it holds in packed order, those on several ranks hatched."""
    counts = Counter(e for _, ids in placement.by_rank for e in ids)
    copies = sum(n > 1 for n in counts.values())
    title = f"{many(len(counts), 'expert')} on {many(len(placement.by_rank), 'rank')}"
    said = (
        f"packed order left to right; {copies} held by several ranks (*)"
        if copies
        else "packed order left to right"
    )
    shown = placement.by_rank[:MOST_RANKS]
    width = max((len(f"rank {rank}") for rank, _ in shown), default=0)
    lines = [f"  {f'rank {rank}'.ljust(width)}  {_ids_text(ids, counts)}" for rank, ids in shown]
    more = unshown(len(placement.by_rank), MOST_RANKS, "ranks")
    parts = [heading(title, said), _rows(shown, counts), *map(note, more), _legend(copies)]
    shapes, height = stacked(parts)
    shapes.insert(0, svg.definitions([8, 9], []))
    text = "\n".join([f"{title}, {said}", *lines, *more])
    return Picture(svg.document(WIDTH, height, shapes, title=title, about=said), text)


def _ids_text(ids: tuple[int, ...], counts: Counter[int]) -> str:
    said = [f"{e}{'*' if counts[e] > 1 else ''}" for e in ids[:MOST_POSITIONS]]
    return (" ".join(said) or "none") + (
        f" ... {len(ids) - MOST_POSITIONS} more" if len(ids) > MOST_POSITIONS else ""
    )


def _rows(shown: tuple[tuple[int, tuple[int, ...]], ...], counts: Counter[int]) -> Drawing:
    heads = [f"rank {rank}" for rank, _ in shown]
    left = max((svg.wide(h, 10.5) for h in heads), default=0) + 8
    digits = max((len(str(e)) for _, ids in shown for e in ids), default=1)
    w = max(22.0, svg.wide("0" * digits, 10) + 6)
    most = min(MOST_POSITIONS, int((WIDTH - 2 * MARGIN - left - 70) / w))
    shapes = []
    for i, (head, (_, ids)) in enumerate(zip(heads, shown)):
        y = i * 22.0
        shapes.append(svg.words(0, y + 13, head, size=10.5))
        cells = [_expert(e, counts[e] > 1, j * w, w) for j, e in enumerate(ids[:most])]
        if not ids:
            cells = [svg.dim(0, 13, "none", size=10.5)]
        if len(ids) > most:
            cells.append(svg.dim(most * w + 6, 13, f"... {len(ids) - most} more", size=10.5))
        shapes.append(moved(Drawing(cells, 0, 0), left, y))
    return Drawing(shapes, WIDTH, 22.0 * len(heads))


def _expert(e: int, replicated: bool, x: float, w: float) -> str:
    k = 9 if replicated else 0
    box = svg.rect(x, 0, w, 18, f'fill="{svg.swatch(k)}" stroke="#111111" stroke-opacity="0.35"')
    return box + svg.words(x + w / 2, 12.8, str(e), svg.on(k), size=10, anchor="middle")


def _legend(copies: int) -> Drawing:
    entries = [(f'fill="{svg.swatch(0)}"', "on one rank")]
    return swatches(entries + ([(f'fill="{svg.swatch(9)}"', "on several ranks")] if copies else []))


@show.register(Difference)
def _show_difference(difference: Difference) -> Picture:
    """The counts of a difference as one bar, and its reason."""
    counts = [(name, getattr(difference, name), k) for name, k in PAIRS]
    title = "the two maps are equal" if difference else "the two maps differ"
    total = sum(n for _, n, _ in counts)
    bar: list[str] = []
    x, room = 0.0, float(WIDTH - 2 * MARGIN)
    for name, n, k in counts:
        w = room * n / total if total else 0.0
        bar += [svg.rect(x, 0, w, 22, f'fill="{svg.swatch(k)}"', tip=f"{n} {name}")] if n else []
        if svg.wide(f"{n} {name}") + 4 < w:
            bar.append(svg.words(x + w / 2, 15, f"{n} {name}", svg.on(k), anchor="middle"))
        x += w
    parts = [heading(title, difference.reason)]
    if total:
        legend = swatches([(f'fill="{svg.swatch(k)}"', f"{many(n, 'pair')} {name}") for name, n, k in counts])
        parts += [Drawing(bar, room, 24), legend]
    shapes, height = stacked(parts)
    document = svg.document(WIDTH, height, shapes, title=title, about=str(difference))
    return Picture(document, f"{title}: {difference}")
