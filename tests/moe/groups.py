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
        pipes, processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe(duplex=False)
            work = (theirs, f"{folder}/store", size, rank, function, args)
            processes.append(context.Process(target=_one_process, args=work, daemon=True))
            processes[-1].start()
            theirs.close()
            pipes.append(mine)
        try:
            found = [pickle.loads(pipe.recv_bytes()) for pipe in pipes if pipe.poll(seconds)]
        finally:
            for process in processes:
                process.join(seconds if len(found) == size else 0)
                process.kill()
    assert len(found) == size, f"{size - len(found)} of {size} ranks gave no result in {seconds} s"
    return found


def _one_process(pipe, path, size, rank, function, args):
    torch.set_num_threads(1)
    group = dist.ProcessGroupGloo(dist.FileStore(path, size), rank, size, TIMEOUT)
    pipe.send_bytes(pickle.dumps(function(group, rank, *args)))
