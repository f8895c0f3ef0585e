"""Device backends: the shared logic on a pretended device, choice by device, backends of other packages."""

import logging
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, full, own, require, rows
from devices import Pretended, pretend

import shardalg as sa
from shardalg.backends import _registry
from shardalg.backends._cuda import Cuda
from shardalg.backends._strategies import tournament
from shardalg.backends._xpu import Xpu


def name_of_strategy(ctx):
    x = full(ROWS)
    require(
        sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), own(ctx, sa.extract(ROWS, x))),
        own(ctx, sa.extract(COLUMNS, x)),
    )
    return ctx.transport.strategy.name


@pytest.mark.parametrize(
    ("corrupting", "chosen"), [((), "fused"), (("alltoall_base",), "pairwise"), (("recv",), "fused")]
)
def test_a_strategy_that_corrupts_is_switched_off_on_every_rank(corrupting, chosen, caplog):
    """The control exchanges of a run travel fused, so here only the self-test is spoiled."""
    layer = Pretended(corrupting=corrupting)
    with caplog.at_level(logging.WARNING, "shardalg"):
        found = pretend(4, lambda ctx: ctx.transport.strategy.name, layer).good()
    assert found == [chosen] * 4
    assert ("switched off" in caplog.text) == (chosen != "fused")
    if chosen != "fused":
        assert "'fused' changes data on ranks [1]" in caplog.text


def test_a_healthy_device_runs():
    assert pretend(4, name_of_strategy, Pretended()).good() == ["fused"] * 4


def test_no_strategy_left_is_an_error_on_every_rank():
    errors = pretend(3, name_of_strategy, Pretended(corrupting=("alltoall_base", "recv"))).errors
    assert all(isinstance(e, sa.TransferError) and "backends.cpu()" in str(e) for e in errors)


@pytest.mark.parametrize("strategy", ["fused", "pairwise"])
def test_a_strategy_can_be_asked_for(strategy):
    assert pretend(4, name_of_strategy, Pretended(), strategy=strategy).good() == [strategy] * 4


def test_an_unknown_strategy_is_refused():
    errors = pretend(2, name_of_strategy, Pretended(), strategy="carrier pigeon").errors
    assert all(isinstance(e, sa.InvalidMapError) and "pairwise" in str(e) for e in errors)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_a_tournament_lets_all_meet_all_once(count):
    games = [tournament(k, count) for k in range(count)]
    assert all(sorted(its) == [p for p in range(count) if p != k] for k, its in enumerate(games))
    met = set()
    for k, its in enumerate(games):
        for step in range(count):
            peer = (step - k) % count
            assert (step - peer) % count == k  # in every step the meetings are mutual
            met.add(frozenset((k, peer)))
        assert its == [(step - k) % count for step in range(count) if (step - k) % count != k]
    assert len(met) == count * (count + 1) // 2


def test_a_background_run_waits_for_the_device_and_settles_it():
    layer = Pretended()

    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        handle = sa.run_async(ctx, bound, own(ctx, sa.extract(ROWS, full(ROWS))))
        require(handle.wait(), own(ctx, sa.extract(COLUMNS, full(ROWS))))
        return threading.get_ident()

    callers = set(pretend(4, rank, layer).good())
    assert len(layer.fences) == 8 and len(layer.settled) == 4
    assert callers < set(layer.fences) and not callers & set(layer.settled)


def test_devices_go_to_ranks_in_turn_or_as_the_launcher_says(monkeypatch):
    layer = Pretended(devices=2)
    pretend(4, name_of_strategy, layer).good()
    assert sorted(layer.selected) == [0, 0, 1, 1]
    monkeypatch.setenv("LOCAL_RANK", "1")
    layer = Pretended(devices=2)
    pretend(2, lambda ctx: None, layer).good()
    assert layer.selected == [1, 1]
    layer = Pretended(devices=2)
    pretend(2, lambda ctx: None, layer, device=0).good()
    assert layer.selected == [0, 0]
    errors = pretend(1, lambda ctx: None, Pretended(devices=2), device=5).errors
    assert isinstance(errors[0], sa.InvalidMapError) and "there are 2" in str(errors[0])


class Forever:
    def is_completed(self):
        return False


