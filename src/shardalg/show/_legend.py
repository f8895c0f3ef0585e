"""What the owners in a picture are called and how they are coloured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ..maps import AffineMap
from ..maps._relation import exact_sizes
from ._grid import MIXED, Grid, Holders

Groups = tuple[tuple[int, ...], ...]


class Legend(NamedTuple):
    """Colours and letters of everything that occurs in the grids of one picture."""

    colour: Mapping[tuple[int, ...], int]  # group of ranks -> colour
    letters: Mapping[Groups, str]  # several groups -> letter
    elements: Mapping[int, int]  # rank -> elements held

    @classmethod
    def of(cls, m: AffineMap, grids: Sequence[Grid]) -> Legend:
        found = sorted({g.groups[k] for g in grids for h in g.classes if h != MIXED for k in h})
        many = {named(g, h) for g in grids for h in g.classes if h != MIXED and len(h) > 1}
        ordered = sorted(many, key=lambda h: (len(h), h))
        letters = {h: _letter(i) for i, h in enumerate(ordered)}
        sizes = dict.fromkeys(m.ranks, 0)
        ranks = m.domain.box_ranks[m.table.columns.dom_box].tolist()
        for rank, size in zip(ranks, exact_sizes(m.table.shape)):
            sizes[rank] += size
        each = {ranks: k for k, ranks in enumerate(found)}
        return cls(each, letters, sizes)

    def groups(self) -> list[tuple[tuple[int, ...], int]]:
        return list(self.colour.items())


def _letter(i: int) -> str:
    return chr(ord("A") + i) if i < 26 else f"A{i}"


def named(grid: Grid, holders: Holders) -> Groups:
    return tuple(grid.groups[k] for k in holders)


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks in few characters: ``3``, ``0-127``, ``0,2,5``."""
    runs: list[list[int]] = []
    for r in ranks:
        if runs and r == runs[-1][1] + 1:
            runs[-1][1] = r
        else:
            runs.append([r, r])
    said = [f"{a}" if a == b else f"{a}{',' if b == a + 1 else '-'}{b}" for a, b in runs]
    return ",".join(said) if len(said) <= 6 else ",".join(said[:5]) + f",... ({len(ranks)})"


def together(groups: Groups) -> tuple[int, ...]:
    return tuple(sorted(r for ranks in groups for r in ranks))


def rank_word(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def unshown(count: int, most: int, what: str) -> list[str]:
    return [f"... and {count - most} more {what}"] if count > most else []


def counted(m: AffineMap, ranks: Sequence[int], legend: Legend) -> str:
    if len(m.codomain) > 1:
        return ""
    count = sum(legend.elements.get(r, 0) for r in ranks)
    return f", {count} element{'s' * (count != 1)}"


def colours(groups: Groups, legend: Legend) -> tuple[int, ...]:
    """The colour of each group."""
    return tuple(legend.colour[ranks] for ranks in groups)
