"""Makes a request to end (SIGTERM) take the same way out as Ctrl-C."""

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def end_in_good_order() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too, so that `with` blocks end what they started.

    Belongs to the main thread.
    """
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt
