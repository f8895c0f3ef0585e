"""Real gloo groups, as objects in threads of one process or between processes."""

import threading
from datetime import timedelta

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
