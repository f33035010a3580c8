"""What a peer that runs says of itself, for people and as JSON."""

import shlex
import sys
import time
from collections.abc import Iterator
from typing import Any

from ...peer.process.config import PeerEvent
from ...protocol.endpoints import Endpoint
from ...protocol.net.libp2p.multiaddrs import split_multiaddr
from ...protocol.spans import Span
from ..options.quantities import count_of
from .terminal import Terminal

_PURPOSES = {
    "use": "The swarm is private. Join code (--join) for members that only use it:",
    "serve": "Join code for members that may also serve:",
}
_PUBLIC_PURPOSE = "The swarm is public: join with an address or with this code (--join):"


def print_json(event: PeerEvent) -> None:
    """Print an event as a line of JSON."""
    Terminal(sys.stdout).print_event(event.name, time=round(time.time(), 3), **event.facts)


class EventPrinter:
    """Prints the events of one peer for people; keeps its newest code, for commands to copy."""

    def __init__(self, model: str, way_in: str) -> None:
        """`model` and `way_in`, the options that name its swarm, are those of its own command."""
        self._serve = f"shoal serve {shlex.quote(model)}"
        self._way_in = way_in

    def __call__(self, event: PeerEvent) -> None:
        """Print what there is to say of an event."""
        codes: Any = event.facts.get("join_codes")
        if codes:
            self._way_in = f"--join {codes['serve']}"
        print_for_people(event, self._serve, self._way_in)


def print_for_people(
    event: PeerEvent, serve: str = "shoal serve MODEL", way_in: str = "--join CODE"
) -> None:
    """Print what there is to say of an event; `serve` and `way_in` make a command for others."""
    facts: dict[str, Any] = event.facts
    terminal = Terminal(sys.stdout)
    if event.name == "started":
        terminal.print(f"Peer {facts['peer_id']}")
        for line in terminal.wrap(_describe_memory(facts)):
            terminal.print(line)
        if not facts["adapter_bytes"]:
            terminal.print("Accepts no adapters: it has no memory for them (--adapter-memory).")
    elif event.name == "last_swarm":
        when = time.strftime("%H:%M on %d %B", time.localtime(facts["kept_at"]))
        for line in terminal.wrap(
            f"This machine was in another swarm at {when}. If it still runs, go back to it with "
            "--join and its code in place of --new-swarm; or, if it is public, with:"
        ):
            terminal.print(line)
        terminal.print(f"--initial-peers {' '.join(facts['addresses'])}")
    elif event.name == "directory":
        if not facts["relays"]:
            terminal.print("Joined the directory. Others can join through:")
        _print_reach(terminal, facts)
    elif event.name == "addresses":
        sentence = "The addresses of this peer have changed."
        if not facts["relays"]:
            sentence += " Others can join through:"
        terminal.print(f"{time.strftime('%H:%M:%S')} {sentence}")
        _print_reach(terminal, facts)
        if facts["reach"] in ("inside", "nobody"):
            terminal.print("Start it again, and it looks for a relay.")
    elif event.name == "join_codes":
        terminal.print(
            f"{time.strftime('%H:%M:%S')} The join code names the peers that are here now:"
        )
        _print_codes(terminal, facts["join_codes"])
    elif event.name == "metrics":
        terminal.print(f"Prometheus metrics: {facts['url']}")
    elif event.name == "loading":
        is_done = facts["done"] == facts["blocks"]
        if terminal.can_redraw or is_done:
            end = "\n" if is_done else ""
            terminal.redraw(f"Loading block {facts['done']} of {facts['blocks']}{end}")
    else:
        # A peer runs for days, so its readers need the time of an event.
        for sentence in _describe_event(event):
            for line in terminal.wrap(f"{time.strftime('%H:%M:%S')} {sentence}"):
                terminal.print(line)
        if event.name == "gap" and facts["can_join"]:
            for span in facts["missing"]:  # each on a line, so that it can be copied
                terminal.print(f"{serve} --blocks {span} {way_in}".rstrip())


