"""Bound plans: a program stamped with the one live context that may run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

from .._errors import ProvenanceError
from .._struct import struct
from ..plans import Program


class Owner:
    """The private token of one live context, compared by ``is``.

    An instance of our own class and never a bare ``object()`` or an ``id()``: compiled code drops
    the check for the one, and the other is used again after a context is gone.
    """

    __slots__ = ()


class Watched(NamedTuple):
    """One field of one value, as it was when the plan was bound."""

    holder: Any
    name: str
    value: Any


class Stamp(NamedTuple):
    """Who may run a bound plan, and every field that says what it does."""

    owner: Owner
    fields: tuple[Watched, ...]


@struct
class Bound:
    """A program stamped with the context that may run it.

    Equality, hash, repr and tree structure ignore the stamp: it decides who may run the plan, not
    what the plan is. Kept by ``clone()``; lost by construction, ``replace``, copies, pickle and
    every unflatten.
    """

    program: Program
    _stamp: Stamp | None = dataclasses.field(default=None, init=False, repr=False, compare=False)

    def clone(self) -> Bound:
        """An equal bound plan that the same context accepts."""
        copy = Bound(self.program)
        object.__setattr__(copy, "_stamp", self._stamp)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return (Bound, (self.program,))

    def __copy__(self) -> Bound:
        return Bound(self.program)

    def __deepcopy__(self, memo: dict[int, Any]) -> Bound:
        return Bound(self.program)


def stamped(program: Program, owner: Owner) -> Bound:
    """The program, to be run by the context that holds ``owner``."""
    bound = Bound(program)
    object.__setattr__(bound, "_stamp", Stamp(owner, tuple(_fields(program))))
    return bound


def _fields(program: Program) -> Iterator[Watched]:
    """Every field of a program, its tree, its entries and its distinct plans."""
    yield from _own_fields(program)
    yield from _own_fields(program.plan)
    for entry in program.plan.entries:
        yield from _own_fields(entry)
    for plan in {id(e.plan): e.plan for e in program.plan.entries}.values():
        yield from _own_fields(plan)


def _own_fields(value: Any) -> Iterator[Watched]:
    return (Watched(value, f.name, getattr(value, f.name)) for f in dataclasses.fields(value))


def check_stamp(owner: Owner, bound: Any) -> None:
    """Raise unless ``bound`` was stamped with this very ``owner`` and is as it was then."""
    if not isinstance(bound, Bound):
        raise ProvenanceError(
            f"run takes what bind returned, got {type(bound).__name__}: bind the plan to this context first"
        )
    stamp = bound._stamp
    if stamp is None:
        raise ProvenanceError(
            "this bound plan has no owner: it was built by hand, replaced, copied, unpickled or unflattened;"
            " bind the plan to this context, or use clone()"
        )
    if stamp.owner is not owner:
        raise ProvenanceError("this plan was bound to another context; bind it to this one")
    if bound.program is not stamp.fields[0].holder:
        raise ProvenanceError("the program of this bound plan was changed by force; bind the plan again")
    for holder, name, value in stamp.fields:
        if getattr(holder, name) is not value:
            raise ProvenanceError(
                f"{type(holder).__name__}.{name} of this bound plan was changed by force; bind the plan again"
            )
