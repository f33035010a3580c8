"""From where a peer can be dialled, by what others answer."""

from __future__ import annotations

import pytest

from shoal.protocol.net.addresses import DialBackAnswer
from shoal.protocol.net.relays.reach import Scope, judge_reach

OWN = "192.168.1.5"
ROUTER = "203.0.113.9"


@pytest.mark.parametrize(
    ("answers", "scope", "hosts"),
    [
        ([], Scope.UNKNOWN, [OWN]),
        ([(None, ROUTER)], Scope.UNKNOWN, [OWN]),
        ([(True, "no address")], Scope.UNKNOWN, [OWN]),
        ([(True, "127.0.0.1")], Scope.UNKNOWN, [OWN]),
        ([(True, "2001:db8::1%\x1b[2J")], Scope.UNKNOWN, [OWN]),
        ([(True, "224.0.0.1")], Scope.UNKNOWN, [OWN]),
        ([(True, "::ffff:224.0.0.1")], Scope.UNKNOWN, [OWN]),
        ([(True, "255.255.255.255")], Scope.UNKNOWN, [OWN]),
        ([(True, "2001:db8::1")], Scope.INTERNET, ["2001:db8::1", OWN]),
        ([(True, OWN)], Scope.NETWORK, [OWN]),
        ([(True, "10.0.0.7")], Scope.NETWORK, ["10.0.0.7", OWN]),
        ([(False, OWN)], Scope.NOBODY, [OWN]),
        ([(False, ROUTER)], Scope.NOBODY, [OWN]),
        ([(True, ROUTER)], Scope.INTERNET, [ROUTER, OWN]),
        ([(True, ROUTER), (False, ROUTER)], Scope.INTERNET, [ROUTER, OWN]),
        ([(True, ROUTER), (False, ROUTER), (False, ROUTER)], Scope.NOBODY, [OWN]),
        ([(True, OWN), (False, ROUTER)], Scope.INSIDE, [OWN]),
        ([(False, OWN), (True, ROUTER)], Scope.INTERNET, [ROUTER, OWN]),
        ([(True, "198.51.100.1"), (True, ROUTER), (True, ROUTER)], Scope.INTERNET, [ROUTER, OWN]),
    ],
)
def test_most_of_those_outside_decide_before_those_inside(
    answers: list[tuple[bool | None, str]], scope: Scope, hosts: list[str]
) -> None:
    reach = judge_reach([OWN], [DialBackAnswer(*answer) for answer in answers])

    assert reach.scope is scope
    assert reach.list_hosts([OWN]) == hosts
    assert reach.needs_relay is (scope in (Scope.INSIDE, Scope.NOBODY))


def test_machine_with_a_public_address_is_dialled_there() -> None:
    reach = judge_reach([ROUTER, OWN], [DialBackAnswer(True, ROUTER)])

    assert reach.list_hosts([ROUTER, OWN]) == [ROUTER, OWN]
