"""Checkpoints written in place by many processes, which appear under their name only when complete."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .._errors import InvalidMapError
from .._struct import struct
from ._arrangements import Arrangement, Logical, Stored, even
from ._checkpoints import INDEX, LAYOUT, layout_json
from ._safetensors import SIZES, Entry, TensorFile, create, lay_out, sync, write_at

LOCK = "lock"
MAPS = "affine_map.json"  # the DeepSpeed maps of per-rank files, beside them


@struct
class Place:
    """Where one rank's shard of a tensor is written: a file and the byte it begins at."""

    name: str
    rank: int
    path: str
    offset: int


@struct
class Output:
    """A checkpoint to be written: its files, where each shard goes, and the JSON file beside them."""

    files: tuple[TensorFile, ...]
    places: tuple[Place, ...]
    side_file: str = ""
    side_text: str = ""


# --- what is to be written ----------------------------------------------------------------


def rank_output(
    folder: Path, arrangement: Arrangement, ranks: int, metadata: Mapping[str, str], units: Mapping[str, int]
) -> Output:
    """One file per rank and a ``layout.json``."""
    names = {r: f"rank-{r:05d}.safetensors" for r in range(ranks)}
    files, places = [], []
    for r, file in names.items():
        here = {n: s for n, s in arrangement.items() if r in s.layout.ranks}
        tensors = [(n, s.dtype, s.layout.shard_shape(r)) for n, s in here.items()]
        made = lay_out(folder / file, tensors)
        files.append(made)
        places += [Place(e.name, r, made.path, e.begin) for e in made.entries]
    text = json.dumps(layout_json(arrangement, names, metadata, units), separators=(",", ":"))
    return Output(tuple(files), tuple(places), str(folder / LAYOUT), text)


def plain_output(
    folder: Path, tensors: Mapping[str, Logical], ranks: int, metadata: Mapping[str, str], file_bytes: int
) -> Output:
    """One safetensors file, or several of at most ``file_bytes`` bytes of tensors (but at least one) and
    an index. The shards are those of ``even``: each rank writes its own range of every tensor."""
    groups = _by_file(tensors, file_bytes)
    files = []
    for k, group in enumerate(groups):
        name = (
            "model.safetensors" if len(groups) == 1 else f"model-{k + 1:05d}-of-{len(groups):05d}.safetensors"
        )
        entries = [(n, tensors[n].dtype, tensors[n].shape) for n in group]
        files.append(lay_out(folder / name, entries, metadata))
    arrangement = even(tensors, ranks)
    places = [p for f in files for e in f.entries for p in _ranges(f, e, arrangement[e.name])]
    if len(groups) == 1:
        return Output(tuple(files), tuple(places))
    index = {
        "metadata": {"total_size": sum(e.nbytes for f in files for e in f.entries)},
        "weight_map": {e.name: Path(f.path).name for f in files for e in f.entries},
    }
    return Output(tuple(files), tuple(places), str(folder / f"model{INDEX}"), json.dumps(index, indent=1))


def _by_file(tensors: Mapping[str, Logical], file_bytes: int) -> list[list[str]]:
    groups: list[list[str]] = [[]]
    room = file_bytes
    for name, tensor in tensors.items():
        size = nbytes(tensor)
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(name)
        room -= size
    return groups


def nbytes(tensor: Logical) -> int:
    """Bytes of a whole tensor."""
    size = SIZES[tensor.dtype]
    for n in tensor.shape:
        size *= n
    return size


def shard_bytes(stored: Stored, rank: int) -> int:
    """Bytes of one rank's shard of a stored tensor."""
    return nbytes(Logical(stored.dtype, stored.layout.shard_shape(rank)))


def _ranges(file: TensorFile, entry: Entry, stored: Stored) -> Iterator[Place]:
    """The consecutive ranges of an entry that the ranks write."""
    for rank in stored.layout.ranks:
        for piece in stored.layout.pieces_of(rank):
            start = piece.codomain.offset * SIZES[entry.dtype]
            yield Place(entry.name, rank, file.path, entry.begin + start)


# --- writing ------------------------------------------------------------------------------


def prepare(output: Output) -> None:
    """Make the files with room for everything."""
    for file in output.files:
        create(file)


