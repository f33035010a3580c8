"""Values of as many peers of a public swarm as a test needs, as members tell them each other."""

from __future__ import annotations

from announcements import make_announcement

from shoal.protocol.identity import Identity
from shoal.protocol.ids import PeerId
from shoal.protocol.membership.membership import Membership, make_public
from shoal.protocol.records.announcements import sign_announcement
from shoal.protocol.records.swarm_records import SwarmRecords

PUBLIC = make_public(bytes(16))


def number_identity(number: int) -> Identity:
    return Identity(number.to_bytes(32, "big"))


def number_peer(number: int) -> PeerId:
    return number_identity(number).peer_id


def make_values(num_values: int, now: float, membership: Membership = PUBLIC) -> list[bytes]:
    """Return valid values of as many peers, which hold for 90 s."""
    values: list[bytes] = []
    for number in range(num_values):
        identity = number_identity(number)
        announcement = make_announcement(1, now, peer_id=identity.peer_id)
        record = sign_announcement(identity, announcement)
        values.append(SwarmRecords(membership).add_own(record, now).value)
    return values
