"""The swarm that chaos is made in: real processes, each behind a proxy, started by name."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from chaos.links import PEER_HOST, PROXY_HOST, Links
from chaos.plan import CLIENTS, Action, Kind, name_peer

from shoal.peer.local_swarm.swarm import (
    SHOAL_PROGRAM,
    LocalPeer,
    LocalSwarm,
    PeerProcessError,
    Place,
)
from shoal.protocol.ids import PeerId
from shoal.protocol.spans import Span

_DRAIN_SECONDS = 3.0
_ANNOUNCE_SECONDS = 2.0

_LEAVE_SECONDS = 30.0
"""How long a peer may take to end that was asked to: its drain, and much for a busy machine."""


class LiveSwarm(LocalSwarm):
    """A local swarm whose peers have names, in the order in which they start: P1, P2 …

    They reach each other, and are reached, through `links`. Everything is done by one thread.
    """

    def __init__(self, model: str, spans: Sequence[Span], weights: str, folder: Path) -> None:
        super().__init__(
            model,
            spans,
            weights=weights,
            announce_period_seconds=_ANNOUNCE_SECONDS,
            serve_arguments=("--drain", str(_DRAIN_SECONDS)),
        )
        self.links = Links(self._name_processes)
        self._folder = folder
        self._named: dict[str, LocalPeer] = {}
        self._holders: dict[str, str] = {}
        self._killed: set[str] = set()
        self._leaving: set[str] = set()

    def __enter__(self) -> LiveSwarm:
        self.links.__enter__()
        try:
            super().__enter__()
        except BaseException:
            self.links.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.links.__exit__()

    @property
    def initial_peers(self) -> list[str]:
        """Addresses as old as the swarm, some of a peer that may be gone, and those of the rest."""
        first = self._named[name_peer(0)].addresses if self._named else []
        return list(dict.fromkeys([*first, *super().initial_peers]))

    def name_of(self, peer_id: PeerId) -> str:
        """Return the name of a peer: the newest, where one was restarted."""
        names = [n for n, peer in self._named.items() if peer.facts.get("peer_id") == peer_id]
        return names[-1] if names else f"…{peer_id[-6:]}"

    def do(self, action: Action) -> None:
        """Carry out one line of a plan.

        Raises PeerProcessError when a peer does not come online or does not leave when asked to.
        """
        peer = self._named.get(action.target)
        if action.kind is Kind.JOIN:
            self._join(action)
            return
        assert peer is not None, f"{action} names nobody"
        match action.kind:
            case Kind.KILL:
                self._killed.add(action.target)
                peer.kill()
            case Kind.PAUSE:
                peer.pause()
            case Kind.RESUME:
                peer.resume()
            case Kind.DRAIN:
                self._leaving.add(action.target)
                peer.terminate()
            case Kind.CUT:
                self.links.cut(action.target, action.other)
            case Kind.HEAL:
                self.links.heal(action.target, action.other)
            case Kind.RESET:
                self.links.reset(action.target, action.other)
            case Kind.ONLINE:
                self.wait_until_online([peer])

    def check_peers(self) -> None:
        """Raise PeerProcessError when a peer has ended to which nothing was done."""
        for name, peer in self.running.items():
            if not peer.is_running:
                raise PeerProcessError(f"{name} ended by itself, with {peer.wait(0)}")

    def wait_for_leavers(self) -> None:
        """Wait for those that were asked to leave; PeerProcessError unless they do so in order."""
        deadline = time.monotonic() + _LEAVE_SECONDS
        for name in sorted(self._leaving):
            self._wait_for_end(name, deadline)

    def show_log(self, name: str) -> str:
        """Return what a peer said last."""
        peer = self._named[name]
        return f"{name}, {peer.facts.get('endpoint')}, {peer!r}:\n{peer.log()}"

    @property
    def running(self) -> dict[str, LocalPeer]:
        """Those that should be there, by name."""
        gone = self._killed | self._leaving
        return {name: peer for name, peer in self._named.items() if name not in gone}

    @property
    def names(self) -> list[str]:
        """The names of all peers there ever were."""
        return list(self._named)

    def _join(self, action: Action) -> None:
        assert action.span is not None
        holder = self._holders.get(action.identity_of)
        if holder is not None:
            self._wait_for_end(holder, time.monotonic() + _LEAVE_SECONDS)
        self._holders[action.identity_of] = action.target
        self.add(action.span, identity=self._find_key(action.identity_of), wait=False)

    def _find_key(self, name: str) -> Path:
        return self._folder / f"{name}.key"

    def start_peer(
        self,
        place: Place | None,
        initial_peers: Sequence[str],
        more: Sequence[str] = (),
        program: Sequence[str] = SHOAL_PROGRAM,
    ) -> LocalPeer:
        name = name_peer(len(self._named))
        port = self.links.add(name)
        behind = ("--listen", f"{PEER_HOST}:{port}", "--announce-host", PROXY_HOST)
        if "--identity" not in more:
            behind += ("--identity", str(self._find_key(name)))
            self._holders[name] = name
        peer = super().start_peer(place, initial_peers, (*more, *behind), program)
        self._named[name] = peer
        return peer

    def _wait_for_end(self, name: str, deadline: float) -> None:
        try:
            code = self._named[name].wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise PeerProcessError(f"{name} did not leave when it was asked to") from None
        if code and name in self._leaving:
            raise PeerProcessError(f"{name} was asked to leave and ended with {code}")

    def _name_processes(self) -> dict[int, str]:
        running = {p.pid: name for name, p in list(self._named.items()) if p.is_running}
        return {os.getpid(): CLIENTS, **running}
