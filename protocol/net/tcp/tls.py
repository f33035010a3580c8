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
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from ...endpoints import Endpoint
from ...errors import RemoteProtocolError, UnavailableError, UsageError

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
    """A certificate and its private key, both PEM. `repr` does not show the key."""

    certificate_pem: bytes
    private_key_pem: bytes

    def __repr__(self) -> str:
        return f"TlsIdentity({fingerprint_of(self.certificate_pem)[:12]}…)"


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
        certificate.public_bytes(serialization.Encoding.PEM),
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
    )


def fingerprint_of(certificate_pem: bytes) -> str:
    """Return the SHA-256 of a certificate's public key, 64 lower-case hex digits.

    Of its DER form, SubjectPublicKeyInfo, as in RFC 7469.
    """
    try:
        return _hash_key(x509.load_pem_x509_certificate(certificate_pem))
    except _UNREADABLE as error:
        raise UsageError("the TLS certificate is not in PEM form") from error


def _hash_key(certificate: x509.Certificate) -> str:
    der = certificate.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return hashlib.sha256(der).hexdigest()


async def fetch_pinned_certificate(endpoint: Endpoint) -> bytes:
    """Return the PEM certificate that answers at an endpoint, once its fingerprint is right.

    Raises UnavailableError when nobody answers and RemoteProtocolError when someone answers
    without TLS or with another certificate. Waits as long as it takes: wrap it in a timeout.
    """
    # Nothing is sent over this connection and nothing it says is believed but the certificate.
    context = make_client_context()
    try:
        _, writer = await asyncio.open_connection(endpoint.host, endpoint.port, ssl=context)
    except (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLSyscallError) as error:
        raise UnavailableError(f"{endpoint} broke off the TLS handshake") from error
    except ssl.SSLError as error:
        raise RemoteProtocolError(f"{endpoint} does not answer with TLS") from error
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"nobody answers at {endpoint}: {explain(error)}") from error
    try:
        der: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True) or b""
    finally:
        writer.transport.abort()
    check_pinned(der, endpoint)
    return ssl.DER_cert_to_PEM_cert(der).encode("ascii")


def check_pinned(der: bytes, endpoint: Endpoint) -> None:
    """Raise RemoteProtocolError unless a certificate has the key that an endpoint's peer announced.

    The handshake proved that whoever answers holds the private half of the certificate's key.
    """
    try:
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
    """Return what a dialler needs. It verifies nothing: use `check_pinned` before anything else."""
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
