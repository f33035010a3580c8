"""A process that sends every frame back, over the transport of peers: `hop.py` measures against it.

Run as `python -m shoal.cli.benchmarks.echo_server`; prints where it listens and ends with stdin.
"""

import asyncio
import json
import sys

import uvloop

from ...protocol.net.grpc_transport import GrpcTransport
from ...protocol.net.transport import Stream


async def _echo(stream: Stream) -> None:
    while (frame := await stream.receive()) is not None:
        await stream.send(frame)


async def _serve() -> None:
    transport = GrpcTransport()
    try:
        endpoint = (await transport.listen("127.0.0.1", 0, _echo)).endpoint
        print(json.dumps([endpoint.host, endpoint.port, endpoint.fingerprint]), flush=True)
        await asyncio.to_thread(sys.stdin.read)
    finally:
        await transport.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve())
