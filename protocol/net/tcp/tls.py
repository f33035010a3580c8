"""Self-signed TLS certificates, known by the fingerprints of their keys.

There is no authority: the fingerprint in a signed announcement says whose certificate must answer.
It is that of the key, so that a peer that restarts with its identity is the same to whoever knows
its old announcement.
"""

import asyncio
import datetime
import hashlib
import os
import ssl
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ...endpoints import Endpoint
from ...errors import RemoteProtocolError, UnavailableError

# The order of P-256 (FIPS 186-5): private keys are the numbers from 1 to one less.
_NUM_KEYS = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
ALPN = "shoal/1"
"""The TLS application protocol (ALPN) that both ends of a TCP stream must agree on."""

SHUTDOWN_SECONDS = 1.0
"""How long TLS waits for the other end's farewell."""

COMMON_NAME = "shoal.invalid"
"""The name in every certificate: it means nothing, but libraries want one."""
_LIFETIME = datetime.timedelta(days=3650)
# Clocks of volunteers differ: a certificate that is valid only from now on would be refused.
_BACKDATED = datetime.timedelta(days=2)

_UNREADABLE = (
    ValueError,
    UnsupportedAlgorithm,
    x509.DuplicateExtension,
    x509.InvalidVersion,
    x509.UnsupportedGeneralNameType,
)
"""Exceptions that reading a stranger's certificate can raise; most are not ValueErrors."""


@dataclass(frozen=True)
class TlsIdentity:
    """A certificate and its private key, both PEM."""

    fingerprint: str
    """The SHA-256 of the public key's DER form, SubjectPublicKeyInfo, as in RFC 7469: 64 lower-case
    hex digits."""
    certificate_pem: bytes = field(repr=False)
    private_key_pem: bytes = field(repr=False)


def make_tls_identity(secret: bytes | None = None) -> TlsIdentity:
    """Return a self-signed ECDSA P-256 certificate; its key is that of the secret, or a fresh one.

    The same secret, of 32 random bytes, makes the same key.
    """
    if secret is None:
        key = ec.generate_private_key(ec.SECP256R1())
    else:
        number = 1 + int.from_bytes(secret, "big") % (_NUM_KEYS - 1)
        key = ec.derive_private_key(number, ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, COMMON_NAME)])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(COMMON_NAME)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    return TlsIdentity(
        _hash_key(certificate),
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def _hash_key(certificate: x509.Certificate) -> str:
    der = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


async def connect_pinned(
    make_protocol: Callable[[], asyncio.Protocol], endpoint: Endpoint, context: ssl.SSLContext
) -> asyncio.Transport:
    """Return a connection to the peer that announced an endpoint, known by its fingerprint.

    Raises UnavailableError when nobody answers and RemoteProtocolError when someone answers
    without TLS or with another certificate. Waits as long as it takes: wrap it in a timeout.
    """
    try:
        connected, _ = await asyncio.get_running_loop().create_connection(
            make_protocol,
            endpoint.host,
            endpoint.port,
            ssl=context,
            server_hostname="",
            ssl_shutdown_timeout=SHUTDOWN_SECONDS,
        )
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError) as error:
        raise UnavailableError(f"{endpoint} broke off the TLS handshake") from error
    except ssl.SSLError as error:
        raise RemoteProtocolError(f"{endpoint} does not answer with our TLS") from error
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"nobody answers at {endpoint}: {explain(error)}") from error
    try:
        _check_pinned(connected.get_extra_info("ssl_object"), endpoint)
    except RemoteProtocolError:
        connected.abort()
        raise
    return connected


async def check_certificate(endpoint: Endpoint) -> None:
    """Connect to an endpoint and hang up; raises what `connect_pinned` does."""
    connected = await connect_pinned(asyncio.Protocol, endpoint, make_client_context())
    connected.abort()


def _check_pinned(secured: ssl.SSLObject, endpoint: Endpoint) -> None:
    """Raise RemoteProtocolError unless the other end has the key that the peer announced.

    The handshake proved that whoever answers holds the private half of the certificate's key.
    """
    try:
        der = secured.getpeercert(binary_form=True) or b""
        fingerprint = _hash_key(x509.load_der_x509_certificate(der))
    except _UNREADABLE as error:
        raise RemoteProtocolError(
            f"{endpoint} has a TLS certificate that cannot be read"
        ) from error
    if fingerprint != endpoint.fingerprint:
        raise RemoteProtocolError(
            f"the peer at {endpoint} presents another TLS certificate than it announced"
        )


def make_server_context(identity: TlsIdentity) -> ssl.SSLContext:
    """Return what a listener needs to prove its key."""
    context = _harden(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
    context.num_tickets = 0  # connections last; nobody resumes one
    with tempfile.TemporaryDirectory(prefix="shoal-") as folder:  # mode 0700
        file = Path(folder) / "identity.pem"
        file.write_bytes(identity.certificate_pem + identity.private_key_pem)
        context.load_cert_chain(file)
    return context


def make_client_context() -> ssl.SSLContext:
    """Return what a dialler needs. It verifies nothing: see `connect_pinned`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return _harden(context)


def _harden(context: ssl.SSLContext) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.set_alpn_protocols([ALPN])
    return context


def explain(error: Exception) -> str:
    """Return why nobody answers, without the numbers that asyncio puts around it."""
    if isinstance(error, OSError) and error.errno is not None and error.errno > 0:
        return os.strerror(error.errno).lower()
    return getattr(error, "strerror", None) or str(error)
