"""A small engine's way to cut its weights: what somebody has before they meet shardalg.

Nothing here knows of shardalg. The functions do what such loaders do: slice, reorder, pad.
"""

from __future__ import annotations

import torch

HEADS, KV_HEADS, HEAD = 8, 2, 4
QUERY, KEY = HEADS * HEAD, KV_HEADS * HEAD


def load_qkv(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of the fused projection: its query heads, then its key head, then its value head.

    With more ranks than key/value heads, neighbours hold the same one.
    """
    q, k, v = full.split([QUERY, KEY, KEY])
    mine = rank * KV_HEADS // ranks
    rows = slice(mine * HEAD, (mine + 1) * HEAD)
    return torch.cat([q.chunk(ranks)[rank], k[rows], v[rows]])


def load_vocabulary(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """A rank's rows of the embedding, the last ones padded with zeros to equal heights."""
    height = -(-full.shape[0] // ranks)
    rows = full[rank * height : (rank + 1) * height]
    return torch.cat([rows, rows.new_zeros(height - rows.shape[0], *full.shape[1:])])


def load_vocabulary_wrongly(full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """The same with a height that is rounded down: the last rows are lost."""
    height = full.shape[0] // ranks
    return full[rank * height : (rank + 1) * height]
