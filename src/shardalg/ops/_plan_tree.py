"""One plan for a tree of layouts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import optree

from .._errors import InvalidMapError
from .._limits import Limits
from ..maps import AffineMap, Box, Space
from ..maps._map import inherit, rebox
from ..maps._reading import as_text, by_key
from ..maps._table import build, concatenate
from ..plans import Entry, TransferPlan, TreePlan
from ._compose import compose
from ._equivalent import equivalent
from ._plan import RanksLike, plan
from ._relabel import relabel
from ._select import SelectLike
from ._views import Join, Section, View


def plan_tree(
    sources: Any,
    targets: Any,
    *,
    views: Mapping[str, View] | None = None,
    tied: Mapping[str, str] | None = None,
    select: SelectLike = "stay",
    limits: Limits = Limits(),
    missing: str = "error",
    source_ranks: RanksLike = None,
    target_ranks: RanksLike = None,
    rank: int | None = None,
    holds: str = "parameters",
) -> TreePlan:
    """One plan for a tree of layouts (a dict by name; nested trees get dotted names).

    ``views[target]`` says how a target tensor is made of source tensors: a map from their
    logical space (boxes named like the tensors) to the target's, or ``join``/``section`` by names. A
    target without a view is the source of the same name. ``tied={"lm_head": "embed"}`` says that
    a target shares another target's storage: it is written once. Equal layout pairs are planned once. The
    other arguments are those of ``plan``.

    Raises ``InvalidMapError`` that lists the names present on one side only.

    Cost: a plan per distinct pair of layouts.

    >>> from shardalg import layout, Split, join
    >>> rows = lambda n: layout((n, 4), Split(0), ranks=2)
    >>> both = plan_tree({"q": rows(4), "k": rows(2)}, {"qk": layout((6, 4), Split(1), ranks=2)},
    ...                  views={"qk": join(["q", "k"])})
    >>> len(both)
    8
    """
    source, target = named_leaves(sources, "sources"), named_leaves(targets, "targets")
    views, tied = ({} if x is None else by_key(x, word) for x, word in ((views, "views"), (tied, "tied")))
    _check_names(source, target, views, tied)
    for alias, name in tied.items():
        _check_tied(target, alias, name)
    arguments: dict[str, Any] = {
        "select": select, "limits": limits, "missing": missing,
        "source_ranks": source_ranks, "target_ranks": target_ranks, "rank": rank, "holds": holds,
    }  # fmt: skip
    made: dict[Any, TransferPlan] = {}
    entries = []
    for name, layout in target.items():
        if name not in tied:
            entries.append(_entry(name, layout, source, views.get(name), made, arguments))
    limits.hold("copies", sum(len(e.plan) for e in entries))
    return TreePlan(tuple(entries), tuple(sorted(tied.items())))


def named_leaves(tree: Any, what: str) -> dict[str, AffineMap]:
    """The layouts of a tree by dotted path, in the tree's order."""
    if isinstance(tree, Mapping) and all(isinstance(v, AffineMap) for v in tree.values()):
        names, leaves = [str(k) for k in tree], list(tree.values())
    else:
        paths, leaves, _ = optree.tree_flatten_with_path(tree)
        names = [".".join(map(str, path)) for path in paths]
    named = dict(zip(names, leaves))
    if len(named) < len(names):
        twice = sorted({name for name in names if names.count(name) > 1})
        raise InvalidMapError(f"{what}: several tensors are called {twice[:8]}")
    for name, leaf in named.items():
        if not isinstance(leaf, AffineMap):
            raise InvalidMapError(f"{what}: {name!r} is a {type(leaf).__name__}, not a layout")
    return named


