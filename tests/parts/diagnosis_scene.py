"""A swarm on a loopback network for `diagnose` to look at, and the looking."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence, Set
from typing import Any

from scripted_swarm import MODEL_ID, ScriptedSwarm
from virtual_time import run_virtual

from shoal.client.doctor.diagnosis import Diagnosis
from shoal.client.doctor.finding import Finding
from shoal.client.doctor.probes import LIBP2P_GREETING, JoinedSwarm, ModelFacts, Probes
from shoal.client.doctor.reach_check import ListenAddress
from shoal.client.doctor.served_models import ServedModel, find_served_models
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import DirectoryError, ModelError, ShoalError
from shoal.protocol.identity import Identity
from shoal.protocol.membership.membership import Membership
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import Hello, Welcome
from shoal.protocol.net.addresses import DialBackAnswer
from shoal.protocol.net.memory.loopback import Link, LoopbackTransport
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.spans import Span

MODEL = ModelFacts("my stories", MODEL_ID, 8)
DELAY_SECONDS = 0.05
ADDRESS = "/ip4/10.0.0.1/tcp/4001/p2p/" + Identity(bytes([9]) * 32).peer_id


class Swarm(ScriptedSwarm):
    """Peers that greet, and a diagnosis of them."""

    def __init__(self) -> None:
        super().__init__(MODEL.num_blocks, Link(DELAY_SECONDS))
        self.identities: list[Identity] = []
        self.dial_error: OSError | UnicodeError | None = None
        self.is_dial_silent = False
        self.refusing_hosts: Set[str] = set()
        self.hail_answer: bytes | None = LIBP2P_GREETING
        self.join_error: DirectoryError | None = None
        self.certificate_errors: dict[str, Exception] = {}
        self.heard: list[Finding] = []
        self.reach: Sequence[DialBackAnswer] = ()
        self.reach_error: ShoalError | None = None
        self.membership: Membership | None = None
        self.way_in = ""

    async def add(
        self,
        span: Span,
        *,
        clock_ahead_seconds: float = 0.0,
        answer: Callable[[Welcome], Message] = lambda welcome: welcome,
        membership: Membership | None = None,
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

        endpoint = await self.listen(host, serve, membership)
        expires_at = self.clock.wall() + 90
        facts = {"endpoints": (endpoint,), "expires_at": expires_at} | announced
        return await self.announce(identity, span, **facts)

    async def diagnose(
        self,
        addresses: Sequence[str] = (ADDRESS,),
        model: ModelFacts | None = MODEL,
        listen_address: ListenAddress | None = None,
    ) -> Diagnosis:
        diagnosis = Diagnosis(self._probes, self.heard.append, self.membership, self.way_in)

        def read_model() -> ModelFacts:
            if model is None:
                raise ModelError("there is no model here")
            return model

        await diagnosis.run(read_model, addresses, listen_address)
        return diagnosis

    async def find_served_models(self) -> list[ServedModel]:
        return await find_served_models(await self._join((ADDRESS,)), self._probes)

    @property
    def _probes(self) -> Probes:
        return Probes(
            self.clock,
            self._dial,
            self._greet_libp2p,
            self._join,
            self._check_certificate,
            self._reach,
        )

    async def _dial(self, host: str, port: int) -> None:
        if self.is_dial_silent:
            await asyncio.Event().wait()
        if self.dial_error:
            raise self.dial_error
        if host in self.refusing_hosts:
            raise ConnectionRefusedError

    async def _greet_libp2p(self, host: str, port: int) -> bytes:
        if self.hail_answer is None:
            await asyncio.Event().wait()
        return self.hail_answer or b""

    async def _join(self, addresses: Sequence[str]) -> JoinedSwarm:
        if self.join_error:
            raise self.join_error
        return JoinedSwarm(LoopbackTransport(self.network, "us", self.membership), self.directory)

    async def _reach(
        self, addresses: Sequence[str], listen_address: ListenAddress
    ) -> Sequence[DialBackAnswer]:
        if self.reach_error:
            raise self.reach_error
        return self.reach

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
