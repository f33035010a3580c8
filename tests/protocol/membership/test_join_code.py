"""Join codes come back as they were, and every wrong one is called what it is."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import random

import pytest

from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.ids import JOIN_CODE_PREFIX
from shoal.protocol.membership.join_code import MAX_ADDRESSES, JoinCode
from shoal.protocol.membership.membership import Membership, Role, make_owner, make_public
from shoal.protocol.net.libp2p.multiaddrs import PeerAddress

PEER = Identity(bytes([9]) * 32).peer_id
OWNER = make_owner(bytes(range(16)))
MEMBERSHIPS = [make_public(bytes(range(16))), *(OWNER.as_role(role) for role in Role)]
ADDRESSES = [
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}",
    f"/ip6/2001:db8::1/tcp/65535/p2p/{PEER}",
    f"/dns/peer.example.org/tcp/1/p2p/{PEER}",
    f"/dns4/peer.example.org/tcp/80/p2p/{PEER}",
    f"/ip4/192.0.2.7/udp/4001/quic-v1/p2p/{PEER}",
    f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}/p2p-circuit/p2p/{PEER}",
    f"/ip4/192.0.2.7/tcp/99999/p2p/{PEER}",
    f"/ip6/2001:DB8:0:0::1/tcp/4001/p2p/{PEER}",
    "/ip4/192.0.2.7/tcp/4001/p2p/QmForeign",
]


@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=str)
def test_code_comes_back_with_every_kind_of_address(membership: Membership) -> None:
    code = JoinCode(membership, tuple(ADDRESSES[:MAX_ADDRESSES]))

    assert JoinCode.parse(str(code)) == code
    assert JoinCode.parse(str(JoinCode(membership, (ADDRESSES[-1],)))).addresses == (ADDRESSES[-1],)


def test_random_codes_come_back_however_they_were_copied() -> None:
    rng = random.Random(1)
    for _ in range(200):
        membership = rng.choice([make_public, make_owner])(rng.randbytes(16))
        if membership.is_private:
            membership = membership.as_role(rng.choice(list(Role)))
        addresses = tuple(rng.sample(ADDRESSES, rng.randrange(MAX_ADDRESSES)))
        code = JoinCode(membership, addresses)
        copied = rng.choice([str.upper, str.lower, str.title])(str(code))
        broken = rng.randrange(len(copied))

        assert JoinCode.parse(f" {copied[:broken]}\n  {copied[broken:]}\n") == code


@pytest.mark.parametrize(
    ("membership", "most"), list(zip(MEMBERSHIPS, (107, 210, 158, 107), strict=True)), ids=str
)
def test_code_with_one_address_can_be_pasted(membership: Membership, most: int) -> None:
    assert len(str(JoinCode(membership, (ADDRESSES[0],)))) <= most


def test_code_shows_no_secret_when_it_is_logged() -> None:
    code = JoinCode(OWNER, (ADDRESSES[0],))

    for secret in (OWNER.owner_secret, OWNER.serve_secret, OWNER.use_secret):
        assert secret.hex() not in repr(code)
        assert repr(secret) not in repr(code) + repr(OWNER)


@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=str)
def test_code_that_was_cut_anywhere_is_called_cut_short(membership: Membership) -> None:
    text = str(JoinCode(membership, (ADDRESSES[0],)))

    for length in range(len(JOIN_CODE_PREFIX), len(text)):
        with pytest.raises(UsageError, match="cut short"):
            JoinCode.parse(text[:length])


@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=str)
def test_any_mistyped_letter_is_found(membership: Membership) -> None:
    text = str(JoinCode(membership, (ADDRESSES[0],)))

    for index in range(len(JOIN_CODE_PREFIX), len(text)):
        typo = "b" if text[index] != "b" else "c"
        # One in the length may look as if something was missing.
        with pytest.raises(UsageError, match=r"mistyped|cut short"):
            JoinCode.parse(text[:index] + typo + text[index + 1 :])


def test_two_letters_that_changed_places_are_found() -> None:
    text = str(JoinCode(OWNER, (ADDRESSES[0],)))

    for index in range(len(JOIN_CODE_PREFIX) + 8, len(text) - 1):
        swapped = text[:index] + text[index + 1] + text[index] + text[index + 2 :]
        if swapped != text:
            with pytest.raises(UsageError, match="mistyped"):
                JoinCode.parse(swapped)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "begins with shoal:"),
        ("hello", "begins with shoal:"),
        (ADDRESSES[0], "--initial-peers"),
        (JOIN_CODE_PREFIX, "cut short"),
        (JOIN_CODE_PREFIX + "abc", "cut short"),
        (JOIN_CODE_PREFIX + "abcdefgh" * 12, "cut short"),
        (JOIN_CODE_PREFIX + "abaaaaaa" * 12, "^the join code was mistyped; copy it again$"),
        (JOIN_CODE_PREFIX + "0189", "letters and the digits 2 to 7"),
        (JOIN_CODE_PREFIX + "käse", "letters and the digits 2 to 7"),
        (str(JoinCode(OWNER)) + "abcd", "text after the end"),
        (str(JoinCode(OWNER)) + str(JoinCode(OWNER)), "mistyped"),
        (JOIN_CODE_PREFIX + "ai" + str(JoinCode(OWNER))[8:], "version 2"),
        (JOIN_CODE_PREFIX + "a" * 5000, "too long"),
    ],
)
def test_what_is_no_code_is_called_what_it_is(text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=complaint) as caught:
        JoinCode.parse(text)

    assert "\n" not in str(caught.value)


def test_junk_raises_nothing_but_one_sentence() -> None:
    rng = random.Random(2)
    codes = [str(JoinCode(m, tuple(ADDRESSES[:3]))) for m in MEMBERSHIPS]
    for _ in range(1000):
        letters = list(rng.choice(codes))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(letters))
            what = rng.randrange(4)
            if what == 0:
                letters[place] = chr(rng.choice([rng.randrange(32, 127), rng.randrange(0x3000)]))
            elif what == 1:
                del letters[place:]
                letters.append("a")
            elif what == 2:
                letters.insert(place, rng.choice("abcdefgh234567= \t"))
            else:
                letters[place:place] = letters[:place]
        text = "".join(letters)
        with contextlib.suppress(UsageError):
            assert str(JoinCode.parse(text)) in codes


def test_contents_that_a_forger_signed_off_are_checked_all_the_same() -> None:
    """The checksum is no secret: anybody can make a code of any content."""
    rng = random.Random(3)
    for _ in range(1000):
        content = rng.randbytes(rng.randrange(120))
        text = _forge(rng.randrange(6), content)
        with contextlib.suppress(UsageError):
            assert len(JoinCode.parse(text).addresses) <= MAX_ADDRESSES


def test_more_addresses_than_a_code_holds_are_refused() -> None:
    with pytest.raises(UsageError, match="at most 8"):
        str(JoinCode(OWNER, (ADDRESSES[0],) * (MAX_ADDRESSES + 1)))
    with pytest.raises(UsageError, match="does not fit"):
        str(JoinCode(OWNER, ("/dns/" + "a" * 300,)))
    with pytest.raises(UsageError, match="more than 8"):
        JoinCode.parse(_forge(0, bytes(16) + b"\0\1/" * (MAX_ADDRESSES + 1)))


def _forge(kind: int, content: bytes) -> str:
    """Return a code of any content, with the right length and checksum."""
    packed = bytes((1, kind)) + (len(content) + 8).to_bytes(2, "big") + content
    packed += hashlib.sha256(b"shoal join code\0" + packed).digest()[:4]
    return JOIN_CODE_PREFIX + base64.b32encode(packed).decode().rstrip("=")


def test_join_code_in_place_of_an_address_is_told_where_it_belongs_and_not_shown() -> None:
    with pytest.raises(UsageError, match="--join") as refusal:
        PeerAddress.parse("shoal:aeaaagaaaa")
    assert "aeaaag" not in str(refusal.value)


def test_file_in_place_of_a_code_is_told_how_to_be_read() -> None:
    with pytest.raises(UsageError, match=r"read_text\(\)"):
        JoinCode.parse("@swarm.code")
