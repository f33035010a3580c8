"""Certificates with the key that was announced, in which something else cannot be read."""

import asyncio
import base64
import datetime
import hashlib
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtensionOID, NameOID

from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import RemoteProtocolError, UnavailableError
from shoal.protocol.net.tcp.tcp_transport import TcpTransport
from shoal.protocol.net.tcp.tls import ALPN

pytestmark = pytest.mark.network

KEY = ec.generate_private_key(ec.SECP256R1())
NAME = x509.SubjectAlternativeName([x509.DNSName("x")])
SOME_OID, ITS_NEIGHBOUR = (x509.ObjectIdentifier(f"1.2.3.{last}") for last in (4, 5))


def sign(*extensions: x509.ExtensionType) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(KEY.public_key())
        .serial_number(5)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=5))
    )
    for extension in extensions:
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(KEY, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def replace_in(der: bytes, before: str, after: str) -> bytes:
    """Nobody checks the signature of a certificate that is known by its key."""
    assert der.count(bytes.fromhex(before)) == 1
    return der.replace(bytes.fromhex(before), bytes.fromhex(after))


def name_of_an_unknown_kind() -> bytes:
    x400_address = bytes.fromhex("3004a3020500")
    return sign(x509.UnrecognizedExtension(ExtensionOID.SUBJECT_ALTERNATIVE_NAME, x400_address))


def extension_twice() -> bytes:
    null = b"\x05\x00"
    both = [x509.UnrecognizedExtension(oid, null) for oid in (SOME_OID, ITS_NEIGHBOUR)]
    return replace_in(sign(NAME, *both), "06032a0305", "06032a0304")


def unknown_version() -> bytes:
    return replace_in(sign(NAME), "a003020102", "a003020105")


def to_pem(der: bytes) -> bytes:
    text = base64.encodebytes(der)
    return b"-----BEGIN CERTIFICATE-----\n" + text + b"-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("make", [name_of_an_unknown_kind, extension_twice, unknown_version])
async def test_unreadable_certificate_is_the_peers_fault(make, tmp_path: Path) -> None:
    private_key = KEY.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    public_key = KEY.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    chain = tmp_path / "chain.pem"
    chain.write_bytes(to_pem(make()) + private_key)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)
    context.set_alpn_protocols([ALPN])
    server = await asyncio.start_server(
        lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context
    )
    port = server.sockets[0].getsockname()[1]
    endpoint = Endpoint("127.0.0.1", port, hashlib.sha256(public_key).hexdigest())
    transport = TcpTransport()
    try:
        async with asyncio.timeout(10):
            # What cannot be read beside the key does not matter, and nobody speaks here.
            with pytest.raises((RemoteProtocolError, UnavailableError)):
                await transport.open_stream(endpoint)
    finally:
        await transport.close()
        server.close()
