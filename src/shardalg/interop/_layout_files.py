"""Layout files: TOML that says by name pattern how the tensors of a checkpoint are placed.

    format = 1
    default = "Replicate"              # without it, a tensor that no pattern matches is an error

    [units]
    head = 64                          # words for Split's unit=

    [[join]]                           # stored as one tensor; * in all patterns is the same text
    name = "*.attn.qkv.weight"
    parts = ["*.attn.q.weight", "*.attn.k.weight", "*.attn.v.weight"]

    [[tensor]]                         # the first match wins
    name = ["*.attn.qkv.weight", "*.attn.qkv.bias"]
    placement = { kind = "Segments", axis = 0, each = { kind = "Split", axis = 0, unit = "head" } }

A placement is the name of a placement, or a table of its name and fields as in Python; a scale is written
``"1/3"``. ``Segments`` takes ``segments = [{ size = 32, placement = ... }]``, or ``each`` with ``sizes``,
with ``equal = 3`` equal ones, or with neither for the parts of a joined tensor. With
``mesh = { dp = 2, tp = 2 }`` (and ``order``) placements are lists.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import InvalidMapError
from .._struct import struct
from ..maps import AffineMap
from ..maps._space import Shape
from ..ops import join, layout
from ..placements import Replicate
from ._arrangements import Logical, Stored
from ._nearest import nearest
from ._placement_tables import Table, build_placement, frozen, require_keys

FORMAT = 1
DEEPEST = 32  # tables and lists within each other; placements need about six


@struct
class Rule:
    """Names (patterns) and the placement of the tensors they match, as written."""

    patterns: tuple[str, ...]
    placement: Any


@struct
class JoinRule:
    """Patterns of logical tensors that are stored as one."""

    name: str
    parts: tuple[str, ...]
    options: Table = ()


@struct
class LayoutFile:
    """What a layout file says, before it meets a checkpoint."""

    source: str
    rules: tuple[Rule, ...]
    joins: tuple[JoinRule, ...] = ()
    default: Any = None
    units: tuple[tuple[str, int], ...] = ()
    mesh: Table = ()
    order: tuple[str, ...] = ()
    optional: bool = False


# --- reading ------------------------------------------------------------------------------


def shipped() -> tuple[str, ...]:
    """The names of the layout files that come with the library."""
    folder = resources.files("shardalg.interop").joinpath("layouts")
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def read_layout_file(name: str) -> LayoutFile:
    """The layout file at a path, or one that ships with the library by its name.

    >>> read_layout_file("transformer-tp").optional
    True
    """
    if Path(name).is_file():
        try:
            text = Path(name).read_text("utf-8")
        except UnicodeDecodeError as error:
            raise InvalidMapError(f"{name}: not TOML: {error}") from None
        return parse_layout_file(text, name)
    if name in shipped():
        text = resources.files("shardalg.interop").joinpath("layouts", f"{name}.toml").read_text()
        return parse_layout_file(text, name)
    raise InvalidMapError(f"no layout file {name!r}: give the path of one, or one of {', '.join(shipped())}")


def parse_layout_file(text: str, source: str) -> LayoutFile:
    """The value of a layout file's text; ``source`` names it in errors."""
    try:
        data = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits, too
        raise InvalidMapError(f"{source}: not TOML: {error}") from None
    _require_shallow(data, source)
    known = ("format", "default", "units", "mesh", "order", "optional", "tensor", "join")
    require_keys(data, known, ("format",), source)
    if data["format"] != FORMAT:
        raise InvalidMapError(f"{source}: format {data['format']!r}; this release reads format {FORMAT}")
    rules = [_rule(source, k, table) for k, table in enumerate(_tables(data, "tensor", source))]
    joins = [_join_rule(source, k, table) for k, table in enumerate(_tables(data, "join", source))]
    if not rules and "default" not in data:
        raise InvalidMapError(f"{source}: places nothing: it has no [[tensor]] and no default")
    return LayoutFile(
        source, tuple(rules), tuple(joins), frozen(_default(data, source)), _sizes(data, "units", source),
        _sizes(data, "mesh", source), _order(data, source), _optional(data, source),
    )  # fmt: skip


