"""What the owner of a peer sees and changes while it runs: by gRPC, and by commands."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from shoal.cli.main import main
from shoal.peer.local_swarm.swarm import LocalPeer
from shoal.peer.operating import operator_pb2
from shoal.protocol.net.tcp.tls import COMMON_NAME, make_tls_identity

pytestmark = [pytest.mark.network, pytest.mark.slow]

SERVICE = "shoal.operator.v1.Peer"
TOKEN = "0123456789abcdef"
PATIENCE_SECONDS = 60.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The runtime folder of the user, with a certificate, its key and a token."""
    folder = tmp_path_factory.mktemp("run")
    identity = make_tls_identity()
    files = {
        "certificate": identity.certificate_pem,
        "key": identity.private_key_pem,
        "token": TOKEN.encode(),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        (folder / name).chmod(0o600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        yield folder


@pytest.fixture(scope="module")
def peer(folder: Path, tiny_models: Any) -> Iterator[LocalPeer]:
    arguments = ["--new-swarm", "--local", "--weights", "fp32", "--threads", "1"]
    arguments += ["--operator", "127.0.0.1:0", "--kv-memory", "64M"]
    for name in ("certificate", "key", "token"):
        arguments += [f"--operator-{name}", str(folder / name)]
    peer = LocalPeer(str(tiny_models.get().directory), None, arguments)
    try:
        peer.wait_for("online", time.monotonic() + 120)
        yield peer
    finally:
        peer.terminate()
        peer.close(time.monotonic() + 30)


def call(channel: grpc.Channel, method: str, metadata: Any = None, **fields: Any) -> Any:
    """Call a method that answers once, as any client would."""
    found = operator_pb2.DESCRIPTOR.services_by_name["Peer"].methods_by_name[method]
    answer = getattr(operator_pb2, found.output_type.name)
    request = getattr(operator_pb2, found.input_type.name)(**fields)
    stub = channel.unary_unary(
        f"/{SERVICE}/{method}",
        request_serializer=type(request).SerializeToString,
        response_deserializer=answer.FromString,
    )
    return stub(request, timeout=PATIENCE_SECONDS, metadata=metadata)


def watch(channel: grpc.Channel) -> Any:
    stub = channel.unary_stream(
        f"/{SERVICE}/Watch",
        request_serializer=operator_pb2.WatchRequest.SerializeToString,
        response_deserializer=operator_pb2.WatchReply.FromString,
    )
    return stub(operator_pb2.WatchRequest(), timeout=PATIENCE_SECONDS)


def check(channel: grpc.Channel, service: str, metadata: Any = None) -> int:
    request = health_pb2.HealthCheckRequest(service=service)
    stub: Any = health_pb2_grpc.HealthStub(channel)
    return stub.Check(request, timeout=PATIENCE_SECONDS, metadata=metadata).status


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command with --json; return its exit code and what it printed."""
    code = main([*words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_owner_watches_limits_drains_and_resumes_a_peer(
    peer: LocalPeer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    socket, _ = peer.facts["operator_addresses"]
    path = Path(socket.removeprefix("unix:"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    with grpc.insecure_channel(socket) as channel:
        assert [check(channel, ""), check(channel, SERVICE)] == [SERVING, SERVING]
        with pytest.raises(grpc.RpcError, match="no service 'other'"):
            check(channel, "other")
        services = ProtoReflectionDescriptorDatabase(channel).get_services()
        assert {SERVICE, "grpc.health.v1.Health"} <= set(services)
        code, printed = run(capsys, "peers")
        (described,) = printed["peers"]
        name = described["name"]
        assert code == 0
        assert described["peer_id"] == peer.peer_id
        assert (described["state"], described["span"]) == ("online", "0:4")
        assert described["limits"]["kv_memory"] == 64 * 2**20

        code, printed = run(capsys, "limits", name, "--sessions", "3", "--kv-memory", "8M")
        assert code == 0
        assert printed["limits"]["sessions"] == 3
        assert not printed["notes"]
        words = ["--upload", "1M", "--hours", "0:00-24:00", "--hours", "22:00-7:00"]
        code, printed = run(capsys, "limits", name, *words)
        assert (code, printed["limits"]["upload"]) == (0, 2**20)
        assert printed["limits"]["hours"] == "00:00-24:00,22:00-07:00"
        before = call(channel, "Describe")
        with pytest.raises(grpc.RpcError, match="hours are given as") as refusal:
            call(channel, "SetLimits", limits={"hours": "7", "sessions": 1})
        assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert run(capsys, "limits", name, "--kv-memory", "1")[0] == 2
        assert call(channel, "Describe").limits == before.limits

        replies = watch(channel)
        assert next(replies).peer.state == "online"
        code, printed = run(capsys, "drain", name)
        assert (code, printed["state"]) == (0, "offline")
        assert printed["paused_because"] == ["drained by its owner"]
        told = [event.name for event in next(r for r in replies if r.events).events]
        assert "paused" in told
        replies.cancel()
        assert [check(channel, ""), check(channel, SERVICE)] == [SERVING, NOT_SERVING]
        assert call(channel, "Drain").state == "offline", "twice does no harm"

        code, printed = run(capsys, "limits", name, "--hours", "always", "--upload", "0")
        assert (printed["limits"]["hours"], printed["limits"]["upload"]) == ("", 0)
        code, printed = run(capsys, "resume", name)
        assert (code, printed["state"], printed["limits"]["sessions"]) == (0, "online", 3)
        assert printed["limits"]["kv_memory"] == 8 * 2**20
        assert check(channel, SERVICE) == SERVING
    assert run(capsys, "drain", "nobody")[0] == 2


def test_stranger_on_the_tcp_port_is_refused(peer: LocalPeer, folder: Path) -> None:
    _, address = peer.facts["operator_addresses"]
    credentials = grpc.ssl_channel_credentials((folder / "certificate").read_bytes())
    options = [("grpc.ssl_target_name_override", COMMON_NAME)]
    wrong = [("authorization", f"Bearer {TOKEN}x")]
    right = [("authorization", f"Bearer {TOKEN}")]

    with grpc.secure_channel(address, credentials, options) as channel:
        for metadata in (None, wrong):
            for ask in (
                lambda metadata=metadata: call(channel, "Drain", metadata),
                lambda metadata=metadata: check(channel, "", metadata),
            ):
                with pytest.raises(grpc.RpcError) as refusal:
                    ask()
                assert refusal.value.code() is grpc.StatusCode.UNAUTHENTICATED
        with pytest.raises(grpc.RpcError, match="authorization"):
            next(watch(channel))
        with pytest.raises(grpc.RpcError):
            ProtoReflectionDescriptorDatabase(channel).get_services()
        assert call(channel, "Describe", right).peer_id == peer.peer_id
        assert check(channel, SERVICE, right) == SERVING
    with grpc.insecure_channel(address) as plain, pytest.raises(grpc.RpcError) as refusal:
        call(plain, "Describe", right)
    assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
