"""Converting per-rank checkpoint files to other maps, rank by rank, without a full tensor."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from .._errors import InvalidMapError, LimitError, UnsupportedError
from .._struct import struct
from .._torch import torch
from ..interop import deepspeed
from ..interop._arrangements import Logical
from ..interop._layout_files import Matches, arrange, matches, read_layout_file
from ..interop._nearest import nearest
from ..interop._outputs import MAPS, appearing, require_free
from ..interop._safetensors import create, lay_out, mapped, read_header, write_at
from ..maps import AffineMap
from ..ops import plan, sharded
from ..ops._blocks import block, flat, scaled, write, zeros
from ..ops._tensors import strips
from ..plans import TransferPlan
from ._progress import draw
from ._replicas import is_plain, require_agreement, same

PARAMETERS = ("module", "model", "fp32")  # words before or after a name, as in module.layer.w
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin")


class Held(NamedTuple):
    """What a file holds by dotted name, and where that stands in its tree."""

    values: dict[str, Any]
    paths: dict[str, tuple[Any, ...]]


class Item(NamedTuple):
    """A stored tensor: the parameter whose map it has, and whether it is an optimizer moment of it."""

    parameter: str
    moment: bool


@struct
class Conversion:
    """What a run did: ranks read and written, tensors (moments among them), bytes written, copies, where it
    wrote, and the patterns that placed the tensors where ``to`` is a layout file."""

    source_ranks: int
    target_ranks: int
    tensors: int
    moments: int
    nbytes: int
    copies: int
    path: str
    matches: Matches | None = None


def convert(
    source: str,
    destination: str,
    maps: str,
    to: str,
    *,
    processes: int | None = None,
    moments: bool = True,
    units: Mapping[str, int] | None = None,
    force: bool = False,
    progress: bool = False,
) -> Conversion:
    """Write the per-rank files in ``source``, laid out by the DeepSpeed maps in ``maps``, laid out by ``to``.

    The k-th file by name is rank k. ``to`` is another file of maps, or a layout file with the number of
    ``processes``. Moments (``NAME.exp_avg``, ``exp_avg.NAME``, ``exp_avg_sq`` alike) move as their
    parameter does, and are refused where its scale changes: ``moments=False`` leaves them out. What has no
    map must be equal on all ranks. Everything that can be refused is refused before a byte is written.
    ``force`` replaces the checkpoint at ``destination``; ``progress`` draws a bar.
    """
    require_free(Path(destination), force, Path(source))
    files = rank_files(Path(source))
    here = read_maps(maps)
    held = [_read(file) for file in files]
    shards = [h.values for h in held]
    paths = {key: path for h in held for key, path in h.paths.items()}
    there = _targets(to, here, processes, units or {})
    items = {key: item for key, item in _items(shards, here).items() if moments or not item.moment}
    plans = {key: _planned(key, item, here, there, shards) for key, item in items.items()}
    common = _common(shards, here)
    ranks = sorted({r for m in there.values() for r in m.ranks})
    text = json.dumps({"version": deepspeed.MAP_VERSION, "params": _said(there)})
    size = 0
    with appearing(destination, force=force) as folder:
        for done, rank in enumerate(ranks, start=1):
            made = {key: _shard(p, rank, key, shards) for key, p in plans.items() if rank in p.target.ranks}
            size += sum(x.numel() * x.element_size() for x in made.values())
            _write(folder / f"rank-{rank:05d}{files[0].suffix}", common | made, paths)
            draw(progress, done, len(ranks), "ranks")
        (folder / MAPS).write_text(text)
    return Conversion(
        len(files), len(ranks), len(items), sum(i.moment for i in items.values()), size,
        sum(map(len, plans.values())), destination,
        None if _is_maps(to) else matches(read_layout_file(to), there),
    )  # fmt: skip


# --- reading ------------------------------------------------------------------------------


def rank_files(folder: Path) -> list[Path]:
    """The files of the ranks, in rank order, all of one kind."""
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise InvalidMapError(f"{folder}: SRC is a folder with one file per rank, and this {what}")
    found = sorted(p for p in folder.glob("*") if p.suffix in SUFFIXES)
    kinds = sorted({p.suffix for p in found})
    if len(kinds) != 1:
        raise InvalidMapError(f"{folder}: expected one file per rank of one kind {SUFFIXES}, found {kinds}")
    return found


def read_maps(path: str) -> dict[str, AffineMap]:
    """The DeepSpeed maps in a JSON or torch file."""
    if not Path(path).is_file():
        raise InvalidMapError(f"{path}: there is no such file of maps")
    if Path(path).suffix in SUFFIXES[1:]:
        return deepspeed.from_container(_loaded(Path(path), mmap=False))
    try:
        data = json.loads(Path(path).read_text("utf-8"))
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits, too
        raise InvalidMapError(f"{path}: not JSON: {error}") from None
    return deepspeed.from_container(data)


def _read(file: Path) -> Held:
    """What a file holds; tensors are mapped, not loaded."""
    if file.suffix == ".safetensors":
        return Held({e.name: mapped(str(file), e) for e in read_header(file).entries}, {})
    if not zipfile.is_zipfile(file):
        raise InvalidMapError(
            f"{file}: no torch file of the zip form, whose tensors can be mapped; one of the older form is"
            " rewritten by torch.save(torch.load(FILE), FILE)"
        )
    tree = _loaded(file, mmap=True)
    found = {".".join(map(str, path)): (path, _resolved(value)) for path, value in _leaves(tree, ())}
    return Held({k: v for k, (_, v) in found.items()}, {k: path for k, (path, _) in found.items()})


def _loaded(file: Path, mmap: bool) -> Any:
    """What a torch file holds, mapped where ``mmap``; a file of another form is refused."""
    try:
        return torch().load(file, mmap=mmap, weights_only=True, map_location="cpu")
    except OSError:
        raise
    except Exception as error:  # of any kind: the pickle may be junk
        said = (str(error).splitlines() or [""])[0]
        raise InvalidMapError(f"{file}: torch cannot read it: {type(error).__name__}: {said}") from error


def _resolved(value: Any) -> Any:
    """A value; a tensor whose conjugation or sign is still to be applied has it applied."""
    return value.resolve_conj().resolve_neg() if hasattr(value, "resolve_conj") else value


def _leaves(tree: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _leaves(value, (*path, key))
    else:
        yield path, tree


def item_of(key: str, names: Any) -> Item | None:
    """What a stored tensor is, from its name and the names that have a map; None where it has none.

    >>> item_of("exp_avg.layer.w", {"layer.w"}), item_of("module.layer.w", {"layer.w"})
    (Item(parameter='layer.w', moment=True), Item(parameter='layer.w', moment=False))
    """
    if key in names:
        return Item(key, False)
    head, _, after = key.partition(".")
    before, _, tail = key.rpartition(".")
    for word, name in ((head, after), (tail, before)):
        if name in names and word in (*PARAMETERS, *MOMENTS):
            return Item(name, word in MOMENTS)
    return None


def _items(shards: list[dict[str, Any]], maps: Mapping[str, AffineMap]) -> dict[str, Item]:
    """The stored tensors that have a map."""
    keys = dict.fromkeys(key for its in shards for key, x in its.items() if hasattr(x, "shape"))
    found = {key: item for key in keys if (item := item_of(key, maps)) is not None}
    unused = sorted(set(maps) - {item.parameter for item in found.values()})
    if unused:
        raise InvalidMapError(f"no file holds {unused[0]!r}, which has a map; {nearest(unused[0], keys)}")
    return found


def _common(shards: list[dict[str, Any]], maps: Mapping[str, AffineMap]) -> dict[str, Any]:
    """What has no map and is equal on all ranks; anything else without a map is refused."""
    names = dict.fromkeys(key for its in shards for key in its if item_of(key, maps) is None)
    for key in names:
        holding = [rank for rank, its in enumerate(shards) if key in its]
        first, *others = holding
        wrong = [r for r in others if not same(shards[first][key], shards[r][key])]
        lacking = sorted({*range(len(shards))} - {*holding})
        if wrong or lacking:
            raise InvalidMapError(
                f"{key!r} has no map and "
                + (
                    f"is not the same on ranks {first} and {wrong[0]}"
                    if wrong
                    else f"is on rank {first} and not on rank {lacking[0]}"
                )
                + ": add its map; without one nobody can say how its shards make a tensor"
            )
    return {key: shards[0][key] for key in names}


# --- planning -----------------------------------------------------------------------------


def _targets(
    to: str, here: Mapping[str, AffineMap], processes: int | None, units: Mapping[str, int]
) -> dict[str, AffineMap]:
    """The layouts to be written."""
    if _is_maps(to):
        there = read_maps(to)
        if set(there) != set(here):
            raise InvalidMapError(
                f"maps on one side only: the source alone has {sorted(set(here) - set(there))[:8]},"
                f" the target alone {sorted(set(there) - set(here))[:8]}"
            )
        return there
    if processes is None:
        raise InvalidMapError(f"the layout {to} needs the number of ranks: pass --processes")
    logical = {name: Logical("float32", m.logical_shape) for name, m in here.items()}
    stored = arrange(read_layout_file(to), logical, processes, units)
    joined = [name for name, s in stored.items() if s.joined is not None]
    if joined:
        raise InvalidMapError(f"{to} joins tensors into {joined[0]!r}; convert keeps the tensors there are")
    return {name: s.layout for name, s in stored.items()}


def _planned(
    key: str,
    item: Item,
    here: Mapping[str, AffineMap],
    there: Mapping[str, AffineMap],
    shards: list[dict[str, Any]],
) -> TransferPlan:
    """The plan of one stored tensor; what it says is checked against what is stored."""
    source, target = here[item.parameter], there[item.parameter]
    lost = [r for r in source.ranks if r >= len(shards) or key not in shards[r]]
    if lost:
        raise InvalidMapError(f"{key!r}: its map names rank {lost[0]}, whose file does not hold it")
    sharded(source, {r: shards[r][key] for r in source.ranks})
    odd = [r for r in source.ranks if not is_plain(shards[r][key])]
    if odd:
        raise UnsupportedError(
            f"{key!r} is sparse, quantized or without data on rank {odd[0]}; a map cuts plain tensors"
        )
    dtypes = sorted({str(shards[r][key].dtype) for r in source.ranks})
    if len(dtypes) > 1:
        raise InvalidMapError(f"{key!r} has dtypes {dtypes} on different ranks")
    _named(key, require_agreement, source, {r: shards[r][key] for r in source.ranks})
    made: TransferPlan = _named(key, plan, source, target, holds="moments" if item.moment else "parameters")
    return made


def _said(there: Mapping[str, AffineMap]) -> dict[str, Any]:
    """The layouts as DeepSpeed maps; what those cannot say names its tensor."""
    return {name: _named(name, deepspeed.to_map, m) for name, m in there.items()}


def _named(name: str, function: Callable[..., Any], *given: Any, **options: Any) -> Any:
    """What a function returns, with the tensor's name before what it refuses."""
    try:
        return function(*given, **options)
    except (InvalidMapError, UnsupportedError, LimitError) as error:
        raise type(error)(f"{name!r}: {error}") from error