def _require_shallow(data: Mapping[str, Any], source: str) -> None:
    """Raise for data nested so deep that what walks it would run out of stack."""
    level: list[Any] = [data]
    for _ in range(DEEPEST):
        within = [v for x in level for v in (x.values() if isinstance(x, Mapping) else x)]
        level = [v for v in within if isinstance(v, (dict, list))]
    if level:
        raise InvalidMapError(f"{source}: tables and lists are nested more than {DEEPEST} deep")


def _default(data: Mapping[str, Any], source: str) -> Any:
    default = data.get("default")
    if default is not None and not isinstance(default, (str, dict, list)):
        raise InvalidMapError(
            f"{source}: default is the name of a placement, a table or a list, got {default!r}"
        )
    return default


def _sizes(data: Mapping[str, Any], key: str, source: str) -> Table:
    """A table of words and sizes of at least 1."""
    table = data.get(key, {})
    if not isinstance(table, dict) or not all(type(n) is int and n > 0 for n in table.values()):
        raise InvalidMapError(
            f"{source}: {key} is a table of names and sizes of at least 1, as in {key} = {{ a = 2 }},"
            f" got {table!r}"
        )
    return tuple(sorted(table.items()))


def _order(data: Mapping[str, Any], source: str) -> tuple[str, ...]:
    order = data.get("order", [])
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order):
        raise InvalidMapError(f"{source}: order is a list of the names of mesh axes, got {order!r}")
    return tuple(order)


def _optional(data: Mapping[str, Any], source: str) -> bool:
    optional = data.get("optional", False)
    if not isinstance(optional, bool):
        raise InvalidMapError(f"{source}: optional is true or false, got {optional!r}")
    return optional


def _tables(data: Mapping[str, Any], key: str, source: str) -> list[Mapping[str, Any]]:
    tables = data.get(key, [])
    if not isinstance(tables, list) or not all(isinstance(t, dict) for t in tables):
        raise InvalidMapError(f"{source}: write each {key} under its own [[{key}]]")
    return tables


def _rule(source: str, k: int, table: Mapping[str, Any]) -> Rule:
    where = f"{source}: [[tensor]] {k + 1}"
    require_keys(table, ("name", "placement"), ("name", "placement"), where)
    return Rule(_patterns(table["name"], where), frozen(table["placement"]))


def _join_rule(source: str, k: int, table: Mapping[str, Any]) -> JoinRule:
    where = f"{source}: [[join]] {k + 1}"
    options = ("axis", "stack", "interleave")
    require_keys(table, ("name", "parts", *options), ("name", "parts"), where)
    names, parts = _patterns(table["name"], where), _patterns(table["parts"], where)
    if len(names) > 1:
        raise InvalidMapError(f"{where}: a join has one name, got {len(names)}: {list(names)}")
    (name,) = names
    stars = [p.count("*") for p in (name, *parts)]
    if len(set(stars)) > 1:
        raise InvalidMapError(f"{where}: name and parts have {stars} stars; each must have the same number")
    return JoinRule(name, parts, frozen({k: v for k, v in table.items() if k in options}))


def _patterns(value: Any, where: str) -> tuple[str, ...]:
    names = value if isinstance(value, list) else [value]
    if not names or not all(isinstance(n, str) and n for n in names):
        raise InvalidMapError(f"{where}: expected one or more name patterns, got {value!r}")
    return tuple(names)


# --- meeting a checkpoint -----------------------------------------------------------------


