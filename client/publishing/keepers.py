"""Who keeps a publication by now, and how long whoever published it waits for more."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from ...protocol.errors import SilentError
from ...protocol.messages.adapters import allow_upload_seconds
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span, find_gaps
from .publication import KeeperError

_logger = logging.getLogger(__name__)

_UPLOADS_AFTER_EACH_OTHER = 2
"""How many of the slowest uploads somebody waits for: those that come first may all be so slow."""

_PUBLISHING_SECONDS = 600.0
_PATIENCE = 8.0
"""Once one peer keeps it, all of it may take so long, or so many times as long as that one took."""

_OTHERS_SECONDS = 5.0
"""How long the others are waited for when there is a peer for each block: whoever uses the adapter
at once then finds it at most of them."""


class Keepers:
    """The peers that keep a publication of so many bytes for blocks of a span."""

    def __init__(self, span: Span, num_bytes: int, now: float) -> None:
        self._span = span
        self._begun_at = now
        slowest_seconds = _UPLOADS_AFTER_EACH_OTHER * allow_upload_seconds(num_bytes)
        self._deadline = now + max(_PUBLISHING_SECONDS, slowest_seconds)
        self._kept: list[Span] = []
        self._errors: list[KeeperError] = []
        self._last_words = "nobody serves them, or only who is slow to take it"

    @property
    def deadline(self) -> float:
        """Until when more of them are waited for."""
        return self._deadline

    def note(self, peer: Announcement, error: KeeperError | None) -> None:
        """Note that a peer keeps it, or why not."""
        if error is None:
            self._kept.append(peer.span)
        else:
            self._errors.append(error)
            self._last_words = f"peer …{peer.peer_id[-6:]} (blocks {peer.span}): {error}"

    def wait_for(self, rest: Sequence[Announcement], now: float) -> None:
        """Bring the deadline forward as far as those that may keep it still allow it."""
        if not self._kept:
            return
        usual_seconds = max(_PUBLISHING_SECONDS, _PATIENCE * (now - self._begun_at))
        self._deadline = min(self._deadline, self._begun_at + usual_seconds)
        missing = self._find_missing()
        if not any(gap.overlap(peer.span) for gap in missing for peer in rest):
            self._deadline = min(self._deadline, now + _OTHERS_SECONDS)

    def check(self, rest: Sequence[Announcement], now: float) -> None:
        """Warn of blocks for which nobody keeps it; raise what peers did where nobody does at all.

        `rest` are those that were waited for in vain.
        """
        if not self._kept:
            last = self._errors[-1] if self._errors else None
            if rest:
                raise SilentError(
                    f"no peer has all of the adapter after {now - self._begun_at:.0f} s; "
                    f"{len(rest)} have not answered, or wait for the others"
                ) from last
            raise last or SilentError("no peer was asked to keep the adapter")
        elif missing := self._find_missing():
            _logger.warning(
                "no peer keeps the adapter for blocks %s yet, and it cannot be used until one "
                "does: %s",
                ", ".join(map(str, missing)),
                self._last_words,
            )

    def _find_missing(self) -> list[Span]:
        """Return the blocks that nobody keeps it for."""
        gaps = [gap.overlap(self._span) for gap in find_gaps(self._span.stop, self._kept)]
        return [gap for gap in gaps if gap is not None]
