"""A state machine that re-shards at random: what a user's program may do, in any order."""

from __future__ import annotations

import json
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.strategies import DataObject

from .. import backends
from ..maps import AffineMap
from ..ops import compose, equivalent, explain, extract, identity, layout, nest, plan, rebuild
from ..plans import TransferPlan
from ._strategies import anywhere, layouts, shapes

MAX_RANKS = 6  # cutting shards again doubles them


class ReshardMachine(RuleBasedStateMachine):
    """One tensor that is moved between drawn layouts, cut again, moved back and resumed from JSON.

    Invariants: gathering the shards gives the original tensor; every shard has the shape that its layout
    says; the copies so far, composed, read the present shards out of the first ones. Shrinks towards
    few moves of one element. Use it as ``TestReshard = ReshardMachine.TestCase``; to run on
    a backend of your own, override ``context``.
    """

    full: Any
    first: AffineMap
    layout: AffineMap
    origin: dict[int, Any]
    shards: dict[int, Any]
    trail: AffineMap  # present slots -> first slots
    last: TransferPlan | None = None

    def context(self, ranks: int) -> Any:
        """A context that holds ranks 0 .. ranks - 1 in this process."""
        return backends.simulate(ranks)

    @initialize(shape=shapes(), data=st.data())
    def start(self, shape: tuple[int, ...], data: DataObject) -> None:
        self.first = self.layout = data.draw(layouts(shape, scaled=False, complete=True))
        size = self.first.codomain.size
        self.full = torch.arange(1, size + 1).reshape(shape)
        self.shards = self.origin = extract(self.layout, self.full)
        self.trail = identity(self.layout.domain)

    @rule(data=st.data())
    def reshard(self, data: DataObject) -> None:
        """Move to another layout."""
        target = layouts(self.full.shape, scaled=False, complete=True)
        self._move(plan(self.layout, data.draw(target)))

    @precondition(lambda self: self.last is not None)
    @rule()
    def invert(self) -> None:
        """Move back to the layout before."""
        assert self.last is not None
        self._move(plan(self.last.target, self.last.source))

    @precondition(lambda self: 2 * len(self.layout.ranks) <= MAX_RANKS)
    @rule(data=st.data())
    def split(self, data: DataObject) -> None:
        """Cut every shard again over two ranks."""
        inner = {r: self._halves(data, self.layout.shard_shape(r)) for r in self.layout.ranks}
        names = {(r, i): 2 * k + i for k, r in enumerate(self.layout.ranks) for i in (0, 1)}
        cut = nest(self.layout, inner, names)
        parts = {r: extract(m, self.shards[r]) for r, m in inner.items()}
        shards = {names[r, i]: parts[r][i] for r, i in names}
        self._now(cut, shards, nest(identity(self.layout.domain), inner, names))

    @staticmethod
    def _halves(data: DataObject, shape: tuple[int, ...]) -> AffineMap:
        return layout(shape, data.draw(anywhere(shape)), ranks=2)

    @rule()
    def compose(self) -> None:
        """All moves so far in one: the same shards."""
        at_once = self._run(plan(self.first, self.layout), self.origin)
        assert all(torch.equal(x, self.shards[r]) for r, x in at_once.items())

    @rule()
    def resume(self) -> None:
        """Write everything down and read it again."""
        kept = self.layout, self.trail, self.last
        self.layout, self.trail, self.last = map(_read_again, kept)
        assert (self.layout, self.trail, self.last) == kept

    def _move(self, move: TransferPlan) -> None:
        self._now(move.target, self._run(move, self.shards), move.map)
        self.last = move

    def _run(self, move: TransferPlan, shards: dict[int, Any]) -> dict[int, Any]:
        ranks = 1 + max((*move.source.ranks, *move.target.ranks))
        with self.context(ranks) as ctx:
            out: Any = backends.run(ctx, backends.bind(ctx, move), shards)
        return dict(out)

    def _now(self, present: AffineMap, shards: dict[int, Any], step: AffineMap) -> None:
        self.layout, self.shards, self.last = present, shards, None
        self.trail = compose(self.trail, step)

    @invariant()
    def gathers(self) -> None:
        """Gathering gives the original."""
        assert torch.equal(rebuild(self.layout, self.shards), self.full)

    @invariant()
    def has_its_shapes(self) -> None:
        shapes = {r: tuple(x.shape) for r, x in self.shards.items()}
        assert shapes == {r: self.layout.shard_shape(r) for r in self.layout.ranks}

    @invariant()
    def reads_the_first_shards(self) -> None:
        """The copies so far are one map into the first shards."""
        found = compose(self.first, self.trail)
        assert equivalent(found, self.layout), explain(self.layout, found)


def _read_again(x: Any) -> Any:
    """A value as it comes back from its JSON text."""
    return x and type(x).from_dict(json.loads(json.dumps(x.to_dict())))
