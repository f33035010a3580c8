"""A `shoal` whose peer announces a TLS certificate that it does not have.

    python forged_peer.py serve MODEL ...

Its announcement is signed and valid in every other way, as that of somebody in the middle would be.
"""

import sys
from dataclasses import replace
from typing import Any

from shoal.cli.main import main
from shoal.peer import peer
from shoal.protocol.records.announcements import Announcement

_make_honest_template = peer.make_template


def make_forged_template(*facts: Any) -> Announcement:
    honest = _make_honest_template(*facts)
    forged = tuple(replace(endpoint, fingerprint="f" * 64) for endpoint in honest.endpoints)
    return replace(honest, endpoints=forged)


if __name__ == "__main__":
    peer.make_template = make_forged_template
    sys.exit(main(sys.argv[1:]))
