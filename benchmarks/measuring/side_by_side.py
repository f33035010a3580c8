"""Computations that do not measure time, several at once, each in a process of its own."""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def compute_side_by_side(
    jobs: Mapping[Key, Callable[[], Result]], num_at_once: int
) -> Iterator[tuple[Key, Result]]:
    """Yield the result of each job as soon as it is there. Jobs are pickled, and begun in order."""
    if not jobs:
        return
    with start_processes(num_at_once) as pool:
        try:
            keys = {pool.submit(job): key for key, job in jobs.items()}
            for future in as_completed(keys):
                yield keys[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def start_processes(num_processes: int) -> ProcessPoolExecutor:
    """Return a pool of processes that end with this one, however it ends."""
    return ProcessPoolExecutor(num_processes, get_context("spawn"), _end_with_parent)


def _end_with_parent() -> None:
    """End this process with its parent: a pool tells its processes nothing when it is killed."""
    Thread(target=_wait_for_parent, daemon=True).start()


def _wait_for_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()  # a pipe that closes
    os._exit(1)
