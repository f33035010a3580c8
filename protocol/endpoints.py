"""Where a peer can be dialled, and what proves that it is the right one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Endpoint:
    """A host and port, with the SHA-256 fingerprint of the TLS key that must answer there.

    `fingerprint` is 64 lower-case hex digits, or empty for plain text, which is for loopback only.
    """

    host: str
    port: int
    fingerprint: str = ""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
