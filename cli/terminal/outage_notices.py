"""Says what a text waits for when it stops in the middle."""

import threading
from collections.abc import Callable
from types import TracebackType

_PATIENCE_SECONDS = 1.0
"""Most failovers are over by then, and the report at the end names them."""

_LOOK_SECONDS = 0.1


class OutageNotices:
    """Looks again and again whether something is waited for, in a thread of its own, for use in a
    `with` block.

    `describe` says what that is, empty if nothing; `notify` gets the same words once, when they
    have held for a second.
    """

    def __init__(
        self,
        describe: Callable[[], str],
        notify: Callable[[str], None],
        patience_seconds: float = _PATIENCE_SECONDS,
    ) -> None:
        self._describe = describe
        self._notify = notify
        self._num_patient_looks = round(patience_seconds / _LOOK_SECONDS)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "OutageNotices":
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        known, num_looks = "", 0
        while not self._is_over.wait(_LOOK_SECONDS):
            found = self._describe()
            num_looks = num_looks + 1 if found == known else 0
            known = found
            if found and num_looks == self._num_patient_looks:
                self._notify(found)
