"""The swarm of docker/compose.yaml in containers, by docker/run_swarm.sh.

Needs root, Debian's podman and what that script names, and the images of `make images-from-debian`.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from container_files import DOCKER
from prometheus_queries import Prometheus

from shoal.client import AutoDistributedModelForCausalLM
from shoal.protocol.ids import PeerId

MODEL = DOCKER.parent / "models" / "shoal-stories"
PEERS = ("bootstrap", "peer-1", "peer-2", "peer-3")
PATIENCE_SECONDS = 240
REWRITTEN = r"\S+\.sock|\.cache/shoal/swarms\S*"
"""Of a volume: what a peer writes anew at each start."""


def compose(*words: str) -> str:
    """Run docker/run_swarm.sh and return what it prints; raises where it fails."""
    return subprocess.run(
        [DOCKER / "run_swarm.sh", *words], check=True, capture_output=True, text=True, timeout=300
    ).stdout


def podman(*words: str) -> str:
    return compose("podman", *words).strip()


def has_images() -> bool:
    if shutil.which("podman-compose") is None:
        return False
    found = subprocess.run(
        [DOCKER / "run_swarm.sh", "podman", "image", "exists", "localhost/shoal-monitor"],
        capture_output=True,
        timeout=60,
    )
    return found.returncode == 0


pytestmark = [
    pytest.mark.network,
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.skipif(not has_images(), reason="needs podman-compose and the images"),
]


def name_container(service: str) -> str:
    return f"shoal_{service}_1"


def wait_for_line(service: str, pattern: str) -> str:
    """Return the first group of a pattern once the log of a container has it."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        command = [DOCKER / "run_swarm.sh", "podman", "logs", name_container(service)]
        log = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if found := re.search(pattern, log.stdout):
            return found[1]
        time.sleep(1)
    raise AssertionError(f"{service} did not print {pattern}")


def wait_until_online(service: str) -> PeerId:
    wait_for_line(service, r"(Online) at")
    return PeerId(wait_for_line(service, r"Peer (\w+)"))


def find_volume(name: str) -> Path:
    return Path(podman("volume", "inspect", "--format", "{{.Mountpoint}}", f"shoal_{name}"))


def list_kept_files(service: str) -> dict[str, bytes]:
    """Return what the volume of a peer holds, without what each start writes anew."""
    folder = find_volume(service)
    files = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes() for name, path in files.items() if not re.fullmatch(REWRITTEN, name)
    }


@pytest.fixture(scope="module")
def peer_ids() -> Iterator[dict[PeerId, str]]:
    """The running swarm: the service of each peer."""
    try:
        compose("up", "-d")
        yield {wait_until_online(service): service for service in PEERS}
    finally:
        compose("down", "--timeout", "30", "--volumes")


@pytest.fixture
def model(peer_ids: dict[PeerId, str]) -> Iterator[Any]:
    """The model over the swarm, from outside of it: by the bootstrap's port on this machine."""
    (bootstrap,) = [peer_id for peer_id, service in peer_ids.items() if service == "bootstrap"]
    code = (find_volume("join") / "serve.code").read_text()
    with AutoDistributedModelForCausalLM.from_pretrained(
        str(MODEL), join=code, initial_peers=[f"/ip4/127.0.0.1/tcp/4001/p2p/{bootstrap}"]
    ) as model:
        yield model


@pytest.mark.usefixtures("peer_ids")
@pytest.mark.parametrize("service", [*PEERS, "monitor"])
def test_container_has_no_rights_and_is_healthy(service: str) -> None:
    name = name_container(service)
    script = (
        "id -u; find -name own.code; touch /etc/x 2>&1;"
        " grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status"
    )

    podman("healthcheck", "run", name)  # raises where it is not healthy
    user, touched, *status = podman("exec", name, "sh", "-c", script).splitlines()

    assert user == "10001"
    assert "Read-only file system" in touched
    assert sorted(line.split()[1].lstrip("0") for line in status) == ["", "", "1"]


def test_peer_that_is_stopped_hands_over_and_comes_back_as_itself(
    peer_ids: dict[PeerId, str], model: Any
) -> None:
    prompt = torch.tensor([[3, 4, 5, 6]])
    with model.inference_session(max_length=64) as session:
        model.generate(prompt, session=session, max_new_tokens=4, min_new_tokens=4)
        leaving = session.hops[-1].peer.peer_id
        service = peer_ids[leaving]
        name = name_container(service)
        kept = list_kept_files(service)

        podman("stop", "--time", "60", name)
        code = podman("inspect", "--format", "{{.State.ExitCode}}", name)
        podman("rm", name)
        model.generate(None, session=session, max_new_tokens=8, min_new_tokens=8)

        assert code == "0"
        assert (len(session.handoffs), session.failovers) == (1, ())
    compose("up", "-d")
    assert wait_until_online(service) == leaving
    assert list_kept_files(service) == kept
    assert "peer.key" in kept


@pytest.mark.usefixtures("peer_ids")
def test_every_query_of_the_dashboard_and_the_alerts_is_answered() -> None:
    prometheus = Prometheus("http://127.0.0.1:9090")
    prometheus.wait_for("shoal_monitor_canary_hop_seconds", PATIENCE_SECONDS)
    prometheus.wait_for("rate(shoal_monitor_canary_runs_total[5m])", PATIENCE_SECONDS)
    prometheus.wait_for("count(up == 1) == 5", PATIENCE_SECONDS)

    assert not prometheus.list_unanswered()
