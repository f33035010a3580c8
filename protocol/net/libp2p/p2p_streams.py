# hivemind's types are partial; what we say ourselves is checked.
# pyright: reportMissingTypeStubs=false, reportUnknownMemberType=false
# pyright: reportAttributeAccessIssue=false
"""Requests to p2pd outside the DHT: to connect to a peer, to open byte streams to it, and to say
whom it is connected to.

hivemind's own functions for it leave a socket open when they fail or are cancelled, and spell a
peer id inside an address in a way that p2pd does not read.
"""

from __future__ import annotations

import asyncio
import warnings
from typing import Any, cast

from ...errors import RemoteProtocolError, ShoalError, UnavailableError
from ...fair_share import Holder, name_holder
from ...identity import peer_id_bytes
from .multiaddrs import pack_multiaddr, split_multiaddr

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # about what hivemind itself uses
    from hivemind.p2p import P2P
    from hivemind.p2p.p2p_daemon_bindings.datastructures import PeerInfo
    from hivemind.p2p.p2p_daemon_bindings.utils import (
        ControlFailure,
        raise_if_failed,
        read_pbmsg_safe,
        write_pbmsg,
    )
    from hivemind.proto import p2pd_pb2


async def connect(p2p: P2P, peer_id: str, address: str) -> None:
    """Have p2pd connect to a peer at an address, unless it is connected already.

    Raises UnavailableError when nobody answers there and RemoteProtocolError when it is somebody
    else, or the address is none.
    """
    try:
        peer, packed = peer_id_bytes(peer_id), pack_multiaddr(address)
    except ValueError as error:
        raise RemoteProtocolError(f"{address} is no address of a peer: {error}") from error
    connecting = p2pd_pb2.ConnectRequest(peer=peer, addrs=[packed])
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.CONNECT, connect=connecting)
    _, _, writer = await _ask(p2p, question, address)
    writer.transport.abort()


async def list_peers(p2p: P2P) -> list[tuple[str, str]]:
    """Return the peers that p2pd is connected to, and at which address; raises ShoalError."""
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.LIST_PEERS)
    answer, _, writer = await _ask(p2p, question, "p2pd")
    writer.transport.abort()
    found = [PeerInfo.from_protobuf(peer) for peer in answer.peers]
    return [(peer.peer_id.to_base58(), str(peer.addrs[0])) for peer in found]


async def open_byte_stream(
    p2p: P2P, peer_id: str, protocol: str
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a new stream to a peer that p2pd is connected to; raises UnavailableError.

    p2pd takes it for open before the other end has agreed.
    """
    opening = p2pd_pb2.StreamOpenRequest(peer=peer_id_bytes(peer_id), proto=[protocol])
    question = p2pd_pb2.Request(type=p2pd_pb2.Request.STREAM_OPEN, streamOpen=opening)
    _, reader, writer = await _ask(p2p, question, f"peer …{peer_id[-6:]}")
    return reader, writer


async def _ask(
    p2p: P2P, question: Any, where: str
) -> tuple[Any, asyncio.StreamReader, asyncio.StreamWriter]:
    """Put a question to p2pd; return its answer, and the socket that a stream goes on in."""
    try:
        reader, writer = await cast(Any, p2p)._client.control.daemon_connector.open_connection()
        try:
            answer: Any = p2pd_pb2.Response()
            await write_pbmsg(writer, question)
            await read_pbmsg_safe(reader, answer)
            raise_if_failed(answer)
        except BaseException:
            writer.transport.abort()
            raise
    except ControlFailure as error:
        raise _translate(error, where) from error
    except (OSError, EOFError) as error:
        raise UnavailableError("the p2pd process has ended") from error
    return answer, reader, writer


def _translate(error: ControlFailure, where: str) -> ShoalError:
    if "peer id mismatch" in str(error):
        return RemoteProtocolError(f"another peer answers at {where}")
    reason = " ".join(str(error).removeprefix("Connect failed. msg=").split())
    return UnavailableError(f"nobody answers at {where}: {reason:.200}")


def name_dialler(info: Any) -> Holder:
    """Return the name under which a stream is counted, by what p2pd says of it.

    All that comes through one relay has its address. There the peer ids, which libp2p has proven,
    keep strangers apart.
    """
    host, _ = split_multiaddr(str(info.addr))
    return Holder(name_holder(host), str(info.peer_id))
