"""What a peer announces, where a test has little to say about it."""

from typing import Any

from shoal.protocol.records.announcements import Announcement, PeerState


def describe_peer(**facts: Any) -> Announcement:
    """Return the first announcement of a peer that is ONLINE, nowhere to be dialled, with changes.

    Who it is, which blocks of which model it serves, and from when to when, a test has to say.
    """
    usual: dict[str, Any] = {
        "state": PeerState.ONLINE,
        "endpoints": (),
        "min_version": 1,
        "max_version": 1,
        "weights": "int8",
        "compute_dtype": "fp32",
        "sequence": 1,
    }
    return Announcement(**(usual | facts))
