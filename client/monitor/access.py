"""The monitor's access to swarms on the internet."""

from ...protocol.membership.membership import Membership
from ...protocol.net.transport import Transport
from ...protocol.records.announcements import Announcement
from ..doctor.peer_check import PeerFault, check_peer
from ..doctor.probes import make_network_probes
from .collector import SwarmAccess
from .state import Dialled


def make_access(membership: Membership | None) -> SwarmAccess:
    """Return the access to a swarm over TCP, TLS and the DHT, which takes seconds to import.

    Without a membership it joins open swarms only.
    """
    probes = make_network_probes(membership)

    async def dial(peer: Announcement, transport: Transport) -> Dialled:
        check = await check_peer(peer, transport, probes)
        fault = "" if check.fault is None else f"{check.fault}: {check.detail}"
        is_refusal = check.fault in (PeerFault.REFUSED, PeerFault.VERSION)
        return Dialled(probes.clock.wall(), fault, is_refusal, check.rtt_seconds)

    return SwarmAccess(probes.clock, probes.join, dial)
