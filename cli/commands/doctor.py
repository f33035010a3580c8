"""`shoal doctor`: find out what is broken in a swarm, and how to fix it."""

import argparse
import asyncio
import sys
import textwrap
from typing import TYPE_CHECKING

from ...protocol.errors import UsageError
from ...protocol.net.addresses import check_can_be_dialled
from ..options.bundled_model import find_model
from ..options.join_options import add_join_arguments, quote_swarm, read_joining
from ..options.quantities import count_of, parse_host, parse_listen
from ..options.shared_options import add_optional_model_argument
from ..remote_models.opening import import_client
from ..terminal.interrupts import quitting_at_once
from ..terminal.terminal import Progress, Terminal

if TYPE_CHECKING:
    from ...client.doctor.diagnosis import Diagnosis
    from ...client.doctor.finding import Finding
    from ...client.doctor.peer_check import PeerCheck

_SIGNS = {"ok": ("✓", "green"), "warning": ("!", "yellow"), "broken": ("✗", "red")}
_NAME_COLUMNS = 15
_INDENT = " " * (_NAME_COLUMNS + 4)
_MIN_DETAIL_COLUMNS = 20  # a narrower terminal wraps the lines itself
_MAX_ROWS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `shoal doctor`."""
    add_optional_model_argument(parser)
    add_join_arguments(parser, "address of any peer, whether it works or not")
    parser.add_argument(
        "--listen", metavar="HOST[:PORT]",
        help="also check whether others could dial a peer on this machine at this address",
    )  # fmt: skip
    parser.add_argument(
        "--announce-host", type=parse_host, metavar="HOST",
        help="host that they would dial (default: that of --listen)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end")


def run(options: argparse.Namespace) -> int:
    """Examine a swarm; return 0 when nothing is broken, else 1."""
    joining = read_joining(options)
    name = find_model(options.model)
    place = _read_place(options)
    screen = None if options.json else _Screen(Terminal(sys.stdout))
    with Progress(Terminal(sys.stderr), lambda: "Examining"):
        with quitting_at_once(options.json):
            import_client()
            from ...client.doctor.diagnosis import Diagnosis
            from ...client.doctor.probes import ModelFacts, make_network_probes
            from ...client.doctor.reach_check import ListenAddress

        def report(finding: "Finding") -> None:
            if screen:
                screen.show_finding(finding)

        def read_model() -> ModelFacts:
            return ModelFacts.read(name, options.model)

        async def examine() -> Diagnosis:
            probes = make_network_probes(joining.membership)
            way_in = quote_swarm(joining.initial_peers, options.join)
            diagnosis = Diagnosis(probes, report, joining.membership, way_in)
            listen_address = ListenAddress(*place) if place else None
            await diagnosis.run(read_model, joining.addresses, listen_address)
            return diagnosis

        diagnosis = asyncio.run(examine())
    if screen:
        screen.show_peers(diagnosis)
        screen.show_verdict(diagnosis)
    else:
        Terminal(sys.stdout).print_json(_make_json(diagnosis))
    return 0 if diagnosis.is_well else 1


def _read_place(options: argparse.Namespace) -> tuple[str, int, str] | None:
    """Return where a peer would listen, at which port, and which host it would announce."""
    if options.listen is None:
        if options.announce_host is not None:
            raise UsageError("--announce-host needs --listen HOST:PORT")
        return None
    host, port = parse_listen(options.listen)
    announced_host = options.announce_host or host
    check_can_be_dialled(announced_host)
    return host, port, announced_host


class _Screen:
    """Shows findings as they come, then the peers and a verdict."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def show_finding(self, finding: "Finding") -> None:
        """Show one finding and, below it, its fix, on as many lines as they need."""
        sign, colour = _SIGNS[finding.status]
        width = max(self._terminal.width - len(_INDENT), _MIN_DETAIL_COLUMNS)
        first, *rest = _wrap(finding.detail, width) or [""]
        name = finding.name.ljust(_NAME_COLUMNS)
        self._terminal.print(f" {self._terminal.paint(sign, 'bold', colour)} {name} {first}")
        for line in rest:
            self._terminal.print(_INDENT + line)
        for number, line in enumerate(_wrap(finding.fix, width - 2)):
            lead = "→ " if number == 0 else "  "
            self._terminal.print(_INDENT + self._terminal.paint(lead + line, "bold"))

    def show_peers(self, diagnosis: "Diagnosis") -> None:
        """Show the announced peers as a table."""
        if diagnosis.view is None or not diagnosis.view.peers:
            return
        rows = [("peer", "blocks", "state", "weights", "steps/s", "age", "rtt", "endpoint")]
        checks = {check.peer.peer_id: check for check in diagnosis.checks}
        for peer in sorted(diagnosis.view.peers, key=lambda peer: peer.span)[:_MAX_ROWS]:
            check = checks.get(peer.peer_id)
            speed, rtt = peer.decode_steps_per_second, check.rtt_seconds if check else None
            rows.append(
                (
                    f"…{peer.peer_id[-6:]}",
                    str(peer.span),
                    str(check.fault) if check and check.fault else str(peer.state),
                    peer.weights,
                    "-" if speed is None else f"{speed:.0f}",
                    f"{diagnosis.view.taken_at - peer.issued_at:.0f} s",
                    "-" if rtt is None else f"{rtt * 1000:.1f} ms",
                    peer.all_endpoints[0].short_name if peer.all_endpoints else "-",
                )
            )
        self._terminal.print()
        self._terminal.print_table(rows)
        num_more = len(diagnosis.view.peers) - _MAX_ROWS
        if num_more > 0:
            self._terminal.print(f" … and {num_more} more (--json shows all)")

    def show_verdict(self, diagnosis: "Diagnosis") -> None:
        """Show the verdict in one line."""
        num_broken = sum(not finding.ok for finding in diagnosis.findings)
        failed = count_of(num_broken, "check") + " failed"
        num_warnings = sum(finding.status == "warning" for finding in diagnosis.findings)
        if diagnosis.is_well and not num_warnings:
            verdict, colour = "No problem found: text can be generated.", "green"
        elif diagnosis.is_well:
            noun = count_of(num_warnings, "warning")
            verdict = f"Text can be generated, with {noun}: see the lines with ! above."
            colour = "yellow"
        elif diagnosis.is_usable:
            verdict = f"Text can be generated, but {failed}: see the lines with → above."
            colour = "yellow"
        else:
            verdict = f"Text cannot be generated: {failed}. Do what the first → says."
            colour = "red"
        self._terminal.print()
        self._terminal.print(" " + self._terminal.paint(verdict, "bold", colour))


