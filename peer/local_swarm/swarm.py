"""A swarm of real processes on this machine: for tests, demos and experiments.

Every peer is a `shoal serve` process. However the parent program ends, no process is left behind:
each peer watches a pipe from its parent and exits with it.
"""

import contextlib
import json
import operator
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from ...protocol.errors import UnavailableError, UsageError
from ...protocol.ids import PeerId
from ...protocol.spans import Span

Place = Span | int
"""The blocks of a peer: a span, or a number of blocks where the swarm needs them."""

_LOG_TAIL_BYTES = 2000

_LEAVING_SECONDS = 30.0
"""How long a peer may take to leave once its sessions are gone; generous for busy machines."""

_ERROR_LEAD = "shoal serve: "
"""The beginning of the sentence with which a failing peer ends."""

SHOAL_PROGRAM = ("-m", "shoal.cli")
"""The program that Python runs for a peer; tests put programs here that fail on purpose."""


@dataclass(frozen=True)
class LocalSwarmConfig:
    """The settings of a local swarm; its peers check those that are passed on to them."""

    weights: str = "int8"
    """Format of the block weights in memory: int8, bf16 or fp32."""

    num_threads: int = 1
    """Compute threads of each peer."""

    kv_budget_bytes: int = 2**28
    """Memory for the KV caches of each peer."""

    announce_period_seconds: float = 5.0
    """Interval between announcements; short, so that an interactive user sees changes soon."""

    ready_timeout_seconds: float = 120.0
    """Time for one peer to come online; generous for busy machines."""

    drain_seconds: float = 0.0
    """Time that `terminate` and `drain` give sessions to move to other peers."""

    serve_arguments: Sequence[str] = ()
    """Further arguments for every `shoal serve`."""


class PeerProcessError(UnavailableError):
    """A peer's process ended before it was online; the message holds its last output."""


