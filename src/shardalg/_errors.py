"""The error family, classed by what the caller can do about it."""

from __future__ import annotations


class ShardalgError(Exception):
    """Base class of every error this library raises on purpose."""


class InvalidMapError(ShardalgError, ValueError):
    """The map, placement or tensor given is not what it says: fix the input."""


class UnsupportedError(ShardalgError, NotImplementedError):
    """The request is well formed but this route cannot serve it: take another."""


class LimitError(ShardalgError, RuntimeError):
    """The result would exceed a bound in ``Limits``: raise the bound or ask for less."""


class ProvenanceError(ShardalgError, RuntimeError):
    """The bound plan does not belong to the live context it was given to: bind again."""


class SelectionError(ShardalgError, ValueError):
    """A selector answered with something that is not a candidate: fix the selector."""


class TransferError(ShardalgError, RuntimeError):
    """A run failed. ``targets_touched`` says whether targets may hold partial data."""

    def __init__(self, message: str, *, targets_touched: bool = False) -> None:
        super().__init__(message)
        self.targets_touched = targets_touched


for _error in (ShardalgError, *ShardalgError.__subclasses__()):
    _error.__module__ = "shardalg"  # the name that tracebacks print is the one to catch
