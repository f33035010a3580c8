"""Finds out which link of a swarm is broken: the checks behind `shoal doctor`.

Each check is bounded in time and ends in a finding, never in an exception. What touches the
network comes in as `Probes`, so that all of it runs without one.
"""

import asyncio
import errno
import re
import shlex
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from ...protocol.endpoints import Endpoint
from ...protocol.errors import (
    DirectoryError,
    P2pdEndedError,
    ShoalError,
    UnavailableError,
    UsageError,
    WrongSwarmError,
)
from ...protocol.ids import ModelId
from ...protocol.limits import MAX_CLOCK_SKEW_SECONDS
from ...protocol.membership.membership import Membership, Role
from ...protocol.net.libp2p.multiaddrs import PeerAddress
from ...protocol.net.tcp.tls import explain
from ...protocol.records.announcements import PeerState
from ...protocol.records.swarm_view import SwarmView
from ...protocol.spans import Span, find_gaps
from .finding import Finding, FindingStatus
from .peer_check import PeerCheck, advise, check_peers
from .probes import LIBP2P_GREETING, JoinedSwarm, ModelFacts, Probes
from .reach_check import (
    LOCAL_FIX,
    ListenAddress,
    find_local_peers,
    is_in_local_network,
    judge_reach,
    name_bounds,
)

DIAL_SECONDS = 3.0
JOIN_SECONDS = 15.0
LOOKUP_SECONDS = 15.0
REACH_SECONDS = 30.0
"""How long each check may take; joining alone is allowed ten seconds by the directory."""

_WARNING_SKEW_SECONDS = 1.0


_NUMBER = re.compile(r"\[Errno -?[0-9]+\] ")  # of the system, which says nothing to people

_JOIN_FIXES = {
    "clock": "enable time synchronisation (timedatectl set-ntp true)",
    "address names": "copy the address from the peer that runs there now: the id at its end "
    "changes when a peer is restarted without --identity",
    "answers": "its p2pd runs but the peer itself is silent: it is paused (resume it: kill -CONT) "
    "or overloaded; if nothing helps, restart it and use the address that it prints then",
}
"""Advice for a failed join, by words of the directory's error."""

_RESTART_FIX = (
    "use the address of another peer, or restart the one at this address and use the address that "
    "it prints then: it stays the same only with --identity FILE and --directory-port PORT"
)


