"""`shoal generate`: stream text from a swarm."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...protocol.errors import UsageError
from ...protocol.spans import Span
from ..options.adapter_folder import find_adapter
from ..options.bundled_model import find_model
from ..options.join_options import add_join_arguments, read_joining
from ..options.quantities import (
    count_of,
    parse_count,
    parse_fraction,
    parse_non_negative,
    parse_positive,
    parse_text,
    parse_whole,
)
from ..options.shared_options import add_model_argument, add_wait_argument
from ..remote_models.opening import load_tokenizer, open_model
from ..remote_models.routes import describe_failover, describe_route, failover_facts, route_facts
from ..remote_models.text_generation import Generation, Sampling, generate_text, read_prompt
from ..remote_models.tracing import TraceFile, parse_trace_path
from ..terminal.interrupts import quitting_at_once, stop_on_sigterm
from ..terminal.terminal import Terminal
from ..terminal.text_printer import ChangeNotices, TextPrinter, show_waiting

if TYPE_CHECKING:
    from ...client.session.inference_session import InferenceSession

_DTYPES = ("auto", "fp32", "bf16", "fp16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal generate`."""
    add_model_argument(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="text to continue; - reads stdin")
    add_join_arguments(parser)
    parser.add_argument(
        "--adapter", metavar="DIR|DIGEST",
        help="folder written by `shoal finetune` or, for LoRA, by PEFT, or the digest of a "
        "published adapter",
    )  # fmt: skip
    parser.add_argument(
        "--max-new-tokens", type=parse_count, default=64, metavar="N",
        help="maximum number of new tokens (default: %(default)s)",
    )  # fmt: skip
    _add_sampling_arguments(parser)
    parser.add_argument(
        "--beams", type=parse_count, default=1, metavar="N",
        help="beam search with N beams; the text appears at the end",
    )  # fmt: skip
    add_wait_argument(parser, 20.0)
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="auto",
        help="data type of the embedding and the head on this machine (default: as stored)",
    )  # fmt: skip
    parser.add_argument(
        "--kv", choices=("float", "int8"), default="float",
        help="format of the KV cache on the peers; int8 takes a quarter to a half of the memory "
        "and is slightly less precise (default: %(default)s)",
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


def _add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--temperature", type=parse_non_negative, metavar="T",
        help="sampling temperature; 0 decodes greedily",
    )  # fmt: skip
    parser.add_argument(
        "--top-p", type=parse_fraction, metavar="P",
        help="sample from the most likely tokens whose probabilities add up to P",
    )  # fmt: skip
    parser.add_argument(
        "--top-k", type=parse_count, metavar="K", help="sample from the K most likely tokens"
    )
    parser.add_argument(
        "--min-p", type=parse_fraction, metavar="P",
        help="sample from tokens at least P times as likely as the likeliest",
    )  # fmt: skip
    parser.add_argument(
        "--repetition-penalty", type=parse_positive, metavar="R",
        help="divide the scores of tokens that the text has already by R; 1 is no penalty",
    )  # fmt: skip
    parser.add_argument(
        "--stop", action="append", default=[], type=parse_text, metavar="TEXT",
        help="end before this text; may be given several times",
    )  # fmt: skip
    parser.add_argument(
        "--seed", type=parse_whole, metavar="S",
        help="sample with this random seed; the same seed gives the same text",
    )  # fmt: skip


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
    prompt = _read_prompt(options.prompt)
    joining = read_joining(options)
    sampling = _read_sampling(options)
    name, adapter = find_model(options.model), find_adapter(options.adapter)
    with show_waiting(notices, lambda: "Joining the swarm"):
        # transformers imports its parts when they are first used, and turns an interrupt there
        # into errors of its own.
        with quitting_at_once(options.json):
            tokenizer, revision = load_tokenizer(name)
        model = open_model(
            name,
            joining.initial_peers,
            revision=revision,
            torch_dtype=options.dtype,
            failover_timeout_seconds=options.wait,
            kv_format=options.kv,
            join=joining.join,
            delivery=options.delivery,
            standby=options.standby,
            **adapter,
        )
    with model, output.ending_lines(), contextlib.ExitStack() as waiting:
        sessions: list[Any] = []
        lacking_standby: list[Span] = []

        is_published = isinstance(adapter.get("active_adapter"), str)

        def describe_start() -> str:
            return _describe_start(model, sessions, is_published, options.wait, notices.can_redraw)

        waiting.enter_context(show_waiting(notices, describe_start, "Generating"))
        printer = TextPrinter(None if options.json else output, notices, prompt)

        def on_token(piece: str) -> None:
            if printer.is_fresh:
                waiting.close()
                if options.standby:
                    lacking_standby.extend(sessions[0].spans_without_replica)
                    _warn_of_missing_standbys(notices, lacking_standby)
            printer.add(piece)

        def on_session(session: "InferenceSession") -> None:
            sessions.append(session)
            trace_file.watch(session)

        def describe_outage() -> str:
            sought = None if printer.is_fresh else sessions[0].sought
            return _describe_wait([sought], options.wait) if sought else ""

        with ChangeNotices(describe_outage, printer.interrupt):
            generation = generate_text(model, tokenizer, prompt, sampling, on_token, on_session)
        printer.end()
    return generation, lacking_standby


def _read_sampling(options: argparse.Namespace) -> Sampling:
    return Sampling(
        options.max_new_tokens,
        options.temperature,
        options.top_p,
        options.top_k,
        options.min_p,
        options.seed,
        options.beams,
        options.repetition_penalty,
        options.stop,
    )


def _read_prompt(text: str) -> str:
    if text == "-":
        try:
            text = sys.stdin.read().rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise UsageError("the prompt on stdin is not valid in the locale's encoding") from error
    return read_prompt(text)


def _describe_start(
    model: Any,
    sessions: Sequence[Any],
    is_adapter_published: bool,
    seconds: float,
    is_redrawn: bool,
) -> str:
    """Return what the first token waits for, as far as that is known.

    Estimates, which change every second, are only for a line that is redrawn.
    """
    if sessions and (waiting := sessions[0].waiting):
        return f"Waiting for {waiting if is_redrawn else waiting.place}"
    if is_adapter_published and not model.missing_blocks and not (sessions and sessions[0].hops):
        return "Waiting for peers to fetch the adapter"
    if missing := _describe_wait(model.missing_blocks, seconds):
        return missing
    progress = sessions[0].progress if sessions and is_redrawn else None
    if progress is None or progress.num_done == 0:  # or the prompt is one piece
        return ""
    return f"Reading the prompt: {progress.num_done:,} of {progress.num_tokens:,} tokens"


def _describe_wait(missing: Sequence[Span], seconds: float) -> str:
    """Return the missing blocks for which no token comes; nothing where none is missing.

    >>> _describe_wait([Span(0, 4)], 20.0)
    'Waiting for blocks 0:4, at most 20 s'
    >>> _describe_wait([Span(0, 4)], 0.0)
    'No peer serves blocks 0:4'
    """
    names = ", ".join(map(str, missing))
    if not names:
        return ""
    if seconds == 0:
        return f"No peer serves blocks {names}"
    return f"Waiting for blocks {names}, at most {seconds:g} s"


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