class LocalPeer:
    """One `shoal serve` process. Made by `LocalSwarm`."""

    Popen: ClassVar[type[subprocess.Popen[bytes]]] = subprocess.Popen
    """Starts the process; tests replace it by one that does not need to import anything."""

    def __init__(
        self,
        model: str,
        place: Place | None,
        arguments: Sequence[str],
        program: Sequence[str] = SHOAL_PROGRAM,
        drain_seconds: float = 0.0,
    ) -> None:
        self.model = model
        self._drain_seconds = drain_seconds
        self.facts: dict[str, Any] = {}
        # Without a name: whatever ends this program, the log is gone with its last user.
        self._log_file = tempfile.TemporaryFile()  # noqa: SIM115 - see close
        self._last_words = ""
        self._events: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        command = [sys.executable, "-P", *program, "serve", model, "--json"]
        self._place = place
        if place is not None:
            command += ["--blocks" if isinstance(place, Span) else "--num-blocks", str(place)]
        command += ["--drain", str(drain_seconds), "--end-with-stdin", *arguments]
        # A process group of its own: Ctrl-C in a terminal goes to the parent only, who then ends
        # the peers in good order.
        self._process = self.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log_file,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read_events, daemon=True)
        self._reader.start()

    def __repr__(self) -> str:
        state = "running" if self.is_running else "ended"
        return f"<LocalPeer of {self._name} pid {self.pid} {state}>"

    @property
    def _name(self) -> str:
        place = self._place
        if isinstance(place, Span):
            return f"blocks {place}"
        return "blocks of its choice" if place is None else f"{place} blocks of its choice"

    @property
    def span(self) -> Span:
        """The blocks that it serves; if it chooses them itself, known once it is online."""
        return self._place if isinstance(self._place, Span) else Span.parse(self.facts["span"])

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether the process exists."""
        return self._process.poll() is None

    @property
    def peer_id(self) -> PeerId:
        """The peer's id; known once it has started."""
        return PeerId(self.facts["peer_id"])

    @property
    def addresses(self) -> list[str]:
        """Addresses for `initial_peers`; known once the directory is up."""
        return list(self.facts.get("addresses", ()))

    def wait_for(self, event: str, deadline: float) -> None:
        """Read events until one has this name. Raises PeerProcessError if the process ends."""
        while True:
            try:
                facts = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise PeerProcessError(
                    f"the peer of {self._name} was not online within ready_timeout_seconds: "
                    f"{self.log()}"
                ) from None
            if facts is None:
                raise PeerProcessError(self._explain_end())
            if facts.get("event") == event:
                return

    def log(self) -> str:
        """Return the end of the process's stderr."""
        if not self._log_file.closed:
            descriptor = self._log_file.fileno()
            start = max(0, os.fstat(descriptor).st_size - _LOG_TAIL_BYTES)
            # Reading at a place leaves the position alone, at which the process writes.
            tail = os.pread(descriptor, _LOG_TAIL_BYTES, start)
            self._last_words = tail.decode(errors="replace").strip()
        return self._last_words or "it said nothing"

    def _explain_end(self) -> str:
        """Return why the process ended before it was online, in its own words if it had any."""
        lines = self.log().splitlines()
        said = [line.removeprefix(_ERROR_LEAD) for line in lines if line.startswith(_ERROR_LEAD)]
        if said:
            return f"the peer of {self._name} cannot start: {said[-1]}"
        return f"the peer of {self._name} ended before it was online: {self.log()}"

    def kill(self) -> None:
        """Send SIGKILL: the process ends at once, without any message."""
        self._process.kill()
        self._process.wait()

    def pause(self) -> None:
        """Send SIGSTOP: the process keeps its connections and answers nothing. Waits until it
        stops.

        Raises UsageError if the process has ended.
        """
        self._check_is_running()
        self._process.send_signal(signal.SIGSTOP)
        # All of its threads have to stop first. Also, the kernel ends the stopped orphans of a
        # program that died, but not those that are only about to stop.
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Send SIGCONT after a pause; raises UsageError if the process has ended."""
        self._check_is_running()
        self._process.send_signal(signal.SIGCONT)

    def _check_is_running(self) -> None:
        if not self.is_running:
            raise UsageError(f"{self!r} has ended; it can be neither paused nor resumed")

    def terminate(self, signal_number: int = signal.SIGTERM) -> None:
        """Ask the process to leave in good order; does not wait."""
        if self.is_running:
            self._process.send_signal(signal_number)

    def drain(self) -> int:
        """Have the process move its sessions to other peers and leave; return its exit code.

        Raises UsageError if the swarm was created without `drain_seconds`.
        """
        if self._drain_seconds == 0:
            raise UsageError("sessions cannot move: make the swarm with drain_seconds=…")
        self.terminate()
        return self.wait(self._drain_seconds + _LEAVING_SECONDS)

    def wait(self, timeout_seconds: float) -> int:
        """Wait for the end of the process and return its exit code."""
        return self._process.wait(timeout_seconds)

    def close(self, deadline: float) -> None:
        """End the process by any means and free its resources."""
        if self.is_running:
            try:
                self._process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join()
        self.log()  # it may be asked for later
        self._log_file.close()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()

    def _read_events(self) -> None:
        assert self._process.stdout is not None
        for facts in _read_json_lines(self._process.stdout):
            # Also for peers that nobody waits for: others may meet them before.
            if facts.get("event") != "status":  # of the moment, and again every minute
                self.facts = {**self.facts, **facts}
            self._events.put(facts)
        self._events.put(None)


def _read_json_lines(pipe: IO[bytes]) -> Iterator[dict[str, Any]]:
    for line in pipe:
        with contextlib.suppress(ValueError):
            facts = json.loads(line)
            if isinstance(facts, dict):
                yield facts


class LocalSwarm:
    """A swarm on this machine, one process per peer, for use in a `with` block.

        with LocalSwarm("path", spans=[(0, 4), (4, 8), (4, 8)], weights="fp32") as swarm:
            model = AutoDistributedModelForCausalLM.from_pretrained(
                "path", initial_peers=swarm.initial_peers)
            swarm.peers[1].kill()

    The block is entered when all peers are announced. A number in place of a span lets a peer serve
    that many blocks, where the swarm needs them most. `config` and the keywords are those of
    `LocalSwarmConfig`.
    """

    def __init__(
        self, model: str | Path, spans: Sequence[tuple[int, int] | Place], **settings: Any
    ) -> None:
        if not isinstance(model, str | Path) or not str(model):
            raise UsageError(f"the model must be a directory or an id on the Hub, not {model!r}")
        self.model = str(model)
        self.config = LocalSwarmConfig(**settings)
        self.peers: list[LocalPeer] = []
        self._places = [make_place(span) for span in spans]
        if not self._places:
            raise UsageError("a swarm needs at least one span")
        self._is_running = False

    def __repr__(self) -> str:
        return f"<LocalSwarm of {self.peers}>"

    def __enter__(self) -> "LocalSwarm":
        if self._is_running:
            raise UsageError(
                "the swarm is running already; add() gives it more peers, and another LocalSwarm "
                "is another swarm"
            )
        self._is_running = True
        try:
            deadline = self._make_deadline()
            first = self.start_peer(self._places[0], ())
            first.wait_for("directory", deadline)
            others = [self.start_peer(place, first.addresses) for place in self._places[1:]]
            for peer in (first, *others):
                peer.wait_for("online", deadline)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def initial_peers(self) -> list[str]:
        """Addresses to join through, of all running peers."""
        running = [peer for peer in self.peers if peer.is_running]
        return [address for peer in running for address in peer.addresses]

    @property
    def num_online(self) -> int:
        """How many peers are online while the swarm starts. From any thread."""
        return sum(peer.facts.get("event") == "online" for peer in list(self.peers))

    def add(
        self,
        span: tuple[int, int] | Place | None = None,
        identity: Path | None = None,
        wait: bool = True,
        program: Sequence[str] = SHOAL_PROGRAM,
        options: Sequence[str] = (),
    ) -> LocalPeer:
        """Start one more peer; return it when it is announced (or at once, with `wait=False`).

        Without a span it serves as many blocks as memory holds, where the swarm needs them most.
        `options` are more options of `shoal serve`.
        """
        arguments = (*(("--identity", str(identity)) if identity else ()), *options)
        place = None if span is None else make_place(span)
        peer = self.start_peer(place, self.initial_peers, arguments, program)
        if wait:
            peer.wait_for("online", self._make_deadline())
        return peer

    def find(self, peer_id: PeerId) -> LocalPeer:
        """Return the process of a peer; the newest one if the peer was restarted."""
        for peer in reversed(self.peers):
            if peer.facts.get("peer_id") == peer_id:
                return peer
        raise UsageError(f"no peer of this swarm is {peer_id}")

    def close(self) -> None:
        """Stop all peers; kill those that do not exit. Safe to call twice."""
        for peer in self.peers:
            peer.terminate()
            peer.terminate(signal.SIGCONT)  # a paused one cannot hear otherwise
        deadline = time.monotonic() + 5.0
        for peer in self.peers:
            peer.close(deadline)
        self._is_running = False

    def wait_until_online(self, peers: Sequence[LocalPeer]) -> None:
        """Wait for peers that were added with `wait=False`."""
        for peer in peers:
            peer.wait_for("online", self._make_deadline())

    def start_peer(
        self,
        place: Place | None,
        initial_peers: Sequence[str],
        more: Sequence[str] = (),
        program: Sequence[str] = SHOAL_PROGRAM,
    ) -> LocalPeer:
        """Start the process of one peer, with more arguments, and do not wait for it."""
        if not self._is_running:
            raise UsageError("the swarm is not running; use it in a `with` block")
        config = self.config
        arguments = ["--weights", config.weights, "--threads", str(config.num_threads)]
        arguments += ["--kv-memory", str(config.kv_budget_bytes)]
        arguments += ["--announce-period", str(config.announce_period_seconds)]
        # Hundreds of peers of tests would pay for what nobody asks them.
        arguments += ["--no-operator"]
        arguments += ["--listen", "127.0.0.1", *config.serve_arguments, *more]
        arguments += ["--initial-peers", *initial_peers] if initial_peers else ["--new-swarm"]
        peer = LocalPeer(self.model, place, arguments, program, config.drain_seconds)
        self.peers.append(peer)
        return peer

    def _make_deadline(self) -> float:
        return time.monotonic() + self.config.ready_timeout_seconds


def make_place(given: object) -> Place:
    """Return a span that was given as such or as a pair of numbers, or how long one may be.

    The numbers may be of any library.

    >>> make_place((0, 4)), make_place(4)
    (Span(start=0, stop=4), 4)
    """
    if isinstance(given, Span):
        return given
    num_blocks = _read_whole(given)
    if num_blocks is not None and num_blocks > 0:
        return num_blocks
    numbers = [_read_whole(n) for n in given] if isinstance(given, list | tuple) else []
    if len(numbers) != 2 or numbers[0] is None or numbers[1] is None:
        raise UsageError(f"a span must be a pair of whole numbers such as (0, 4), not {given!r}")
    try:
        return Span(numbers[0], numbers[1])
    except ValueError as error:
        raise UsageError(f"{given!r} is not a span of blocks: {error}") from error


def _read_whole(given: object) -> int | None:
    """Return a whole number of any library as int, None for anything else."""
    try:
        return None if isinstance(given, bool) else operator.index(given)  # pyright: ignore[reportArgumentType]
    except TypeError:
        return None
