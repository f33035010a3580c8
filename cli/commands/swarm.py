"""`shoal swarm`: run a whole swarm on this machine until Ctrl-C."""

import argparse
import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence

from ...peer.local_swarm.swarm import LocalPeer, LocalSwarm
from ...protocol.errors import UnavailableError
from ...protocol.spans import Span, find_gaps
from ..options.bundled_model import count_blocks, find_model
from ..options.join_options import quote_command
from ..options.layout import choose_num_replicas, plan_spans
from ..options.quantities import parse_count, parse_threads
from ..options.shared_options import add_optional_model_argument, add_weights_argument
from ..terminal.interrupts import stop_on_sigterm
from ..terminal.reporter import Reporter
from ..terminal.terminal import Terminal

_WATCH_SECONDS = 0.3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal swarm`."""
    add_optional_model_argument(parser)
    parser.add_argument(
        "--peers", type=parse_count, default=4, metavar="N",
        help="number of peers (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--replicas", type=parse_count, metavar="R",
        help="number of peers that hold each block (default: 2 with 4 or more peers, else 1)",
    )  # fmt: skip
    add_weights_argument(parser)
    parser.add_argument(
        "--threads", type=parse_threads, metavar="N",
        help="compute threads per peer (default: the cores divided among the peers)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print events as JSON lines")


def run(options: argparse.Namespace) -> int:
    """Run the swarm until Ctrl-C or SIGTERM; return 0.

    Raises KeyboardInterrupt if that comes before all peers are online.
    """
    model = find_model(options.model)
    num_blocks = count_blocks(model)
    num_replicas = options.replicas or choose_num_replicas(options.peers)
    spans = plan_spans(num_blocks, options.peers, num_replicas)
    num_threads = options.threads or max(1, (os.cpu_count() or 1) // len(spans))
    swarm = LocalSwarm(model, spans, weights=options.weights, num_threads=num_threads)
    reporter = Reporter(Terminal(sys.stdout), Terminal(sys.stderr), options.json)
    with stop_on_sigterm(), contextlib.ExitStack() as stack:
        with reporter.showing(lambda: f"Starting {len(spans)} peers, {swarm.num_online} online"):
            stack.enter_context(swarm)
        with contextlib.suppress(KeyboardInterrupt):
            _report_online(reporter, swarm, options.model, num_blocks)
            _watch(swarm, options.model, num_blocks, reporter)
    reporter.tell("stopped", ["\nThe swarm has stopped."])
    return 0


def _watch(swarm: LocalSwarm, model: str, num_blocks: int, reporter: Reporter) -> None:
    """Report peers that end by themselves; raises UnavailableError when none is left."""
    running = list(swarm.peers)
    while running:
        time.sleep(_WATCH_SECONDS)
        for peer in [peer for peer in running if not peer.is_running]:
            running.remove(peer)
            missing = find_gaps(num_blocks, (other.span for other in running))
            _report_ended(reporter, peer, missing, swarm.initial_peers, model)
    raise UnavailableError("all peers that this command started have ended; start it again")


def _report_online(reporter: Reporter, swarm: LocalSwarm, model: str, num_blocks: int) -> None:
    """Say which peer serves which blocks, and how to use the swarm."""
    peers = [
        {
            "peer_id": peer.peer_id,
            "span": str(peer.span),
            "pid": peer.pid,
            "endpoint": peer.facts.get("endpoint"),
            "addresses": peer.addresses,
        }
        for peer in swarm.peers
    ]
    reporter.tell(
        "online",
        _describe_swarm(reporter.output, swarm, model, num_blocks),
        model=swarm.model,
        num_blocks=num_blocks,
        peers=peers,
        initial_peers=swarm.initial_peers,
    )


def _describe_swarm(
    output: Terminal, swarm: LocalSwarm, model: str, num_blocks: int
) -> Iterator[str]:
    yield output.paint(f"{len(swarm.peers)} peers serve {model}, {num_blocks} blocks:", "bold")
    yield ""
    for peer in swarm.peers:
        yield (
            f"  …{peer.peer_id[-6:]}  blocks {peer.span!s:7} pid {peer.pid:<9}"
            f"{peer.facts['endpoint']:22} {peer.facts['decode_steps_per_second']:.0f} steps/s"
        )
    yield ""
    yield f"  A text passes all blocks in turn: up to {_estimate_speed(swarm.peers):.0f} tokens/s."
    address = swarm.initial_peers[0]
    yield ""
    yield output.paint("Generate text from another terminal:", "bold")
    command = f'shoal generate {shlex.quote(model)} "Once upon a time"'
    yield f"  {quote_command(command, [address], None)}"
    yield ""
    yield output.paint("Or from Python:", "bold")
    for line in _make_snippet(swarm.model, address):
        yield f"  {line}".rstrip()
    yield ""
    yield "Press Ctrl-C to stop the swarm."


def _estimate_speed(peers: Sequence[LocalPeer]) -> float:
    """Return tokens per second of a text alone, of which each token takes a step at every span."""
    steps: dict[Span, float] = {}
    for peer in peers:
        steps[peer.span] = max(peer.facts["decode_steps_per_second"], steps.get(peer.span, 0.0))
    return 1 / sum(1 / speed for speed in steps.values())


def _report_ended(
    reporter: Reporter, peer: LocalPeer, missing: list[Span], addresses: list[str], model: str
) -> None:
    """Say that a peer has ended, and whether the others can do without it.

    Peers that have joined the swarm since are not known here.
    """
    lines = [
        reporter.output.paint(
            f"Peer …{peer.peer_id[-6:]} (blocks {peer.span}, pid {peer.pid}) has ended: "
            f"{describe_exit(peer.wait(0))}.",
            "yellow",
        )
    ]
    if missing:
        names = ", ".join(map(str, missing))
        lines.append(f"  None of the others here serves blocks {names}.")
        if addresses:
            lines.append("  Unless a peer that has joined does, start one in another terminal:")
            serve = f"shoal serve {shlex.quote(model)} --blocks"
            lines += [
                f"    {quote_command(f'{serve} {gap}', addresses[:1], None)}" for gap in missing
            ]
    elif addresses:
        lines.append("  The remaining peers serve all blocks. Join through:")
        lines.append(f"    {addresses[0]}")
    reporter.tell(
        "peer_ended",
        lines,
        peer_id=peer.peer_id,
        span=str(peer.span),
        pid=peer.pid,
        exit_code=peer.wait(0),
        missing=[str(span) for span in missing],
        initial_peers=addresses,
    )


def describe_exit(code: int) -> str:
    """Return an exit code in words.

    >>> describe_exit(-9), describe_exit(1)
    ('killed by signal 9', 'exit code 1')
    """
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"


def _make_snippet(model: str, address: str) -> list[str]:
    return [
        "from transformers import AutoTokenizer",
        "from shoal.client import AutoDistributedModelForCausalLM",
        "",
        f"path = {model!r}",
        "model = AutoDistributedModelForCausalLM.from_pretrained(",
        "    path, initial_peers=[",
        f"        {address!r}])",
        "tokenizer = AutoTokenizer.from_pretrained(path)",
        'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=64)[0]))",
    ]
