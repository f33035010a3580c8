"""What is asked of a router, and what becomes of its refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shoal.protocol.errors import UsageError
from shoal.protocol.net.relays import port_mapping
from shoal.protocol.net.relays.port_mapping import open_mapping

PUBLIC_HOST = "203.0.113.9"


class Router:
    """Stands in for miniupnpc's gateway, which raises bare exceptions."""

    lanaddr = "192.168.1.5"

    def __init__(self, host: str | None = PUBLIC_HOST, num_ports: int = 2) -> None:
        self.host, self.num_ports = host, num_ports
        self.forwarded: dict[int, tuple[str, int]] = {}
        self.leases: list[int] = []

    def discover(self) -> None: ...

    def selectigd(self) -> None: ...

    def externalipaddress(self) -> str | None:
        if self.host == "fails":
            raise Exception("no such service")
        return self.host

    def addportmapping(self, port: int, _: str, host: str, at: int, *more: Any) -> None:
        if len(self.forwarded) == self.num_ports:
            raise Exception("ConflictInMappingEntry")
        self.forwarded[port] = (host, at)
        self.leases.append(more[-1])

    def deleteportmapping(self, port: int, _: str) -> None:
        del self.forwarded[port]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Any:
    miniupnpc = pytest.importorskip("miniupnpc")

    def use(router: Router) -> Router:
        monkeypatch.setattr(miniupnpc, "UPnP", lambda: router)
        return router

    return use


async def test_ports_are_forwarded_for_a_while_and_given_back(use: Any) -> None:
    router = use(Router())

    async with open_mapping() as mapping:
        await mapping.add(4001)
        await mapping.add(4002)

        assert mapping.host == PUBLIC_HOST
        assert router.forwarded == {4001: (router.lanaddr, 4001), 4002: (router.lanaddr, 4002)}
        assert all(0 < lease <= 3600 for lease in router.leases)
    assert router.forwarded == {}


async def test_ports_are_asked_for_again_in_time(use: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port_mapping, "LEASE_SECONDS", 0.01)
    router = use(Router(num_ports=99))

    async with open_mapping() as mapping:
        await mapping.add(4001)
        async with asyncio.timeout(60):  # only a broken test waits
            while len(router.leases) < 3:  # noqa: ASYNC110 - a thread's
                await asyncio.sleep(0.01)


async def test_ports_are_asked_for_of_the_router_that_is_there_by_now(use: Any) -> None:
    old = use(Router())
    async with open_mapping() as mapping:
        await mapping.add(4001)
        new = use(Router("203.0.113.10"))

        await mapping.renew()

        assert (mapping.host, list(new.forwarded)) == ("203.0.113.10", [4001])
    assert (new.forwarded, list(old.forwarded)) == ({}, [4001])


async def test_router_that_is_gone_for_a_while_is_no_reason_to_forget_it(use: Any) -> None:
    use(Router())
    async with open_mapping() as mapping:
        use(Router("fails"))

        await mapping.renew()

        assert mapping.host == PUBLIC_HOST
        use(Router())


async def test_first_port_is_given_back_although_the_second_is_refused(use: Any) -> None:
    router = use(Router(num_ports=1))

    async with open_mapping() as mapping:
        await mapping.add(4001)
        with pytest.raises(UsageError, match=r"TCP port 4002 .*Conflict.*the ports by hand"):
            await mapping.add(4002)
    assert router.forwarded == {}


@pytest.mark.parametrize("host", [None, "", "100.64.0.7", "nonsense"])
async def test_router_without_a_public_address_is_no_use(host: str | None, use: Any) -> None:
    use(Router(host))

    with pytest.raises(UsageError, match="no public address"):
        async with open_mapping():
            pass


async def test_router_that_does_not_say_its_address_is_an_error_of_the_option(use: Any) -> None:
    use(Router("fails"))

    with pytest.raises(UsageError, match="leave out --port-mapping"):
        async with open_mapping():
            pass
