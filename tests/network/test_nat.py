"""Peers and clients behind real NATs: who is dialled, who is relayed, and that the words come."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import warm_python
from nat_scene import (
    HOME_HOSTS,
    NEIGHBOUR_HOST,
    PUBLIC_HOST,
    ROUTER_HOSTS,
    NatNetworks,
    nat_networks,
)
from peer_events import START_SECONDS, read_event

from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.net.libp2p.multiaddrs import split_multiaddr

MODEL = str(Path(__file__).resolve().parents[2] / "models" / "shoal-stories")
PROMPT = "Once upon a time"
LONG_PROMPT = "Once upon a time there was a fox. " * 120
"""Its hidden states are more than the 128 KiB that relays of libp2p carry by default."""

PROMPT_BYTES = 200 * 2**10
"""What the hidden states of the long prompt have, at least; everything else has far less."""

DECODED_BYTES = 8 * 2**10
"""What the hidden states of some dozens of tokens have; connecting takes 3 KiB."""

TEXT_TOKENS = 400

OFTEN = ("--announce-period", "2")
"""So that addresses that change are noticed soon."""

FORGETTING_SECONDS = 20
"""How long NAT a remembers a connection over which nothing goes."""

pytestmark = [pytest.mark.network, pytest.mark.slow]


class RunningPeer(NamedTuple):
    """A peer that is online, and what it said then."""

    process: subprocess.Popen[bytes]
    directory: dict[str, Any]
    facts: dict[str, Any]

    @property
    def address(self) -> str:
        """Where others join through it."""
        return self.facts["addresses"][0]


class Scene(NamedTuple):
    """A swarm of one public peer and one behind NAT a."""

    networks: NatNetworks
    address: str
    public: dict[str, Any]
    relayed: dict[str, Any]


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Nobody says where to listen: what may be dialled, and who is a relay, is found out."""
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        networks.forget_after("a", FORGETTING_SECONDS)
        public = start_peer(networks, stack, "public", None, "0:4", "--new-swarm")
        (code,) = public.directory["join_codes"].values()
        relayed = start_peer(networks, stack, "home-a", None, "4:8", "--join", code)
        assert read_event(public.process, "got_through")["host"] == ROUTER_HOSTS["a"]
        read_event(relayed.process, "parked")
        facts = (peer.directory | peer.facts for peer in (public, relayed))
        yield Scene(networks, public.address, *facts)


def start_peer(
    networks: NatNetworks,
    stack: contextlib.ExitStack,
    where: str,
    host: str | None,
    blocks: str,
    *options: str,
) -> RunningPeer:
    """Start a peer, and return it when it is online."""
    serve = (sys.executable, "-P", "-m", "shoal.cli", "serve", MODEL, "--json", *options)
    settings = ("--blocks", blocks, "--weights", "fp32", "--block-cache", "0")
    settings += () if host is None else ("--listen", host)
    # Unbuffered, or `select` would not see what was read ahead.
    command = networks.command(where, *serve, *settings)
    peer = warm_python.Popen(command, stdout=subprocess.PIPE, bufsize=0)
    stack.callback(peer.wait, 30)
    stack.callback(peer.terminate)
    assert peer.stdout is not None
    stack.enter_context(peer.stdout)
    return RunningPeer(peer, read_event(peer, "directory"), read_event(peer, "online"))


