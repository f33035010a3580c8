"""`shoal demo`: a peer dies in mid-sentence, and the sentence goes on with the same words."""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...peer.local_swarm.swarm import LocalPeer, LocalSwarm
from ...protocol.errors import UsageError
from ...protocol.ids import PeerId
from ...protocol.spans import Span
from ..options.bundled_model import count_blocks, find_model
from ..options.layout import cut_evenly
from ..options.quantities import parse_count, parse_non_negative, parse_whole
from ..options.shared_options import add_weights_argument
from ..remote_models.opening import import_client, load_tokenizer, open_model
from ..remote_models.routes import failover_facts, route_facts
from ..remote_models.text_generation import Generation, Sampling, generate_text, read_prompt
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.terminal import Progress, Terminal, WordWrapper

if TYPE_CHECKING:
    from ...client.session.inference_session import InferenceSession
    from ...client.trace.trace import SessionFailover

_LETTERS = "ABCD"
_SAMPLING_TEMPERATURE = 0.7
_INDENT = "  "
_MARGIN_COLUMNS = 4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal demo`."""
    parser.add_argument(
        "--tokens", type=parse_count, default=160, metavar="N",
        help="length of the story in tokens (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kill-after", type=parse_count, metavar="N",
        help="kill a peer after N tokens (default: 40, or half of a shorter story)",
    )  # fmt: skip
    parser.add_argument(
        "--prompt", default="Once upon a time, there was a kind boy named Milo", metavar="TEXT",
        help="beginning of the story (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=parse_whole, metavar="S",
        help="sample a story with this random seed (default: decode greedily)",
    )  # fmt: skip
    add_weights_argument(parser)
    parser.add_argument(
        "--pace", type=parse_non_negative, default=30.0, metavar="N",
        help="show at most N tokens per second on a terminal (default: 30; 0: no limit)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Run the demo; return 0 when a peer was lost and no token changed, else 1."""
    model_path, prompt = find_model(), read_prompt(options.prompt)
    if options.tokens < 2:
        raise UsageError("the demo kills a peer between two tokens; use --tokens 2 or more")
    kill_after = options.kill_after or max(1, min(40, options.tokens // 2))
    if kill_after >= options.tokens:
        raise UsageError(
            f"the peer would be killed after {kill_after} tokens of {options.tokens}, with none "
            "left to generate; use a smaller --kill-after or more --tokens"
        )
    terminal = Terminal(sys.stdout)
    screen = None if options.json else DemoScreen(terminal)
    with stop_on_sigterm(), terminal.ending_lines():
        result = _run_demo(options, model_path, prompt, kill_after, screen)
    if screen is None:
        Terminal(sys.stdout).print_json(result.to_json())
    else:
        screen.show_verdict(result)
    return 0 if result.is_proof else 1


def plan_demo_spans(num_blocks: int) -> list[Span]:
    """Return the spans of the four peers: three parts of the model, the middle one twice."""
    first, middle, last = cut_evenly(num_blocks, 3)
    return [first, middle, middle, last]


def _run_demo(
    options: argparse.Namespace,
    model_path: str,
    prompt: str,
    kill_after: int,
    screen: DemoScreen | None,
) -> DemoResult:
    spans = plan_demo_spans(count_blocks(model_path))
    swarm = LocalSwarm(model_path, spans, weights=options.weights)
    sampling = Sampling(
        options.tokens,
        temperature=None if options.seed is None else _SAMPLING_TEMPERATURE,
        seed=options.seed,
    )
    if screen:
        screen.show_title(len(spans))
    with contextlib.ExitStack() as stack:
        with Progress(
            Terminal(sys.stderr), lambda: f"Starting {len(spans)} peers, {swarm.num_online} online"
        ) as progress:
            # The client's libraries take seconds to import: meanwhile the peers start.
            importing = threading.Thread(target=import_client, daemon=True)
            importing.start()
            stack.enter_context(swarm)
            importing.join()
            tokenizer, _ = load_tokenizer(model_path)
            model = stack.enter_context(open_model(model_path, swarm.initial_peers))
        letters = {peer.peer_id: _LETTERS[i] for i, peer in enumerate(swarm.peers)}
        if screen:
            screen.show_peers(swarm.peers, letters, progress.seconds)
            screen.begin_story(prompt)
        pace = options.pace if screen and screen.terminal.is_terminal else 0.0
        killer = _Killer(swarm, kill_after, pace, letters, screen)
        disturbed = generate_text(
            model, tokenizer, prompt, sampling, killer.on_token, killer.on_session
        )
        if screen:
            screen.end_story(disturbed, letters, is_slowed=pace > 0)
        with Progress(Terminal(sys.stderr), lambda: "Generating the same again, undisturbed"):
            undisturbed = generate_text(model, tokenizer, prompt, sampling, lambda piece: None)
        return DemoResult(disturbed, undisturbed, killer.kill, progress.seconds)


class _Killer:
    """Watches the tokens, and after some of them kills a peer in use that has a replica."""

    def __init__(
        self,
        swarm: LocalSwarm,
        kill_after: int,
        pace: float,
        letters: dict[Any, str],
        screen: DemoScreen | None,
    ) -> None:
        self._swarm = swarm
        self._kill_after = kill_after
        self._pause_seconds = 1.0 / pace if pace else 0.0
        self._letters = letters
        self._screen = screen
        self._session: InferenceSession | None = None
        self._victim: LocalPeer | None = None
        self._num_tokens = 0
        self._token_seconds: list[float] = []
        self._resumed_at = 0.0
        self.kill: Kill | None = None

    def on_session(self, session: InferenceSession) -> None:
        """Take the session, whose hops may be killed."""
        self._session = session

    def on_token(self, piece: str) -> None:
        """Time the token, show it, slow down for readers, and kill the peer when it is time.

        Only the time between the end of one call and the beginning of the next counts as the
        token's, because printing and waiting are not work of the swarm.
        """
        seconds = time.perf_counter() - self._resumed_at
        self._num_tokens += 1
        if self._victim and not self.kill and self._session and self._session.failovers:
            self._note_failover(self._victim, seconds)
        elif self._num_tokens > 1:  # the first one waited for the prompt
            self._token_seconds.append(seconds)
        if self._screen:
            self._screen.add_story(piece)
        time.sleep(max(0.0, self._pause_seconds - seconds))
        self._resumed_at = time.perf_counter()
        if self._num_tokens == self._kill_after:
            self._kill_peer()

    def _kill_peer(self) -> None:
        assert self._session is not None  # tokens come from one
        replicated = [
            peer.span
            for peer in self._swarm.peers
            if sum(other.span == peer.span for other in self._swarm.peers) > 1
        ]
        hop = next(hop for hop in self._session.hops if hop.peer.span in replicated)
        self._victim = self._swarm.find(hop.peer.peer_id)
        self._victim.kill()
        if self._screen:
            letter = self._letters[hop.peer.peer_id]
            self._screen.show_kill(self._victim, letter, self._num_tokens)

    def _note_failover(self, victim: LocalPeer, gap_seconds: float) -> None:
        usual_seconds = statistics.median(self._token_seconds) if self._token_seconds else 0.0
        letter = self._letters[victim.peer_id]
        self.kill = Kill(letter, victim, self._kill_after, gap_seconds, usual_seconds)
        if self._screen:
            assert self._session is not None
            self._screen.show_failover(self._session.failovers[-1], self.kill, self._letters)


@dataclass(frozen=True)
class Kill:
    """The killed peer, the moment, and the delay that followed."""

    letter: str
    peer: LocalPeer
    after_tokens: int
    gap_seconds: float
    usual_seconds: float


@dataclass(frozen=True)
class DemoResult:
    """The results of a demo."""

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
        """Print the title."""
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
        """Show the prompt."""
        self.terminal.write(self.terminal.paint(self._wrapper.feed(prompt), "bold"))

    def add_story(self, piece: str) -> None:
        """Show the next complete words of the story."""
        self.terminal.write(self._wrapper.feed(piece))

    def show_kill(self, peer: LocalPeer, letter: str, num_tokens: int) -> None:
        """Interrupt the story: a peer has just been killed."""
        paint = self.terminal.paint
        self.terminal.write("\n\n")
        self._print(
            paint(f"✗ kill -9 {peer.pid}", "bold", "red")
            + paint(
                f": peer {letter} (blocks {peer.span}) is gone after {num_tokens} tokens", "red"
            )
        )

    def show_failover(
        self, failover: SessionFailover, kill: Kill, letters: Mapping[PeerId, str]
    ) -> None:
        """Name the replacement and the delay, then resume the story in its column."""
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
        """Say whether both texts are the same."""
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
