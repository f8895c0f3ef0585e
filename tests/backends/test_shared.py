"""Shared memory, step by step: what a waiter sees when its peer answers, closes, ends or is slow."""

import errno
import os
import threading
import time
import weakref
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from cases import COLUMNS, ROWS, columns, full, move, own, require, rows

import shardalg as sa
from shardalg.backends import _futex, _shared
from shardalg.backends._shared import CLOSED, POSTED, READ, READY, Shared
from shardalg.backends._strategies import PeerToPeer
from shardalg.backends._transport import Outgoing

LONG = 20.0  # seconds, where nobody should sleep so long


class Alone:
    """A group on which nothing is sent."""


@pytest.fixture
def pair():
    """Two ranks of one process, with a segment each."""
    segments = [_shared.make(2) for _ in range(2)]
    for _, file in segments:
        os.close(file)
    (a, _), (b, _) = segments
    far = [PeerToPeer(Alone(), k, timedelta(seconds=LONG)) for k in range(2)]
    return Shared(a, {1: b}, far[0], {1: os.getpid()}), Shared(b, {0: a}, far[1], {0: os.getpid()})


@contextmanager
def beside(work):
    """Do some work in another thread; wait for it, and raise what it raised."""
    found = []

    def run():
        try:
            work()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield thread
    thread.join(LONG)
    assert not thread.is_alive()
    for error in found:
        raise error


# --- a peer that answers and goes ---------------------------------------------------------


class Answering:
    """A peer's segment in which a word is written at the very moment that another is read."""

    def __init__(self, on, answers):
        self.words, self._on, self._answers = self, on, answers
        self._values = {READY: 0, CLOSED: 0}

    def __getitem__(self, word):
        if word == self._on:
            self._values[READY] = 3 if self._answers else 0
            self._values[CLOSED] = 1
        return self._values[word]

    def wait(self, word, value):
        """Nothing is written meanwhile."""


def test_a_peer_that_answers_and_then_closes_has_answered(pair):
    mine, _ = pair
    mine.near[1] = Answering(CLOSED, answers=True)
    mine._wait(1, READY, 3)
    mine.near[1] = Answering(CLOSED, answers=False)
    with pytest.raises(sa.TransferError, match="position 1 closed its context"):
        mine._wait(1, READY, 3)


@pytest.mark.parametrize("answers", [True, False])
def test_a_peer_that_answers_and_then_ends_has_answered(pair, monkeypatch, answers):
    mine, its = pair

    def gone(file):
        if answers:
            its.mine.words[READY] = 3
        return True

    monkeypatch.setattr(_shared, "_gone", gone)
    monkeypatch.setattr(_shared, "NAP", 0.0)
    if answers:
        mine._wait(1, READY, 3)
    else:
        with pytest.raises(sa.TransferError, match="position 1 is gone"):
            mine._wait(1, READY, 3)


def test_who_is_closed_waits_no_more(pair):
    mine, _ = pair
    mine.close()
    start = time.monotonic()
    with pytest.raises(sa.TransferError, match="the context was closed"):
        mine._wait(1, READY, 1)
    assert time.monotonic() - start < 1


# --- sleeping and waking ------------------------------------------------------------------


@pytest.mark.parametrize("word", [READY, READ, POSTED])
@pytest.mark.parametrize("closes", [False, True], ids=["says", "closes"])
def test_a_sleeper_is_woken(pair, monkeypatch, word, closes):
    """By the word, and by the end of the peer whose word it waits for: not by the clock."""
    mine, its = pair
    monkeypatch.setattr(_shared, "NAP", LONG)

    def later():
        time.sleep(0.1)
        its.close() if closes else its.mine.say(word, 1)

    start = time.monotonic()
    with beside(later):
        if closes:
            with pytest.raises(sa.TransferError, match="closed"):
                mine._wait(1, word, 1)
        else:
            mine._wait(1, word, 1)
    assert time.monotonic() - start < LONG / 4


def test_a_word_that_comes_before_the_sleep_is_not_slept_through(pair, monkeypatch):
    mine, its = pair
    monkeypatch.setattr(_shared, "NAP", LONG)
    real = _futex.sleep_on

    def sleep(address, value, seconds):
        its.mine.say(READY, 1)  # between the look and the sleep
        real(address, value, seconds)

    monkeypatch.setattr(_shared, "sleep_on", sleep)
    start = time.monotonic()
    mine._wait(1, READY, 1)
    assert time.monotonic() - start < LONG / 4


def test_without_futexes_a_sleep_is_short(monkeypatch):
    monkeypatch.setattr(_futex, "_call", lambda *given: -1)
    monkeypatch.setattr(_futex.ctypes, "get_errno", lambda: errno.ENOSYS)
    start = time.monotonic()
    _futex.sleep_on(0, 0, LONG)
    assert _futex.NAP <= time.monotonic() - start < 1


# --- memory that is written again ---------------------------------------------------------


