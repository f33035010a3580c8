"""What is said of a place where nobody can listen."""

from __future__ import annotations

import asyncio

import pytest

from shoal.protocol.errors import UsageError
from shoal.protocol.net.addresses import check_can_listen, list_own_hosts

pytestmark = pytest.mark.network

ELSEWHERE = "192.0.2.1"
"""An address for documents, which no machine has (RFC 5737)."""


@pytest.mark.parametrize("port", [0, 80])
def test_address_of_another_machine_comes_with_advice(port: int) -> None:
    with pytest.raises(UsageError, match=f"^{ELSEWHERE} is not an address of this machine; leave"):
        asyncio.run(check_can_listen(ELSEWHERE, port))


def test_machine_without_ipv6_has_no_address_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("Address family not supported by protocol")

    monkeypatch.setattr("socket.socket", refuse)

    assert list_own_hosts("::") == []


def test_host_that_nobody_knows_is_named_without_a_port_that_nobody_chose() -> None:
    with pytest.raises(UsageError, match=r"^cannot listen on a\.invalid: [A-Z]"):
        asyncio.run(check_can_listen("a.invalid", 0))