def save(output: Output, rank: int, shards: Mapping[str, Any]) -> None:
    """Write one rank's shards ``{name: tensor}`` to their places."""
    places = {p.name: p for p in output.places if p.rank == rank}
    for name, shard in shards.items():
        if name in places:
            write_at(places[name].path, places[name].offset, shard)


def finish(output: Output) -> None:
    """Write the JSON file and wait until everything is on disk."""
    if output.side_file:
        Path(output.side_file).write_text(output.side_text)
        sync(output.side_file)
    for file in output.files:
        sync(file.path)


# --- appearing when complete --------------------------------------------------------------


@contextmanager
def appearing(destination: str | os.PathLike[str], *, force: bool = False) -> Iterator[Path]:
    """A fresh folder to write in. At the end of the block it becomes ``destination``, or its one file does
    where that ends in ``.safetensors``; on an error it is removed.

    Nothing is written over, unless ``force`` says that the checkpoint under the name goes: the two change
    names once the new is complete, so that there is one at every moment. Anything that is no checkpoint
    stays and is an error. What a killed run has left is removed by the next one.
    """
    target = Path(destination)
    require_free(target, force)
    if not target.parent.is_dir():
        raise InvalidMapError(f"{target}: there is no folder {target.parent} to write it in; make it first")
    folder = partial(target)
    with _locked(folder, target):
        try:
            yield folder
            require_free(target, force)
            _publish(folder, target)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def partial(target: Path) -> Path:
    """The folder that is written until a destination is complete."""
    return target.parent / f".{target.name}.partial"


def require_absent(target: Path) -> None:
    """Raise if there is something under the name already."""
    if os.path.lexists(target):
        raise InvalidMapError(
            f"{target} exists and nothing is written over; choose another name, remove it, or pass --force"
        )


def require_free(target: Path, force: bool = False, source: Path | None = None) -> None:
    """Raise if there is something under the name: with ``force`` only if it is not just a
    checkpoint, or if ``source`` is it or lies in it."""
    if not force:
        require_absent(target)
        return
    if source is not None and target.resolve() in (source.resolve(), *source.resolve().parents):
        raise InvalidMapError(f"{target} holds the source {source}: --force would remove what is read")
    if target.is_symlink() or not target.exists():
        return
    foreign = sorted(p.name for p in target.iterdir() if not _of_checkpoint(p)) if target.is_dir() else []
    if foreign or (target.is_file() and not _of_checkpoint(target)):
        raise InvalidMapError(
            f"{target} holds more than a checkpoint ({(foreign or [target.name])[0]!r});"
            " --force does not remove that"
        )


CHECKPOINT_FILES = (".safetensors", INDEX, ".pt", ".pth", ".bin")
SIDE_FILES = (LAYOUT, MAPS)


def _of_checkpoint(path: Path) -> bool:
    """Whether a file is one that checkpoints consist of."""
    return path.is_file() and (path.name in SIDE_FILES or path.name.endswith(CHECKPOINT_FILES))


@contextmanager
def _locked(folder: Path, target: Path) -> Iterator[None]:
    """An empty folder that is ours as long as we live."""
    folder.mkdir(exist_ok=True)
    with open(folder / LOCK, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InvalidMapError(
                f"{target} is being written by another run in {folder}; wait for it"
            ) from None
        for old in folder.iterdir():
            if old.name != LOCK:
                old.unlink()
        yield


def _publish(folder: Path, target: Path) -> None:
    """Give what was written its name. What had the name gets that of the folder, which is then removed."""
    new = folder
    if target.suffix == ".safetensors":
        (new,) = folder.glob("*.safetensors")
    else:
        (folder / LOCK).unlink()
        sync(folder)
    if target.is_symlink():
        target.unlink()
    if target.exists():
        exchange(new, target)
    elif new == folder:
        os.rename(folder, target)
    else:
        os.link(new, target)
    sync(target.parent)


HERE, EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def exchange(a: Path, b: Path) -> None:
    """Swap two names in one step; in three where the system or its file system cannot."""
    rename: Any = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is not None and not rename(HERE, os.fsencode(a), HERE, os.fsencode(b), EXCHANGE):
        return
    if rename is not None and ctypes.get_errno() not in NO_EXCHANGE:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(a), None, str(b))
    aside = b.parent / f".{b.name}.old"
    os.rename(b, aside)
    os.rename(a, b)
    os.rename(aside, a)