def test_a_device_that_does_not_answer_is_given_up_at_the_timeout():
    def rank(ctx):
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        ctx.transport.group.alltoall_base = lambda *given: Forever()
        with pytest.raises(sa.TransferError, match=r"no answer within 0\.5 s"):
            sa.run(ctx, bound, own(ctx, sa.extract(ROWS, full(ROWS))))

    pretend(4, rank, Pretended(), timeout=0.5).good()


def test_tensors_of_another_device_are_refused():
    with sa.backends.simulate(4) as ctx:
        bound = sa.bind(ctx, sa.plan(ROWS, COLUMNS))
        with pytest.raises(sa.InvalidMapError, match="meta"):
            sa.run(ctx, bound, {r: x.to("meta") for r, x in sa.extract(ROWS, full(ROWS)).items()})


# --- choosing -----------------------------------------------------------------------------


@pytest.mark.parametrize(("make", "layer"), [("cuda", Cuda()), ("xpu", Xpu())])
def test_a_missing_device_is_an_error_that_says_what_to_use(make, layer):
    if layer.count():
        pytest.skip(f"this machine has {layer.count()} devices of kind {make}")
    for name in (make, "auto"):
        options = {"device": make} if name == "auto" else {}
        with pytest.raises(sa.UnsupportedError, match=r"backends\.cpu"):
            getattr(sa.backends, name)(store=dist.HashStore(), rank=0, size=1, **options)


@pytest.mark.parametrize("layer", [Cuda(), Xpu(), Pretended()])
def test_a_layer_says_all_that_differs(layer):
    assert {"name", "group_backend", "strategies", "count", "select", "group", "fence", "settle"} <= set(
        dir(layer)
    )
    assert set(layer.strategies) <= {"fused", "pairwise"}


@pytest.mark.parametrize(
    ("config", "kinds"),
    [
        ("cpu:gloo", ["cpu"]),
        ("cpu:gloo,cuda:nccl", ["cpu", "cuda"]),
        ("cuda:nccl", ["cuda"]),
        ("xpu:xccl", ["xpu"]),
    ],
)
def test_what_a_group_serves(config, kinds):
    assert _registry._served(config) == kinds


@pytest.mark.parametrize(
    ("config", "present", "chosen"),
    [
        ("cpu:gloo", "cuda", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda", "cuda"),
        ("cpu:gloo,cuda:nccl", None, "cpu"),
        ("cpu:gloo,xpu:xccl,cuda:nccl", "xpu", "xpu"),
        ("cuda:nccl", None, "cuda"),
    ],
)
def test_auto_goes_by_what_the_group_serves_and_the_machine_has(monkeypatch, config, present, chosen):
    here = None if present is None else torch.device(present)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: here is not None)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: here)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    assert _registry.device_type("a group") == chosen


def test_auto_without_a_group_takes_the_machines_own():
    with sa.backends.auto(store=dist.HashStore(), rank=0, size=1, device="cpu") as ctx:
        require(sa.run(ctx, sa.bind(ctx, sa.plan(rows(1), rows(1))), {0: full(ROWS)}), {0: full(ROWS)})
    if not torch.accelerator.is_available():
        assert _registry.device_type() == "cpu"


# --- other packages' backends -------------------------------------------------------------

PLUGIN = """
import shardalg.backends

def simple(group=None, **options):
    return shardalg.backends.simulate(options.get("size", 2))
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """A package that offers a backend by entry point."""
    (tmp_path / "a_plugin.py").write_text(PLUGIN)
    info = tmp_path / "a_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: a-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[shardalg.backends]\nsimple = a_plugin:simple\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("a_plugin", None)


def test_a_backend_of_another_package_is_found_by_name(installed):
    for make in (sa.backends.backend("simple"), lambda **o: sa.backends.auto(device="simple", **o)):
        with make(size=4) as ctx:
            shards = sa.extract(ROWS, full(ROWS))
            require(
                sa.run(ctx, sa.bind(ctx, sa.plan(ROWS, COLUMNS)), shards), sa.extract(COLUMNS, full(ROWS))
            )


def test_an_unknown_backend_lists_those_there_are(installed):
    with pytest.raises(sa.InvalidMapError, match=r"cpu.*simple"):
        sa.backends.backend("nowhere")


def test_ours_are_found_by_name():
    for name, make in sa.backends.BACKENDS.items():
        assert sa.backends.backend(name) is make is getattr(sa.backends, name)