def _wrap(text: str, width: int) -> list[str]:
    """Return lines; options and addresses stay whole, so that they can be copied."""
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def _make_json(diagnosis: "Diagnosis") -> dict[str, object]:
    view, missing = diagnosis.view, diagnosis.missing
    announcements, now = (view.peers, view.taken_at) if view else ((), 0.0)
    checks = {check.peer.peer_id: check for check in diagnosis.checks}
    return {
        "ok": diagnosis.is_well,
        "usable": diagnosis.is_usable,
        "missing": None if missing is None else [str(span) for span in missing],
        "findings": [
            {
                "name": finding.name,
                "ok": finding.ok,
                "status": str(finding.status),
                "detail": finding.detail,
                "fix": finding.fix,
            }
            for finding in diagnosis.findings
        ],
        "peers": [
            {
                "peer_id": peer.peer_id,
                "span": str(peer.span),
                "state": str(peer.state),
                "weights": peer.weights,
                "kernels": peer.kernels,
                "endpoints": [str(endpoint) for endpoint in peer.all_endpoints],
                "decode_steps_per_second": peer.decode_steps_per_second,
                "age_seconds": round(now - peer.issued_at, 3),
                **_check_facts(checks.get(peer.peer_id)),
            }
            for peer in announcements
        ],
    }


def _check_facts(check: "PeerCheck | None") -> dict[str, object]:
    """Return the results of a check; all None for a peer that was not checked."""
    if check is None:
        return {"reachable": None, "fault": None, "rtt_seconds": None, "clock_ahead_seconds": None}
    return {
        "reachable": check.fault is None,
        "fault": None if check.fault is None else str(check.fault),
        "rtt_seconds": check.rtt_seconds,
        "clock_ahead_seconds": check.clock_ahead_seconds,
    }
