"""A peer as a service of systemd: the unit that is written for it, and what it tells systemd."""

import argparse
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from ...peer.operating.operator_addresses import is_socket_name
from ...peer.process.config import PeerEvent, Report
from ...protocol.errors import UsageError
from ..terminal.terminal import Terminal

INSTALL = "--install-service"

_UNITS = "~/.config/systemd/user"
_STATE = "~/.local/state/shoal"

_READY = ("online", "paused")
"""Events upon which a peer is ready: outside of its hours it need not be online for that."""

_UNIT = """\
# Written for a peer of shoal that was given {install}.
[Unit]
Description=shoal peer {name}

[Service]
# The peer says when it serves, which downloads and slow disks can delay for hours.
Type=notify
TimeoutStartSec=infinity
WorkingDirectory={folder}
ExecStart={command}
Restart=on-failure
RestartSec=10
# Wrong options do not get better by trying again.
RestartPreventExitStatus=2
SuccessExitStatus=130
# Sessions move to other peers first; p2pd is ended by the peer.
KillMode=mixed
TimeoutStopSec={stop_seconds:.0f}
# The owner's own work comes first.
Nice=5
CPUWeight=50
IOWeight=50

[Install]
WantedBy=default.target
"""

_LEAVING_SECONDS = 30.0
"""After sessions have moved, until the process ends; generous for busy machines."""


def notify_systemd(report: Report) -> Report:
    """Return what reports events, and tells systemd that the peer is ready or is stopping.

    That is sd_notify(3). Without systemd it is `report`.
    """
    address = os.environ.pop("NOTIFY_SOCKET", "")  # it is not for processes that are started here
    if not address:
        return report

    def tell(event: PeerEvent) -> None:
        report(event)
        if event.name in _READY:
            _send(address, f"READY=1\nSTATUS={event.name}")
        elif event.name == "left":
            _send(address, "STOPPING=1")

    return tell


def _send(address: str, state: str) -> None:
    if address.startswith("@"):  # an abstract socket
        address = f"\0{address[1:]}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.connect(address)
            sender.send(state.encode())
        except OSError as error:
            print(f"systemd cannot be told {state!r}: {error.strerror}", file=sys.stderr)


def install_service(options: argparse.Namespace, words: Sequence[str]) -> int:
    """Write a user's unit that runs `shoal` with these words, and print how to enable it."""
    if options.new_swarm:
        raise UsageError(
            f"a service joins its swarm at each start: start the swarm once without {INSTALL}, "
            "and give the service --join in place of --new-swarm"
        )
    if options.join is None and not options.initial_peers:
        raise UsageError(f"{INSTALL} needs the swarm, such as --join @FILE with its code")
    name = options.name if is_socket_name(options.name) else "peer"
    command = [sys.executable, "-P", "-m", "shoal.cli"]
    command += [word for word in words if word != INSTALL]
    state = Path(_STATE).expanduser()
    if options.identity is None:
        command += ["--identity", str(state / f"{name}.key")]
    path = Path(_UNITS).expanduser() / f"shoal-{name}.service"
    unit = _UNIT.format(
        install=INSTALL,
        name=name,
        folder=_escape(os.getcwd()),
        command=" ".join(map(_quote, command)),
        stop_seconds=options.drain + _LEAVING_SECONDS,
    )
    verb = "Replaced" if path.exists() else "Wrote"
    try:
        for folder in (state, path.parent):
            folder.mkdir(parents=True, exist_ok=True)
        path.write_text(unit, encoding="utf-8")
        path.chmod(0o600)  # it may hold a join code
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    terminal = Terminal(sys.stdout)
    commands = [
        f"systemctl --user daemon-reload && systemctl --user enable --now {path.stem}",
        "loginctl enable-linger",
        f"journalctl --user -u {path.stem} -f",
    ]
    if options.json:
        terminal.print_json({"unit": str(path), "commands": commands})
        return 0
    terminal.print(f"{verb} {path}.")
    terminal.print("To start it, now and whenever you log in:")
    terminal.print(f"  {commands[0]}")
    terminal.print("To have it run from the start of the machine, whoever is logged in:")
    terminal.print(f"  {commands[1]}")
    terminal.print("To read what it says:")
    terminal.print(f"  {commands[2]}")
    return 0


def _quote(word: str) -> str:
    """Return a word of a command line as a unit has it, see systemd.service(5).

    >>> print(_quote("50% of $HOME"))
    "50%% of $$HOME"
    """
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("$", "$$")
    return f'"{_escape(escaped)}"'


def _escape(text: str) -> str:
    if not text.isprintable():
        raise UsageError(f"a unit of systemd cannot hold {text!r}")
    return text.replace("%", "%%")
