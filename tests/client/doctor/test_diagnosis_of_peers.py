"""What a diagnosis says of single peers: silent, faulty, old, with a clock that is off."""

from __future__ import annotations

import asyncio
import ssl
from dataclasses import replace
from ipaddress import IPv4Interface
from types import SimpleNamespace
from typing import Any

import pytest
from announcements import describe_peer
from diagnosis_scene import Swarm, examine, find
from virtual_time import VirtualClock, run_virtual

from shoal.client.doctor.finding import FindingStatus
from shoal.client.doctor.peer_check import PeerFault, check_peer
from shoal.protocol.endpoints import Endpoint, Relay
from shoal.protocol.errors import ErrorCode, RemoteProtocolError, UnavailableError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.membership.membership import Membership, make_owner
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Declined, Hello
from shoal.protocol.net import dialling
from shoal.protocol.spans import Span


def test_killed_peer_is_named_and_so_are_its_blocks() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 3))
        await swarm.add(Span(3, 5))
        await swarm.add(Span(5, 8))
        swarm.network.kill("peer2")

    diagnosis = examine(build)

    (broken,) = [check for check in diagnosis.checks if check.fault]
    assert broken.fault is PeerFault.UNREACHABLE
    assert not find(diagnosis, f"peer …{broken.peer.peer_id[-6:]}").ok
    assert not diagnosis.is_well
    assert broken.peer.span == Span(3, 5)
    assert diagnosis.missing == (Span(3, 5),)
    assert "blocks 3:5 are missing" in find(diagnosis, "blocks").detail
    assert "--blocks 3:5" in find(diagnosis, "blocks").fix


def test_relayed_peer_that_is_gone_is_not_told_to_announce_an_address() -> None:
    async def build(swarm: Swarm) -> None:
        relay = Relay("192.0.2.7", 4001, Identity(bytes([9]) * 32).peer_id)
        await swarm.add(Span(0, 8), endpoints=(), relays=(relay,))

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is not None
    assert "start it again if its process has ended" in find(diagnosis, "peer").fix
    assert "--announce-host" not in find(diagnosis, "peer").fix


@pytest.mark.parametrize("near_seconds", [0.0, 3.0, 1000.0])
def test_time_of_a_relays_dial_tells_nothing_of_our_network(
    monkeypatch: pytest.MonkeyPatch, near_seconds: float
) -> None:
    """A stranger may announce its own relay, and any address here."""
    monkeypatch.setattr(dialling, "list_own_interfaces", lambda: [IPv4Interface("10.0.1.9/24")])
    peer_id = Identity(bytes([9]) * 32).peer_id
    near = Endpoint("10.0.1.3", 80, "c" * 64)
    relay = Relay("192.0.2.7", 4001, peer_id)
    peer = describe_peer(
        peer_id=peer_id,
        model_id=ModelId("a" * 32),
        num_blocks=8,
        span=Span(0, 8),
        endpoints=(),
        local_endpoints=(near,),
        relays=(relay,),
        issued_at=0.0,
        expires_at=90.0,
    )
    relay_dialled_at: list[float] = []

    async def refuse(endpoint: Endpoint) -> None:
        await asyncio.sleep(near_seconds)
        raise UnavailableError("it refused the connection")

    async def open_stream(endpoint: Endpoint, timeout_seconds: float) -> None:
        relay_dialled_at.append(VirtualClock().now())
        raise UnavailableError("nobody is at the relay")

    transport: Any = SimpleNamespace(open_stream=open_stream)
    probes: Any = SimpleNamespace(clock=VirtualClock(), check_certificate=refuse)
    check = run_virtual(check_peer(peer, transport, probes))

    assert relay_dialled_at == [0.0]
    assert check.detail == "nobody is at the relay"


def test_broken_replica_does_not_make_the_swarm_unusable() -> None:
    swarm_ids: list[str] = []

    async def build(swarm: Swarm) -> None:
        swarm_ids.extend([(await swarm.add(Span(0, 8))).peer_id for _ in range(2)])
        swarm.network.kill("peer1")

    diagnosis = examine(build)

    assert diagnosis.is_well
    assert diagnosis.is_usable
    assert find(diagnosis, "blocks").ok
    assert "before any is asked: 2 online" in find(diagnosis, "announcements").detail
    faulty = find(diagnosis, f"peer …{swarm_ids[0][-6:]}")
    assert faulty.status is FindingStatus.WARNING
    assert "unreachable" in faulty.detail


def test_paused_peer_is_silent() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.network.pause("peer1")

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is PeerFault.SILENT


