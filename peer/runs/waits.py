"""Says what a run waits for, once for each wait and not for each attempt."""

from __future__ import annotations

from ..process.config import PeerEvent, Report


class Waits:
    """What one peer waits for."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._what: str | None = None

    def note(self, what: str | None) -> None:
        """Note what is waited for now; None: nothing."""
        if what is not None and what != self._what:
            self._report(PeerEvent("waiting_for", {"what": what}))
        self._what = what