def test_a_line_of_post_is_not_written_over_before_all_have_read_it(pair):
    """A quick rank posts its second word while a slow one is about to read the first."""
    quick, slow = pair
    real, found = slow._wait, []

    def wait(peer, word, number):
        real(peer, word, number)
        end = time.monotonic() + LONG
        while number == 1 and slow.near[peer].words[POSTED] < 2 and time.monotonic() < end:
            time.sleep(0.001)

    slow._wait = wait
    with beside(lambda: found.extend((quick.post(b"q1"), quick.post(b"q2")))):
        assert slow.post(b"s1") == [b"q1", b"s1"]
        assert slow.post(b"s2") == [b"q2", b"s2"]
    assert found == [[b"q1", b"s1"], [b"q2", b"s2"]]


def turn(strategy, text=b""):
    """One turn of one of two ranks: ``text`` for the other; what the other sent."""
    out = strategy.outbox(strategy.position, len(text), buffers)
    out.copy_(torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else out)
    nothing, peer = out[:0], 1 - strategy.position
    messages = [nothing, nothing]
    messages[peer] = out
    sizes = [0, 0]
    sizes[peer] = 2
    part = Outgoing(out, messages, sizes, {})
    return bytes(
        strategy.swap({strategy.position: part}, buffers, lambda: None)[strategy.position][peer].numpy()
    )


def buffers(rank, use, size):
    return torch.empty(size, dtype=torch.uint8)


def test_a_half_is_not_written_over_before_its_readers_have_read_it(pair):
    """The third turn takes the half of the first."""
    writer, reader = pair
    went = []

    def write():
        for text in (b"w1", b"w2", b"w3"):
            turn(writer, text)
            writer.release()
            went.append(text)

    with beside(write):
        assert turn(reader, b"r1") == b"w1"
        message = reader.near[0].half(1)[:2]
        reader.mine.say(READY, 2)  # the second turn is ready here, and the first not read yet
        time.sleep(0.2)
        assert went == [b"w1", b"w2"] and bytes(message.numpy()) == b"w1"
        reader._turn = 1
        reader.release()
        assert turn(reader, b"r2") == b"w2"
        reader.release()
        assert turn(reader, b"r3") == b"w3"
        reader.release()


@pytest.mark.parametrize("hosts", ["aaa", "aab", "aabb"])
def test_messages_larger_than_a_half_go_in_turns_that_all_ranks_know(monkeypatch, hosts):
    """Also between ranks that share memory and one that cannot."""
    monkeypatch.setattr(_shared, "HALF", 4096)
    monkeypatch.setattr(Shared, "turn_bytes", 4096)
    store, size, errors = dist.HashStore(), len(hosts), []
    source, target = rows(size, (64, 512)), columns(size, (64, 512))
    x = full(source)

    def rank(r):
        try:
            mine, limit = dist.PrefixStore("halves", store), timedelta(seconds=LONG)
            with sa.backends.cpu(store=mine, rank=r, size=size, timeout=limit, host=hosts[r]) as ctx:
                bound = sa.bind(ctx, sa.schedule(sa.plan(source, target), dtypes="float32"))
                for k in range(3):
                    out = sa.run(ctx, bound, own(ctx, sa.extract(source, x * k)))
                    require(out, own(ctx, sa.extract(target, x * k)))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=rank, args=(r,), daemon=True) for r in range(size)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(2 * LONG)
    assert not errors and not any(t.is_alive() for t in threads)


# --- ends and places ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["fused", "p2p", "shared"])
def test_a_closed_context_lets_its_group_go(world, strategy):
    """Whoever holds a group keeps its connections: the others would not hear of the end."""

    def rank(ctx):
        move(ctx, ROWS, COLUMNS)
        group = weakref.ref(ctx.transport.group)
        ctx.close()
        return group() is None

    assert world(4, rank, strategy=strategy).good() == [True] * 4


def test_a_segment_closes_once(pair):
    mine, its = pair
    mine._alive = {1: os.pidfd_open(os.getpid())}
    file = mine._alive[1]
    mine.close()
    mine.close()  # the number may be another file's by now
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)
    assert its.near[0].words[CLOSED] == 1 and mine.far.group is None


@pytest.mark.parametrize("kind", _shared.NAMESPACES)
def test_another_namespace_is_another_host(monkeypatch, kind):
    """Of processes, of the network, of names: each stands for a machine of its own."""
    here, real = _shared.this_host(), os.readlink
    assert here and here == _shared.this_host() and _shared.this_host("a") != here

    def readlink(path):
        return "elsewhere" if path == f"/proc/self/ns/{kind}" else real(path)

    monkeypatch.setattr(os, "readlink", readlink)
    assert _shared.this_host() not in ("", here)


@pytest.mark.parametrize("missing", ["order", "memfd", "proc"])
def test_a_system_that_cannot_share_is_no_host(monkeypatch, missing):
    def refuse(path):
        raise FileNotFoundError(path)

    if missing == "order":
        monkeypatch.setattr(_shared.platform, "machine", lambda: "aarch64")
    elif missing == "memfd":
        monkeypatch.delattr(os, "memfd_create")
    else:
        monkeypatch.setattr(os, "readlink", refuse)
    assert _shared.this_host() == ""
