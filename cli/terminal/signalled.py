"""Runs a peer in this process until a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from ...peer.process.config import PeerEvent, Report
from .terminal import discard_output

RunPeerUntil = Callable[[asyncio.Event, Report], Coroutine[Any, Any, None]]
"""Runs the peer until the event is set."""


async def run_until_signalled(run_peer: RunPeerUntil, report: Report, end_with_stdin: bool) -> bool:
    """Run the peer until it ends, or a signal stops it; return whether it was online."""
    _allow_many_files()
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def leave() -> None:
        (hurry if stop.is_set() else stop).set()

    def leave_without_terminal() -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                discard_output(stream)
        leave()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, leave)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
        loop.add_signal_handler(signal.SIGHUP, leave_without_terminal)
    if end_with_stdin:
        loop.add_reader(sys.stdin.fileno(), _stop_at_end_of_stdin, stop)
    try:
        return await _run_until_stopped(run_peer, stop, hurry, report)
    finally:
        if end_with_stdin:
            loop.remove_reader(sys.stdin.fileno())


def _allow_many_files() -> None:
    """Raise the limit of open files to its maximum: every stream needs a descriptor."""
    with contextlib.suppress(ImportError, OSError, ValueError):  # not on every system
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _run_until_stopped(
    run_peer: RunPeerUntil, stop: asyncio.Event, hurry: asyncio.Event, report: Report
) -> bool:
    """Run the peer and return whether it was online.

    `stop` does not wait for blocks that are being loaded; `hurry` waits for no session either.
    """
    is_online = was_online = False

    def watch(event: PeerEvent) -> None:
        nonlocal is_online, was_online
        is_online = event.name == "online" or (is_online and event.name != "drained")
        was_online = was_online or is_online
        report(event)

    running = asyncio.create_task(run_peer(stop, watch))
    for event in (stop, hurry):
        waiting = asyncio.ensure_future(event.wait())
        await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        if not is_online or hurry.is_set():
            running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    return was_online


def _stop_at_end_of_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        stop.set()
