"""What a reshard is to do, before anything is done: the request, the arrangements, the steps."""

from __future__ import annotations

from collections.abc import Mapping

from .._errors import InvalidMapError
from .._struct import struct
from ..interop._arrangements import Arrangement, Stored, components, even, logical_tensors, transfer
from ..interop._checkpoints import Checkpoint, open_checkpoint
from ..interop._layout_files import Matches, arrange, matches, read_layout_file
from ..interop._outputs import nbytes
from ..ops import schedule
from ..plans import Program, TreePlan

FULL = "full"


@struct
class Options:
    """The numbers of a run: how many bytes are moved at once, staged per rank, put in one file; seconds."""

    group_bytes: int = 256 << 20
    max_bytes: int = 64 << 20
    file_bytes: int = 5 * 10**9
    timeout: float = 300.0


@struct
class Request:
    """A checkpoint and the layout it is to have.

    ``to`` is a layout file, one that ships with the library, or ``"full"`` for a plain checkpoint. A plain
    source is read in the target's slices, so that nothing crosses; with ``start`` (a layout, on
    ``start_processes`` ranks, by default ``processes``) it is read in that one and moved. ``units`` are sizes
    that layouts may name, over those of the checkpoint.
    """

    source: str
    to: str
    processes: int
    start: str | None = None
    start_processes: int | None = None
    units: tuple[tuple[str, int], ...] = ()
    options: Options = Options()


@struct
class Step:
    """Tensors that are read, moved and written together. Without a program they stay where they are read."""

    sources: tuple[tuple[str, Stored], ...]
    program: Program | None


@struct
class Prepared:
    """A run that nothing refuses: what is read, how it is then stored, which patterns say so (None: it is
    stored whole), the plan (None: nothing moves) and its steps, and how many ranks take part."""

    request: Request
    checkpoint: Checkpoint
    units: tuple[tuple[str, int], ...]
    target: tuple[tuple[str, Stored], ...]
    matches: Matches | None
    plan: TreePlan | None
    steps: tuple[Step, ...]
    count: int

    @property
    def programs(self) -> tuple[Program, ...]:
        return tuple(s.program for s in self.steps if s.program is not None)


def prepared(request: Request) -> Prepared:
    """Everything about a run but its output. No tensor is read; what can be refused is refused here."""
    checkpoint = open_checkpoint(request.source)
    words = dict(checkpoint.units) | dict(request.units)
    target = _arranged(checkpoint, request.to, request.processes, words)
    met = None if request.to == FULL else matches(read_layout_file(request.to), target)
    origin, count = _origin(checkpoint, request, words)
    tree = None if origin is None else transfer(origin, target)
    return Prepared(
        request, checkpoint, tuple(words.items()), tuple(target.items()), met, tree,
        _steps(target if origin is None else origin, target, tree, request.options),
        max(request.processes, count),
    )  # fmt: skip


def _arranged(checkpoint: Checkpoint, to: str, processes: int, units: Mapping[str, int]) -> dict[str, Stored]:
    """The arrangement that ``to`` means for a checkpoint."""
    if processes < 1:
        raise InvalidMapError(f"the number of processes must be at least 1, got {processes}")
    if to == FULL:
        return even(checkpoint.logical, processes)
    return arrange(read_layout_file(to), checkpoint.logical, processes, units)


def _origin(
    checkpoint: Checkpoint, request: Request, units: Mapping[str, int]
) -> tuple[dict[str, Stored] | None, int]:
    """How the workers hold the source after reading (None: as they will write it), and how many do."""
    start, count = request.start, request.start_processes
    if not checkpoint.plain:
        if start is not None or count is not None:
            given = "--from-processes" if start is None else f"--from {start}"
            raise InvalidMapError(f"{checkpoint.path} says itself how it is stored: leave out {given}")
        return dict(checkpoint.stored), max(checkpoint.ranks) + 1
    if start is None:
        if count is not None:
            raise InvalidMapError(
                f"--from-processes {count} says on how many ranks the source is read, and there is no --from"
                " to say in which layout: add it, or leave both out and the slices of the new layout are read"
            )
        return None, 1
    count = count or request.processes
    return _arranged(checkpoint, start, count, units), count


def _steps(
    origin: dict[str, Stored], target: dict[str, Stored], tree: TreePlan | None, options: Options
) -> tuple[Step, ...]:
    """Groups of tensors that are moved together, each of about ``options.group_bytes`` bytes."""
    groups: list[tuple[list[str], list[str]]] = [([], [])]
    room = options.group_bytes
    for here, there in components(origin, target):
        size = sum(map(nbytes, logical_tensors({n: target[n] for n in there}).values()))
        if groups[-1][1] and size > room:
            groups.append(([], []))
            room = options.group_bytes
        groups[-1][0].extend(here)
        groups[-1][1].extend(there)
        room -= size
    if tree is None:
        return tuple(Step(_picked(origin, here), None) for here, _ in groups)
    entries = {e.target: e for e in tree.entries}
    plans = (TreePlan(tuple(entries[n] for n in there)) for _, there in groups)
    dtypes = [{n: target[n].dtype for n in there} for _, there in groups]
    programs = [schedule(p, max_bytes=options.max_bytes, dtypes=d) for p, d in zip(plans, dtypes)]
    return tuple(Step(_picked(origin, here), p) for (here, _), p in zip(groups, programs))


def _picked(arrangement: Arrangement, names: list[str]) -> tuple[tuple[str, Stored], ...]:
    return tuple((name, arrangement[name]) for name in names)
