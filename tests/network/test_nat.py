"""Peers and clients behind real NATs: who is dialled, who is relayed, and that the words come."""

from __future__ import annotations

import contextlib
import json
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from nat_scene import HOME_HOSTS, PUBLIC_HOST, ROUTER_HOSTS, NatNetworks, nat_networks

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "shoal-stories")
START_SECONDS = 120.0
PROMPT = "Once upon a time"

pytestmark = [pytest.mark.network, pytest.mark.slow]


class Scene(NamedTuple):
    """A swarm of one public peer and one behind NAT a."""

    networks: NatNetworks
    address: str
    public: dict[str, Any]
    relayed: dict[str, Any]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        public = start_peer(networks, stack, "public", PUBLIC_HOST, "0:4", "--new-swarm")
        address = public["addresses"][0]
        join = ("--initial-peers", address)
        relayed = start_peer(networks, stack, "home-a", HOME_HOSTS["a"], "4:8", *join)
        yield Scene(networks, address, public, relayed)


def start_peer(
    networks: NatNetworks,
    stack: contextlib.ExitStack,
    where: str,
    host: str,
    blocks: str,
    *options: str,
) -> dict[str, Any]:
    """Start a peer, and return what it says when it is online."""
    serve = (sys.executable, "-P", "-m", "shoal.cli", "serve", MODEL, "--json", *options)
    settings = ("--listen", host, "--blocks", blocks, "--weights", "fp32", "--block-cache", "0")
    peer = subprocess.Popen(networks.command(where, *serve, *settings), stdout=subprocess.PIPE)
    stack.callback(peer.wait, 30)
    stack.callback(peer.terminate)
    assert peer.stdout is not None
    stack.enter_context(peer.stdout)
    while select.select([peer.stdout], [], [], START_SECONDS)[0]:
        event = json.loads(peer.stdout.readline() or "{}")
        assert event, f"the peer {where} ended"
        if event["event"] == "online":
            return event
    raise AssertionError(f"the peer {where} did not come online")


def generate(scene: Scene, where: str) -> str:
    """Generate a text from somewhere, and return it."""
    command = (sys.executable, "-P", "-m", "shoal.cli", "generate", MODEL, PROMPT, "--json")
    options = ("--initial-peers", scene.address, "--max-new-tokens", "24")
    done = subprocess.run(
        scene.networks.command(where, *command, *options),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["text"]


def test_peer_that_cannot_be_dialled_announces_its_relay(scene: Scene) -> None:
    relay = scene.address
    assert scene.relayed["endpoint"] == f"{relay}/p2p-circuit/p2p/{scene.relayed['peer_id']}"
    assert scene.public["endpoint"].startswith(f"{PUBLIC_HOST}:")


def test_peer_that_can_be_dialled_announces_itself(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        host = ROUTER_HOSTS["b"]
        join = ("--initial-peers", scene.address)
        direct = start_peer(scene.networks, stack, "router-b", host, "0:4", *join)

        assert direct["endpoint"].startswith(f"{host}:")


def test_peer_behind_a_nat_serves_a_client_behind_another(scene: Scene) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    inputs = tokenizer(PROMPT, return_tensors="pt").input_ids
    outputs = model.generate(inputs, max_new_tokens=24, do_sample=False)

    text = generate(scene, "home-b")

    assert text.endswith(tokenizer.decode(outputs[0, inputs.shape[1] :]))
    assert len(text) > 40


def test_doctor_finds_nothing_wrong_behind_a_nat(scene: Scene) -> None:
    doctor = (sys.executable, "-P", "-m", "shoal.cli", "doctor", MODEL, "--json")
    command = scene.networks.command("home-b", *doctor, "--initial-peers", scene.address)

    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECONDS)

    assert done.returncode == 0, done.stdout + done.stderr
    assert scene.relayed["endpoint"] in done.stdout