def arrange(
    file: LayoutFile, tensors: Mapping[str, Logical], ranks: int, units: Mapping[str, int] | None = None
) -> dict[str, Stored]:
    """How a checkpoint's tensors are stored on ``ranks`` ranks according to a layout file.

    Every tensor is stored exactly once, by the first rule that matches. ``units`` override the file's own.
    Raises ``InvalidMapError`` for a tensor that nothing matches, a pattern that matches nothing (in an
    ``optional`` file only where none of them matches), and a placement that cannot apply.
    """
    joined = _join_all(file, tensors)
    used = {part for j in joined.values() for part in j.parts}
    shapes: dict[str, Shape] = {n: t.shape for n, t in tensors.items() if n not in used}
    shapes |= {name: j.map.codomain.boxes[0].shape for name, j in joined.items()}
    _require_matches(file, shapes)
    if not joined:
        _require_some(file, shapes)
    words = dict(file.units) | dict(units or {})
    made: dict[Any, AffineMap] = {}
    return {
        name: _stored(file, name, shapes[name], tensors, joined.get(name), ranks, words, made)
        for name in sorted(shapes)
    }


class Joined(NamedTuple):
    """The names of the parts, in order, and the map from them to the joined tensor."""

    parts: tuple[str, ...]
    map: AffineMap


def _join_all(file: LayoutFile, tensors: Mapping[str, Logical]) -> dict[str, Joined]:
    """The joined tensors by name."""
    made: dict[str, Joined] = {}
    owner: dict[str, str] = {}
    for rule in file.joins:
        found = [m for m in (match(rule.parts[0], name) for name in tensors) if m is not None]
        if not found and not file.optional:
            raise InvalidMapError(f"{file.source}: {_nothing(rule.parts[0], tensors)}")
        for stars in found:
            name, parts = filled(rule.name, stars), [filled(p, stars) for p in rule.parts]
            if name in made or (name in tensors and name not in parts):
                raise InvalidMapError(f"{file.source}: the join {name!r} has the name of another tensor")
            for part in parts:
                if part in owner:
                    raise InvalidMapError(
                        f"{file.source}: {part!r} is joined in {owner[part]!r} and in {name!r}"
                    )
                owner[part] = name
            made[name] = Joined(tuple(parts), _join(file, name, parts, tensors, rule))
    return made


def _join(
    file: LayoutFile, name: str, parts: Sequence[str], tensors: Mapping[str, Logical], rule: JoinRule
) -> AffineMap:
    missing = [p for p in parts if p not in tensors]
    if missing:
        raise InvalidMapError(
            f"{file.source}: the join {name!r} needs {missing[0]!r}, {nearest(missing[0], tensors)}"
        )
    dtypes = {p: tensors[p].dtype for p in parts}
    if len(set(dtypes.values())) > 1:
        raise InvalidMapError(f"{file.source}: the join {name!r} has parts of different dtypes: {dtypes}")
    try:
        made: AffineMap = join({p: tensors[p].shape for p in parts}, **dict(rule.options))
    except InvalidMapError as error:
        raise InvalidMapError(f"{file.source}: the join {name!r}: {error}") from error
    return made


def _require_matches(file: LayoutFile, names: Iterable[str]) -> None:
    """Raise for a pattern that matches no tensor, and for a tensor that no pattern matches."""
    names = list(names)
    for rule in file.rules:
        for pattern in rule.patterns:
            if not file.optional and all(match(pattern, n) is None for n in names):
                raise InvalidMapError(f"{file.source}: {_nothing(pattern, names)}")
    if file.default is None:
        lost = [n for n in names if _placement_of(file, n) is None]
        if lost:
            raise InvalidMapError(
                f"{file.source}: no pattern matches {len(lost)} of {len(names)} tensors,"
                f" the first is {lost[0]!r};"
                ' add a [[tensor]] for it, or default = "Replicate"'
            )


def _require_some(file: LayoutFile, names: Iterable[str]) -> None:
    """Raise where all would go by the default of a file that has patterns: it is for other names."""
    met = matches(file, names)
    if file.rules and met.stored and len(met.defaulted) == met.stored:
        raise InvalidMapError(
            f"{file.source}: 0 of {met.stored} tensors match one of its patterns, and all of them would be"
            f" stored by its default, {met.default}; the first tensor is {met.defaulted[0]!r}, the first"
            f" pattern {file.rules[0].patterns[0]!r}: write a layout file for these names"
        )


