"""The identity of a peer: an Ed25519 key, and the peer id that carries its public half.

Holds keys in memory only; where they are kept on disk is not decided here.
"""

from __future__ import annotations

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from .errors import RemoteProtocolError, UsageError
from .ids import PeerId

SEED_BYTES = 32
SIGNATURE_BYTES = 64
PUBLIC_KEY_BYTES = 32

# Bitcoin's alphabet: no 0, O, I and l, which look alike.
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

# libp2p peer-id specification, "Keys": a public key is the protobuf message
# {1: key type, 2: data}; key type 1 is Ed25519. Up to 42 bytes are not hashed but wrapped whole
# in the identity multihash (code 0, length 36), so the peer id contains the key.
_PUBLIC_KEY_PREFIX = bytes.fromhex("08011220")
_PEER_ID_PREFIX = bytes.fromhex("0024") + _PUBLIC_KEY_PREFIX
_PRIVATE_KEY_PREFIX = bytes.fromhex("08011240")
_PEER_ID_BYTES = len(_PEER_ID_PREFIX) + 32
_MAX_PEER_ID_CHARACTERS = 64  # a real one has 52; decoding is quadratic in the length


class Identity:
    """A peer's signing key. Whoever holds it is the peer; it never leaves the process by itself.

    >>> Identity(bytes(32)).peer_id
    '12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN'
    """

    def __init__(self, seed: bytes) -> None:
        """Make the identity of a secret seed of 32 bytes; raises UsageError for another length."""
        if len(seed) != SEED_BYTES:
            raise UsageError(f"an identity needs a seed of {SEED_BYTES} bytes, got {len(seed)}")
        self._seed = bytes(seed)
        self._key = Ed25519PrivateKey.from_private_bytes(self._seed)
        self.public_key = self._key.public_key().public_bytes_raw()
        """The raw public key, 32 bytes."""
        self.peer_id = make_peer_id(self.public_key)
        """The public name of this identity, `12D3KooW…`."""

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the seed: this ends up in logs

    @classmethod
    def generate(cls) -> Identity:
        """Return a new identity from the operating system's random source."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @classmethod
    def from_libp2p_private_key(cls, data: bytes) -> Identity:
        """Read the content of a libp2p identity file; raises UsageError when it is not Ed25519."""
        key = data.removeprefix(_PRIVATE_KEY_PREFIX)
        if len(data) != len(_PRIVATE_KEY_PREFIX) + 64 or len(key) != 64:
            raise UsageError("the identity is not an Ed25519 private key in libp2p's format")
        identity = cls(key[:SEED_BYTES])
        if key[SEED_BYTES:] != identity.public_key:
            raise UsageError("the identity is damaged: its public key does not match its seed")
        return identity

    def to_libp2p_private_key(self) -> bytes:
        """Return the content of a libp2p identity file. It is secret."""
        return _PRIVATE_KEY_PREFIX + self._seed + self.public_key

    def derive_secret(self, purpose: str) -> bytes:
        """Return 32 secret bytes for a purpose, the same ones each time; they tell nothing else."""
        return HKDF(hashes.SHA256(), 32, salt=None, info=purpose.encode()).derive(self._seed)

    def sign(self, message: bytes) -> bytes:
        """Return the signature of a message, 64 bytes."""
        return self._key.sign(message)


def make_in_use_error(where: str) -> UsageError:
    """Return the error of a peer whose identity another process has; `where` that was found out."""
    return UsageError(
        f"another running peer uses the identity {where}; stop that peer first, or use another "
        "identity file (--identity)"
    )


def make_peer_id(public_key: bytes) -> PeerId:
    """Return the peer id of a raw Ed25519 public key of 32 bytes."""
    return PeerId(_encode_base58(_PEER_ID_PREFIX + public_key))


def public_key_of(peer_id: str) -> bytes:
    """Return the raw Ed25519 public key inside a peer id.

    Raises RemoteProtocolError when the text is not a peer id of that kind, in its one spelling.
    """
    if len(peer_id) > _MAX_PEER_ID_CHARACTERS:
        raise RemoteProtocolError(f"a peer id of {len(peer_id)} characters is too long")
    try:
        decoded = _decode_base58(peer_id)
    except ValueError as error:
        raise RemoteProtocolError(f"{peer_id!r} is not a peer id: not base58") from error
    if len(decoded) != _PEER_ID_BYTES or not decoded.startswith(_PEER_ID_PREFIX):
        raise RemoteProtocolError(f"{peer_id!r} is not the peer id of an Ed25519 key")
    return decoded[len(_PEER_ID_PREFIX) :]


def peer_id_bytes(peer_id: str) -> bytes:
    """Return the binary form of a peer id; raises RemoteProtocolError like `public_key_of`."""
    return _PEER_ID_PREFIX + public_key_of(peer_id)


def verify(peer_id: str, message: bytes, signature: bytes) -> bool:
    """Return whether the peer of that id signed the message; False for a malformed peer id."""
    try:
        return verify_by_key(public_key_of(peer_id), message, signature)
    except RemoteProtocolError:
        return False


def verify_by_key(public_key: bytes, message: bytes, signature: bytes) -> bool:
    """Return whether the holder of a raw public key signed; False for bytes that are no key."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def _encode_base58(data: bytes) -> str:
    """Return the one base58 text of the data; every leading zero byte is a leading `1`.

    >>> _encode_base58(bytes([0, 0, 58]))
    '1121'
    """
    number, digits = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        digits = _BASE58[digit] + digits
    return "1" * (len(data) - len(data.lstrip(b"\0"))) + digits


def _decode_base58(text: str) -> bytes:
    """Return the data of a base58 text; raises ValueError for any other character.

    >>> _decode_base58("1121")
    b'\\x00\\x00:'
    """
    number = 0
    for character in text:
        number = number * 58 + _BASE58.index(character)
    num_zeros = len(text) - len(text.lstrip("1"))
    return bytes(num_zeros) + number.to_bytes((number.bit_length() + 7) // 8, "big")
