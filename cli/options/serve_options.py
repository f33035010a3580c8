"""The options of `shoal serve` that say what a peer serves, where, and how much of this machine."""

import argparse
from dataclasses import replace

from ...peer.process.config import PeerConfig
from ...protocol.errors import DirectoryError, UsageError
from ...protocol.net.clock import SystemClock
from ...protocol.net.dht.internet import InternetNetwork, Listening
from ...protocol.spans import Span
from .bundled_model import find_model
from .config_file import add_config_argument
from .join_options import add_join_arguments, choose_swarm, list_addresses_of_new
from .listen_options import add_listen_arguments, choose_place
from .operating_options import OperatorConfig, add_operating_arguments, read_operator_config
from .quantities import (
    parse_bytes,
    parse_count,
    parse_memory,
    parse_non_negative,
    parse_threads,
)
from .shared_options import (
    add_announce_period_argument,
    add_identity_argument,
    add_metrics_argument,
    add_model_argument,
    add_weights_argument,
    parse_device,
)

_DEFAULTS = PeerConfig(model="")


def add_serve_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options that say what a peer serves, where, and how much of this machine."""
    add_model_argument(parser)
    swarm = parser.add_mutually_exclusive_group()
    swarm.add_argument(
        "--new-swarm", action="store_true",
        help="start a swarm with this peer and print its join code: a new public swarm or, with "
        "--join, the swarm of a code from `shoal swarm-new`",
    )  # fmt: skip
    add_join_arguments(parser, "join the swarm of the peer at this address", swarm)
    _add_work_arguments(parser)
    add_listen_arguments(parser)
    add_operating_arguments(parser)
    add_config_argument(parser)
    add_identity_argument(parser)
    parser.add_argument(
        "--name", default=_DEFAULTS.name, metavar="NAME",
        help="name of this peer for those who look at the swarm (default: none)",
    )  # fmt: skip
    add_metrics_argument(parser)
    add_announce_period_argument(parser)
    parser.add_argument(
        "--drain", type=parse_non_negative, default=_DEFAULTS.drain_seconds, metavar="SECONDS",
        help="when stopping, time for sessions to move to other peers (default: %(default)s)",
    )  # fmt: skip


def _add_work_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options for the share of this machine's resources."""
    blocks = parser.add_mutually_exclusive_group()
    blocks.add_argument(
        "--blocks", metavar="A:B",
        help="blocks to serve, such as 0:4 (default: those that the swarm needs most, which may "
        "change over time)",
    )  # fmt: skip
    blocks.add_argument(
        "--num-blocks", type=parse_count, metavar="N",
        help="number of blocks to serve (default: as many as free memory holds)",
    )  # fmt: skip
    add_weights_argument(parser, has_device=True)
    parser.add_argument(
        "--device", type=parse_device, default=_DEFAULTS.device, metavar="DEVICE",
        help="device to compute on: cpu, cuda, cuda:N, or auto, which is cuda if it can be used "
        "(default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--threads", type=parse_threads, metavar="N",
        help="number of compute threads (default: one per core)",
    )  # fmt: skip
    parser.add_argument(
        "--sessions", type=parse_count, default=_DEFAULTS.max_sessions, metavar="N",
        help="most sessions at the same time (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-memory", type=parse_memory, default=_DEFAULTS.kv_budget_bytes, metavar="BYTES",
        help="memory for KV caches of sessions, such as 512M or 4G (default: 1G)",
    )  # fmt: skip
    parser.add_argument(
        "--training-memory", type=parse_memory, metavar="BYTES",
        help="memory for fine-tuning clients; 0 disables fine-tuning (default: an eighth of free "
        "memory, at most 4G)",
    )  # fmt: skip
    parser.add_argument(
        "--adapter-memory", type=parse_memory, metavar="BYTES",
        help="memory for LoRA adapters uploaded by clients; 0 disables them (default: a sixteenth "
        "of free memory, at most 512M)",
    )  # fmt: skip
    parser.add_argument(
        "--block-cache", type=parse_bytes, default=_DEFAULTS.block_cache_bytes, metavar="BYTES",
        help="disk space for int8 blocks, which speeds up the next start; 0 disables it (default: "
        "16G)",
    )  # fmt: skip


def make_configs(options: argparse.Namespace) -> tuple[PeerConfig, OperatorConfig]:
    """Return the configuration of a peer, and how its owner controls it."""
    return make_config(options), read_operator_config(options)


def make_network(options: argparse.Namespace) -> InternetNetwork:
    """Return the swarm of a peer and where it listens; raises UsageError where it may not serve."""
    membership, initial_peers = choose_swarm(options)
    if membership is not None:
        membership.check_may_serve()
    listening = Listening(
        *choose_place(options, initial_peers),
        options.directory_port,
        options.announce_host,
        options.relay,
        options.port_mapping,
    )
    return InternetNetwork(SystemClock(), initial_peers, membership, listening)


def make_config(options: argparse.Namespace) -> PeerConfig:
    """Return the configuration of a peer; raises UsageError for options that contradict."""
    try:
        span = Span.parse(options.blocks) if options.blocks else None
    except ValueError as error:
        raise UsageError(f"--blocks: {error}") from error
    return PeerConfig(
        model=find_model(options.model),
        span=span,
        num_blocks=options.num_blocks,
        weights=options.weights,
        device=options.device,
        num_threads=options.threads,
        max_sessions=options.sessions,
        kv_budget_bytes=options.kv_memory,
        pass_bytes=options.training_memory,
        adapter_bytes=options.adapter_memory,
        block_cache_bytes=options.block_cache,
        identity_path=options.identity,
        name=options.name,
        announce_period_seconds=options.announce_period,
        drain_seconds=options.drain,
    )


async def check_is_new(options: argparse.Namespace, network: InternetNetwork) -> None:
    """Raise UsageError where somebody answers in a swarm that is to begin."""
    addresses = list_addresses_of_new(options)
    if not addresses:
        return
    try:
        transport, directory = await replace(network, initial_peers=addresses).connect()
    except DirectoryError:
        return
    await transport.close()
    await directory.close()
    raise UsageError("the swarm of this code runs already: leave out --new-swarm to join it")
