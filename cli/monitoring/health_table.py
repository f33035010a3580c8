"""The health of a swarm as lines and tables on the terminal."""

from ...client.monitor.description import CanaryPanel, Description, ModelPanel, PeerRow
from ..options.quantities import count_of
from ..terminal.terminal import Terminal

COLOURS = {"healthy": "green", "degraded": "yellow", "failing": "red", "unknown": "red"}
PEER_COLUMNS = ("peer", "blocks", "state", "sessions", "queue", "steps/s", "round trip", "device")
_MAX_ROWS = 32
_NAME_CHARACTERS = 12
_ENDING_CHARACTERS = 6  # of a peer id in the table; --json has the whole


def show_health(described: Description, terminal: Terminal) -> None:
    """Print the state, each model with its gaps, and the peers."""
    colour = COLOURS[described.health]
    health = terminal.paint(described.health.upper(), "bold", colour)
    for number, line in enumerate(terminal.wrap(f"{described.sentence}")):
        terminal.print(f" {health}  {line}" if number == 0 else line)
    if described.error:
        for line in terminal.wrap(f"   {described.error}"):
            terminal.print(line)
    for model in described.models:
        terminal.print()
        _show_model(model, terminal)
    for canary in described.canaries:
        terminal.print()
        _show_canary(canary, terminal)


def _show_canary(canary: CanaryPanel, terminal: Terminal) -> None:
    health = terminal.paint(canary.health, COLOURS[canary.health])
    terminal.print(f" {terminal.paint(f'Canary of {canary.name}', 'bold')}  {health}")
    if canary.error:
        for line in terminal.wrap(f"   {canary.error}"):
            terminal.print(line)
        return
    if canary.first_token_seconds is not None:
        speed = f", {canary.tokens_per_second:.3g} tokens/s" if canary.tokens_per_second else ""
        terminal.print(f"   First token after {canary.first_token_seconds:.2f} s{speed}")
    for failover in canary.failovers:
        for line in terminal.wrap(f"   {failover}"):
            terminal.print(line)
    rows: list[tuple[str, ...]] = [("peer", "blocks", "queue", "compute", "network")]
    for hop in canary.hops:
        parts = (hop.queue_seconds, hop.compute_seconds, hop.network_seconds)
        times = (f"{1000 * seconds:.1f} ms" for seconds in parts)
        rows.append((f"…{hop.peer_id[-_ENDING_CHARACTERS:]}", hop.span, *times))
    terminal.print_table(rows)


def _show_model(model: ModelPanel, terminal: Terminal) -> None:
    blocks = f"{model.num_blocks} blocks, {count_of(model.num_serving, 'serving peer')}"
    name = terminal.paint(model.name or "a model without a name", "bold")
    terminal.print(f" {name}  {terminal.paint(model.health, COLOURS[model.health])}: {blocks}")
    if model.progress:
        terminal.print(f"   {model.progress}")
    for words, spans in (("no replica", model.missing), ("a single replica", model.single)):
        if spans:
            for line in terminal.wrap(f"   Blocks with {words}: {', '.join(spans)}"):
                terminal.print(line)
    rows = [PEER_COLUMNS]
    rows += [make_row(peer) for peer in model.peers[:_MAX_ROWS]]
    terminal.print_table(rows)
    if len(model.peers) > _MAX_ROWS:
        terminal.print(f"   and {len(model.peers) - _MAX_ROWS} more, see --json")
    for peer in model.peers[:_MAX_ROWS]:
        if peer.fault:
            for line in terminal.wrap(f"   …{peer.peer_id[-_ENDING_CHARACTERS:]}: {peer.fault}"):
                terminal.print(line)


def make_row(peer: PeerRow) -> tuple[str, ...]:
    """Return the cells of a peer, below `PEER_COLUMNS`."""
    speed = peer.loaded_decode_steps_per_second or peer.decode_steps_per_second
    rtt = "no answer" if peer.fault else "-"
    if peer.rtt_seconds is not None and not peer.fault:
        rtt = f"{1000 * peer.rtt_seconds:.1f} ms"
    return (
        f"{peer.name[:_NAME_CHARACTERS]} …{peer.peer_id[-_ENDING_CHARACTERS:]}".lstrip(),
        peer.span,
        peer.state,
        str(peer.num_sessions),
        f"{1000 * peer.queue_seconds:.1f} ms",
        "-" if speed is None else f"{speed:.0f}" if speed >= 100 else f"{speed:.3g}",
        rtt,
        peer.device or "-",
    )
