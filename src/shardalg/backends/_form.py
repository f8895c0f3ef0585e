"""What the caller may give besides the tensors this process needs: nothing that the plan does not know."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from .._errors import InvalidMapError
from ..plans import Program
from ._context import Context


class Known(NamedTuple):
    """One tensor of one side: the ranks of its layout, those that this process holds, and the tensor names
    within a shard of each rank (none where a shard is one tensor)."""

    ranks: frozenset[int]
    held: frozenset[int]
    names: dict[int, frozenset[str]]


class Form(NamedTuple):
    """One side of a program: its tensors by name, and further names for some."""

    what: str
    single: bool
    tensors: dict[str, Known]
    tied: tuple[tuple[str, str], ...]


def form_of(ctx: Context, program: Program, what: str) -> Form:
    """What ``shards`` or ``out`` of a program may look like."""
    boxes: dict[str, list[tuple[int, bool, str]]] = {}
    held = set(ctx.ranks)
    for e in program.plan.entries:
        p = e.plan
        side, to = (p.source, p.global_source) if what == "shards" else (p.target, p.global_target)
        for name in e.sources if what == "shards" else (e.target,):
            boxes.setdefault(name, [])
        for b in side.domain.boxes:
            if b.rank is not None:
                name, inner = (e.target, b.name)
                if what == "shards":
                    name, inner = e.source_name(b.name), e.inner_name(b.name)
                boxes[name].append((b.rank, to(b.rank) in held, inner))
    tied = program.plan.tied if what == "out" else ()
    tensors = {name: _known(its) for name, its in boxes.items()}
    return Form(what, program.single, tensors | {alias: tensors[name] for alias, name in tied}, tied)


def _known(boxes: list[tuple[int, bool, str]]) -> Known:
    names: dict[int, set[str]] = {}
    for rank, _, name in boxes:
        names.setdefault(rank, set()).add(name)
    return Known(
        frozenset(rank for rank, _, _ in boxes),
        frozenset(rank for rank, held, _ in boxes if held),
        {rank: frozenset(its) for rank, its in names.items() if its != {""}},
    )


def check_form(form: Form, given: Any) -> None:
    """Raise where ``given`` has a tensor, a rank or a name that the plan does not know, or a bare tensor
    where that could mean several ranks or none. What other processes hold may be there; what this one
    holds is there. Sizes and keys only."""
    if form.single:
        _check(form.what, form.tensors[""], given)
        return
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise InvalidMapError(f"{form.what} must be a dict of tensors by name, got {type(given).__name__}")
    if not given.keys() <= form.tensors.keys():
        raise _strangers(form.what, "tensors", given, form.tensors, "the plan knows")
    for name, its in given.items():
        known = form.tensors[name]
        if type(its) is not dict or len(its) != len(known.held) or known.names:  # else it is what was found
            _check(form.what, known, its, name)
    for alias, name in form.tied:
        if alias in given and not _same(given[alias], given.get(name)):
            raise InvalidMapError(
                f"{form.what}[{alias!r}] is tied to {name!r}: give the same tensors for both, or leave it out"
            )


def _check(what: str, known: Known, given: Any, name: str = "") -> None:
    if isinstance(given, dict) or isinstance(given, Mapping):  # noqa: SIM101 -- the first is quick
        if not given.keys() <= known.ranks:
            raise _strangers(place(what, name), "shards of ranks", given, known.ranks, "the layout has")
        for rank in given.keys() & known.names.keys() if known.names else ():
            its = given[rank]
            if isinstance(its, Mapping) and not its.keys() <= known.names[rank]:
                where = f"{place(what, name)}[{rank}]"
                raise _strangers(where, "tensors", its, known.names[rank], "the layout has")
    elif given is not None and len(known.held) != 1:
        raise InvalidMapError(
            f"{place(what, name)} is a {type(given).__name__}, which stands for the shard of one rank, and"
            f" this process holds {_few(known.held) if known.held else 'none'} of its ranks"
            f" {_few(known.ranks)}: give {{rank: tensor}}"
        )


def place(what: str, name: str) -> str:
    """Where a tensor is in what the caller gives; a program of one tensor has no name for it."""
    return f"{what}[{name!r}]" if name else what


def _strangers(
    where: str, kind: str, given: Mapping[Any, Any], known: Collection[Any], who: str
) -> InvalidMapError:
    strange = [key for key in given if key not in known]
    return InvalidMapError(f"{where} has {kind} {_few(strange)}; {who} {_few(known)}")


def _few(keys: Collection[Any]) -> str:
    """Some of them in words, in order."""
    words = sorted(keys, key=lambda k: (0, k, "") if isinstance(k, int) else (1, 0, str(k)))
    return f"[{', '.join(map(repr, words[:8]))}{', ...' if len(words) > 8 else ''}]"


def _same(a: Any, b: Any) -> bool:
    """Whether two trees hold the very same tensors."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
        return a is b
    return a is b or (a.data_ptr(), a.shape, a.stride()) == (b.data_ptr(), b.shape, b.stride())
