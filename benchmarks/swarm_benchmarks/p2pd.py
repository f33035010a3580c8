"""Texts of a client, and a peer's place in the directory, while its p2pd is ended all the time.

The attacker (`p2pd_attacker.py`) is another process on the same machine. A peer counts as absent
from the directory while its node does not answer a p2pd that asks it.
"""

import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

import torch

from measuring.helper_process import HelperProcess
from measuring.report import TargetFigure, at_least, at_most
from shoal.cli.benchmarking.figure import Figure
from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalPeer
from shoal.protocol.errors import ShoalError
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress
from shoal.protocol.net.libp2p.p2p_daemon import (
    MAX_DATA_BYTES,
    connect,
    start_reading_p2pd,
    stop_p2pd,
)
from shoal.protocol.net.libp2p.swarm_question import find_swarm, make_ask
from swarm_benchmarks.setting import Setting

_NUM_TOKENS = 64
_MOST_SECONDS_TO_RETURN = 30.0
_POLL_SECONDS = 0.25
_ANSWER_SECONDS = 2.0


@dataclass
class _Watch:
    """What is seen of a peer's p2pd, every moment."""

    peer: LocalPeer
    begun_at: list[float] = field(default_factory=list[float])
    """When each p2pd was seen first."""
    most_bytes: int = 0
    answered_at: list[float] = field(default_factory=list[float])

    @property
    def longest_absence_seconds(self) -> float:
        """The longest time between two answers."""
        return max(b - a for a, b in itertools.pairwise(self.answered_at))

    async def look(self, is_over: Event) -> None:
        """Ask the peer's node, and look at its p2pd, until it is over and the node has answered."""
        target, known = PeerAddress.parse(self.peer.addresses[0]), set[int]()
        p2p = await start_reading_p2pd([], None)
        try:
            while True:
                for pid, resident_bytes in _list_children(self.peer.pid):
                    if pid not in known:
                        known.add(pid)
                        self.begun_at.append(time.monotonic())
                    self.most_bytes = max(self.most_bytes, resident_bytes)
                is_last = is_over.is_set()
                with suppress(ShoalError, TimeoutError):
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        address, _, _ = target.text.rpartition("/p2p/")
                        await connect(p2p, target.peer_id, address)
                        await find_swarm([target], None, make_ask(p2p))
                    self.answered_at.append(time.monotonic())
                    if is_last:
                        return
                await asyncio.sleep(_POLL_SECONDS)
        finally:
            await stop_p2pd(p2p)


def measure(setting: Setting) -> list[Figure]:
    """Attack the p2pd of the first of two peers while a client generates."""
    seconds = setting.effort.p2pd_attack_seconds
    swarm = setting.start_swarm(setting.tiny_model)
    watch, is_over = _Watch(swarm.peers[0]), Event()
    with AutoDistributedModelForCausalLM.from_pretrained(
        str(setting.tiny_model.directory), initial_peers=swarm.initial_peers
    ) as model:
        expected = _generate(model)
        with _in_thread(lambda: asyncio.run(watch.look(is_over))):
            setting.say(f"attacking p2pd for {seconds:.0f} s")
            with HelperProcess(
                "swarm_benchmarks.p2pd_attacker", swarm.peers[0].addresses[0]
            ) as attacker:
                attacker.read()
                took, num_right = list[float](), 0
                until = time.monotonic() + seconds
                while time.monotonic() < until:
                    began_at = time.monotonic()
                    num_right += torch.equal(_generate(model), expected)
                    took.append(time.monotonic() - began_at)
                num_streams = attacker.end()
            ended_at = time.monotonic()
            is_over.set()
    begun = [at - watch.begun_at[0] for at in watch.begun_at[1:]]
    most_mib = MAX_DATA_BYTES / 2**20
    back_at = next(at for at in watch.answered_at if at >= ended_at)
    return [
        Figure("streams that promise a message", num_streams, ""),
        Figure("texts", len(took), ""),
        TargetFigure("right texts", num_right / len(took), "", at_least(1)),
        Figure("median text", statistics.median(took), "s"),
        Figure("slowest text", max(took), "s"),
        Figure("p2pd started again", len(begun), "times"),
        Figure("of these in the last minute", sum(at > seconds - 60 for at in begun), "times"),
        TargetFigure("most memory of a p2pd", watch.most_bytes / 2**20, "MiB", at_most(most_mib)),
        Figure("longest absence from the directory", watch.longest_absence_seconds, "s"),
        TargetFigure(
            "back in it after the end", back_at - ended_at, "s", at_most(_MOST_SECONDS_TO_RETURN)
        ),
    ]


def _generate(model: Any) -> torch.Tensor:
    prompt = torch.arange(1, 9)[None]
    return model.generate(
        prompt, max_new_tokens=_NUM_TOKENS, min_new_tokens=_NUM_TOKENS, do_sample=False
    )


def _list_children(parent: int) -> Iterator[tuple[int, int]]:
    """Yield the id and the resident bytes of each child of a process that has not ended."""
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            fields = dict(
                line.split(":", 1) for line in (folder / "status").read_text().splitlines()
            )
            if int(fields["PPid"]) == parent and "VmRSS" in fields:
                yield int(folder.name), 1024 * int(fields["VmRSS"].split()[0])


@contextmanager
def _in_thread(run: Any) -> Iterator[None]:
    """Run something beside the block, and wait for its end behind it."""
    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
