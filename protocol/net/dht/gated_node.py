# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
"""A node of hivemind's DHT that keeps and believes nothing but what passes our gate."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from ...errors import DirectoryError
from ...membership.membership import Membership
from ..clock import Clock
from ..p2pd.multiaddrs import PeerAddress
from ..p2pd.swarm_question import make_silence_error
from .newcomers import Newcomers
from .node_ids import distrust, make_node_id
from .record_gate import RecordGate
from .record_intake import RecordIntake

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.dht.node import DHTNode
    from hivemind.dht.protocol import ValidationError
    from hivemind.dht.routing import DHTID
    from hivemind.dht.validation import DHTRecord, RecordValidatorBase
    from hivemind.p2p import P2P
    from hivemind.utils import MSGPackSerializer
    from hivemind.utils.logging import use_hivemind_log_handler

logging.addLevelName(logging.WARNING, "WARNING")  # hivemind renames it for the whole process

_logger = logging.getLogger(__name__)

# With those of p2p_daemon.py, it keeps a join that cannot succeed below ten seconds.
_JOIN_ANSWER_SECONDS = 3.0
# How long one neighbour may keep an operation waiting before it counts as gone.
_ANSWER_SECONDS = 1.5

_NODE_OPTIONS: dict[str, Any] = {
    # Reads must be fresh, and nobody shall fill our memory with what we did not ask for.
    "cache_locally": False,
    "cache_nearest": 0,
    "cache_on_store": False,
    "cache_refresh_before_expiry": 0,
    "cache_size": -1,  # or a single record that a stranger puts there would hide all others
    "reuse_get_requests": False,
    "num_workers": 16,  # dead neighbours are found out side by side, not one after the other
    "blacklist_time": 10.0,
    "wait_timeout": _JOIN_ANSWER_SECONDS,
}


class GatedNode(NamedTuple):
    """A node of the DHT, and the gate that all records pass which it stores or finds."""

    node: DHTNode
    gate: RecordGate


class GateValidator(RecordValidatorBase):
    """Makes hivemind ask our gate before it stores anything."""

    def __init__(self, gate: RecordGate) -> None:
        self._gate = gate

    def validate(self, record: DHTRecord) -> bool:
        return self._gate.accept(record.key, record.subkey, record.value, record.expiration_time)


async def start_node(
    p2p: P2P,
    membership: Membership,
    clock: Clock,
    initial_peers: Sequence[PeerAddress],
    client_mode: bool,
) -> GatedNode:
    """Start a node over a p2pd. Raises DirectoryError when no initial peer wants us."""
    gate = RecordGate(
        membership,
        clock,
        lambda key: DHTID.generate(source=key).to_bytes(),
        MSGPackSerializer.dumps,
    )
    try:
        node = await DHTNode.create(
            p2p=p2p,
            node_id=make_node_id(cast(Any, p2p).peer_id),
            initial_peers=[f"/p2p/{peer.peer_id}" for peer in initial_peers],
            client_mode=client_mode,
            record_validator=GateValidator(gate),
            **_NODE_OPTIONS,
        )
    except ValidationError as error:
        raise DirectoryError(_explain(error)) from error
    except RuntimeError as error:  # none of them responded
        raise make_silence_error(initial_peers) from error

    def forget(key: str, peer_id: str) -> None:
        stored: Any = node.protocol.storage.get(DHTID.generate(source=key))
        if stored is not None:
            del stored.value[peer_id]

    gate.when_displaced(forget)
    node.protocol.wait_timeout = _ANSWER_SECONDS
    distrust(node.protocol)
    Newcomers(node.protocol).watch()
    if not client_mode:
        RecordIntake(node.protocol, gate.wall).open(p2p)
    return GatedNode(node, gate)


def _explain(error: ValidationError) -> str:
    """Translate why the initial peers do not want us."""
    times = re.search(r"local: ([\d.]+), peer: ([\d.]+)", str(error))
    if times is None:
        return f"the initial peers cannot connect to us: {error}"
    ahead_seconds = float(times[1]) - float(times[2])
    direction = "ahead of" if ahead_seconds > 0 else "behind"
    return (
        f"the clock of this machine is {abs(ahead_seconds):.1f} seconds {direction} that of an "
        "initial peer: synchronise it with a time server (3 seconds are allowed)"
    )


def quieten_hivemind() -> None:
    """Hand hivemind's messages to whoever set up logging, and only when debugging."""
    use_hivemind_log_handler("nowhere")
    is_debugging = _logger.isEnabledFor(logging.DEBUG)
    logging.getLogger("hivemind").setLevel(logging.DEBUG if is_debugging else logging.CRITICAL)
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"hivemind\.")
