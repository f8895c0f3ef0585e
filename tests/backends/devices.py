"""A pretended accelerator: the shared device code over gloo, with faults that can be switched on."""

import threading
from datetime import timedelta

import torch
import torch.distributed as dist
import worlds

from shardalg.backends._device import device_context


class Pretended:
    """A device layer whose devices are the CPU. ``corrupting`` names group calls that change a byte."""

    name = "pretended"
    group_backend = "gloo"

    def __init__(self, strategies=("fused", "pairwise"), corrupting=(), devices=4):
        self.strategies, self.corrupting, self.devices = strategies, corrupting, devices
        self.selected, self.fences, self.settled = [], [], []

    def count(self):
        return self.devices

    def select(self, index):
        self.selected.append(index)
        return torch.device("cpu")

    def group(self, store, position, size, timeout):
        return Corrupting(dist.ProcessGroupGloo(store, position, size, timeout), self.corrupting, position)

    def fence(self, device):
        self.fences.append(threading.get_ident())
        return lambda: self.fences.append(threading.get_ident())

    def settle(self, device):
        self.settled.append(threading.get_ident())


class Corrupting:
    """A process group that changes what arrives on position 1 in some of its calls, without an error."""

    def __init__(self, group, corrupting, position):
        self.group, self.corrupting, self.position = group, corrupting, position

    def allgather(self, *given):
        return Polled(self.group.allgather(*given))

    def alltoall_base(self, into, *given):
        return Polled(self.group.alltoall_base(into, *given), self._spoil("alltoall_base", into))

    def recv(self, into, *given):
        return Polled(self.group.recv(into, *given), self._spoil("recv", into[0]))

    def send(self, *given):
        return Polled(self.group.send(*given))

    def _spoil(self, name, x):
        if name not in self.corrupting or self.position != 1 or x.numel() < 8:
            return None
        return lambda: x[7].bitwise_xor_(1)


class Polled:
    """Work that is looked at, as on a device, and spoiled once it is done."""

    def __init__(self, work, spoil=None):
        self.work, self.spoil, self.done = work, spoil, False

    def is_completed(self):
        if not self.done:
            self.work.wait()
            self.done = True
            if self.spoil is not None:
                self.spoil()
        return True

    def wait(self):
        assert self.done


def pretend(n, fn, layer, *, timeout=20.0, **options):
    """``fn(ctx)`` on n ranks of pretended devices."""
    store = dist.HashStore()
    results, errors = [None] * n, [None] * n

    def rank(r):
        mine = dist.PrefixStore("devices", store)
        try:
            limit = timedelta(seconds=timeout)
            with device_context(layer, store=mine, rank=r, size=n, timeout=limit, **options) as ctx:
                results[r] = fn(ctx)
        except BaseException as error:
            errors[r] = error

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(n)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(worlds.PATIENCE)
    assert not any(t.is_alive() for t in threads), "a rank hangs"
    return worlds.Outcome(results, errors)
