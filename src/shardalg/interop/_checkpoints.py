"""Checkpoints on disk: what is in them, and the slices of any arrangement read from them.

A plain checkpoint is one safetensors file, or several with an index, as Hugging Face writes them. A
sharded one is a folder with one file per rank and a ``layout.json`` that says how the tensors are stored.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from .._errors import InvalidMapError
from .._struct import struct
from ..maps import AffineMap
from ..maps._map import FORMAT, check_format
from ..ops import extract
from ._arrangements import Logical, Stored, elements_of, logical_tensors
from ._nearest import nearest
from ._safetensors import Entry, TensorFile, mapped, read_header

KIND = "shardalg.checkpoint"
LAYOUT = "layout.json"
INDEX = ".safetensors.index.json"
CONFIG = "config.json"


@struct
class Home:
    """Where a tensor, or one rank's shard of it (``rank``), lies on disk."""

    name: str
    rank: int | None
    path: str
    entry: Entry


@struct
class Checkpoint:
    """What a checkpoint holds. ``stored`` and ``ranks`` are empty for a plain one, whose tensors are whole.

    ``units`` are sizes its layouts may name, such as ``head``."""

    path: str
    homes: tuple[Home, ...]
    stored: tuple[tuple[str, Stored], ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    ranks: tuple[int, ...] = ()
    units: tuple[tuple[str, int], ...] = ()

    @property
    def plain(self) -> bool:
        return not self.ranks

    @property
    def logical(self) -> dict[str, Logical]:
        """The tensors as users name them."""
        if self.plain:
            return {h.name: Logical(h.entry.dtype, h.entry.shape) for h in self.homes}
        return logical_tensors(dict(self.stored))


def open_checkpoint(path: str | Path) -> Checkpoint:
    """The checkpoint at a path, its headers and its layout checked against each other; no tensor is read.

    The path is a ``.safetensors`` file, an index, or a folder with either or with a ``layout.json``.
    Raises ``InvalidMapError`` naming what is missing, truncated, given twice, or not what is said of it.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise InvalidMapError(f"{path}: there is no such file or folder")
    if path.name == LAYOUT:
        return _open_ranks(path)
    return _open_index(path) if path.suffix == ".json" else _open_files(path, [path])


def _open_folder(folder: Path) -> Checkpoint:
    if (folder / LAYOUT).exists():
        return _open_ranks(folder / LAYOUT)
    indexes, files = sorted(folder.glob(f"*{INDEX}")), sorted(folder.glob("*.safetensors"))
    if len(indexes) == 1:
        return _open_index(indexes[0])
    if not indexes and len(files) == 1:
        return _open_files(folder, files)
    found = [p.name for p in [*indexes, *files]]
    raise InvalidMapError(
        f"{folder}: expected a {LAYOUT}, one *{INDEX} or one *.safetensors file, found {found or 'none'};"
        + (" give the path of the file or index itself" if found else " is it a checkpoint?")
        + _by_rank(folder)
    )


def _by_rank(folder: Path) -> str:
    """What to do with a folder of per-rank files, if it looks like one."""
    files = [p for p in folder.iterdir() if p.suffix in (".safetensors", ".pt", ".pth", ".bin")]
    if not files:
        return ""
    return f"; {len(files)} files of ranks that DeepSpeed maps describe are read by shardalg convert --map"


# --- plain --------------------------------------------------------------------------------


def _open_files(path: Path, files: Iterable[Path]) -> Checkpoint:
    homes: dict[str, Home] = {}
    metadata: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        metadata |= dict(header.metadata)
        for entry in header.entries:
            if entry.name in homes:
                raise InvalidMapError(
                    f"{path}: {entry.name!r} is in both {homes[entry.name].path} and {file}"
                )
            homes[entry.name] = Home(entry.name, None, str(file), entry)
    folder = path if path.is_dir() else path.parent
    units = tuple(units_of(folder / CONFIG).items())
    return Checkpoint(str(path), tuple(homes.values()), (), tuple(sorted(metadata.items())), (), units)


def units_of(config: Path) -> dict[str, int]:
    """The head size that a model's ``config.json`` states, if there is one."""
    if not config.is_file():
        return {}
    data = _json(config)
    for key in ("head_dim", "d_kv"):
        if isinstance(data.get(key), int):
            return {"head": data[key]}
    for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head"), ("dim", "n_heads")):
        if isinstance(data.get(width), int) and isinstance(data.get(heads), int) and data[heads] > 0:
            return {"head": data[width] // data[heads]}
    return {}


def _open_index(path: Path) -> Checkpoint:
    places = _weight_map(path)
    files = sorted(set(places.values()))
    for name in files:
        if not (path.parent / name).is_file():
            wanted = [n for n, f in places.items() if f == name]
            raise InvalidMapError(
                f"{path}: names the file {name!r}, which is missing; {len(wanted)} of {len(places)} tensors"
                f" are in it, the first is {wanted[0]!r}; fetch the file again"
            )
    checkpoint = _open_files(path, [path.parent / name for name in files])
    found = {h.name: Path(h.path).name for h in checkpoint.homes}
    if found != places:
        wrong = sorted(n for n in {*found, *places} if found.get(n) != places.get(n))
        raise InvalidMapError(
            f"{path}: {len(wrong)} tensors are not where the index says, the first is {wrong[0]!r}:"
            f" the index has it in {places.get(wrong[0])}, the files in {found.get(wrong[0])}"
        )
    return checkpoint


def _weight_map(path: Path) -> dict[str, str]:
    data = _json(path)
    places = data.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(f, str) for f in places.values()):
        raise InvalidMapError(f"{path}: an index has a weight_map from tensor names to file names")
    outside = [f for f in places.values() if not f or Path(f).name != f]
    if outside:
        raise InvalidMapError(f"{path}: {outside[0]!r} is not the name of a file beside the index")
    return places


def _json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # ValueError: an integer of thousands of digits, too
        raise InvalidMapError(f"{path}: not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InvalidMapError(f"{path}: expected a JSON object, got a {type(data).__name__}")
    return data


# --- one file per rank --------------------------------------------------------------------


def layout_json(
    stored: Mapping[str, Stored],
    files: Mapping[int, str],
    metadata: Mapping[str, str],
    units: Mapping[str, int],
) -> dict[str, Any]:
    """The ``layout.json`` of a folder of per-rank files, as plain data. Equal layouts are written once."""
    layouts: dict[AffineMap, int] = {}
    tensors = {
        name: {
            "dtype": s.dtype,
            "layout": layouts.setdefault(s.layout, len(layouts)),
            "joined": None if s.joined is None else s.joined.to_dict(),
        }
        for name, s in stored.items()
    }
    return {
        "format": KIND, "version": FORMAT, "files": {str(r): f for r, f in files.items()},
        "metadata": dict(metadata), "units": dict(units), "tensors": tensors,
        "layouts": [m.to_dict() for m in layouts],
    }  # fmt: skip


def _open_ranks(path: Path) -> Checkpoint:
    data = _json(path)
    try:
        check_format(data, KIND)
        files = {int(r): str(f) for r, f in data["files"].items()}
        layouts = [AffineMap.from_dict(m) for m in data["layouts"]]
        stored = {name: _stored(name, t, layouts) for name, t in data["tensors"].items()}
        metadata = tuple(sorted((str(k), str(v)) for k, v in data["metadata"].items()))
        units = tuple((str(k), int(v)) for k, v in data["units"].items())
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as error:
        if isinstance(error, InvalidMapError):
            raise InvalidMapError(f"{path}: {error}") from error
        raise InvalidMapError(f"{path}: not a layout that this tool wrote: {error!r}") from error
    ranks = tuple(sorted(files))
    logical_tensors(stored)
    for name, s in stored.items():
        lost = [r for r in s.layout.ranks if r not in files]
        if lost:
            raise InvalidMapError(
                f"{path}: {name!r} has shards on ranks {lost}, which have no file in {files}"
            )
    homes = tuple(h for r in ranks for h in _rank_homes(path, r, files[r], stored))
    return Checkpoint(str(path.parent), homes, tuple(stored.items()), metadata, ranks, units)


def _stored(name: str, data: Mapping[str, Any], layouts: list[AffineMap]) -> Stored:
    position = data["layout"]
    if not isinstance(position, int) or not 0 <= position < len(layouts):
        raise InvalidMapError(f"{name!r} has the layout {position!r} of {len(layouts)}")
    m = layouts[position]
    joined = None if data["joined"] is None else AffineMap.from_dict(data["joined"])
    if joined is not None and joined.codomain != m.codomain:
        raise InvalidMapError(
            f"{name!r} is laid out as {m.codomain}, but its parts make {joined.codomain}:"
            " the layout is of another logical shape"
        )
    if not m.single_valued:
        raise InvalidMapError(f"the layout of {name!r} gives one slot several elements")
    return Stored(str(data["dtype"]), m, joined)


def _rank_homes(path: Path, rank: int, file: str, stored: Mapping[str, Stored]) -> list[Home]:
    """The shards in one rank's file, each as its layout says."""
    if Path(file).name != file or not (path.parent / file).is_file():
        raise InvalidMapError(
            f"{path}: names the file {file!r} of rank {rank}, which is missing; write it again"
        )
    header = read_header(path.parent / file)
    found = {e.name: e for e in header.entries}
    wanted = {n for n, s in stored.items() if rank in s.layout.ranks}
    _require_names(header, set(found), wanted, rank)
    return [_home(header, found[name], stored[name], rank) for name in sorted(wanted)]


def _require_names(header: TensorFile, found: set[str], wanted: set[str], rank: int) -> None:
    for name in sorted(wanted - found):
        raise InvalidMapError(
            f"{header.path}: the shard of {name!r} of rank {rank} is missing; {nearest(name, sorted(found))}"
        )
    for name in sorted(found - wanted):
        raise InvalidMapError(f"{header.path}: {name!r} is in the file but not in the layout of rank {rank}")


def _home(header: TensorFile, entry: Entry, stored: Stored, rank: int) -> Home:
    shape = stored.layout.shard_shape(rank)
    if (entry.dtype, entry.shape) != (stored.dtype, shape):
        raise InvalidMapError(
            f"{header.path}: the shard of {entry.name!r} of rank {rank} is {entry.dtype} of shape"
            f" {entry.shape}, its layout says {stored.dtype} of shape {shape}"
        )
    return Home(entry.name, rank, header.path, entry)


# --- reading slices -----------------------------------------------------------------------


def load(checkpoint: Checkpoint, arrangement: Mapping[str, Stored], rank: int) -> dict[str, Any]:
    """One rank's shards ``{name: tensor}`` of some tensors of a checkpoint.

    Of a plain checkpoint any arrangement can be read, of a sharded one its own. Only the elements that the
    shards hold are read; they are fresh tensors.
    """
    here = {name: s for name, s in arrangement.items() if rank in s.layout.ranks}
    homes = {(h.rank, h.name): h for h in checkpoint.homes}
    if checkpoint.plain:
        return {name: _extracted(name, s, homes, rank) for name, s in here.items()}
    return {name: _whole(homes[rank, name]) for name in here}


def _whole(home: Home) -> Any:
    return mapped(home.path, home.entry).clone()


def _extracted(name: str, stored: Stored, homes: Mapping[Any, Home], rank: int) -> Any:
    elements = elements_of(name, stored)
    names = [b.name for b in elements.codomain.boxes]
    return extract(elements, {n: mapped(homes[None, n].path, homes[None, n].entry) for n in names}, rank)