def generate(scene: Scene, where: str, prompt: str = PROMPT, *more: str) -> dict[str, Any]:
    """Generate a text from somewhere, and return what is said of it."""
    command = (sys.executable, "-P", "-m", "shoal.cli", "generate", MODEL, prompt, "--json")
    options = ("--initial-peers", scene.address, "--max-new-tokens", "24", *more)
    done = warm_python.run(
        scene.networks.command(where, *command, *options),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@functools.cache
def generate_alone(num_tokens: int, prompt: str = PROMPT) -> str:
    """Return what transformers writes behind the prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(MODEL)
    model: Any = AutoModelForCausalLM.from_pretrained(MODEL)
    inputs = tokenizer(prompt, return_tensors="pt").input_ids
    outputs = model.generate(inputs, max_new_tokens=num_tokens, do_sample=False)
    return tokenizer.decode(outputs[0, inputs.shape[1] :], skip_special_tokens=True)


def test_peer_that_cannot_be_dialled_announces_its_relay(scene: Scene) -> None:
    relay = scene.address
    assert scene.relayed["endpoint"] == f"{relay}/p2p-circuit/p2p/{scene.relayed['peer_id']}"
    assert scene.relayed["relays"] == [relay]
    assert scene.relayed["reach"] == "nobody"
    assert scene.public["endpoint"].startswith(f"{PUBLIC_HOST}:")
    assert scene.public["reach"] == "unknown"
    assert (scene.public["is_relay"], scene.relayed["is_relay"]) == (True, False)


def test_peer_that_can_be_dialled_announces_itself(scene: Scene) -> None:
    with contextlib.ExitStack() as stack:
        host = ROUTER_HOSTS["b"]
        join = ("--initial-peers", scene.address)
        direct = start_peer(scene.networks, stack, "router-b", host, "0:4", *join)

        assert direct.facts["endpoint"].startswith(f"{host}:")
        assert direct.directory["reach"] == "internet"


def test_peer_that_nobody_can_dial_says_how_to_find_a_relay(scene: Scene) -> None:
    """It joins through a peer that wants to be none."""
    with contextlib.ExitStack() as stack:
        join = ("--initial-peers", scene.address, "--no-relay")
        other = start_peer(scene.networks, stack, "router-b", ROUTER_HOSTS["b"], "0:4", *join)
        serve = (sys.executable, "-P", "-m", "shoal.cli", "serve", MODEL, "--blocks", "4:8")
        options = ("--listen", HOME_HOSTS["a"], "--initial-peers", other.address)

        refused = warm_python.run(
            scene.networks.command("home-a", *serve, *options),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
        )

    assert refused.returncode == 1
    assert re.search(r"TCP ports (\d+) and (\d+) .*:\1 --directory-port \2;", refused.stderr)


def test_long_prompt_goes_through_a_relay_in_one_go(scene: Scene) -> None:
    done = generate(scene, "home-b", LONG_PROMPT, "--delivery", "star")

    assert done["failovers"] == []
    assert done["text"].endswith(generate_alone(24, LONG_PROMPT))


def test_doctor_finds_nothing_wrong_behind_a_nat(scene: Scene) -> None:
    doctor = (sys.executable, "-P", "-m", "shoal.cli", "doctor", MODEL, "--json")
    command = scene.networks.command("home-b", *doctor, "--initial-peers", scene.address)

    done = warm_python.run(command, capture_output=True, text=True, timeout=START_SECONDS)

    assert done.returncode == 0, done.stdout + done.stderr
    assert scene.relayed["endpoint"] in done.stdout


def test_monitor_counts_peers_behind_a_nat(scene: Scene) -> None:
    look = (sys.executable, "-P", "-m", "shoal.cli", "monitor", "--once", "--json")
    command = scene.networks.command("home-b", *look, "--initial-peers", scene.address)

    done = warm_python.run(command, capture_output=True, text=True, timeout=START_SECONDS)

    peers = json.loads(done.stdout)["models"][0]["peers"]
    assert {peer["reachability"] for peer in peers} == {"direct", "relayed"}
    assert [peer["state"] for peer in peers] == ["online"] * len(peers), peers


def test_prompt_is_pushed_into_a_nat_without_a_relay(scene: Scene) -> None:
    with scene.networks.count_bytes("a", scene.public["endpoint"]) as count_bytes:
        done = generate(scene, "home-b", LONG_PROMPT)

        assert done["failovers"] == []
        assert done["text"].endswith(generate_alone(24, LONG_PROMPT))
        assert count_bytes() > PROMPT_BYTES


def test_peer_behind_a_nat_that_lets_its_port_through_announces_the_address_outside(
    scene: Scene,
) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(scene.networks.forward("b", 4444))
        join = ("--initial-peers", scene.address)
        peer = start_peer(scene.networks, stack, "home-b", "0.0.0.0:4444", "0:4", *join)

        assert peer.directory["reach"] == "internet"
        hosts = (ROUTER_HOSTS["b"], HOME_HOSTS["b"])
        assert peer.directory["endpoints"] == [f"{host}:4444" for host in hosts]


def test_peer_that_starts_before_its_network_is_reached_when_that_is_there() -> None:
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        networks.remove_address("public", PUBLIC_HOST)
        peer = start_peer(networks, stack, "public", None, "0:8", "--new-swarm", *OFTEN)
        assert peer.directory["reach"] == "machine"

        networks.add_address("public", PUBLIC_HOST)
        moved = read_event(peer.process, "addresses")

        assert moved["endpoints"] == [f"{PUBLIC_HOST}:{peer.facts['endpoint'].split(':')[1]}"]
        generate_in(networks, "home-a", *moved["join_codes"].values())


@pytest.mark.thorough  # half a minute of waiting for looks at addresses
def test_peers_whose_addresses_change_are_found_at_the_new_ones() -> None:
    """Both change theirs, one after the other, so that none of the first addresses is left."""
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        first = start_peer(networks, stack, "public", None, "0:4", "--new-swarm", *OFTEN)
        (code,) = first.directory["join_codes"].values()
        other = start_peer(networks, stack, "router-b", None, "4:8", "--join", code, *OFTEN)
        (code,) = read_event(first.process, "join_codes")["join_codes"].values()
        named = JoinCode.parse(code).addresses
        assert [split_multiaddr(one)[0] for one in named] == [PUBLIC_HOST, ROUTER_HOSTS["b"]]

        networks.remove_address("router-b", ROUTER_HOSTS["b"])
        networks.add_address("router-b", "198.51.100.13")
        read_event_with(other.process, "198.51.100.13")
        generate_in(networks, "home-a", code)
        networks.remove_address("public", PUBLIC_HOST)
        networks.add_address("public", "198.51.100.11")
        moved = read_event_with(first.process, "198.51.100.11")

        generate_in(networks, "home-a", *moved["join_codes"].values())


def test_peer_behind_a_router_is_used_from_its_own_network_by_the_same_code() -> None:
    """This router, as many do, does not lead from its network back into it."""
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        for port in (4001, 4002):
            stack.enter_context(networks.forward("a", port))
        place = ("--directory-port", "4002", "--announce-host", ROUTER_HOSTS["a"])
        peer = start_peer(networks, stack, "home-a", "0.0.0.0:4001", "0:8", "--new-swarm", *place)
        (code,) = peer.directory["join_codes"].values()

        generate_in(networks, "router-a", code)
        generate_in(networks, "home-b", code)


def test_peer_behind_a_nat_is_reached_within_its_network_without_its_relay() -> None:
    """Neighbours find each other through a peer outside, and need it for no token."""
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        first = start_peer(networks, stack, "public", None, "0:4", "--new-swarm")
        (code,) = first.directory["join_codes"].values()
        relayed = start_peer(networks, stack, "home-a", None, "4:8", "--join", code)
        assert relayed.directory["reach"] == "nobody"

        networks.cut_off("a")
        generate_in(networks, "neighbour-a", code, "--delivery", "star")

        assert read_event(relayed.process, "got_through")["host"] == NEIGHBOUR_HOST


def read_event_with(peer: subprocess.Popen[bytes], host: str) -> dict[str, Any]:
    """Return what a peer says when it is announced at a host."""
    while True:
        event = read_event(peer, "addresses")
        if any(endpoint.startswith(f"{host}:") for endpoint in event["endpoints"]):
            return event


def generate_in(networks: NatNetworks, where: str, code: str, *options: str) -> None:
    """Generate a text by a code from somewhere, as soon as the whole model is found."""
    command = (sys.executable, "-P", "-m", "shoal.cli", "generate", MODEL, PROMPT, "--join", code)
    done = warm_python.run(
        networks.command(where, *command, "--max-new-tokens", "4", "--json", *options),
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["text"].endswith(generate_alone(4))


@pytest.mark.thorough
def test_parked_streams_survive_a_nat_that_forgets_what_is_silent(scene: Scene) -> None:
    time.sleep(3 * FORGETTING_SECONDS)

    test_prompt_is_pushed_into_a_nat_without_a_relay(scene)


@pytest.mark.thorough
def test_text_goes_on_when_the_relay_dies_through_one_that_came_later() -> None:
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        relay = start_peer(networks, stack, "public", PUBLIC_HOST, "0:4", "--new-swarm", "--relay")
        join = ("--initial-peers", relay.address)
        relayed = start_peer(networks, stack, "home-a", HOME_HOSTS["a"], "4:8", *join)
        other = start_peer(networks, stack, "router-b", ROUTER_HOSTS["b"], "0:4", "--relay", *join)
        assert read_event(relayed.process, "relayed")["relays"] == [relay.address, other.address]
        writing = write_text(networks, stack, "home-b", relay.address, other.address)
        assert writing.stdout is not None
        begun = writing.stdout.read(40)

        relay.process.kill()
        assert read_event(relayed.process, "relayed")["relays"] == [other.address]
        text = begun + writing.stdout.read()

        assert writing.wait(START_SECONDS) == 0
        assert text.strip() == generate_alone(TEXT_TOKENS).strip()


def write_text(
    networks: NatNetworks, stack: contextlib.ExitStack, where: str, *addresses: str
) -> subprocess.Popen[str]:
    """Begin to generate a text that takes some seconds; what is done of it can be read."""
    command = (sys.executable, "-P", "-m", "shoal.cli", "generate", MODEL, PROMPT)
    options = ("--initial-peers", *addresses, "--max-new-tokens", str(TEXT_TOKENS))
    writing = warm_python.Popen(
        networks.command(where, *command, *options),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writing.stdout is not None
    stack.enter_context(writing.stdout)
    stack.callback(writing.wait, 30)
    stack.callback(writing.terminate)
    return writing


@pytest.mark.thorough
def test_text_goes_on_when_either_end_of_a_parked_stream_dies() -> None:
    with nat_networks() as networks, contextlib.ExitStack() as stack:
        first = start_peer(networks, stack, "public", PUBLIC_HOST, "0:4", "--new-swarm", "--relay")
        join = ("--initial-peers", first.address)
        hosts = [first, start_peer(networks, stack, "public", PUBLIC_HOST, "0:4", "--relay", *join)]
        addresses = [host.address for host in hosts]
        join = ("--initial-peers", ",".join(addresses))
        relayed = {
            letter: start_peer(networks, stack, f"home-{letter}", host, "4:8", *join)
            for letter, host in HOME_HOSTS.items()
        }
        for peer in relayed.values():
            wait_until_parked(peer, hosts)
        counts = [
            (letter, host, stack.enter_context(networks.count_bytes(letter, endpoint)))
            for letter in HOME_HOSTS
            for host, endpoint in enumerate(peer.facts["endpoint"] for peer in hosts)
        ]
        writing = write_text(networks, stack, "public", *addresses)
        assert writing.stdout is not None
        begun = writing.stdout.read(150)

        letter, host = find_busiest(counts)
        hosts[host].process.kill()
        begun += writing.stdout.read(250)
        remaining = [count for count in counts if count[1] != host]
        letter, _ = find_busiest(remaining)
        relayed[letter].process.kill()
        begun += writing.stdout.read(250)
        other, _ = find_busiest([count for count in remaining if count[0] != letter])
        text = begun + writing.stdout.read()

        assert other != letter
        assert writing.wait(START_SECONDS) == 0
        assert text.strip() == generate_alone(TEXT_TOKENS).strip()


def wait_until_parked(peer: RunningPeer, hosts: Sequence[RunningPeer]) -> None:
    """Wait until a peer has parked streams at others, and nowhere else."""
    endings = {host.facts["peer_id"][-8:] for host in hosts}
    while set(read_event(peer.process, "parked")["parked_at"]) != endings:
        pass


def find_busiest(counts: Sequence[tuple[str, int, Callable[[], int]]]) -> tuple[str, int]:
    """Return into which home outputs are pushed, and which host does it."""
    letter, host, count_bytes = max(counts, key=lambda count: count[2]())
    assert count_bytes() > DECODED_BYTES
    return letter, host