def _check_names(
    source: Mapping[str, AffineMap],
    target: Mapping[str, AffineMap],
    views: Mapping[str, View],
    tied: Mapping[str, str],
) -> None:
    """Names on one side only are an error that lists both sets."""
    for name in [*views, *tied, *tied.values()]:
        as_text(name, "a name in views= and tied=")
    unknown = sorted(set(views) - set(target)) + sorted((set(tied) | set(tied.values())) - set(target))
    if unknown:
        raise InvalidMapError(f"views= and tied= name targets that are not there: {unknown}")
    parts = {name: view_parts(view) for name, view in views.items() if name not in tied}
    used = {p for its in parts.values() for p in its}
    plain = {name for name in target if name not in views and name not in tied}
    no_source = sorted((plain | used) - set(source))
    no_target = sorted(set(source) - plain - used)
    if no_source or no_target:
        raise InvalidMapError(
            f"names on one side only: wanted but not among the sources {no_source};"
            f" among the sources but not wanted {no_target}; say with views= how targets are made of sources"
        )


def view_parts(view: View) -> tuple[str, ...]:
    """The names of the source tensors a view reads."""
    if isinstance(view, (Join, Section)):
        return view.parts
    if isinstance(view, AffineMap):
        return tuple(b.name for b in view.domain.boxes)
    raise InvalidMapError(f"a view is an AffineMap between logical spaces, join or section; got {view!r}")


def _check_tied(target: Mapping[str, AffineMap], alias: str, name: str) -> None:
    if not equivalent(target[alias], target[name]):
        raise InvalidMapError(
            f"tied targets {alias!r} and {name!r} have different layouts: they cannot share storage"
        )


def _entry(
    name: str,
    target: AffineMap,
    source: Mapping[str, AffineMap],
    view: View | None,
    made: dict[Any, TransferPlan],
    arguments: Mapping[str, Any],
) -> Entry:
    parts = (name,) if view is None else view_parts(view)
    layouts = tuple(source[p] for p in parts)
    through = None if view is None else _by_position(_resolved(view, parts, layouts), parts)
    key = (layouts, through, target)
    if key not in made:
        try:
            made[key] = plan(_source(layouts, through), target, **arguments)
        except InvalidMapError as error:
            raise InvalidMapError(f"{name!r}: {error}") from error
    return Entry(name, parts, made[key])


def _resolved(view: View, parts: Iterable[str], layouts: tuple[AffineMap, ...]) -> AffineMap:
    if isinstance(view, (Join, Section)):
        return view.resolve({p: m.logical_shape for p, m in zip(parts, layouts)})
    return view


def _by_position(view: AffineMap, parts: tuple[str, ...]) -> AffineMap:
    """The view with its source boxes named by position, so that alike views are equal."""
    names = {(None, p): (None, _position(k, len(parts))) for k, p in enumerate(parts)}
    return relabel(view, domain=names)


def _position(k: int, count: int) -> str:
    return str(k) if count > 1 else ""


def _source(layouts: tuple[AffineMap, ...], view: AffineMap | None) -> AffineMap:
    """The source as one layout of the target's logical tensor."""
    joined = layouts[0] if len(layouts) == 1 else side_by_side(layouts)
    if view is None:
        return joined
    if len(layouts) == 1 and joined.codomain != view.domain:
        raise InvalidMapError(f"the view starts from {view.domain}, the source lays out {joined.codomain}")
    return compose(view, joined)


def beside(b: Box, k: int) -> Box:
    """A box of the k-th of several layouts: the position goes before its name."""
    return Box(b.shape, b.rank, f"{k}.{b.name}" if b.name else str(k))


def side_by_side(layouts: tuple[AffineMap, ...]) -> AffineMap:
    """Layouts of several tensors as one, boxes named by position, and by their own names after it."""
    boxes = [[beside(b, k) for b in m.domain.boxes] for k, m in enumerate(layouts)]
    storage = Space(tuple(b for its in boxes for b in its))
    logical = Space.logical({str(k): m.logical_shape for k, m in enumerate(layouts)})
    tables = []
    for k, (m, its) in enumerate(zip(layouts, boxes)):
        dom = np.array([storage.index(*b.key) for b in its], np.int64)
        cod = np.array([logical.index(None, str(k))], np.int64)
        tables.append(build(rebox(m.table, dom, cod)))
    return inherit(AffineMap(storage, logical, concatenate(tables)), *layouts)
