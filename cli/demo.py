"""`shoal demo`: a peer dies in mid-sentence, and the sentence goes on with the same words."""

import argparse
import contextlib
import json
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..peer.local_swarm.swarm import LocalPeer, LocalSwarm
from ..protocol.errors import UsageError
from ..protocol.spans import Span
from .demo_screen import DemoResult, DemoScreen, Kill
from .swarm import describe_start
from .terminal.bundled_model import count_blocks, find_model, read_configuration
from .terminal.interrupts import end_in_good_order
from .terminal.layout import cut_evenly
from .terminal.options import add_weights_argument
from .terminal.quantities import parse_count, parse_non_negative, parse_whole
from .terminal.terminal import Progress, Terminal
from .terminal.text_generation import (
    Sampling,
    TextModel,
    import_client,
    read_prompt,
)

if TYPE_CHECKING:
    from ..client.session.inference_session import InferenceSession

_LETTERS = "ABCD"
_SAMPLING_TEMPERATURE = 0.7


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
    _check_length(model_path, prompt, options.tokens)
    terminal = Terminal(sys.stdout)
    screen = None if options.json else DemoScreen(terminal)
    with end_in_good_order(), terminal.ending_lines():
        result = _run_demo(options, model_path, prompt, kill_after, screen)
    if screen is None:
        Terminal(sys.stdout).print(json.dumps(result.to_json()))
    else:
        screen.show_verdict(result)
    return 0 if result.is_proof else 1


def plan_demo_spans(num_blocks: int) -> list[Span]:
    """Return the spans of the four peers: three parts of the model, the middle one twice."""
    first, middle, last = cut_evenly(num_blocks, 3)
    return [first, middle, middle, last]


def _check_length(model_path: str, prompt: str, num_tokens: int) -> None:
    """Raise UsageError when the story could not get that long; imports no torch for it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(Path(model_path) / "tokenizer.json"))
    maximum = read_configuration(model_path)["max_position_embeddings"]
    longest = maximum - len(tokenizer.encode(prompt).ids)
    if num_tokens > longest:
        raise UsageError(
            f"the model has {maximum} positions, too few for this prompt and {num_tokens} tokens; "
            + (f"use at most --tokens {longest}" if longest > 0 else "use a shorter prompt")
        )


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
        with Progress(Terminal(sys.stderr), lambda: describe_start(swarm, len(spans))) as progress:
            # The client's libraries take seconds to import: meanwhile the peers start.
            importing = threading.Thread(target=import_client, daemon=True)
            importing.start()
            stack.enter_context(swarm)
            importing.join()
            model = stack.enter_context(TextModel.open(model_path, swarm.initial_peers))
        letters = {peer.peer_id: _LETTERS[i] for i, peer in enumerate(swarm.peers)}
        if screen:
            screen.show_peers(swarm.peers, letters, progress.seconds)
            screen.begin_story(prompt)
        pace = options.pace if screen and screen.terminal.is_terminal else 0.0
        killer = _Killer(swarm, kill_after, pace, letters, screen)
        disturbed = model.generate(prompt, sampling, killer.on_token, killer.on_session)
        if screen:
            screen.end_story(disturbed, letters, is_slowed=pace > 0)
        with Progress(Terminal(sys.stderr), lambda: "Generating the same again, undisturbed"):
            undisturbed = model.generate(prompt, sampling, lambda piece: None)
        return DemoResult(disturbed, undisturbed, killer.kill, progress.seconds)


class _Killer:
    """Watches the tokens come, and kills the peer in use that has a replica after some of them."""

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

    def on_session(self, session: "InferenceSession") -> None:
        """Take the session whose hops may be killed."""
        self._session = session

    def on_token(self, piece: str) -> None:
        """Note how long the token took, show it, wait for readers, kill when it is time.

        Only the time between the end of one call and the beginning of the next counts as the
        token's: showing and waiting are not work of the swarm.
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
