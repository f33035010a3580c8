"""Which swarm a command line names, and the codes that `shoal swarm-new` makes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shoal.cli.main import _parse, main
from shoal.cli.options.join_options import VARIABLE, Joining, read_joining
from shoal.cli.options.serve_options import make_network
from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import Role, make_owner, make_public
from shoal.protocol.net.dht.known_addresses import AddressFolder
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress

OWNER = make_owner(bytes(range(16)))
FIRST, SECOND = (
    f"/ip4/192.0.2.{n}/tcp/4001/p2p/{Identity(bytes([n]) * 32).peer_id}" for n in (1, 2)
)
CODE = str(JoinCode(OWNER.as_role(Role.SERVE), (FIRST,)))
EMPTY_CODE = str(JoinCode(OWNER.as_role(Role.SERVE)))


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def read(*words: str) -> Joining:
    return read_joining(_parse(["generate", "m", "p", *words]))


def write_code(file: Path, code: str, mode: int = 0o600) -> Path:
    file.write_text(f"{code}\n")
    file.chmod(mode)
    return file


def test_code_may_stand_on_the_line_in_a_file_or_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write_code(tmp_path / "code", CODE)

    given, from_file = read("--join", CODE), read("--join", f"@{file}")
    monkeypatch.setenv(VARIABLE, CODE)
    from_variable = read()
    monkeypatch.setenv(VARIABLE, f"@{file}")
    from_both = read()

    for joining in (given, from_file, from_variable, from_both):
        assert joining.membership == OWNER.as_role(Role.SERVE)
        assert joining.addresses == (FIRST,)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o602])
def test_code_in_a_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    file = write_code(tmp_path / "a code", CODE, mode)

    with pytest.raises(UsageError, match=rf"{mode:04o}\); run `chmod 600 '{file}'`$"):
        read("--join", f"@{file}")


def test_file_without_a_code_keeps_its_mode(tmp_path: Path) -> None:
    file = write_code(tmp_path / "passwd", "root:x:0:0", 0o644)

    with pytest.raises(UsageError, match="begins with shoal:"):
        read("--join", f"@{file}")


def test_code_comes_through_a_pipe() -> None:
    reader, writer = os.pipe()
    os.write(writer, CODE.encode())
    os.close(writer)

    try:
        joining = read("--join", f"@/dev/fd/{reader}")
    finally:
        os.close(reader)

    assert joining.membership == OWNER.as_role(Role.SERVE)


def test_variable_gives_way_to_what_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, CODE)

    assert read("--initial-peers", SECOND).membership is None
    assert read("--join", str(JoinCode(make_public(bytes(16)), (SECOND,)))).addresses == (SECOND,)
    assert make_network(_parse(["serve", "m", "--new-swarm"])).membership is None


def test_wrong_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, CODE[:-5])

    with pytest.raises(UsageError, match="SHOAL_JOIN: the join code was cut short"):
        read()


def test_addresses_beside_a_code_come_first() -> None:
    assert read("--join", CODE, "--initial-peers", SECOND, FIRST).addresses == (SECOND, FIRST)
    assert read("--join", EMPTY_CODE, "--initial-peers", SECOND).addresses == (SECOND,)


def test_code_without_an_address_finds_the_swarm_where_this_machine_met_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    known = AddressFolder().find(OWNER, ())
    assert known is not None
    known.save(OWNER.swarm_id, [PeerAddress.parse(SECOND)])

    assert read("--join", EMPTY_CODE).addresses == (SECOND,)
    assert read("--join", EMPTY_CODE, "--initial-peers", FIRST).addresses == (FIRST,)
    assert read("--join", CODE).addresses == (FIRST,)


def test_code_without_an_address_needs_one_or_begins_its_swarm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(UsageError, match="names no address"):
        read("--join", EMPTY_CODE)

    network = make_network(_parse(["serve", "m", "--new-swarm", "--join", CODE]))

    assert (network.membership, network.initial_peers) == (OWNER.as_role(Role.SERVE), ())


def test_code_that_may_only_use_a_swarm_is_refused_before_anything_begins() -> None:
    use = str(JoinCode(OWNER.as_role(Role.USE), (FIRST,)))

    with pytest.raises(UsageError, match="only allows using the swarm"):
        make_network(_parse(["serve", "m", "--join", use]))


def test_secrets_do_not_show_in_what_is_logged() -> None:
    assert CODE not in repr(read("--join", CODE))


def make(capsys: pytest.CaptureFixture[str], *words: str) -> JoinCode:
    assert main(["swarm-new", *words]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    return JoinCode.parse(line)


def test_new_swarms_are_private_unless_said_otherwise(capsys: pytest.CaptureFixture[str]) -> None:
    private, other, public = make(capsys), make(capsys), make(capsys, "--public")

    assert private.membership.role is Role.OWN
    assert private.membership.swarm_id != other.membership.swarm_id
    assert not public.membership.is_private


def test_codes_for_others_are_made_from_ones_own(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = write_code(tmp_path / "own", str(JoinCode(OWNER)))

    serve = make(capsys, "--from", f"@{file}", "--role", "serve", "--initial-peers", FIRST, SECOND)
    use = make(capsys, "--from", str(serve))

    assert serve == JoinCode(OWNER.as_role(Role.SERVE), (FIRST, SECOND))
    assert use == JoinCode(OWNER.as_role(Role.USE), (FIRST, SECOND))
    assert main(["swarm-new", "--from", str(use), "--role", "serve"]) == 2
    assert "may only use" in capsys.readouterr().err


def test_code_goes_into_a_file_that_others_cannot_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "own.code"

    assert main(["swarm-new", "--out", str(file)]) == 0

    assert JoinCode.parse(file.read_text()).membership.role is Role.OWN
    assert file.stat().st_mode & 0o777 == 0o600
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("Wrote the owner's code of private swarm ")
    assert output.err.endswith(f"shoal swarm-new --from @{file} --role serve --out serve.code\n")
    assert main(["swarm-new", "--out", str(file)]) == 2
    assert "already exists" in capsys.readouterr().err


def test_code_as_json_says_what_it_is_worth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["swarm-new", "--from", CODE, "--json"]) == 0

    facts = json.loads(capsys.readouterr().out)
    assert JoinCode.parse(facts.pop("join")).membership.role is Role.USE
    assert facts == {
        "swarm_id": OWNER.swarm_id.hex(),
        "role": "use",
        "private": True,
        "addresses": [FIRST],
    }
