"""Swarms that train in one process and in virtual time, whose peers are killed and cut off."""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast

from virtual_time import VirtualClock, run_virtual

from shoal.peer.engine.training.span_state import digest_tensors
from shoal.peer.process.config import PeerEvent
from shoal.peer.runs.remote_members import RemoteMembers
from shoal.peer.runs.run_peer import RunPeer, open_run
from shoal.peer.runs.run_resources import RunPeerConfig
from shoal.peer.streams.service import JoinedPeer
from shoal.peer.streams.stream_host import ServiceCounts
from shoal.protocol.identity import Identity
from shoal.protocol.ids import MemberId
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.runs import PartsCounted
from shoal.protocol.net.directory import Directory
from shoal.protocol.net.memory.loopback import Link, LoopbackNetwork
from shoal.protocol.net.memory.memory_directory import MemoryDirectory, MemoryDirectoryStore
from shoal.protocol.net.memory.memory_network import MemoryNetwork
from shoal.protocol.net.network import Addresses, Presence
from shoal.protocol.net.transport import Stream
from shoal.protocol.records.announcements import Announcement
from shoal.protocol.runs.run_record import RunRecord, sign_run
from shoal.protocol.runs.training_run import PartId, TrainingRun

_Result = TypeVar("_Result")

_MOST_SECONDS = 900.0
"""The longest that a scene takes, in virtual time."""

_LONGEST_SECONDS = 0.02
"""The longest that a pass takes, in virtual time."""

COMPUTE_CLASS = "c1" * 32
"""That of all peers: to measure it takes 0.1 s."""

Moment = Callable[[Message], bool]
"""Whether something is to happen at a message."""


def change_manifest(message: Message, **changes: Any) -> Message:
    """Return a member's manifest with changes, and any other message as it is."""
    if not isinstance(message, PartsCounted):
        return message
    return replace(message, manifest=replace(message.manifest, **changes))


class WatchedStream:
    """A stream of which `note` hears every message, before it is taken and after it was sent."""

    def __init__(
        self,
        stream: Stream,
        note: Callable[[Message, bool], Awaitable[None]],
        change: Callable[[Message], Message],
    ) -> None:
        self._stream = stream
        self._note = note
        self._change = change

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def send(self, frame: bytes) -> None:
        message = decode_frame(frame)
        changed = self._change(message)
        await self._stream.send(frame if changed is message else encode_frame(changed))
        await self._note(message, True)

    async def receive(self) -> bytes | None:
        frame = await self._stream.receive()
        if frame is not None:
            await self._note(decode_frame(frame), False)
        return frame


OWNER = Identity(b"the owner of the run of a swarm.")


def make_identity(host: str) -> Identity:
    """Return the key of the peers of a host."""
    return Identity(hashlib.sha256(host.encode()).digest())


