"""Join codes, `shoal:…`: all that a newcomer needs to find a swarm, and to prove that it may.

    byte 0       version, 1
    byte 1       kind: a public swarm, or what the holder may do in a private one
    byte 2..3    length of the whole, so that a code that was cut short is called that
    then         16 bytes of swarm id (public), or secret and public keys (private)
    then         addresses, each a byte of its form, its parts, and the 32 bytes of a peer's key
    last 4       checksum: the beginning of the SHA-256 of all before

In base32, which survives every chat program, whatever it does to capitals and hyphens. With one
IPv4 address a code has 107 characters for a public swarm, 158 to serve and 210 to use a private
one.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import ipaddress
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import RemoteProtocolError, UsageError
from ..identity import PUBLIC_KEY_BYTES, make_peer_id, public_key_of
from ..ids import JOIN_CODE_PREFIX
from .membership import (
    SECRET_BYTES,
    SWARM_ID_BYTES,
    Membership,
    Role,
    make_owner,
    make_public,
    make_server,
    make_user,
)

MAX_ADDRESSES = 8
MAX_CODE_CHARACTERS = 4096
"""More than 8 of the longest addresses take."""

_VERSION = 1
_MOST_VERSION = 15
"""Any other first byte than those up to this one is no version, but a mistake."""
_HEADER_BYTES = 4
_CHECKSUM_BYTES = 4
_MAX_TEXT_BYTES = 255
_MAX_CHOSEN = 4

_SIMPLE_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/([1-9][0-9]{0,4})/p2p/([^/]+)")
_FORMS = ("text", "ip4", "ip6", "dns", "dns4", "dns6")
"""How an address is packed; its index is its first byte. Whatever is not simple is text."""
_IPS = {"ip4": ipaddress.IPv4Address, "ip6": ipaddress.IPv6Address}


@dataclass(frozen=True)
class JoinCode:
    """A swarm, what the holder may do there, and where to ask for it."""

    membership: Membership
    addresses: tuple[str, ...] = ()
    """Directory addresses of peers, as `shoal serve` prints them; any one of them will do."""

    def __str__(self) -> str:
        """Return the code itself: a secret, where the swarm is private."""
        kind, secrets = _pack_membership(self.membership)
        if len(self.addresses) > MAX_ADDRESSES:
            raise UsageError(f"a join code holds at most {MAX_ADDRESSES} addresses")
        content = secrets + b"".join(map(_pack_address, self.addresses))
        length = _HEADER_BYTES + len(content) + _CHECKSUM_BYTES
        packed = bytes((_VERSION, kind)) + length.to_bytes(2, "big") + content
        packed += _checksum(packed)
        return JOIN_CODE_PREFIX + base64.b32encode(packed).decode().rstrip("=").lower()

    def __repr__(self) -> str:
        return f"JoinCode({self.membership}, may {self.membership.role}, {self.addresses})"

    @classmethod
    def parse(cls, text: str) -> JoinCode:
        """Read a code; raises UsageError that says in one sentence what is wrong with it.

        >>> code = JoinCode(make_public(bytes(16)))
        >>> str(code)
        'shoal:aeaaagaaaaaaaaaaaaaaaaaaaaaaaaaatsnisby'
        >>> JoinCode.parse("Shoal:AEAAAGAAAAAAAAAAAAAAAAAAAAAAAAAATSNISBY ") == code
        True
        """
        packed = _decode(text)
        kind, content = packed[1], _ByteReader(packed[_HEADER_BYTES:-_CHECKSUM_BYTES])
        try:
            return cls(_unpack_membership(kind, content), _unpack_addresses(content))
        except _DamagedError as error:
            # Its checksum is right, so nobody mistyped it.
            raise UsageError(f"the join code is damaged: {error}; ask for a new one") from error


def _decode(text: str) -> bytes:
    """Return the bytes of a code whose version, length and checksum are right."""
    text = "".join(text.split()).lower()
    if text.startswith("/"):
        raise UsageError(
            "that is an address, not a join code; pass it with --initial-peers (initial_peers=)"
        )
    if text.startswith("@"):
        raise UsageError(
            "join= takes the join code itself, not @FILE as the command line does; pass "
            "Path(FILE).read_text()"
        )
    if not text.startswith(JOIN_CODE_PREFIX):
        raise UsageError(f"a join code begins with {JOIN_CODE_PREFIX}; copy the whole code")
    body = text.removeprefix(JOIN_CODE_PREFIX)
    if len(text) > MAX_CODE_CHARACTERS:
        raise UsageError(f"a join code of {len(text)} characters is too long; copy one code only")
    packed, is_even = _decode_base32(body)
    if len(packed) >= _HEADER_BYTES and _VERSION < packed[0] <= _MOST_VERSION:
        raise UsageError(
            "the join code was mistyped; copy all of it. If it is right, a newer shoal has made it "
            f"(version {packed[0]}): update shoal"
        )
    length = int.from_bytes(packed[2:_HEADER_BYTES], "big")
    if len(packed) < _HEADER_BYTES or len(packed) < length:
        raise UsageError("the join code was cut short; copy all of it")
    if len(packed) > length and _is_right(packed[:length]):
        raise UsageError("there is text after the end of the join code; copy the code only")
    if len(packed) > length or not is_even or not _is_right(packed):
        raise UsageError("the join code was mistyped; copy it again")
    return packed


def _decode_base32(body: str) -> tuple[bytes, bool]:
    """Return the whole bytes of a text, and whether it ends where base32 ends."""
    # Of a group of eight characters, 2, 4, 5 and 7 stand for whole bytes.
    num_whole = next(n for n in range(len(body), -1, -1) if n % 8 in (0, 2, 4, 5, 7))
    padded = body[:num_whole] + "=" * (-num_whole % 8)
    try:
        packed = base64.b32decode(padded.upper().encode("ascii"))
    except (binascii.Error, UnicodeEncodeError) as error:
        raise UsageError(
            "the join code was mistyped: only letters and the digits 2 to 7 may follow shoal:; "
            "copy it again"
        ) from error
    encoded = base64.b32encode(packed).decode().rstrip("=").lower()
    return packed, encoded == body


def _is_right(packed: bytes) -> bool:
    return packed[-_CHECKSUM_BYTES:] == _checksum(packed[:-_CHECKSUM_BYTES])


def _checksum(packed: bytes) -> bytes:
    return hashlib.sha256(b"shoal join code\0" + packed).digest()[:_CHECKSUM_BYTES]


class _DamagedError(Exception):
    """A code with the right checksum that nevertheless makes no sense."""


class _ByteReader:
    """Takes bytes from the front of some, and never more than there are."""

    def __init__(self, content: bytes) -> None:
        self._rest = content

    def __len__(self) -> int:
        return len(self._rest)

    def take(self, num_bytes: int) -> bytes:
        taken, self._rest = self._rest[:num_bytes], self._rest[num_bytes:]
        if len(taken) < num_bytes:
            raise _DamagedError("it ends in the middle of a part")
        return taken

    def take_text(self) -> str:
        try:
            return self.take(self.take(1)[0]).decode("ascii")
        except UnicodeDecodeError as error:
            raise _DamagedError("an address is not text") from error


def _pack_membership(membership: Membership) -> tuple[int, bytes]:
    if not membership.is_private:
        return 0, membership.swarm_id
    if membership.role is Role.OWN:
        return 3, membership.owner_secret
    if membership.role is Role.SERVE:
        return 2, membership.serve_secret + membership.owner_key
    return 1, membership.use_secret + membership.serve_key + membership.owner_key


_MAKERS: tuple[tuple[Callable[..., Membership], tuple[int, ...]], ...] = (
    (make_public, (SWARM_ID_BYTES,)),
    (make_user, (SECRET_BYTES, PUBLIC_KEY_BYTES, PUBLIC_KEY_BYTES)),
    (make_server, (SECRET_BYTES, PUBLIC_KEY_BYTES)),
    (make_owner, (SECRET_BYTES,)),
)
"""By kind: what makes a membership of how many bytes each."""


def _unpack_membership(kind: int, content: _ByteReader) -> Membership:
    if kind >= len(_MAKERS):
        raise _DamagedError(f"kind {kind} is unknown")
    make, lengths = _MAKERS[kind]
    return make(*(content.take(length) for length in lengths))


def fits_code(address: str) -> bool:
    """Return whether a code can name an address: strangers announce what they like."""
    return len(address) <= _MAX_TEXT_BYTES and address.isascii() and address.startswith("/")


def _pack_address(address: str) -> bytes:
    if not fits_code(address):
        raise UsageError(f"{address!r} does not fit into a join code")
    packed = _pack_simple(address)
    # Only what comes out again letter by letter is packed by its parts.
    if packed is not None and _unpack_address(_ByteReader(packed)) == address:
        return packed
    return bytes([_FORMS.index("text")]) + _pack_text(address)


def _pack_simple(address: str) -> bytes | None:
    simple = _SIMPLE_ADDRESS.fullmatch(address)
    if simple is None:
        return None
    form, host, port, peer_id = simple.groups()
    try:
        packed_host = _IPS[form](host).packed if form in _IPS else _pack_text(host)
        packed_port = int(port).to_bytes(2, "big")
        return bytes([_FORMS.index(form)]) + packed_host + packed_port + public_key_of(peer_id)
    except (ValueError, OverflowError, RemoteProtocolError):
        return None


def _pack_text(text: str) -> bytes:
    return bytes([len(text)]) + text.encode("ascii")


def _unpack_addresses(content: _ByteReader) -> tuple[str, ...]:
    addresses: list[str] = []
    while len(content):
        if len(addresses) == MAX_ADDRESSES:
            raise _DamagedError(f"it has more than {MAX_ADDRESSES} addresses")
        addresses.append(_unpack_address(content))
    return tuple(addresses)


def _unpack_address(content: _ByteReader) -> str:
    number = content.take(1)[0]
    if number >= len(_FORMS):
        raise _DamagedError(f"an address of form {number} is unknown")
    form = _FORMS[number]
    if form == "text":
        return content.take_text()
    if form in _IPS:
        kind = _IPS[form]
        host = str(kind(content.take(kind(0).max_prefixlen // 8)))
    else:
        host = content.take_text()
    port = int.from_bytes(content.take(2), "big")
    peer_id = make_peer_id(content.take(PUBLIC_KEY_BYTES))
    return f"/{form}/{host}/tcp/{port}/p2p/{peer_id}"


def parse_join_arguments(
    code: str, addresses: Sequence[str]
) -> tuple[Membership | None, tuple[str, ...]]:
    """Return the swarm of a code, and where to join it: addresses that were given come first.

    Without a code, "", the swarm is the public one of the addresses. Raises UsageError for a code
    that is none, and when there is no address at all.
    """
    if not code and not addresses:
        raise UsageError("no swarm is given: pass a join code, or the address of a peer")
    if not code:
        return None, tuple(addresses)
    parsed = JoinCode.parse(code)
    if not addresses and not parsed.addresses:
        raise UsageError(
            "the join code names no address, and this machine has not met its swarm yet: codes "
            "of running peers name one, that of `shoal swarm-new` does not. Give an address with "
            "--initial-peers (initial_peers=), or start the swarm of this code with `shoal "
            "serve MODEL --new-swarm --join CODE`"
        )
    return parsed.membership, tuple(dict.fromkeys((*addresses, *parsed.addresses)))


def make_codes(membership: Membership, addresses: Sequence[str]) -> dict[str, str]:
    """Return the codes to hand to others, by what they may do; the owner's is for nobody else.

    >>> list(make_codes(make_public(bytes(16)), [])), list(make_codes(make_owner(bytes(16)), []))
    (['serve'], ['use', 'serve'])
    """
    # Everybody may serve a public swarm.
    roles = (Role.USE, Role.SERVE) if membership.is_private else (Role.SERVE,)
    chosen = choose_addresses(addresses)
    return {str(role): str(JoinCode(membership.as_role(role), chosen)) for role in roles}


def choose_addresses(addresses: Sequence[str]) -> tuple[str, ...]:
    """Return the addresses to put into a code: those of this machine only if there are no others.

    >>> choose_addresses(["/ip4/127.0.0.1/tcp/1/p2p/A", "/ip4/10.0.0.1/tcp/1/p2p/A"])
    ('/ip4/10.0.0.1/tcp/1/p2p/A',)
    """
    remote = [a for a in addresses if not a.startswith(("/ip4/127.", "/ip6/::1/"))]
    return tuple(remote or addresses)[:_MAX_CHOSEN]
