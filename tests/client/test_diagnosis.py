"""The doctor's checks, over a network in memory on the virtual clock."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from shoal.client.diagnosis import Diagnosis, Finding, ModelFacts, Status
from shoal.client.peer_check import LIBP2P_GREETING, Fault, Probes
from shoal.protocol.announcements import Announcement, PeerState, sign_announcement
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import (
    DirectoryError,
    ErrorCode,
    ModelError,
    RemoteProtocolError,
    UnavailableError,
)
from shoal.protocol.identity import Identity
from shoal.protocol.ids import ModelId
from shoal.protocol.messages import Declined, Hello, Message, Welcome
from shoal.protocol.net.clock import VirtualClock, run_virtual
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.loopback import Link, LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.transport import Stream
from shoal.protocol.spans import Span
from shoal.protocol.wire import decode_frame, encode_frame

MODEL = ModelFacts("stories", ModelId("a" * 32), 8)
DELAY_SECONDS = 0.05
ADDRESS = "/ip4/10.0.0.1/tcp/4001/p2p/" + Identity(bytes([9]) * 32).peer_id
PORT = 7000


class Swarm:
    """Peers at hosts of a network in memory, what they announce, and a diagnosis of it all."""

    def __init__(self) -> None:
        self.network = LoopbackNetwork(link=Link(DELAY_SECONDS))
        self.store = MemoryDirectoryStore()
        self.clock = VirtualClock()
        self.identities: list[Identity] = []
        self.dial_error: OSError | None = None
        self.is_dial_silent = False
        self.hail_answer: bytes | None = LIBP2P_GREETING
        self.join_error: DirectoryError | None = None
        self.certificate_errors: dict[str, Exception] = {}
        self.heard: list[Finding] = []

    async def add(
        self,
        span: Span,
        *,
        clock_ahead_seconds: float = 0.0,
        answer: Callable[[Welcome], Message] = lambda welcome: welcome,
        **announced: Any,
    ) -> Announcement:
        """Start a peer and announce it."""
        identity = Identity(bytes([len(self.identities) + 1]) * 32)
        self.identities.append(identity)
        host = f"peer{len(self.identities)}"

        async def serve(stream: Stream) -> None:
            frame = await stream.receive()
            assert frame is not None
            assert isinstance(decode_frame(frame), Hello)
            wall = self.clock.wall() + clock_ahead_seconds
            welcome = Welcome(1, "test", identity.peer_id, MODEL.model_id, span, wall)
            await stream.send(encode_frame(answer(welcome)))
            await stream.receive()

        listener = await LoopbackTransport(self.network, host).listen(host, PORT, serve)
        now = self.clock.wall()
        fields: dict[str, Any] = {
            "peer_id": identity.peer_id,
            "model_id": MODEL.model_id,
            "num_blocks": MODEL.num_blocks,
            "span": span,
            "state": PeerState.ONLINE,
            "endpoints": (listener.endpoint,),
            "min_version": 1,
            "max_version": 1,
            "weights": "int8",
            "compute_dtype": "fp32",
            "sequence": 1,
            "issued_at": now,
            "expires_at": now + 90,
        }
        announcement = Announcement(**(fields | announced))
        directory = MemoryDirectory(self.store, self.clock)
        await directory.announce(sign_announcement(identity, announcement))
        return announcement

    async def diagnose(
        self, addresses: Sequence[str] = (ADDRESS,), model: ModelFacts | None = MODEL
    ) -> Diagnosis:
        transport = LoopbackTransport(self.network, "us")
        probes = Probes(
            self.clock, transport, self._dial, self._hail, self._join, self._check_certificate
        )
        diagnosis = Diagnosis(probes, self.heard.append)

        def read_model() -> ModelFacts:
            if model is None:
                raise ModelError("there is no model here")
            return model

        await diagnosis.run(read_model, addresses)
        await transport.close()
        return diagnosis

    async def _dial(self, host: str, port: int) -> None:
        if self.is_dial_silent:
            await asyncio.Event().wait()
        if self.dial_error:
            raise self.dial_error

    async def _hail(self, host: str, port: int) -> bytes:
        if self.hail_answer is None:
            await asyncio.Event().wait()
        return self.hail_answer or b""

    async def _join(self, addresses: Sequence[str]) -> Directory:
        if self.join_error:
            raise self.join_error
        return MemoryDirectory(self.store, self.clock)

    async def _check_certificate(self, endpoint: Endpoint) -> None:
        await asyncio.sleep(2 * DELAY_SECONDS)
        if endpoint.host in self.certificate_errors:
            raise self.certificate_errors[endpoint.host]


def examine(build: Callable[[Swarm], Any], **arguments: Any) -> Diagnosis:
    """Build a swarm and return its diagnosis."""

    async def run() -> Diagnosis:
        swarm = Swarm()
        await build(swarm)
        diagnosis = await swarm.diagnose(**arguments)
        assert swarm.heard == diagnosis.findings
        return diagnosis

    return run_virtual(run())


def find(diagnosis: Diagnosis, name: str) -> Finding:
    (finding,) = [finding for finding in diagnosis.findings if finding.name.startswith(name)]
    return finding


def test_sound_swarm_is_well() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 4))
        await swarm.add(Span(4, 8))
        await swarm.add(Span(4, 8))

    diagnosis = examine(build)

    assert diagnosis.is_well
    assert diagnosis.is_usable
    assert [finding.name.split()[0] for finding in diagnosis.findings] == [
        *("model", "address", "directory", "announcements"),
        *("peer", "peer", "peer", "clocks", "blocks"),
    ]
    assert all(finding.fix == "" for finding in diagnosis.findings)
    assert [check.rtt_seconds for check in diagnosis.checks] == [pytest.approx(0.1)] * 3
    # The time the answer travelled is not taken for a wrong clock.
    assert [check.clock_ahead_seconds for check in diagnosis.checks] == [
        pytest.approx(0.0, abs=1e-5)
    ] * 3


def test_missing_model_still_lets_the_network_be_checked() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))

    diagnosis = examine(build, model=None)

    assert not diagnosis.is_well
    assert find(diagnosis, "model").detail == "there is no model here"
    assert find(diagnosis, "directory").ok


def test_malformed_address_is_told_from_a_closed_one() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.dial_error = ConnectionRefusedError(111, "refused")

    diagnosis = examine(build, addresses=["nonsense", ADDRESS])

    malformed, closed = [item for item in diagnosis.findings if item.name == "address"]
    assert "'nonsense' is not the address of a peer" in malformed.detail
    assert "10.0.0.1:4001" in closed.detail
    assert "nobody listens" in closed.detail
    assert not malformed.ok
    assert not closed.ok
    assert diagnosis.missing is None
    assert len(diagnosis.findings) == 3  # nobody is left to join through


def test_silent_address_is_given_up_in_time() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.is_dial_silent = True

    diagnosis = examine(build)

    assert "does not answer within 3 s" in find(diagnosis, "address").detail
    assert "firewall" in find(diagnosis, "address").fix


def test_address_that_accepts_and_says_nothing_is_called_paused() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.hail_answer = None

    diagnosis = examine(build)

    assert "accepts connections and then stays silent" in find(diagnosis, "address").detail
    assert "kill -CONT" in find(diagnosis, "address").fix
    assert len(diagnosis.findings) == 2  # nobody is left to join through


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request"])
def test_address_of_another_program_is_told(answer: bytes) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.hail_answer = answer

    diagnosis = examine(build)

    assert "does not speak libp2p" in find(diagnosis, "address").detail


@pytest.mark.parametrize(
    ("complaint", "advice"),
    [
        ("no initial peer answers: /ip4/...", "paused"),
        ("whoever is there is not the peer that the address names", "--identity"),
        ("the directory is in flames", "start the peer of this address again"),
    ],
)
def test_advice_fits_the_failure_of_the_join(complaint: str, advice: str) -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = DirectoryError(complaint)

    diagnosis = examine(build)

    assert advice in find(diagnosis, "directory").fix


def test_failed_join_is_reported_and_a_wrong_clock_has_its_own_advice() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.join_error = DirectoryError("the clock of this machine is 9.0 seconds ahead")

    diagnosis = examine(build)

    assert "time synchronisation" in find(diagnosis, "clock").fix
    assert not diagnosis.is_usable


def test_directory_that_cannot_be_read_is_reported() -> None:
    async def build(swarm: Swarm) -> None:
        swarm.store.is_reachable = False

    diagnosis = examine(build)

    assert "reading failed" in find(diagnosis, "directory").detail


def test_nobody_online_is_said_with_those_who_left() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), state=PeerState.OFFLINE)

    diagnosis = examine(build)

    assert "1 offline" in find(diagnosis, "announcements").detail
    assert diagnosis.missing == (Span(0, 8),)
    assert not diagnosis.checks


def test_killed_peer_is_named_and_so_are_its_blocks() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 3))
        await swarm.add(Span(3, 5))
        await swarm.add(Span(5, 8))
        swarm.network.kill("peer2")

    diagnosis = examine(build)

    (broken,) = [check for check in diagnosis.checks if check.fault]
    assert broken.fault is Fault.UNREACHABLE
    assert broken.peer.span == Span(3, 5)
    assert diagnosis.missing == (Span(3, 5),)
    assert "blocks 3:5 are missing" in find(diagnosis, "blocks").detail
    assert "--blocks 3:5" in find(diagnosis, "blocks").fix


def test_broken_replica_does_not_make_the_swarm_unusable() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        await swarm.add(Span(0, 8))
        swarm.network.kill("peer1")

    diagnosis = examine(build)

    assert not diagnosis.is_well
    assert diagnosis.is_usable
    assert find(diagnosis, "blocks").ok


def test_paused_peer_is_silent() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.network.pause("peer1")

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is Fault.SILENT


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (RemoteProtocolError("another certificate"), Fault.FINGERPRINT),
        (caused_by(RemoteProtocolError("no TLS"), ssl.SSLError()), Fault.NO_TLS),
        (caused_by(UnavailableError("refused"), ConnectionRefusedError()), Fault.CLOSED_PORT),
        (caused_by(UnavailableError("late"), TimeoutError()), Fault.SILENT),
        (UnavailableError("no way there"), Fault.UNREACHABLE),
    ],
)
def test_faults_of_the_connection_have_their_names(error: Exception, fault: Fault) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8))
        swarm.certificate_errors["peer1"] = error

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is fault
    assert str(fault) in find(diagnosis, "peer").detail
    assert find(diagnosis, "peer").fix


def other_peer(welcome: Welcome) -> Message:
    peer_id = Identity(bytes([77]) * 32).peer_id
    return Welcome(1, "test", peer_id, MODEL.model_id, welcome.span, welcome.wall_seconds)


def other_model(welcome: Welcome) -> Message:
    model_id = ModelId("b" * 32)
    return Welcome(1, "test", welcome.peer_id, model_id, welcome.span, welcome.wall_seconds)


def other_blocks(welcome: Welcome) -> Message:
    span = Span(0, 2)
    return Welcome(1, "test", welcome.peer_id, MODEL.model_id, span, welcome.wall_seconds)


def old_version(welcome: Welcome) -> Message:
    return Declined(None, 0, ErrorCode.BAD_VERSION, "this end speaks version 9")


def busy(welcome: Welcome) -> Message:
    return Declined(None, 0, ErrorCode.BUSY, "come back later", 1.0)


def confused(welcome: Welcome) -> Message:
    return Hello(1, 1, "test")


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (other_peer, Fault.OTHER_PEER),
        (other_model, Fault.OTHER_MODEL),
        (other_blocks, Fault.OTHER_BLOCKS),
        (old_version, Fault.VERSION),
        (busy, Fault.REFUSED),
        (confused, Fault.PROTOCOL),
    ],
)
def test_faults_of_the_answer_have_their_names(
    answer: Callable[[Welcome], Message], fault: Fault
) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), answer=answer)

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is fault
    assert diagnosis.missing == (Span(0, 8),)


def test_peer_of_another_protocol_version_is_not_even_dialled() -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), min_version=8, max_version=9)
        swarm.network.kill("peer1")

    diagnosis = examine(build)

    assert diagnosis.checks[0].fault is Fault.VERSION
    assert "versions 8 to 9" in diagnosis.checks[0].detail


@pytest.mark.parametrize(
    ("ahead_seconds", "status"), [(0.5, Status.OK), (2.0, Status.WARNING), (-5.0, Status.BROKEN)]
)
def test_clock_of_one_peer_is_told_from_ours(ahead_seconds: float, status: Status) -> None:
    async def build(swarm: Swarm) -> None:
        await swarm.add(Span(0, 8), clock_ahead_seconds=ahead_seconds)
        await swarm.add(Span(0, 8))

    diagnosis = examine(build)

    finding = find(diagnosis, "clocks")
    assert finding.status is status
    if status is not Status.OK:
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
