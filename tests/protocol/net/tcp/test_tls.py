"""TLS keys of peers: the same as long as the identity is."""

from shoal.protocol.identity import Identity
from shoal.protocol.net.tcp.tls import make_tls_identity


def make_fingerprint(secret: bytes | None) -> str:
    return make_tls_identity(secret).fingerprint


def test_fingerprint_follows_from_the_identity() -> None:
    one, other = (Identity(bytes(31) + last).derive_secret("a test") for last in (b"1", b"2"))

    assert make_fingerprint(one) == make_fingerprint(one)
    assert make_fingerprint(one) != make_fingerprint(other)


def test_fingerprint_of_no_identity_is_a_new_one() -> None:
    assert make_fingerprint(None) != make_fingerprint(None)
