"""The bytes per second of one plain TCP connection between two places.

Run as a module by `measure_bandwidth`, once at each place.
"""

import json
import socket
import sys
import time
from collections.abc import Sequence

from measuring.helper_process import HelperProcess

_PIECE = bytes(2**18)
_LEAST_SECONDS = 1.0

Place = tuple[str, Sequence[str]]
"""A host, and what runs a command there."""


def measure_bandwidth(sender: Place, receiver: Place) -> float:
    """Return the bytes per second from one place to another one."""
    host, inside = receiver
    with HelperProcess(__name__, host, inside=inside) as receiving:
        port = receiving.read()
        with HelperProcess(__name__, host, str(port), inside=sender[1]) as sending:
            return sending.read()


def _receive(host: str) -> None:
    with socket.create_server((host, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        connection, _ = listener.accept()
        with connection:
            room = bytearray(len(_PIECE))
            while connection.recv_into(room):
                pass
            connection.sendall(b"!")


def _send(host: str, port: int) -> float:
    """Return the bytes per second until the other end has all of them."""
    num_bytes = 0
    with socket.create_connection((host, port)) as connection:
        begun_at = time.perf_counter()
        while time.perf_counter() - begun_at < _LEAST_SECONDS:
            connection.sendall(_PIECE)
            num_bytes += len(_PIECE)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return num_bytes / (time.perf_counter() - begun_at)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _receive(sys.argv[1])
    else:
        print(json.dumps(_send(sys.argv[1], int(sys.argv[2]))), flush=True)
