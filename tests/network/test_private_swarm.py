"""Private swarms of real processes: who gets a text, who is told what, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import warm_python

from shoal.client import AutoDistributedModelForCausalLM
from shoal.peer.local_swarm.swarm import LocalSwarm
from shoal.protocol.errors import NotAMemberError, UsageError, WrongSwarmError
from shoal.protocol.membership.join_code import JoinCode
from shoal.protocol.membership.membership import Membership, Role, make_owner
from shoal.protocol.net.clock import SystemClock
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory
from shoal.protocol.net.tcp.tcp_transport import TcpTransport

pytestmark = [pytest.mark.network, pytest.mark.slow]

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)


@pytest.fixture(scope="module")
def tiny(tiny_models: Any) -> Any:
    return tiny_models.get()


@pytest.fixture(scope="module")
def swarm(tiny: Any) -> Iterator[LocalSwarm]:
    with private_swarm(tiny, OWNER.as_role(Role.SERVE)) as swarm:
        yield swarm


def private_swarm(tiny: Any, membership: Membership) -> LocalSwarm:
    """Return two peers, which the first begins, of the swarm of a membership."""
    join = ("--join", str(JoinCode(membership)))
    return LocalSwarm(tiny.directory, [(0, 2), (2, 4)], weights="fp32", serve_arguments=join)


def code_of(swarm: LocalSwarm, membership: Membership) -> str:
    return str(JoinCode(membership, tuple(swarm.initial_peers)))


def generate(tiny: Any, **settings: Any) -> list[int]:
    prompt = torch.arange(1, 6)[None]
    with AutoDistributedModelForCausalLM.from_pretrained(tiny.directory, **settings) as model:
        return model.generate(prompt, max_new_tokens=4, do_sample=False)[0].tolist()


def run_shoal(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return warm_python.run(
        [sys.executable, "-P", "-m", "shoal.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
        env={**os.environ, **environment},
    )


def test_members_get_their_text_and_others_one_sentence(swarm: LocalSwarm, tiny: Any) -> None:
    assert len(generate(tiny, join=code_of(swarm, USER))) == 9
    with pytest.raises(WrongSwarmError, match="wrong secret"):
        generate(tiny, join=code_of(swarm, STRANGER.as_role(Role.USE)))
    with pytest.raises(WrongSwarmError, match="not a member"):
        generate(tiny, initial_peers=swarm.initial_peers)
    with pytest.raises(UsageError, match="cut short"):
        generate(tiny, join=code_of(swarm, USER)[:-5])
    with pytest.raises(UsageError, match="no swarm is given"):
        generate(tiny)


def test_peers_print_codes_that_let_others_in(swarm: LocalSwarm, tiny: Any) -> None:
    codes = swarm.peers[0].facts["join_codes"]

    assert JoinCode.parse(codes["use"]).membership == USER
    assert JoinCode.parse(codes["serve"]).membership == SERVER
    later = swarm.peers[1].facts["join_codes"]
    assert [JoinCode.parse(later[role]).membership for role in ("use", "serve")] == [USER, SERVER]
    first, *_ = JoinCode.parse(codes["use"]).addresses
    assert first in JoinCode.parse(later["use"]).addresses
    assert len(generate(tiny, join=codes["use"])) == 9


def test_peers_turn_strangers_away_at_the_door(swarm: LocalSwarm, tiny: Any) -> None:
    async def dial() -> None:
        directory = await HivemindDirectory.join(
            swarm.initial_peers,
            identity=None,
            clock=SystemClock(),
            client_mode=True,
            membership=USER,
        )
        (peer, *_) = await directory.lookup(swarm.peers[0].facts["model_id"])
        await directory.close()
        for membership in (None, STRANGER):
            transport = TcpTransport(membership=membership)
            with pytest.raises(NotAMemberError):
                await transport.open_stream(peer.endpoints[0])
            await transport.close()

    asyncio.run(dial())


def test_doctor_names_a_wrong_and_a_missing_secret(swarm: LocalSwarm, tiny: Any) -> None:
    wrong = code_of(swarm, STRANGER.as_role(Role.USE))
    right = run_shoal("doctor", str(tiny.directory), SHOAL_JOIN=code_of(swarm, USER))
    others = [
        run_shoal("doctor", str(tiny.directory), "--json", *words)
        for words in (("--join", wrong), ("--initial-peers", *swarm.initial_peers))
    ]

    assert right.returncode == 0
    assert "No problem found" in right.stdout
    found = [{f["name"]: f for f in json.loads(done.stdout)["findings"]} for done in others]
    assert found[0]["membership"]["detail"].startswith("wrong secret: ")
    assert found[1]["membership"]["detail"].startswith("not a member: ")


@pytest.mark.parametrize(
    ("membership", "complaint", "exit_code"),
    [(USER, "only allows using the swarm", 2), (STRANGER, "wrong secret", 1)],
)
def test_peer_with_the_wrong_code_does_not_start(
    swarm: LocalSwarm, tiny: Any, membership: Membership, complaint: str, exit_code: int
) -> None:
    done = run_shoal("serve", str(tiny.directory), "--join", code_of(swarm, membership))

    assert done.returncode == exit_code
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_swarms_on_one_machine_do_not_mix(swarm: LocalSwarm, tiny: Any) -> None:
    with private_swarm(tiny, STRANGER.as_role(Role.SERVE)) as other:
        ours, theirs = ({peer.peer_id for peer in s.peers} for s in (swarm, other))
        for code, expected in (
            (code_of(swarm, USER), ours),
            (code_of(other, STRANGER.as_role(Role.USE)), theirs),
            # Addresses of both: those that are of another swarm are left out.
            (str(JoinCode(USER, (other.initial_peers[0], swarm.initial_peers[0]))), ours),
        ):
            with AutoDistributedModelForCausalLM.from_pretrained(
                tiny.directory, join=code
            ) as model:
                view = model._client.passes.wait_for(model._client.swarm.book.refresh())
            assert {peer.peer_id for peer in view.online} == expected


def test_swarm_goes_on_without_its_first_peer_and_takes_newcomers(tiny: Any) -> None:
    join = ("--join", str(JoinCode(SERVER)))
    spans = [(0, 2), (0, 4), (0, 4)]
    with LocalSwarm(tiny.directory, spans, weights="fp32", serve_arguments=join) as swarm:
        code = code_of(swarm, USER)
        with AutoDistributedModelForCausalLM.from_pretrained(tiny.directory, join=code) as model:
            swarm.peers[0].kill()

            assert len(model.generate(torch.arange(1, 6)[None], max_new_tokens=4)[0]) == 9
        assert len(generate(tiny, join=code)) == 9
        swarm.add((2, 4))
        assert len(generate(tiny, join=code)) == 9


def test_revoked_peer_is_used_no_more(tiny: Any) -> None:
    join = ("--join", str(JoinCode(SERVER)), "--announce-period", "1")
    spans = [(0, 4), (0, 4)]
    with LocalSwarm(tiny.directory, spans, weights="fp32", serve_arguments=join) as swarm:
        victim = swarm.peers[1].peer_id
        done = run_shoal("revoke", victim, "--join", code_of(swarm, OWNER), "--json")
        refused = run_shoal("revoke", victim, "--join", code_of(swarm, SERVER))

        assert json.loads(done.stdout)["revoked"] == [victim]
        assert refused.returncode == 2
        assert "owner's code" in refused.stderr
        with AutoDistributedModelForCausalLM.from_pretrained(
            tiny.directory, join=code_of(swarm, USER)
        ) as model:
            online = {
                peer.peer_id
                for peer in model._client.passes.wait_for(model._client.swarm.book.refresh()).online
            }
        assert online == {swarm.peers[0].peer_id}
        # It hears of it with its next announcement, and would serve nobody from then on.
        assert swarm.peers[1].wait(60) == 1
        # Nodes that know of it refuse its announcements before.
        *_, last = swarm.peers[1].log().splitlines()
        assert last.startswith("shoal serve: the owner of the swarm has revoked")
        assert "Traceback" not in swarm.peers[1].log()
