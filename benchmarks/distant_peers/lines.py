"""TCP lines that are long and narrow: what comes in at one end leaves the other late, and only so
many bytes a second.

Run as a module by `start_slow_lines`: says so when all lines are there, then for each line on stdin
how many bytes went each way, and ends with stdin.

A line delays and limits, and keeps the order. It does not lose packets, and knows nothing of TCP's
slow start: both ends speak TCP with this process, which is near.
"""

import asyncio
import json
import random
import selectors
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass

from measuring.helper_process import HelperProcess

_PIECE_BYTES = 16 * 2**10
"""What a connection puts on a line before another one has its turn."""

_QUEUE_SECONDS = 0.02
"""What waits at the entrance of a line, over all connections; then nothing more is read, and the
senders have to wait."""

_MAX_PIECES_UNDER_WAY = 64
"""Of a connection: beyond it, a receiver that does not read stops its sender."""


@dataclass(frozen=True)
class LineConfig:
    """What all lines are like, in each direction."""

    delay_seconds: float = 0.02
    bytes_per_second: float = 100e6 / 8
    jitter_seconds: float = 0.0
    """The most that a piece may be later than `delay_seconds`, drawn from the seed."""

    seed: int = 0


class Way:
    """One direction of a line, for all connections together. Says when bytes arrive; pure.

    >>> way = Way(LineConfig(delay_seconds=0.5, bytes_per_second=100))
    >>> way.send(0.0, 100), way.send(0.0, 50), way.send(9.0, 100)
    (1.5, 2.0, 10.5)
    """

    def __init__(self, config: LineConfig, name: str = "") -> None:
        self.num_bytes = 0
        self._config = config
        self._random = random.Random(f"{config.seed}/{name}")
        self._free_at = self._arrived_at = float("-inf")

    def send(self, now: float, num_bytes: int) -> float:
        """Return when bytes arrive that are sent now, behind all others."""
        self.num_bytes += num_bytes
        self._free_at = max(self._free_at, now) + num_bytes / self._config.bytes_per_second
        jitter = self._random.uniform(0.0, self._config.jitter_seconds)
        arrives_at = self._free_at + self._config.delay_seconds + jitter
        self._arrived_at = max(self._arrived_at, arrives_at)
        return self._arrived_at

    def count_seconds_until_room(self, now: float) -> float:
        """Return how long to wait until more may be sent."""
        return max(0.0, self._free_at - now - _QUEUE_SECONDS)


class SlowLine:
    """Listens at one address and forwards every connection to another one."""

    def __init__(self, config: LineConfig, target: tuple[str, int]) -> None:
        self.there = Way(config, f"to {target}")
        self.back = Way(config, f"from {target}")
        self._config = config
        self._target = target

    async def serve(self, host: str, port: int, is_listening: asyncio.Event) -> None:
        """Forward connections until cancelled."""
        async with asyncio.TaskGroup() as tasks:

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                tasks.create_task(self._forward(reader, writer))

            async with await asyncio.start_server(accept, host, port) as server:
                is_listening.set()
                await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # TCP's own handshake takes a round trip as well; here it was over at once.
        await asyncio.sleep(2 * self._config.delay_seconds)
        with closing(writer):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
            except OSError:
                return
            with closing(far_writer):
                try:
                    async with asyncio.TaskGroup() as tasks:
                        _carry(tasks, self.there, reader, far_writer)
                        _carry(tasks, self.back, far_reader, writer)
                except* OSError:
                    pass  # an end that breaks is one that closes


_UnderWay = asyncio.Queue[tuple[float, bytes]]
"""Pieces of one connection and when they arrive; an empty one is the end."""


def _carry(
    tasks: asyncio.TaskGroup, way: Way, source: asyncio.StreamReader, sink: asyncio.StreamWriter
) -> None:
    under_way = _UnderWay(_MAX_PIECES_UNDER_WAY)
    tasks.create_task(_take(way, source, under_way))
    tasks.create_task(_deliver(under_way, sink))


async def _take(way: Way, source: asyncio.StreamReader, under_way: _UnderWay) -> None:
    """Put on the line what a sender sends, and in the end that this was all."""
    now = asyncio.get_running_loop().time
    piece = b"..."
    while piece:
        await asyncio.sleep(way.count_seconds_until_room(now()))
        piece = await source.read(_PIECE_BYTES)
        await under_way.put((way.send(now(), len(piece)), piece))


async def _deliver(under_way: _UnderWay, sink: asyncio.StreamWriter) -> None:
    now = asyncio.get_running_loop().time
    while True:
        arrives_at, piece = await under_way.get()
        await asyncio.sleep(max(0.0, arrives_at - now()))
        if not piece:
            sink.write_eof()
            return
        sink.write(piece)
        await sink.drain()


Address = tuple[str, int]


def start_slow_lines(config: LineConfig, targets: Mapping[Address, Address]) -> "SlowLines":
    """Start a process with a line for each pair of addresses: where it listens, where it leads."""
    pairs = [[*listening, *target] for listening, target in targets.items()]
    return SlowLines(__name__, json.dumps(asdict(config)), json.dumps(pairs))


class SlowLines(HelperProcess):
    """That process, for use in a `with` block. Made by `start_slow_lines`."""

    def __enter__(self) -> "SlowLines":
        super().__enter__()
        self.read()  # they listen
        return self

    def count_bytes(self) -> list[tuple[int, int]]:
        """Return for each line how many bytes went there and back so far."""
        self.tell("count")
        return [(there, back) for there, back in self.read()]


async def _run(config: LineConfig, pairs: Sequence[tuple[str, int, str, int]]) -> None:
    lines = [SlowLine(config, (host, port)) for _, _, host, port in pairs]
    listening = [asyncio.Event() for _ in pairs]
    async with asyncio.TaskGroup() as tasks:
        serving = [
            tasks.create_task(line.serve(host, port, is_listening))
            for line, is_listening, (host, port, _, _) in zip(lines, listening, pairs, strict=True)
        ]
        for is_listening in listening:
            await is_listening.wait()
        print(json.dumps("listening"), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            counts = [(line.there.num_bytes, line.back.num_bytes) for line in lines]
            print(json.dumps(counts), flush=True)
        for task in serving:
            task.cancel()


def _make_loop() -> asyncio.AbstractEventLoop:
    # epoll, and uvloop as well, wait for whole milliseconds: up to one more for each way.
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=_make_loop) as runner:
        runner.run(_run(LineConfig(**json.loads(sys.argv[1])), json.loads(sys.argv[2])))
