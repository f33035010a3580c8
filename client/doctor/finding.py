"""The findings of `shoal doctor`."""

from dataclasses import dataclass
from enum import StrEnum


class FindingStatus(StrEnum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    BROKEN = "broken"


@dataclass(frozen=True)
class Finding:
    """The result of one check, and the advice if something is broken."""

    name: str
    status: FindingStatus
    detail: str
    fix: str = ""

    @property
    def ok(self) -> bool:
        """Return whether things work as they are."""
        return self.status is not FindingStatus.BROKEN
