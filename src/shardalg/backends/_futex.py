"""Sleeping until another process changes a word of shared memory: Linux's ``futex``.

A waiter that spins takes the processor that the rank it waits for needs, wherever ranks share
processors; one that sleeps a fixed time is late. This one sleeps, and is woken.
"""

from __future__ import annotations

import ctypes
import errno
import time

SYSCALL = 202  # futex, on x86_64
WAIT, WAKE, ALL = 0, 1, 2**31 - 1
NAP = 0.0005  # seconds between looks where the system has no futex
LOW = 2**32 - 1  # the kernel compares 32 bits: the lower half of a word, on this processor its first


class _Time(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_call = ctypes.CDLL(None, use_errno=True).syscall
_call.restype = ctypes.c_long
_call.argtypes = (
    ctypes.c_long, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, ctypes.c_void_p,
    ctypes.c_uint32,
)  # fmt: skip


def sleep_on(address: int, value: int, seconds: float) -> None:
    """Sleep while the word at ``address`` is ``value``, until woken or for ``seconds``; maybe shorter."""
    limit = _Time(int(seconds), int(seconds % 1 * 1e9))
    failed = _call(SYSCALL, address, WAIT, value & LOW, ctypes.addressof(limit), None, 0) < 0
    if failed and ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
        time.sleep(min(NAP, seconds))


def wake(address: int) -> None:
    """Wake everybody who sleeps on the word at ``address``, after it was written."""
    _call(SYSCALL, address, WAKE, ALL, None, None, 0)