@dataclass
class Diagnosis:
    """The findings so far. `report` is called with each new one."""

    probes: Probes
    report: Callable[[Finding], None] = lambda finding: None
    membership: Membership | None = None
    """The swarm of the join code; None without one."""
    way_in: str = "--join CODE"
    """The options with which a command joins the swarm; empty if the environment names it."""
    findings: list[Finding] = field(default_factory=list)
    checks: list[PeerCheck] = field(default_factory=list)
    view: SwarmView | None = None
    missing: tuple[Span, ...] | None = None
    """Blocks that no peer serves which answered; None when that was not found out."""

    @property
    def is_well(self) -> bool:
        """Return whether nothing is broken."""
        return all(finding.ok for finding in self.findings)

    @property
    def is_usable(self) -> bool:
        """Return whether text can be generated over this swarm, whatever else is broken."""
        return self.missing == ()

    async def run(
        self,
        read_model: Callable[[], ModelFacts],
        addresses: Sequence[str],
        listen_address: ListenAddress | None = None,
    ) -> None:
        """Do all checks that make sense, one after the other. Leaves nothing open.

        With a `listen_address`, also whether others could dial a peer of this machine there. Raises
        UsageError for an address that is none.
        """
        model = await self._check_model(read_model)
        reachable = await self._check_addresses(addresses)
        # With all addresses, as clients do: where none answers, those of the last time may.
        joined = await self._join(addresses, is_silence_news=bool(reachable))
        if joined is not None:
            try:
                await self._check_swarm(model, joined)
            finally:
                try:
                    await joined.transport.close()
                finally:
                    await joined.directory.close()
        if listen_address and reachable:
            await self._check_reach(listen_address, reachable)

    def _note(self, name: str, status: FindingStatus, detail: str, fix: str = "") -> None:
        finding = Finding(name, status, detail, fix if status is not FindingStatus.OK else "")
        self.findings.append(finding)
        self.report(finding)

    async def _check_model(self, read_model: Callable[[], ModelFacts]) -> ModelFacts | None:
        try:
            model = await asyncio.to_thread(read_model)
        except ShoalError as error:
            self._note(
                "model", FindingStatus.BROKEN, str(error),
                "give a complete model directory with the same files as on the peers",
            )  # fmt: skip
            return None
        detail = f"{model.name}: {model.num_blocks} blocks, id {_short(model.model_id)}"
        self._note("model", FindingStatus.OK, detail)
        return model

    async def _check_addresses(self, texts: Sequence[str]) -> list[str]:
        """Return the addresses that accept connections or cannot be tried."""
        results = await asyncio.gather(*(self._dial_address(text) for text in texts))
        works = {
            PeerAddress.parse(t).peer_id for t, one in zip(texts, results, strict=True) if one.ok
        }
        for text, finding in zip(texts, results, strict=True):
            # Of several addresses of a peer, one will do.
            is_needed = finding.ok or PeerAddress.parse(text).peer_id not in works
            status = finding.status if is_needed else FindingStatus.WARNING
            self._note(finding.name, status, finding.detail, finding.fix if is_needed else "")
        return [text for text, finding in zip(texts, results, strict=True) if finding.ok]

    async def _dial_address(self, text: str) -> Finding:
        address = PeerAddress.parse(text)
        port = address.tcp_port
        name = f"{Endpoint(address.host, port or 0)} (peer …{address.peer_id[-6:]})"
        if port is None:
            return Finding(
                "address", FindingStatus.OK, f"{text}: a relayed address; only joining can test it"
            )
        started_at = self.probes.clock.now()
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self.probes.dial(address.host, port)
        except (OSError, UnicodeError) as error:
            detail = f"{name} cannot be reached: {_explain_failed_dial(error)}"
            detail += name_bounds(address.host)
            return Finding(
                "address", FindingStatus.BROKEN, detail, _advise_dialling(address, error)
            )
        seconds = self.probes.clock.now() - started_at
        detail = f"{name} accepts connections, {_show(seconds)}{name_bounds(address.host)}"
        return await self._check_speaks_libp2p(name, address.host, port) or Finding(
            "address", FindingStatus.OK, detail
        )

    async def _check_speaks_libp2p(self, name: str, host: str, port: int) -> Finding | None:
        """Return the fault of the program that accepts connections at an address."""
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                answer = await self.probes.greet_libp2p(host, port)
        except TimeoutError:
            return Finding(
                "address", FindingStatus.BROKEN,
                f"{name} accepts connections and then stays silent",
                "the peer's p2pd is paused (resume it: kill -CONT) or overloaded; if nothing "
                "helps, restart the peer and use the address that it prints then",
            )  # fmt: skip
        except OSError as error:
            answer = _explain_failed_dial(error).encode()
        if answer.startswith(LIBP2P_GREETING):
            return None
        return Finding(
            "address", FindingStatus.BROKEN, f"{name} is a program that does not speak libp2p",
            "use the address that a peer printed under \"Others can join through\", not its "
            "endpoint for sessions",
        )  # fmt: skip

    async def _check_swarm(self, model: ModelFacts | None, joined: JoinedSwarm) -> None:
        """Read the directory, and talk to the peers that it names."""
        if model is None:
            self._note("directory", FindingStatus.OK, "joined")
            return
        self.view = await self._read_directory(model, joined)
        if self.view and not self.view.online:
            self.missing = (Span(0, model.num_blocks),)
        elif self.view:
            self.checks = await check_peers(self.view.online, joined.transport, self.probes)
            self.missing = self._find_missing(self.view)
            self._note_peers(self.view)
            self._check_clocks()
            self._note_blocks(model, self.missing)

    async def _join(self, addresses: Sequence[str], is_silence_news: bool) -> JoinedSwarm | None:
        try:
            async with asyncio.timeout(JOIN_SECONDS):
                return await self.probes.join(addresses)
        except TimeoutError:
            self._note_directory(f"joining took longer than {JOIN_SECONDS:g} s")
        except WrongSwarmError as error:
            fix = "give addresses of one swarm only"
            if "different swarms" not in str(error):
                fix = "ask the person who started the swarm for a join code: "
                fix += "`shoal swarm-new --from CODE` makes one"
            self._note("membership", FindingStatus.BROKEN, str(error), fix)
        except P2pdEndedError as error:
            self._note_p2pd(error)
        except (UnavailableError, UsageError) as error:
            if is_silence_news:
                self._note_directory(str(error))
        return None

    def _note_p2pd(self, error: P2pdEndedError) -> None:
        if any(finding.name == "p2pd" for finding in self.findings):
            return
        fix = "free memory on this machine, or stop what ends p2pd; no peer is at fault"
        self._note("p2pd", FindingStatus.BROKEN, str(error), fix)

    def _note_directory(self, detail: str) -> None:
        fixes = (fix for words, fix in _JOIN_FIXES.items() if words in detail)
        fix = next(fixes, _RESTART_FIX)
        self._note("clock" if "clock" in detail else "directory", FindingStatus.BROKEN, detail, fix)

    async def _read_directory(self, model: ModelFacts, joined: JoinedSwarm) -> SwarmView | None:
        try:
            async with asyncio.timeout(LOOKUP_SECONDS):
                announcements = await joined.directory.lookup(model.model_id)
        except TimeoutError:
            self._note_directory(f"reading took longer than {LOOKUP_SECONDS:g} s")
            return None
        except DirectoryError as error:
            self._note_directory(f"joined, but reading failed: {error}")
            return None
        self._note("directory", FindingStatus.OK, "joined and read")
        view = SwarmView.from_announcements(
            model.model_id, announcements, self.probes.clock.wall(), model.num_blocks
        )
        self._note_announcements(model, view)
        return view

    def _note_announcements(self, model: ModelFacts, view: SwarmView) -> None:
        counts = [
            f"{number} {state}"
            for state in PeerState
            if (number := sum(peer.state is state for peer in view.peers))
        ]
        if view.online:
            self._note(
                "announcements", FindingStatus.OK, f"before any is asked: {', '.join(counts)}"
            )
            return
        detail = f"no peer is online for model id {_short(model.model_id)}"
        detail += f" ({', '.join(counts)})" if counts else ""
        fix = (
            f"start one with `{self._quote_serve(model)}`{self._condition}; if one "
            "runs, its weights differ from yours: the model id is a digest of the weights"
        )
        self._note("announcements", FindingStatus.BROKEN, detail, fix)

    async def _check_reach(self, listen_address: ListenAddress, addresses: Sequence[str]) -> None:
        """Ask others to dial this machine."""
        try:
            async with asyncio.timeout(REACH_SECONDS):
                answers = await self.probes.reach(addresses, listen_address)
        except P2pdEndedError as error:
            self._note_p2pd(error)
            return
        except (TimeoutError, UnavailableError):
            answers = []
        except ShoalError as error:
            self._note(
                "reach", FindingStatus.BROKEN, str(error), "choose another --listen HOST:PORT"
            )
            return
        finding = judge_reach(listen_address, answers)
        self._note(finding.name, finding.status, finding.detail, finding.fix)

    def _find_missing(self, view: SwarmView) -> tuple[Span, ...]:
        """Return the blocks that no peer serves, without those that did not answer as announced."""
        faulty = {check.peer.peer_id for check in self.checks if check.fault is not None}
        sound = [peer.span for peer in view.online if peer.peer_id not in faulty]
        return tuple(find_gaps(view.num_blocks, sound))

    def _note_peers(self, view: SwarmView) -> None:
        """Say how each peer answered. Nobody needs a faulty one whose blocks others serve."""
        status = FindingStatus.BROKEN if self.missing else FindingStatus.WARNING
        local = find_local_peers(view.online)
        for result in self.checks:
            name = f"peer …{result.peer.peer_id[-6:]}"
            blocks = f"blocks {result.peer.span}"
            if result.peer in local:
                detail = f"{blocks}: it announces an address of its own machine only, "
                detail += f"{result.peer.endpoints[0]}: nobody on another machine can use it"
                self._note(name, FindingStatus.BROKEN, detail, LOCAL_FIX)
            elif result.fault is None:
                seconds = result.rtt_seconds or 0.0
                self._note(name, FindingStatus.OK, f"{blocks}: answers in {_show(seconds)}")
            else:
                detail = f"{blocks}: {result.fault}: {result.detail}"
                self._note(name, status, detail, advise(result))

    def _check_clocks(self) -> None:
        """Compare our clock with those of the peers, and say whose is off."""
        ahead = {
            check.peer.peer_id: check.clock_ahead_seconds
            for check in self.checks
            if check.clock_ahead_seconds is not None
        }
        if not ahead:
            return
        if min(map(abs, ahead.values())) > _WARNING_SKEW_SECONDS:  # nobody agrees with us
            whose, worst = "this machine is", -median(ahead.values())
        else:
            peer_id, worst = max(ahead.items(), key=lambda item: abs(item[1]))
            whose = f"peer …{peer_id[-6:]} is"
        if abs(worst) <= _WARNING_SKEW_SECONDS:
            self._note("clocks", FindingStatus.OK, f"they differ by {_show(abs(worst))} at most")
            return
        is_broken = abs(worst) > MAX_CLOCK_SKEW_SECONDS
        direction = "ahead of" if worst > 0 else "behind"
        self._note(
            "clocks",
            FindingStatus.BROKEN if is_broken else FindingStatus.WARNING,
            f"the clock of {whose} {abs(worst):.1f} s {direction} the others; "
            f"{MAX_CLOCK_SKEW_SECONDS:g} s are allowed",
            "enable time synchronisation there (timedatectl set-ntp true)",
        )

    def _note_blocks(self, model: ModelFacts, missing: Sequence[Span]) -> None:
        """Say which blocks are served by peers that answered."""
        if not missing:
            sound = [check.peer.span for check in self.checks if check.fault is None]
            counts = [sum(block in span for span in sound) for block in range(model.num_blocks)]
            fewest, most = min(counts), max(counts)
            often = f"{fewest}" if fewest == most else f"{fewest} to {most}"
            detail = f"all of 0:{model.num_blocks} are served; working peers per block: {often}"
            self._note("blocks", FindingStatus.OK, detail)
            return
        names = ", ".join(map(str, missing))
        commands = " and ".join(
            f"`{self._quote_serve(model, f'--blocks {gap}')}`" for gap in missing
        )
        detail = f"blocks {names} are missing: no working peer serves them"
        self._note("blocks", FindingStatus.BROKEN, detail, f"start {commands}{self._condition}")

    def _quote_serve(self, model: ModelFacts, *options: str) -> str:
        """Return the command that starts a peer in this swarm."""
        way_in = "--join CODE" if self._is_user else self.way_in
        return " ".join(filter(None, ("shoal serve", shlex.quote(model.name), *options, way_in)))

    @property
    def _is_user(self) -> bool:
        return self.membership is not None and self.membership.role is Role.USE

    @property
    def _condition(self) -> str:
        """The other requirements of the advice."""
        if not self._is_user:
            return ""
        return ", with a code from the owner that allows serving: yours only allows using the swarm"


