"""What a visitor of `shoal demo` sees: the peers, the story, the kill in its midst, the verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..peer.local_swarm.swarm import LocalPeer
from ..protocol.ids import PeerId
from .terminal.terminal import Terminal, WordWrapper
from .terminal.text_generation import Generation, failover_facts, route_facts

if TYPE_CHECKING:
    from ..client.session.mending import Failover

_INDENT = "  "
_MARGIN_COLUMNS = 4


@dataclass(frozen=True)
class Kill:
    """Which peer was killed, when, and what it did to the time between two tokens."""

    letter: str
    peer: LocalPeer
    after_tokens: int
    gap_seconds: float
    usual_seconds: float


@dataclass(frozen=True)
class DemoResult:
    """Everything that a demo found out."""

    disturbed: Generation
    undisturbed: Generation
    kill: Kill | None
    start_seconds: float

    @property
    def first_difference(self) -> int | None:
        """Index of the first token that is not the same in both texts, or None."""
        one, other = self.disturbed.token_ids, self.undisturbed.token_ids
        pairs = zip(one, other, strict=False)
        shared = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
        return None if len(one) == len(other) == shared else shared

    @property
    def is_proof(self) -> bool:
        """Return whether a failover took place and both texts are the same."""
        return bool(self.disturbed.failovers) and self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain JSON types."""
        kill = self.kill
        return {
            "identical": self.first_difference is None,
            "first_difference": self.first_difference,
            "text": self.disturbed.text,
            "tokens": len(self.disturbed.token_ids),
            "killed": kill
            and {
                "peer": kill.letter,
                "peer_id": kill.peer.peer_id,
                "pid": kill.peer.pid,
                "span": str(kill.peer.span),
                "after_tokens": kill.after_tokens,
                "gap_seconds": round(kill.gap_seconds, 4),
                "usual_seconds_per_token": round(kill.usual_seconds, 4),
            },
            "failovers": [failover_facts(failover) for failover in self.disturbed.failovers],
            "route": route_facts(self.disturbed.route),
            "start_seconds": round(self.start_seconds, 2),
            "seconds": round(self.disturbed.seconds, 4),
            "undisturbed_seconds": round(self.undisturbed.seconds, 4),
        }


class DemoScreen:
    """Draws the demo on a terminal, line by line; nothing is ever drawn over."""

    def __init__(self, terminal: Terminal) -> None:
        self.terminal = terminal
        self._wrapper = WordWrapper(terminal.width - _MARGIN_COLUMNS, _INDENT)

    def show_title(self, num_peers: int) -> None:
        """Say what is about to happen."""
        paint = self.terminal.paint
        self._print()
        self._print(paint("shoal demo", "bold", "cyan"))
        self._print(
            f"A small language model runs in {num_peers} processes on this machine; each holds a"
        )
        self._print("few of its blocks. One of them is killed in the middle of the story.")
        self._print()

    def show_peers(
        self, peers: Sequence[LocalPeer], letters: Mapping[Any, str], seconds: float
    ) -> None:
        """List the peers."""
        paint = self.terminal.paint
        num_blocks = max(peer.span.stop for peer in peers)
        for peer in peers:
            held = "".join("■" if block in peer.span else "·" for block in range(num_blocks))
            letter = paint(letters[peer.peer_id], "bold")
            blocks = f"blocks {peer.span!s:6}"
            self._print(
                f"{letter}  {paint(held, 'cyan')}  {blocks} pid {peer.pid:<8}…{peer.peer_id[-6:]}"
            )
        self._print(paint(f"Started in {seconds:.1f} s.", "dim"))
        self._print()

    def begin_story(self, prompt: str) -> None:
        """Show the beginning that was given."""
        self.terminal.write(self.terminal.paint(self._wrapper.feed(prompt), "bold"))

    def add_story(self, piece: str) -> None:
        """Show some more of the story, as far as its words are complete."""
        self.terminal.write(self._wrapper.feed(piece))

    def show_kill(self, peer: LocalPeer, letter: str, num_tokens: int) -> None:
        """Break into the story: a peer has just been killed."""
        paint = self.terminal.paint
        self.terminal.write("\n\n")
        self._print(
            paint(f"✗ kill -9 {peer.pid}", "bold", "red")
            + paint(
                f": peer {letter} (blocks {peer.span}) is gone after {num_tokens} tokens", "red"
            )
        )

    def show_failover(self, failover: Failover, kill: Kill, letters: Mapping[PeerId, str]) -> None:
        """Say who took over and how long it took, then resume the story where it stood."""
        paint = self.terminal.paint
        names = " and ".join(letters[hop.peer.peer_id] for hop in failover.replacements)
        self._print(
            paint(f"✓ peer {names} took over", "bold", "green")
            + paint(f": {failover.num_replayed_tokens} tokens replayed", "green")
        )
        gap, usual = f"{kill.gap_seconds * 1000:.0f} ms", f"{kill.usual_seconds * 1000:.0f} ms"
        self._print(
            paint(f"  the next token came {gap} after the kill", "bold")
            + paint(f" (a token usually takes {usual})", "dim")
        )
        self.terminal.write("\n" + " " * self._wrapper.column)

    def end_story(
        self, generation: Generation, letters: Mapping[Any, str], is_slowed: bool
    ) -> None:
        """End the story's last line and say which route it ended on."""
        paint = self.terminal.paint
        ending = "" if generation.is_complete else paint(" …", "dim")
        self.terminal.write(self._wrapper.flush() + ending + "\n\n")
        hops = [f"{letters[hop.peer.peer_id]} {hop.span}" for hop in generation.route]
        num_tokens = len(generation.token_ids)
        self._print(paint(f"{num_tokens} tokens; route at the end: {' → '.join(hops)}.", "dim"))
        if is_slowed:
            self._print(paint("Slowed down for reading; --pace 0 shows full speed.", "dim"))

    def show_verdict(self, result: DemoResult) -> None:
        """Say whether the story survived."""
        paint = self.terminal.paint
        num_tokens = len(result.undisturbed.token_ids)
        index = result.first_difference
        if result.kill is None:
            self._print(
                paint("✗ No failover took place", "bold", "red")
                + f": the story had {len(result.disturbed.token_ids)} tokens."
            )
            self._print("  Use a smaller --kill-after, or run the demo again.")
        elif index is None:
            self._print(
                paint("✓ Generated again without the kill: ", "green")
                + paint(f"all {num_tokens} tokens are the same.", "bold", "green")
            )
        else:
            tokens = (result.disturbed.token_ids, result.undisturbed.token_ids)
            one, other = (ids[index] if index < len(ids) else "the end" for ids in tokens)
            self._print(
                paint(f"✗ Token {index + 1} differs", "bold", "red")
                + f": {one} with the kill, {other} without."
            )
        self._print()

    def _print(self, line: str = "") -> None:
        self.terminal.print(_INDENT + line if line else "")