def _is_maps(to: str) -> bool:
    """Whether a target is a file of maps, by its name; it is a layout file otherwise."""
    return Path(to).suffix in (".json", *SUFFIXES[1:])


# --- writing ------------------------------------------------------------------------------


def _shard(p: TransferPlan, rank: int, key: str, shards: list[dict[str, Any]]) -> Any:
    """One target shard, read from the shards that the plan's copies name."""
    box = p.target.domain.index(rank)
    out = zeros(shards[p.source.ranks[0]][key], p.target.shard_shape(rank))
    for s in strips(p.map, dom_box=box):
        values = block(flat(shards[s.element.rank or 0][key]), s.shape, s.element_strides, s.element_offset)
        write(out.reshape(-1), s.shape, s.slot_strides, s.slot_offset, scaled(values, *s.scale))
    return out


def _write(path: Path, made: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]) -> None:
    """One rank's file, in the form of the files that were read."""
    if path.suffix != ".safetensors":
        tree: dict[Any, Any] = {}
        for key, value in made.items():
            *above, last = paths[key]
            place = tree
            for word in above:
                place = place.setdefault(word, {})
            place[last] = value.clone() if hasattr(value, "clone") else value
        torch().save(tree, path)
        return
    entries = [(key, str(x.dtype).removeprefix("torch."), tuple(x.shape)) for key, x in made.items()]
    file = lay_out(path, entries)
    create(file)
    for entry in file.entries:
        write_at(file.path, entry.begin, made[entry.name])
