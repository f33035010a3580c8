"""`shoal generate`: stream text from a swarm."""

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...protocol.errors import UsageError
from ...protocol.spans import Span
from ..options.quantities import count_of, parse_count
from ..options.shared_options import add_model_argument
from ..remote_models.generation_options import add_generation_arguments, read_sampling
from ..remote_models.live_text import OnSession, OnToken, show_text
from ..remote_models.opening import open_for_text
from ..remote_models.routes import describe_failover, describe_route, failover_facts, route_facts
from ..remote_models.text_generation import Generation, generate_text, read_prompt
from ..remote_models.tracing import TraceFile, parse_trace_path
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.terminal import Terminal
from ..terminal.text_printer import TextPrinter

if TYPE_CHECKING:
    from ...client.session.inference_session import InferenceSession


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal generate`."""
    add_model_argument(parser)
    parser.add_argument(
        "prompt", metavar="PROMPT",
        help="text to continue; - reads stdin. A terminal shows it before the new text, "
        "which alone goes to a pipe or a file",
    )  # fmt: skip
    add_generation_arguments(parser, 64)
    parser.add_argument(
        "--beams", type=parse_count, default=1, metavar="N",
        help="beam search with N beams; the text appears at the end",
    )  # fmt: skip
    parser.add_argument(
        "--delivery", choices=("chain", "star"),
        help="how hidden states travel: each peer pushes them to the next (chain), or all go "
        "through this machine (star) (default: chain)",
    )  # fmt: skip
    parser.add_argument(
        "--standby", action="store_true",
        help="keep a hot standby for every hop, so that a lost peer is replaced without replay "
        "(doubles the swarm's work)",
    )  # fmt: skip
    parser.add_argument(
        "--trace", type=parse_trace_path, metavar="FILE",
        help="write a timeline of every token at every hop, for ui.perfetto.dev, and print a "
        "summary",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Generate one text; return 0. SIGTERM ends it as Ctrl-C does."""
    output, notices = Terminal(sys.stdout), Terminal(sys.stderr)
    trace_file = TraceFile(options.trace)
    try:
        with stop_on_sigterm(), trace_file:
            generation, lacking_standby = _generate(options, output, notices, trace_file)
            # Inside the block: the text is printed even if writing the trace fails at its end.
            if options.json:
                facts = _make_json(generation) | {"kv_format": options.kv}
                if options.standby:
                    facts["blocks_without_standby"] = list(map(str, lacking_standby))
                output.print_json(facts | trace_file.make_facts())
            else:
                _report(notices, generation)
                for line in trace_file.describe():
                    notices.print(line)
    except BaseException:
        for line in trace_file.describe_cut():
            notices.print(line)
        raise
    return 0


def _generate(
    options: argparse.Namespace, output: Terminal, notices: Terminal, trace_file: TraceFile
) -> tuple[Generation, Sequence[Span]]:
    """Join the swarm and generate one text, printed as it comes where there is no --json.

    Also returns the blocks for which a hot standby is wanted and no peer is there.
    """
    prompt, sampling = _read_prompt(options.prompt), read_sampling(options)
    lacking_standby: list[Span] = []

    def warn_of_missing_standbys(session: "InferenceSession") -> None:
        if options.standby:
            lacking_standby.extend(session.spans_without_replica)
            _warn_of_missing_standbys(notices, lacking_standby)

    opened = open_for_text(options, notices)
    with opened.model as model, output.ending_lines():
        printer = TextPrinter(None if options.json else output, notices, prompt)

        def generate(on_token: OnToken, on_session: OnSession) -> Generation:
            def watch(session: "InferenceSession") -> None:
                on_session(session)
                trace_file.watch(session)

            return generate_text(model, opened.tokenizer, prompt, sampling, on_token, watch)

        generation = show_text(opened, printer, notices, generate, warn_of_missing_standbys)
    return generation, lacking_standby


def _read_prompt(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.read().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError("the prompt on stdin is not valid in the locale's encoding") from error
    return read_prompt(text)


def _warn_of_missing_standbys(notices: Terminal, lacking_standby: Sequence[Span]) -> None:
    """Name the blocks that have no standby."""
    names = ", ".join(map(str, lacking_standby))
    if names:
        notices.print(
            f"No standby for blocks {names}: no other peer serves them with the same weights"
        )


def _report(terminal: Terminal, generation: Generation) -> None:
    """Print one line about the text, and one more for each failover."""
    num_tokens = len(generation.token_ids)
    parts = [count_of(num_tokens, "token")]
    if num_tokens:
        parts.append(f"the first after {generation.first_token_seconds:.1f} s")
    if rate := generation.tokens_per_second:
        parts.append(f"then {rate:.1f} tok/s")
    parts.append(f"route {describe_route(generation.route)}")
    for line in terminal.wrap(", ".join(parts)):
        terminal.print(terminal.paint(line, "dim"))
    if generation.stop and terminal.is_terminal:
        for line in terminal.wrap(f"Stopped before {generation.stop!r}, as --stop says."):
            terminal.print(terminal.paint(line, "dim"))
    for failover in generation.failovers:
        for line in terminal.wrap(describe_failover(failover)):
            terminal.print(terminal.paint(line, "yellow"))


def _make_json(generation: Generation) -> dict[str, object]:
    return {
        "text": generation.text,
        "finish_reason": "stop" if generation.is_complete else "length",
        "tokens": len(generation.token_ids),
        "seconds": round(generation.seconds, 4),
        "tokens_per_second": round(generation.tokens_per_second, 2),
        "time_to_first_token_seconds": round(generation.first_token_seconds, 4),
        "route": route_facts(generation.route),
        "failovers": [failover_facts(failover) for failover in generation.failovers],
    }
