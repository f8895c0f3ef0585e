"""Real gloo groups, as objects in threads of one process or between processes."""

import multiprocessing
import pickle
import tempfile
import threading
from datetime import timedelta

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=20)


def on_threads(size, function, timeout=TIMEOUT):
    """``function(group, rank)`` on every rank of a real gloo group; the results by rank.

    The first error of the lowest rank is raised again, after all have finished.
    """
    store = dist.HashStore()
    results, errors = [None] * size, [None] * size

    def work(rank):
        try:
            group = dist.ProcessGroupGloo(store, rank, size, timeout)
            results[rank] = function(group, rank)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if error is not None:
            raise error
    return results


def errors_on_threads(size, function, timeout=TIMEOUT):
    """The error each rank raised, or None."""

    def guarded(group, rank):
        try:
            function(group, rank)
        except Exception as error:
            return error
        return None

    return on_threads(size, guarded, timeout)


def on_processes(size, function, *args, seconds=60):
    """``function(group, rank, *args)`` on every rank of a gloo group of real processes; results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "shardalg.moe"])
    with tempfile.TemporaryDirectory() as folder:
        results = context.SimpleQueue()
        path = f"{folder}/store"
        processes = [
            context.Process(
                target=_one_process, args=(results, path, size, rank, function, args), daemon=True
            )
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(seconds)
        assert all(process.exitcode == 0 for process in processes), [p.exitcode for p in processes]
        found = dict(results.get() for _ in processes)
    return [pickle.loads(found[rank]) for rank in range(size)]


def _one_process(results, path, size, rank, function, args):
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.FileStore(path, size), rank, size, TIMEOUT)
    results.put((rank, pickle.dumps(function(group, rank, *args))))