@pytest.mark.parametrize(
    ("ours", "fault"),
    [(None, PeerFault.NOT_A_MEMBER), (make_owner(bytes(16)), PeerFault.WRONG_SECRET)],
)
def test_peer_that_takes_members_only_is_no_broken_peer(
    ours: Membership | None, fault: PeerFault
) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.membership = ours
        await swarm.add(Span(0, 8), membership=make_owner(bytes(range(16))))

    diagnosis = examine(build)

    assert [check.fault for check in diagnosis.checks] == [fault]
    assert diagnosis.missing == (Span(0, 8),)
    assert "join code" in find(diagnosis, "peer").fix


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RemoteProtocolError("another certificate"), PeerFault.FINGERPRINT),
        (caused_by(RemoteProtocolError("no TLS"), ssl.SSLError()), PeerFault.NO_TLS),
        (caused_by(UnavailableError("refused"), ConnectionRefusedError()), PeerFault.CLOSED_PORT),
        (caused_by(UnavailableError("late"), TimeoutError()), PeerFault.SILENT),
        (UnavailableError("no way there"), PeerFault.UNREACHABLE),
    ],
)
def test_faults_of_the_connection_have_their_names(error: Exception, fault: PeerFault) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.certificate_errors["peer1"] = error

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is fault
    assert str(fault) in find(diagnosis, "peer").detail
    assert find(diagnosis, "peer").fix


@pytest.mark.parametrize(
    ("facts", "fault"),
    [
        ({"peer_id": Identity(bytes([77]) * 32).peer_id}, PeerFault.OTHER_PEER),
        ({"model_id": ModelId("b" * 32)}, PeerFault.OTHER_MODEL),
        ({"span": Span(0, 2)}, PeerFault.OTHER_BLOCKS),
    ],
    ids=["peer", "model", "blocks"],
)
def test_peer_that_is_another_than_it_announced_is_named(
    facts: dict[str, Any], fault: PeerFault
) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), answer=lambda welcome: replace(welcome, **facts))

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is fault
    assert diagnosis.missing == (Span(0, 8),)


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (Declined(None, 0, ErrorCode.BAD_VERSION, "this end speaks 9"), PeerFault.VERSION),
        (Declined(None, 0, ErrorCode.BUSY, "come back later", 1.0), PeerFault.REFUSED),
        (Hello(1, 1, "test"), PeerFault.PROTOCOL),
    ],
)
def test_faults_of_the_answer_have_their_names(answer: Message, fault: PeerFault) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), answer=lambda _: answer)

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is fault
    assert diagnosis.missing == (Span(0, 8),)


def test_peer_of_another_protocol_version_is_not_even_dialled() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), min_version=9, max_version=10)
        swarm.network.kill("peer1")

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is PeerFault.VERSION
    assert "versions 9 to 10" in diagnosis.checks[0].detail


@pytest.mark.parametrize(
    ("ahead_seconds", "status"),
    [(0.5, FindingStatus.OK), (2.0, FindingStatus.WARNING), (-5.0, FindingStatus.BROKEN)],
)
def test_clock_of_one_peer_is_told_from_ours(ahead_seconds: float, status: FindingStatus) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), clock_ahead_seconds=ahead_seconds)
        await swarm.add(Span(0, 8))

    diagnosis = examine(build)

    finding = find(diagnosis, "clocks")
    assert finding.status is status
    if status is not FindingStatus.OK:
        late = [check for check in diagnosis.checks if abs(check.clock_ahead_seconds or 0) > 1]
        assert late[0].peer.peer_id[-6:] in finding.detail
        assert ("behind" in finding.detail) is (ahead_seconds < 0)


def test_our_clock_is_off_when_nobody_agrees_with_it() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), clock_ahead_seconds=4.0)
        await swarm.add(Span(0, 8), clock_ahead_seconds=4.0)

    diagnosis = examine(build)

    assert "this machine is 4.0 s behind" in find(diagnosis, "clocks").detail
    assert not diagnosis.is_well


@pytest.mark.parametrize("are_others_here", [False, True])
def test_peer_that_only_its_machine_reaches_is_broken_in_a_swarm_of_others(
    are_others_here: bool,
) -> None:
    here = (Endpoint("127.0.0.1", 4000, "f" * 64),)

    async def build(swarm: Swarm) -> None:
        if not are_others_here:
            await swarm.add(Span(0, 8))
        await swarm.add(Span(0, 8), endpoints=here)

    found = examine(build).findings
    told = [one for one in found if "nobody on another machine can use it" in one.detail]

    assert len(told) == (not are_others_here)
    assert all(one.status is FindingStatus.BROKEN and "--local" in one.fix for one in told)