def _print_reach(terminal: Terminal, facts: dict[str, Any]) -> None:
    """Print at which addresses and from where others reach the peer, and the codes that say so."""
    for address in [] if facts["relays"] else facts["dialled"]:
        terminal.print(f"  {address}")
    for line in _describe_reach(facts):
        for part in terminal.wrap(line):
            terminal.print(part)
    if facts.get("is_relay"):
        terminal.print("Relays for peers that nobody can dial (--no-relay turns this off).")
    _print_codes(terminal, facts.get("join_codes", {}), facts["reach"] == "machine")


def _describe_reach(facts: dict[str, Any]) -> Iterator[str]:
    """Yield from where others reach the peer, and what to do where not everybody may."""
    first, places = facts["endpoints"][0], ", ".join(facts["endpoints"])
    if facts["relays"]:
        relays = [str(Endpoint(*split_multiaddr(text))) for text in facts["relays"]]
        yield f"Behind a NAT, through {count_of(len(relays), 'relay')}: {', '.join(relays)}."
    elif facts["reach"] == "machine" and facts["listens_everywhere"]:
        yield f"This machine is in no network yet: reachable on it only, at {places}."
    elif facts["reach"] == "machine":
        yield f"Reachable on this machine only, at {places}."
    elif facts["reach"] == "internet":
        yield f"Reachable from the internet at {first}."
    elif facts["reach"] == "network" and facts["has_public_host"]:
        yield f"Reachable in this network at {places}; not yet confirmed from outside."
    elif facts["reach"] == "unknown":
        yield f"Listening at {places}; not yet confirmed from outside."
        if not facts["has_public_host"]:
            port, directory_port = first.rpartition(":")[2], facts["directory_port"]
            yield (
                "These are addresses of the local network. For others, forward TCP ports "
                f"{port} and {directory_port} of the router to this machine, and start again with "
                f"--listen 0.0.0.0:{port} --directory-port {directory_port} --announce-host "
                "ROUTER-ADDRESS, its public one; or try --port-mapping."
            )
    else:
        yield f"Reachable in this network only, at {places}."
        if facts["reach"] != "network":
            yield "Peers that it joined through cannot dial it there."


def _describe_memory(facts: dict[str, Any]) -> str:
    def show(*kinds: str) -> str:
        num_bytes = sum(facts[f"{kind}_bytes"] for kind in kinds)
        return "under 1" if 0 < num_bytes < 2**20 else f"{num_bytes // 2**20:,}"

    kinds = ("kv", "pass", "adapter", "message", "announcement")
    uses = f"{show('kv')} for KV caches, {show('pass')} for training, {show('adapter')} for "
    uses += f"adapters, {show('message')} (always) for messages in transit, "
    uses += f"{show('announcement')} (always) for announcements of others"
    free, disk = f"{show('free')} MiB of free memory", show("block_cache")
    if facts["weight_bytes"] is None:
        uses = f"Uses at most {free}: {uses}, the rest for weights"
    else:
        total = show("weight", *kinds)
        uses = f"Uses at most {total} of {free}: {show('weight')} for weights, {uses}"
    return f"{uses}. Keeps at most {disk} MiB of blocks on disk."


