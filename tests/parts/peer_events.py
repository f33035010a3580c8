"""Reads the JSON events that a peer process prints with `--json`."""

from __future__ import annotations

import json
import select
import subprocess
from typing import Any

START_SECONDS = 120.0


def read_event(peer: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
    """Return the next event of a kind that a peer reports.

    Its stdout has to be unbuffered (`bufsize=0`), or `select` would not see what was read ahead.
    """
    assert peer.stdout is not None
    while select.select([peer.stdout], [], [], START_SECONDS)[0]:
        event = json.loads(peer.stdout.readline() or "{}")
        assert event, "the peer ended"
        if event["event"] == name:
            return event
    raise AssertionError(f"the peer did not say that it is {name}")
