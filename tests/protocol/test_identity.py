"""Identities and peer ids, against the vectors of libp2p's specification."""

import pytest

from shoal.protocol.errors import RemoteProtocolError, UsageError
from shoal.protocol.identity import Identity, make_peer_id, public_key_of, verify

# libp2p specs, peer-ids/peer-ids.md, "Test vectors": the Ed25519 private key.
LIBP2P_SEED = bytes.fromhex("7e0830617c4a7de83925dfb2694556b12936c477a0e1feb2e148ec9da60fee7d")
LIBP2P_PUBLIC = bytes.fromhex("1ed1e8fae2c4a144b8be8fd4b47bf3d3b34b871c3cacf6010f0e42d474fce27e")
LIBP2P_PRIVATE_KEY = bytes.fromhex("08011240") + LIBP2P_SEED + LIBP2P_PUBLIC


def test_identity_matches_the_vector_of_libp2p() -> None:
    identity = Identity.from_libp2p_private_key(LIBP2P_PRIVATE_KEY)

    assert identity.to_libp2p_private_key() == LIBP2P_PRIVATE_KEY
    assert public_key_of(identity.peer_id) == LIBP2P_PUBLIC
    assert identity.peer_id == "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq"


def test_peer_id_contains_the_public_key_and_has_52_characters() -> None:
    for key in (bytes(32), bytes(range(32)), b"\xff" * 32):
        peer_id = make_peer_id(key)

        assert public_key_of(peer_id) == key
        assert peer_id.startswith("12D3KooW")
        assert len(peer_id) == 52


def test_signature_is_bound_to_signer_and_message() -> None:
    ours, theirs = Identity(bytes(32)), Identity(b"\x01" * 32)
    signature = ours.sign(b"message")

    assert verify(ours.peer_id, b"message", signature)
    assert not verify(theirs.peer_id, b"message", signature)
    assert not verify(ours.peer_id, b"another message", signature)
    assert not verify(ours.peer_id, b"message", signature[:-1])
    assert not verify("nobody", b"message", signature)


def test_generated_identities_differ() -> None:
    assert Identity.generate().peer_id != Identity.generate().peer_id


def test_identity_does_not_show_its_seed() -> None:
    identity = Identity(LIBP2P_SEED)

    assert LIBP2P_SEED.hex() not in repr(identity)
    assert repr(LIBP2P_SEED) not in repr(identity)
    assert identity.peer_id in repr(identity)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "0OIl",
        "12D3KooW",
        "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3p",
        "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq ",
        "112D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq",
        "12D3KooWBtg3aaRMjxwedh83aGiUkwSxDwUZkzuJcfaqUmo7R3pq" * 1000,
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",  # the hash of an RSA key
        "12D3KooW\N{BULLET}",
        "\ud800",
    ],
)
def test_malformed_peer_id_is_the_fault_of_who_sent_it(text: str) -> None:
    with pytest.raises(RemoteProtocolError):
        public_key_of(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        LIBP2P_PRIVATE_KEY[:-1],
        LIBP2P_PRIVATE_KEY + b"\0",
        b"\x08\x00" + LIBP2P_PRIVATE_KEY[2:],
        LIBP2P_PRIVATE_KEY[:-1] + b"\0",
    ],
)
def test_malformed_identity_is_a_usage_error(data: bytes) -> None:
    with pytest.raises(UsageError):
        Identity.from_libp2p_private_key(data)


def test_seed_of_another_length_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="32 bytes"):
        Identity(b"short")


def test_secrets_differ_by_identity_and_purpose_and_stay_the_same() -> None:
    one, other = Identity(bytes(32)), Identity(bytes(31) + b"1")

    assert one.derive_secret("tls") == Identity(bytes(32)).derive_secret("tls")
    secrets = {one.derive_secret("tls"), one.derive_secret("ssh"), other.derive_secret("tls")}
    assert len(secrets) == 3
