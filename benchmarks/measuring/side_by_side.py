"""Computations that do not measure time, several at once, each in a process of its own."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from typing import TypeVar

Key = TypeVar("Key")
Result = TypeVar("Result")


def compute_side_by_side(
    jobs: Mapping[Key, Callable[[], Result]], num_at_once: int
) -> Iterator[tuple[Key, Result]]:
    """Yield the result of each job as soon as it is there. Jobs are pickled, and begun in order."""
    if not jobs:
        return
    with ProcessPoolExecutor(num_at_once, get_context("spawn")) as pool:
        try:
            keys = {pool.submit(job): key for key, job in jobs.items()}
            for future in as_completed(keys):
                yield keys[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)
