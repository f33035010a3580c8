"""Which of two transports dials an endpoint."""

import asyncio

from shoal.protocol.endpoints import Endpoint, Libp2pEndpoint, Relay
from shoal.protocol.identity import Identity
from shoal.protocol.net.memory.loopback import LoopbackNetwork, LoopbackTransport
from shoal.protocol.net.transport import ChoosingTransport, Stream

PEER, RELAY = Identity(bytes(32)).peer_id, Identity(bytes([1]) * 32).peer_id


async def test_endpoint_says_which_transport_dials_it() -> None:
    heard: asyncio.Queue[str | None] = asyncio.Queue()

    async def note(stream: Stream) -> None:
        heard.put_nowait(stream.remote_host)

    network = LoopbackNetwork(seed=1)
    server = LoopbackTransport(network, "server")
    endpoint = (await server.listen("server", 0, note)).endpoint
    direct, libp2p = (LoopbackTransport(network, name) for name in ("direct", "libp2p"))
    transport = ChoosingTransport(direct, libp2p)

    relayed = Libp2pEndpoint(endpoint.host, endpoint.port, endpoint.fingerprint, peer_id=PEER)
    for chosen in (endpoint, relayed):
        await (await transport.open_stream(chosen)).close()

    assert [await heard.get(), await heard.get()] == ["direct", "libp2p"]
    await transport.close()
    await server.close()


def test_relayed_endpoint_is_written_as_libp2p_reads_it() -> None:
    for host, kind in (("192.0.2.1", "ip4"), ("2001:db8::1", "ip6"), ("relay.example", "dns")):
        endpoint: Endpoint = Libp2pEndpoint.behind(Relay(host, 4001, RELAY), PEER)

        assert str(endpoint) == f"/{kind}/{host}/tcp/4001/p2p/{RELAY}/p2p-circuit/p2p/{PEER}"
