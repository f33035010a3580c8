"""Makes a request to end, or a terminal that is closed, take the same way out as Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def end_in_good_order() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, so that `with` blocks end what they began.

    Belongs to the main thread.
    """
    numbers = (signal.SIGTERM, signal.SIGHUP)
    previous = [signal.signal(number, _interrupt) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
