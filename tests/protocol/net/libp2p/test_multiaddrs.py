"""Addresses of the directory, read and refused."""

import pytest

from shoal.protocol.errors import UsageError
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress, make_listen_multiaddr

PEER_ID = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"


@pytest.mark.parametrize(
    ("text", "host", "tcp_port", "is_loopback"),
    [
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}", "127.0.0.1", 4001, True),
        (f"/ip6/::1/tcp/65535/p2p/{PEER_ID}", "::1", 65535, True),
        (f"/dns4/peer.example.org/tcp/1/p2p/{PEER_ID}", "peer.example.org", 1, False),
        (f"/ip4/192.0.2.1/udp/4001/quic-v1/p2p/{PEER_ID}", "192.0.2.1", None, False),
        (
            f"/ip4/192.0.2.1/tcp/4001/p2p/{PEER_ID}/p2p-circuit/p2p/{PEER_ID}",
            "192.0.2.1",
            None,
            False,
        ),
    ],
)
def test_address_of_a_peer_is_read(
    text: str, host: str, tcp_port: int | None, is_loopback: bool
) -> None:
    address = PeerAddress.parse(text)

    assert (address.text, address.host, address.tcp_port) == (text, host, tcp_port)
    assert address.peer_id == PEER_ID
    assert address.is_loopback == is_loopback


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("127.0.0.1:4001", "it does not begin with /"),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}!", "an address cannot contain '!'"),
    ],
)
def test_what_is_wrong_with_an_address_is_named(text: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason):
        PeerAddress.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "127.0.0.1:4001",
        f"ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID}",
        "/ip4/127.0.0.1/tcp/4001",
        "/ip4/127.0.0.1/tcp/4001/p2p",
        "/ip4/127.0.0.1/tcp/4001/p2p/nobody",
        f"/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/p2p/{PEER_ID}",
        f"/ip4/localhost/tcp/4001/p2p/{PEER_ID}",
        f"/ip4/::1/tcp/4001/p2p/{PEER_ID}",
        f"/dns//tcp/4001/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/tcp/0/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/tcp/65536/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/tcp/http/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/sctp/4001/p2p/{PEER_ID}",
        f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER_ID},/ip4/127.0.0.1/tcp/4002/p2p/{PEER_ID}",
    ],
)
def test_anything_else_is_a_usage_error_that_repeats_it(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        PeerAddress.parse(text)

    assert repr(text) in str(caught.value)


def test_listening_takes_an_ip_address() -> None:
    assert make_listen_multiaddr("0.0.0.0", 4001) == "/ip4/0.0.0.0/tcp/4001"
    with pytest.raises(UsageError, match="not an IP address"):
        make_listen_multiaddr("localhost", 4001)