def _describe_event(event: PeerEvent) -> Iterator[str]:
    """Yield an event of a running peer in sentences for people."""
    facts: dict[str, Any] = event.facts
    if event.name == "waiting":
        yield f"Nobody in the swarm answers yet: {facts['why']}."
        yield "Trying again, at least once a minute, until somebody does. Press Ctrl-C to end."
    elif event.name == "draining":
        sessions, passes = facts["sessions"], facts["passes"]
        work = [f"{count_of(sessions, 'session')} to move to other peers or end"] * bool(sessions)
        work += [f"{passes} of training's microbatches"] * bool(passes)
        yield f"Waiting for {' and '.join(work)}. Press Ctrl-C again to leave at once."
    elif event.name in ("placed", "moving"):
        verb = "Taking" if event.name == "placed" else "Moving to"
        yield f"{verb} blocks {facts['target']}: {facts['why']}."
    elif event.name == "returning":
        yield f"Returning to blocks {facts['target']}: {facts['why']}."
    elif event.name == "online":
        place = facts["endpoint"]
        if place.startswith("/"):
            place = f"{Endpoint(*split_multiaddr(place))} (relay)"
        yield (
            f"Online at {place}: blocks {facts['span']} of {facts['num_blocks']}, "
            f"{_describe_speed(facts)}."
        )
        yield f"Computing with {facts['kernels']}. Press Ctrl-C to leave."
    elif event.name == "operator":
        name, places = facts["name"], facts["operator_addresses"]
        yield f"Control this peer with `shoal drain {name}`, `shoal limits {name}`, and so on."
        for place in places:
            if not place.startswith("unix:"):
                yield f"Tools with the token reach it at {place}."
    elif event.name == "paused":
        yield f"Paused: {'; '.join(facts['why'])}. Press Ctrl-C to leave."
    elif event.name == "speed":
        yield f"Measured again: {_describe_speed(facts)}."
    elif event.name == "relayed":
        yield "The relays of this peer have changed. It is now reached through:"
        yield from facts["relays"]
    elif event.name == "parked" and facts["parked_at"]:
        endings = ", ".join(f"…{ending}" for ending in facts["parked_at"])
        yield f"These peers push to this one over connections that it keeps open: {endings}."
    elif event.name == "got_through":
        where = "in this network" if facts["is_local"] else "from the internet"
        yield f"Reachable {where}: first connection, from {facts['host']}."
    elif event.name == "gap":
        yield from _describe_gap(facts)
    elif event.name == "gap_closed":
        yield "All blocks have a peer again."
    elif event.name == "lost":
        yield (
            "No sign of other peers any more: either all have ended, or this machine has lost its "
            "network, or the way to those that it knew. Clients in this network are served on."
        )
    elif event.name == "found":
        yield "Other peers are there again."
    elif event.name == "relaying":
        yield "Other peers are now reached through this one (--no-relay turns this off)."
    elif event.name == "left":
        yield "Left the swarm."


def _describe_gap(facts: dict[str, Any]) -> Iterator[str]:
    """Yield what is missing; the commands that mend it follow on lines of their own."""
    blocks = ", ".join(facts["missing"])
    if facts["is_lost"]:
        yield f"If they have ended, blocks {blocks} have no peer, and no text can be generated."
    else:
        yield f"Blocks {blocks} have no peer: no text can be generated until one comes."
    if facts["can_join"]:
        yield "To start one:"
    else:
        yield (
            "Nobody can join through this peer, which is behind a NAT, and it knows no other: "
            "start the first one again with its --identity and --directory-port; or start a "
            "new swarm where others can dial it, and then this peer in that."
        )


def _describe_speed(facts: dict[str, Any]) -> str:
    """Return steps per second through the span, and what a whole model of such peers writes."""
    steps = facts["decode_steps_per_second"]
    span, num_blocks = Span.parse(facts["span"]), facts["num_blocks"]
    if len(span) == num_blocks:
        return f"{steps} tokens/s"
    tokens = steps * len(span) / num_blocks
    rounded = f"{tokens:.3g}" if tokens < 1000 else f"{tokens:.0f}"
    return f"{steps} steps/s, or {rounded} tokens/s for a whole model of such peers"


def _print_codes(terminal: Terminal, codes: dict[str, str], is_local: bool = False) -> None:
    """Print a code on a line of its own, so that it can be copied whole."""
    for role, code in codes.items():
        purpose = _PURPOSES[role] if len(codes) > 1 else _PUBLIC_PURPOSE
        terminal.print(purpose)
        terminal.print(code)
    if codes and is_local:
        terminal.print("On other machines this is no use: it names addresses of this one only.")
