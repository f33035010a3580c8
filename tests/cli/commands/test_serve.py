"""What the options of `shoal serve` become."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import pytest
from announcements import identity_of
from screens import Screen

from shoal.cli.commands.serve_events import report_with_last_swarm
from shoal.cli.main import _parse, main
from shoal.cli.options.serve_options import make_config, make_network
from shoal.cli.terminal.peer_events import EventPrinter, print_for_people
from shoal.peer.process.config import PeerConfig, PeerEvent
from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.membership.membership import make_public
from shoal.protocol.net.dht.known_addresses import AddressFolder
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], PeerConfig(model="").block_cache_bytes),
        (["--block-cache", "0"], 0),
        (["--block-cache", "1.5T"], 3 * 2**39),
    ],
)
def test_block_cache_is_a_size_of_the_disk(words: list[str], expected: int) -> None:
    config = make_config(_parse(["serve", "m", "--new-swarm", *words]))

    assert config.block_cache_bytes == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--local", "--listen", "0.0.0.0:4000"], "not allowed with argument"),
        (["--local", "--port-mapping"], "leave out --port-mapping"),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, UsageError)) as refusal:
        make_network(_parse(["serve", "m", "--new-swarm", *words]))

    assert said in f"{refusal.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--corpus", "."], "--corpus is of a training run: name the run with --train"),
        (["--new-run"], "--new-run is of a training run"),
        (["--train", "stories", "--device", "auto"], "serves with --device cpu"),
        (["--train", "stories"], "give --corpus FOLDER"),
        (["--train", "stories.toml"], "cannot read stories.toml: No such file"),
    ],
)
def test_options_of_a_run_that_do_not_fit_are_told_before_joining(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}"

    assert main(["serve", "shoal-stories", "--initial-peers", address, *words]) == 2

    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "said"), [(["--port-mapping"], "leave out --port-map"), (["--local"], None)]
)
def test_ports_are_not_mapped_to_a_peer_of_a_local_swarm(
    words: list[str], said: str | None
) -> None:
    address = f"/ip4/127.0.0.1/tcp/4001/p2p/{Identity(bytes(32)).peer_id}"
    options = _parse(["serve", "m", "--initial-peers", address, *words])

    with pytest.raises(UsageError, match=said) if said else contextlib.nullcontext():
        assert make_network(options).listening.host == "127.0.0.1"


PLACE = {"target": "0:4", "why": "blocks 0:4 are served by nobody else, and those of others by two"}
RELAYS = [f"/ip4/198.51.100.{number}/tcp/4001/p2p/12D3KooW" for number in (1, 2)]
ONLINE = {
    "endpoint": "192.168.100.200:40404",
    "span": "100:126",
    "num_blocks": 126,
    "decode_steps_per_second": 1234.5,
    "kernels": "int8 avx512-vnni, attention avx512",
}


@pytest.mark.parametrize(
    ("name", "facts", "words"),
    [
        ("placed", PLACE, "Taking blocks 0:4: blocks 0:4 are served by nobody else"),
        ("moving", PLACE, "Moving to blocks 0:4"),
        ("returning", PLACE, "Returning to blocks 0:4"),
        ("online", ONLINE, "126, 1234.5 steps/s, or 255 tokens/s for a whole model of such peers."),
        ("online", ONLINE | {"span": "0:120"}, "or 1176 tokens/s for a whole model of such peers."),
        ("online", ONLINE | {"span": "0:126"}, "blocks 0:126 of 126, 1234.5 tokens/s."),
        ("waiting", {"why": "no initial peer can be reached: /ip4/a"}, "answers yet: no initial"),
        (
            "draining",
            {"sessions": 12, "passes": 3},
            "for 12 sessions to move to other peers or end and 3 of training's microbatches.",
        ),
        ("draining", {"sessions": 1, "passes": 0}, "for 1 session to move to other peers or end."),
        ("draining", {"sessions": 0, "passes": 1}, "Waiting for 1 of training's microbatches."),
        ("parked", {"parked_at": ["x6nXTN12"] * 8}, "it keeps open: …x6nXTN12, …x6nXTN12"),
        (
            "got_through",
            {"host": "10.0.0.7", "is_local": True},
            "Reachable in this network: first connection, from 10",
        ),
        (
            "got_through",
            {"host": "192.0.2.7", "is_local": False},
            "Reachable from the internet: first connection, from 192",
        ),
        (
            "online",
            ONLINE | {"endpoint": f"{RELAYS[0]}/p2p-circuit"},
            "at 198.51.100.1:4001 (relay):",
        ),
        ("speed", ONLINE, "Measured again: 1234.5 steps/s, or 255 tokens/s"),
        (
            "gap",
            {"missing": ["4:8"], "can_join": True, "is_lost": False},
            "To start one: shoal serve MODEL --blocks 4:8 --join CODE",
        ),
        (
            "gap",
            {"missing": ["0:2", "4:8"], "can_join": True, "is_lost": False},
            "Blocks 0:2, 4:8 have no peer: no text",
        ),
        (
            "gap",
            {"missing": ["4:8"], "can_join": False, "is_lost": True},
            "If they have ended, blocks 4:8 have no peer, and no text can be generated.",
        ),
        ("gap_closed", {}, "All blocks have a peer again."),
        ("lost", {"peers": 1}, "No sign of other peers any more: either all"),
        ("found", {"peers": 1}, "Other peers are there again."),
        ("relaying", {"peers": 1}, "Other peers are now reached through this one (--no-relay"),
        ("left", {}, "Left the swarm."),
    ],
)
def test_what_happens_to_a_peer_is_told_with_its_time_in_80_columns(
    name: str, facts: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", screen)

    print_for_people(PeerEvent(name, facts))

    lines = screen.text.splitlines()
    assert re.match(r"\d\d:\d\d:\d\d [A-Z]", lines[0])
    assert words in " ".join(line.strip() for line in lines)
    assert all(len(line) <= 80 for line in lines)


DIRECTORY: dict[str, object] = {
    "dialled": ["/ip4/10.0.0.1/tcp/4001"],
    "reach": "unknown",
    "has_public_host": False,
    "listens_everywhere": False,
    "endpoints": ["10.0.0.1:4002", "192.168.1.5:4002"],
    "relays": [],
    "directory_port": 4001,
}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"reach": "machine"}, "Reachable on this machine only, at 10.0.0.1:4002"),
        ({"reach": "machine", "listens_everywhere": True}, "This machine is in no network yet"),
        ({"reach": "internet"}, "Reachable from the internet at 10.0.0.1:4002."),
        ({"reach": "network"}, "in this network only, at 10.0.0.1:4002, 192.168.1.5:4002."),
        ({"reach": "network", "has_public_host": True}, "4002; not yet confirmed from outside."),
        ({"reach": "inside"}, "Reachable in this network only, at"),
        ({"reach": "nobody"}, "Peers that it joined through cannot dial it there."),
        ({"relays": RELAYS}, "a NAT, through 2 relays: 198.51.100.1:4001, 198.51.100.2:4001."),
        ({"relays": RELAYS[:1], "reach": "inside"}, "through 1 relay: 198.51.100.1:4001."),
        (
            {"is_relay": True, "has_public_host": True},
            "nobody can dial (--no-relay turns this off)",
        ),
        ({"has_public_host": True}, "10.0.0.1:4002, 192.168.1.5:4002; not yet confirmed"),
        ({}, "forward TCP ports 4002 and 4001 of the router to this machine"),
        ({}, "--listen 0.0.0.0:4002 --directory-port 4001 --announce-host ROUTER-ADDRESS"),
    ],
)
def test_peer_says_from_where_it_is_reached(
    facts: dict[str, object], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", screen)

    print_for_people(PeerEvent("directory", DIRECTORY | facts))

    assert words in " ".join(screen.text.split())
    assert ("forward" in screen.text) is (not facts)
    assert all(len(line) <= 80 for line in screen.text.splitlines())


@pytest.mark.parametrize(("reach", "is_told"), [("machine", True), ("unknown", False)])
def test_code_of_a_peer_for_one_machine_is_said_to_be_no_use_elsewhere(
    reach: str, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)

    facts = {"reach": reach, "join_codes": {"serve": "shoal:code"}}
    print_for_people(PeerEvent("directory", DIRECTORY | facts))

    assert ("On other machines this is no use" in screen.text) is is_told


def test_commands_for_others_name_the_model_and_the_newest_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen, code = Screen(), "shoal:" + "a" * 210
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sys.stdout", screen)
    gap = PeerEvent("gap", {"missing": ["4:8"], "can_join": True, "is_lost": False})

    report = EventPrinter("my model", "--initial-peers /ip4/a")
    report(gap)
    report(PeerEvent("join_codes", {"join_codes": {"use": "shoal:b", "serve": code}}))
    report(gap)

    serve = "shoal serve 'my model' --blocks 4:8"
    assert f"{serve} --initial-peers /ip4/a" in screen.text.splitlines()
    assert f"{serve} --join {code}" in screen.text.splitlines()


def test_code_that_names_others_is_printed_when_there_are_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)

    print_for_people(PeerEvent("join_codes", {"join_codes": {"serve": "shoal:code"}}))

    assert "names the peers that are here now" in screen.text
    assert "shoal:code" in screen.text.splitlines()


@pytest.mark.parametrize(("age_seconds", "is_told"), [(600.0, True), (2 * 86400.0, False)])
def test_new_swarm_says_how_to_go_back_to_the_one_of_the_last_day(
    age_seconds: float, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, address = Screen(), "/ip4/192.0.2.7/tcp/4001/p2p/" + identity_of(1).peer_id
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdout", screen)
    known = AddressFolder().find(make_public(bytes(16)), [address])
    assert known is not None
    known.save(bytes(16), [PeerAddress.parse(address)])
    (path,) = tmp_path.glob(".cache/shoal/swarms/*")
    kept_at = time.time() - age_seconds
    os.utime(path, (kept_at, kept_at))

    events: list[PeerEvent] = []
    for name in ("started", "directory"):
        report_with_last_swarm(events.append, PeerEvent(name))
    for event in events[1:-1]:
        print_for_people(event)

    assert [event.name for event in events] == ["started", *["last_swarm"] * is_told, "directory"]

    assert ("This machine was in another swarm at" in screen.text) is is_told
    assert (f"--initial-peers {address}" in screen.text.splitlines()) is is_told


def test_peer_says_that_its_addresses_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)

    print_for_people(PeerEvent("addresses", DIRECTORY | {"reach": "internet"}))

    assert re.match(r"\d\d:\d\d:\d\d The addresses of this peer have changed\.", screen.text)
    assert "from the internet at 10.0.0.1:4002." in screen.text
    assert "  /ip4/10.0.0.1/tcp/4001" in screen.text.splitlines()


@pytest.mark.parametrize(
    ("codes", "words"), [(["serve"], "is public"), (["use", "serve"], "private")]
)
def test_new_swarm_says_who_may_join_and_shows_codes_whole(
    codes: list[str], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)
    code = "shoal:" + "a" * 210

    print_for_people(PeerEvent("directory", DIRECTORY | {"join_codes": dict.fromkeys(codes, code)}))

    assert words in screen.text
    assert screen.text.splitlines().count(code) == len(codes)


@pytest.mark.parametrize(("num_bytes", "is_told"), [(0, True), (2**24, False)])
@pytest.mark.parametrize(
    ("weight_bytes", "said"),
    [
        (
            2**27,
            "Uses at most {} of 8,192 MiB of free memory: 128 for weights, 1,024 for KV caches",
        ),
        (1000, "of 8,192 MiB of free memory: under 1 for weights, 1,024 for KV caches"),
        (None, "Uses at most 8,192 MiB of free memory: 1,024 for KV caches"),
    ],
)
def test_peer_says_at_its_start_what_it_may_use_and_when_it_keeps_no_adapters(
    weight_bytes: int | None,
    said: str,
    num_bytes: int,
    is_told: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    screen = Screen()
    monkeypatch.setattr("sys.stdout", screen)

    facts: dict[str, object] = {"peer_id": "a", "model_id": "b", "adapter_bytes": num_bytes}
    facts |= {"kv_bytes": 2**30, "pass_bytes": 0, "message_bytes": 2**29, "free_bytes": 2**33}
    facts |= {"announcement_bytes": 2**27}
    facts |= {"weight_bytes": weight_bytes, "block_cache_bytes": 2**34}
    print_for_people(PeerEvent("started", facts))

    words = " ".join(screen.text.split())
    total = f"{(2**27 + 2**30 + num_bytes + 2**29 + 2**27) // 2**20:,}"
    assert said.format(total) in words
    assert "0 for training" in words
    assert "512 (always) for messages in transit" in words
    assert "128 (always) for announcements of others" in words
    assert "16,384 MiB of blocks on disk" in words
    assert ("Accepts no adapters" in screen.text) is is_told
