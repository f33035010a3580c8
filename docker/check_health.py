"""Ask the peer of this container by grpc.health.v1 whether it runs or, with --serves, serves.

Exit code 0 if it does, 1 if not. It is found by its Unix socket, whatever its name.
"""

import os
import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2

_SERVICES = {(): "", ("--serves",): "shoal.operator.v1.Peer"}


def check(service: str) -> str:
    """Return what is wrong, empty if nothing is."""
    sockets = sorted(Path(os.environ["XDG_RUNTIME_DIR"], "shoal").glob("*.sock"))
    if not sockets:
        return "no peer has opened its socket"
    request = health_pb2.HealthCheckRequest(service=service)
    with grpc.insecure_channel(f"unix:{sockets[0]}") as channel:
        try:
            ask = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=health_pb2.HealthCheckResponse.FromString,
            )
            answer = ask(request, timeout=10)
        except grpc.RpcError as error:
            return f"the peer does not answer: {error}"
    if answer.status != health_pb2.HealthCheckResponse.SERVING:
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return ""


if __name__ == "__main__":
    sys.exit(check(_SERVICES[tuple(sys.argv[1:])]) or 0)