def _advise_dialling(address: PeerAddress, error: OSError | UnicodeError) -> str:
    if isinstance(error, socket.gaierror | UnicodeError):
        return "check the spelling of the name, and that this machine can resolve it"
    if error.errno in (errno.ENETUNREACH, errno.ENETDOWN):
        return "check the network of this machine: nothing leads there from here"
    advice = "check that this peer still runs and that the address is the one it printed last, or "
    advice += "give the address of another peer (--initial-peers)"
    port = address.tcp_port
    if address.is_loopback:
        return f"{advice}; from other machines, use a code of a peer started without --local"
    if isinstance(error, ConnectionRefusedError):
        return advice  # a firewall would be silent
    if is_in_local_network(address.host):
        return (
            f"{advice}; from outside that network, its owner has to forward TCP port {port} there "
            "(--port-mapping asks the router to, --directory-port fixes the number)"
        )
    return (
        f"{advice}; if so, a firewall or router there blocks TCP port {port}: open it, or forward "
        "it to that machine (--directory-port fixes its number)"
    )


def _explain_failed_dial(error: OSError | UnicodeError) -> str:
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens on that port"
    if isinstance(error, TimeoutError):
        return f"no answer within {DIAL_SECONDS:g} s"
    if isinstance(error, socket.gaierror | UnicodeError):
        return f"the host name cannot be resolved ({explain(error)})"
    return _NUMBER.sub("", " ".join(explain(error).split()))


def _short(model_id: ModelId) -> str:
    return f"{model_id[:12]}…"


def _show(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