@struct
class Matches:
    """What a layout file's patterns place of a checkpoint: the file, how many stored tensors there are, and
    the names of those that no pattern matches, which are placed by the file's default (its kind)."""

    source: str
    stored: int
    defaulted: tuple[str, ...]
    default: str

    def __str__(self) -> str:
        rest, names = len(self.defaulted), ", ".join(map(repr, self.defaulted[:3]))
        said = f"{self.stored - rest} of {self.stored} tensors match a pattern of {self.source}"
        more = f" and {rest - 3} more" if rest > 3 else ""
        return f"{said}, {rest} by its default {self.default}: {names}{more}" if rest else said


def matches(file: LayoutFile, names: Iterable[str]) -> Matches:
    """Which stored tensors a file's patterns place, and which its default does."""
    names = list(names)
    lost = [n for n in names if not any(match(p, n) is not None for r in file.rules for p in r.patterns)]
    return Matches(file.source, len(names), tuple(lost), _kind(file.default))


def _kind(placement: Any) -> str:
    """The kind of a (frozen) placement as written; of a list, those in it."""
    if not isinstance(placement, tuple):
        return placement if isinstance(placement, str) else ""
    fields = [f for f in placement if isinstance(f, tuple) and len(f) == 2 and isinstance(f[0], str)]
    if len(fields) == len(placement):
        return str(dict(fields).get("kind", ""))
    return ", ".join(filter(None, map(_kind, placement)))


def _nothing(pattern: str, names: Iterable[str]) -> str:
    return f"the pattern {pattern!r} matches nothing, {nearest(pattern, names)}"


def match(pattern: str, name: str) -> tuple[str, ...] | None:
    """What the stars of a pattern stand for in a name; None where it does not match.

    >>> match("layer.*.bias", "layer.7.bias"), match("*.weight", "w")
    (('7',), None)
    """
    found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name, re.DOTALL)
    return None if found is None else found.groups()


def filled(pattern: str, stars: Sequence[str]) -> str:
    """The name a pattern gives when its stars stand for ``stars``."""
    first, *rest = pattern.split("*")
    return first + "".join(s + text for s, text in zip(stars, rest))


def _placement_of(file: LayoutFile, name: str) -> Any:
    for rule in file.rules:
        if any(match(p, name) is not None for p in rule.patterns):
            return rule.placement
    return file.default


def _stored(
    file: LayoutFile,
    name: str,
    shape: Shape,
    tensors: Mapping[str, Logical],
    joined: Joined | None,
    ranks: int,
    units: Mapping[str, int],
    made: dict[Any, AffineMap],
) -> Stored:
    written = _placement_of(file, name)
    parts = None if joined is None else tuple(tensors[p].shape for p in joined.parts)
    key = (written, shape, parts)
    try:
        if key not in made:
            placement = build_placement(written, parts, shape, units)
            made[key] = _layout(file, shape, placement, ranks)
    except InvalidMapError as error:
        raise InvalidMapError(f"{file.source}: {name!r} of shape {shape}: {error}") from error
    if joined is None:
        return Stored(tensors[name].dtype, made[key])
    return Stored(tensors[joined.parts[0]].dtype, made[key], joined.map)


def _layout(file: LayoutFile, shape: Shape, placement: Any, ranks: int) -> AffineMap:
    if not file.mesh:
        return layout(shape, placement, ranks=ranks)
    each = placement if isinstance(placement, tuple) else (placement,) * len(file.mesh)
    if not isinstance(placement, (tuple, Replicate)):
        raise InvalidMapError(
            f"a mesh of {len(file.mesh)} axes needs a list of placements, got {placement!r}"
        )
    total = math.prod(size for _, size in file.mesh)
    if total != ranks:
        raise InvalidMapError(
            f"its mesh of {' x '.join(f'{name} {size}' for name, size in file.mesh)} has {total} ranks and"
            f" {ranks} are asked for: pass --processes {total}, or arrange(..., ranks={total})"
        )
    return layout(shape, each, ranks, mesh=dict(file.mesh), order=file.order or None)