class RunSwarm:
    """Peers of one run. Use it inside `run_virtual`; what it draws follows from the seed."""

    def __init__(
        self, run: TrainingRun, folder: Path, seed: int = 0, admitted: Sequence[str] = ()
    ) -> None:
        """`admitted`: the only hosts that may take part; none: all may."""
        self.run = run
        self.record = sign_run(OWNER, run, [make_identity(host).peer_id for host in admitted])
        self.rng = random.Random(seed)
        self.network = LoopbackNetwork(seed, Link(delay_seconds=0.002))
        self.peers: dict[str, RunPeer] = {}
        """Those that run, by their hosts."""
        self.events: list[tuple[str, PeerEvent]] = []
        self.digests: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        """Of the states that replicas had, by update and stage."""
        self._folder = folder
        self._num_started = 0
        self._store = MemoryDirectoryStore()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._has_changed = asyncio.Event()
        self._moments: list[tuple[Moment, bool, Callable[[str], None]]] = []
        self._killing: list[asyncio.Task[None]] = []
        self.counted = Counter[tuple[int, PartId]]()
        """How often each part was counted by members of a stage, by its index."""
        self.begun = Counter[tuple[int, PartId]]()
        """How often a member of a stage began with the forward pass of a part."""
        self.slow = dict[str, float]()
        """How many times longer than others hosts compute."""
        self.audited_fraction = 0.0
        self.faults: dict[str, Callable[[Any], Any]] = {}
        """What hosts compute in place of a pass, which is a `functools.partial`."""
        self.without_memory = set[str]()
        """Hosts that cannot copy their gradients to sum them."""
        self.num_passed = Counter[tuple[str, int]]()
        """How many parts of an update a host has counted."""
        self.most_passing = 0
        """The most peers that computed passes at the same time."""
        self._passing = set[str]()
        self.falsify: dict[str, Callable[[Message], Message]] = {}
        """What becomes of the answers of a host."""
        self._stops: dict[str, asyncio.Event] = {}
        self._hung: dict[str, asyncio.Event] = {}

    async def start(
        self,
        host: str,
        stage: int | None,
        founds_run: bool = False,
        compute_class: str = COMPUTE_CLASS,
        record: RunRecord | None = None,
    ) -> None:
        """Start a peer, again after it was killed; return when it has joined the directory.

        `record` is what it takes for that of the run.
        """
        self.network.revive(host)
        started = asyncio.get_running_loop().create_future()
        stages = None if stage is None else (stage,)
        config = RunPeerConfig(
            record or self.record, self._folder, stages, founds_run,
            audited_fraction=self.audited_fraction,
        )  # fmt: skip
        serving = self._serve(host, config, compute_class, started)
        self._tasks[host] = asyncio.create_task(serving)
        await asyncio.wait((started, self._tasks[host]), return_when=asyncio.FIRST_COMPLETED)
        if not started.done():
            await self._tasks[host]  # raises what went wrong

    def make_network(self, host: str) -> MemoryNetwork:
        """Return the access of a host to the swarm."""
        return MemoryNetwork(self.network, self._store, VirtualClock(), host)

    async def open_stranger(
        self,
        host: str,
        stack: AsyncExitStack,
        change: Callable[[Directory], Any] = lambda directory: directory,
        counts: ServiceCounts | None = None,
    ) -> RemoteMembers:
        """Return the access of somebody who takes no part to the members, until the stack ends.

        `change` makes the directory that it reads.
        """
        transport, directory = await self.make_network(host).connect()
        stack.push_async_callback(transport.close)
        stack.push_async_callback(directory.close)
        identity = make_identity(host)
        read = change(directory)
        presence = Presence(identity, transport, read, (), Addresses((), {}), stack)
        own = MemberId(f"{identity.peer_id}/1")
        clock, counts = VirtualClock(), counts or ServiceCounts()
        members = RemoteMembers(own, self.record, presence, clock, 10.0, counts)
        stack.push_async_callback(members.close)
        return members

    async def list_announcements(self) -> list[Announcement]:
        """Return what the peers have announced last."""
        directory = MemoryDirectory(self._store, VirtualClock())
        return await directory.lookup(self.record.model_id)

    async def kill(self, host: str) -> None:
        """End a peer without a word."""
        self.network.kill(host)
        self.peers.pop(host, None)
        task = self._tasks.pop(host)
        task.cancel()
        await asyncio.wait((task,))
        if not task.cancelled():
            task.result()  # raises what ended it before

    async def wait_for_end(self, host: str) -> None:
        """Wait until a peer ends by itself; raises what ended it."""
        try:
            await self._tasks.pop(host)
        finally:
            del self.peers[host]

    async def leave(self, host: str) -> None:
        """End a peer in good order."""
        await self.peers[host].leave()
        self.peers.pop(host)
        self._stops[host].set()
        await self._tasks.pop(host)

    def do_at(self, moment: Moment, act: Callable[[str], None], *, is_sent: bool = False) -> None:
        """Act once, on the host that gets such a message, or has sent it as its answer.

        The host that acts takes no more of the message.
        """
        self._moments.append((moment, is_sent, act))

    def hang(self, host: str) -> asyncio.Event:
        """Let a host compute nothing until the event is set; it still answers."""
        return self._hung.setdefault(host, asyncio.Event())

    def kill_soon(self, host: str) -> None:
        """Kill a host, from within what it does."""
        self.network.kill(host)
        self._killing.append(asyncio.create_task(self.kill(host)))

    async def close(self) -> None:
        """End all peers."""
        for task in self._killing:
            await task
        for host in list(self._tasks):
            await self.kill(host)

    async def wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Wait until a state is reached that comes with an event of a peer."""
        while not is_reached():
            self._has_changed.clear()
            await self._has_changed.wait()

    async def wait_for_update(self, update: int) -> None:
        """Wait until some peer has applied so many updates."""
        await self.wait_until(lambda: any(number >= update for number in self.list_updates()))

    async def finish(self) -> str:
        """Wait until all members have applied all updates, and the others know that all is over;
        return the digest of the weights.
        """
        while True:
            if all(self._has_finished(peer) for peer in self.peers.values()):
                return self.check_replicas()
            await asyncio.sleep(0.1)

    def _has_finished(self, peer: RunPeer) -> bool:
        stage = peer.loop.stage
        has_applied = stage is not None and stage.update == self.run.num_updates
        return has_applied or (peer.loop.is_over.is_set() and _is_outside(peer))

    def list_updates(self) -> list[int]:
        """Return how many updates the peers have applied."""
        stages = [peer.loop.stage for peer in self.peers.values()]
        return [-1 if stage is None else stage.update for stage in stages]

    def check_replicas(self) -> str:
        """Check that all replicas of a stage are equal; return the digest of all weights."""
        states: dict[int, str] = {}
        weights: dict[str, Any] = {}
        for peer in self.peers.values():
            if _is_outside(peer):
                continue
            stage = peer.loop.stage
            assert stage is not None
            span = stage.span
            assert states.setdefault(stage.index, span.compute_digest()) == span.compute_digest()
            weights |= span.read_weights()
        return digest_tensors(weights)

    async def _serve(
        self,
        host: str,
        config: RunPeerConfig,
        compute_class: str,
        started: asyncio.Future[None],
    ) -> None:
        def note(event: PeerEvent) -> None:
            self.events.append((host, event))
            stage = self.peers[host].loop.stage if host in self.peers else None
            if event.name == "update" and stage is not None:
                self.digests[stage.update, stage.index].add(stage.digest.whole)
            self._has_changed.set()

        stop = self._stops[host] = asyncio.Event()
        network = self.make_network(host)
        self._num_started += 1
        clock, incarnation = VirtualClock(), str(self._num_started)
        compute = self._make_compute(host)
        async with (
            open_run(config, clock, compute=compute, compute_class=compute_class) as resources,
            JoinedPeer.join(network, make_identity(host), clock, note) as joined,
            RunPeer.join(joined, resources, clock, note, incarnation=incarnation) as peer,
        ):
            self.peers[host] = peer
            serve = network.serve_stream

            def change(message: Message) -> Message:
                return self.falsify.get(host, lambda true: true)(message)

            async def note_message(message: Message, is_sent: bool) -> None:
                for entry in list(self._moments):
                    moment, at_sending, act = entry
                    if is_sent == at_sending and moment(message):
                        self._moments.remove(entry)
                        act(host)

            network.serve_stream = lambda stream: serve(
                cast(Stream, WatchedStream(stream, note_message, change))
            )
            started.set_result(None)
            await peer.serve(stop.wait())

    def _make_compute(self, host: str) -> Callable[[Callable[[], Any]], Any]:
        """Return what computes one thing after the other, each for a time that is drawn."""
        turn = asyncio.Lock()

        async def compute(function: Callable[[], Any]) -> Any:
            async with turn:
                if host in self._hung:
                    await self._hung[host].wait()
                name, key = _find_pass(function)
                if name:
                    self._passing.add(host)
                    self.most_passing = max(self.most_passing, len(self._passing))
                seconds = self.rng.uniform(0.0, _LONGEST_SECONDS) * self.slow.get(host, 1.0)
                await asyncio.sleep(seconds)
                self._passing.discard(host)
                self.begun[key] += name in ("run_forward", "run_loss")
                if host in self.without_memory and _get_name(function) == "collect":
                    raise MemoryError
                function = (
                    self.faults.get(host, lambda right: right)(function) if name else function
                )
                result = function()
                is_counted = name in ("run_backward", "run_loss")
                self.counted[key] += is_counted
                self.num_passed[host, key[1].update] += is_counted
            await asyncio.sleep(self.rng.uniform(0.0, _LONGEST_SECONDS / 4))  # as from a thread
            return result

        return compute


def run_in_swarm(
    run: TrainingRun,
    folder: Path,
    scene: Callable[[RunSwarm], Awaitable[_Result]],
    *,
    num_peers: int = 4,
    seed: int = 0,
    admitted: Sequence[str] = (),
    prepare: Callable[[RunSwarm], None] = lambda swarm: None,
) -> _Result:
    """Start peers, of each stage in turn, and let a scene happen; return what it does.

    The peers are `peer0` and so on; all that are left end with it.
    """
    num_stages = len(run.stage_borders) + 1

    async def main() -> _Result:
        swarm = RunSwarm(run, folder, seed, admitted)
        prepare(swarm)
        try:
            async with asyncio.timeout(_MOST_SECONDS):
                for number in range(num_peers):
                    stage = number % num_stages
                    await swarm.start(f"peer{number}", stage, founds_run=number == 0)
                return await scene(swarm)
        finally:
            await swarm.close()

    return run_virtual(main())


def _is_outside(peer: RunPeer) -> bool:
    """Return whether a peer is no member, as far as it knows."""
    return peer.loop.decisions is not None and peer.loop.decisions.stage is None


async def nothing(swarm: RunSwarm) -> None:
    """Be a scene in which nobody is killed."""


def train_in_swarm(
    run: TrainingRun,
    folder: Path,
    scene: Callable[[RunSwarm], Awaitable[object]] = nothing,
    *,
    num_peers: int = 4,
    seed: int = 0,
) -> str:
    """Let a scene happen, and then all updates; return the digest of the weights at the end.

    Peers that the scene has not killed are there at the end.
    """

    async def train(swarm: RunSwarm) -> str:
        await scene(swarm)
        return await swarm.finish()

    return run_in_swarm(run, folder, train, num_peers=num_peers, seed=seed)


def _find_pass(function: Any) -> tuple[str, tuple[int, PartId]]:
    """Return the method of a stage that computes a part, the stage's index, and the part.

    Return an empty name for anything else.
    """
    method, name = getattr(function, "func", None), _get_name(function)
    if method is None or not name.startswith("run_"):
        return "", (0, PartId(0, 0))
    return name, (method.__self__.stage, function.args[0])


def _get_name(function: Any) -> str:
    return getattr(getattr(function, "func", None), "__name__", "")
