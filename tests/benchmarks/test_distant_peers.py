"""Lines that delay and limit, and the benchmark that puts them between peers."""

from __future__ import annotations

import json
import math
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from distant_peers.lines import LineConfig, Way, start_slow_lines

SEED = 7
BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_bytes_that_are_sent_at_once_arrive_one_behind_the_other() -> None:
    way = Way(LineConfig(delay_seconds=2.0, bytes_per_second=1000))

    arrivals = [way.send(10.0, 500) for _ in range(4)]

    assert arrivals == [12.5, 13.0, 13.5, 14.0]
    assert way.num_bytes == 2000


def test_senders_wait_once_some_of_a_second_is_queued() -> None:
    way = Way(LineConfig(delay_seconds=2.0, bytes_per_second=1000))
    way.send(0.0, 1000)

    assert way.count_seconds_until_room(0.0) == pytest.approx(0.98)
    assert way.count_seconds_until_room(0.99) == 0.0


def test_jitter_is_bounded_follows_the_seed_and_keeps_the_order() -> None:
    sent_at = [0.1 * number for number in range(200)]

    def send(seed: int) -> list[float]:
        way = Way(LineConfig(1.0, 1e12, jitter_seconds=0.5, seed=seed))
        return [way.send(now, 1) for now in sent_at]

    arrivals = send(seed=1)
    late = [arrival - now for arrival, now in zip(arrivals, sent_at, strict=True)]

    assert all(earlier <= later for earlier, later in pairwise(arrivals))
    assert 1.0 <= min(late) < 1.1
    assert 1.4 < max(late) <= 1.5 + 1e-6
    assert send(seed=1) == arrivals
    assert send(seed=2) != arrivals


@pytest.fixture
def echo_address() -> Iterator[tuple[str, int]]:
    """Where bytes come back from until their sender ends."""

    def echo(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(2**16):
                connection.sendall(data)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=echo, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield listener.getsockname()
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.mark.network
def test_connections_over_a_line_get_their_bytes_late_and_whole(
    echo_address: tuple[str, int],
) -> None:
    config = LineConfig(delay_seconds=0.01, bytes_per_second=2e6)
    far_address = "127.0.0.2", echo_address[1]
    data = random.Random(SEED).randbytes(300_000)
    with start_slow_lines(config, {far_address: echo_address}) as lines:
        started_at = time.monotonic()
        with (
            socket.create_connection(far_address) as one,
            socket.create_connection(far_address) as other,
        ):
            for connection in (one, other):
                threading.Thread(target=_send, args=(connection, data)).start()
            answers = [_read_all(one), _read_all(other)]
        seconds = time.monotonic() - started_at
        counts = lines.count_bytes()

    assert answers == [data, data]
    assert counts == [(2 * len(data), 2 * len(data))]
    # Two ways for the connection and two for the last byte, behind all others.
    assert seconds >= 4 * config.delay_seconds + 2 * len(data) / config.bytes_per_second


@pytest.mark.network
def test_line_to_nobody_ends_connections(echo_address: tuple[str, int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        nobody = unused.getsockname()
    far_address = "127.0.0.2", echo_address[1]
    with (
        start_slow_lines(LineConfig(0.0), {far_address: nobody}),
        socket.create_connection(far_address) as connection,
    ):
        assert connection.recv(1) == b""


def _send(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def _read_all(connection: socket.socket) -> bytes:
    parts: list[bytes] = []
    while part := connection.recv(2**16):
        parts.append(part)
    return b"".join(parts)


@pytest.mark.network
@pytest.mark.thorough  # twenty seconds, for figures that mean nothing
def test_benchmark_of_distant_peers_runs() -> None:
    process = subprocess.run(
        [sys.executable, "-P", "-m", "distant_peers", "--quick", "--json", "--rtt", "2"],
        env={**os.environ, "PYTHONPATH": str(BENCHMARKS)},
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip

    assert process.returncode == 0, process.stderr
    result: Any = json.loads(process.stdout)
    assert [part["name"] for part in result["parts"]] == ["decode", "prompt"]
    for part in result["parts"]:
        assert all(math.isfinite(figure["value"]) for figure in part["figures"])
        assert all(figure.get("is_met") is None for figure in part["figures"])
