"""Private swarms in a real DHT: who finds whom, who is turned away, and what revoking does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from directory_processes import CLOCK, MODEL, identity_of, intrude, make_announcement, sign

from shoal.protocol.errors import DirectoryError, UsageError, WrongSwarmError
from shoal.protocol.membership.membership import Membership, Role, make_owner
from shoal.protocol.net.dht.hivemind_directory import HivemindDirectory

OWNER, STRANGER = make_owner(bytes(range(16))), make_owner(bytes(16))
SERVER, USER = OWNER.as_role(Role.SERVE), OWNER.as_role(Role.USE)


class Swarms:
    """Directories of one test; all are closed at its end."""

    def __init__(self) -> None:
        self._directories: list[HivemindDirectory] = []

    async def join(
        self,
        addresses: Sequence[str],
        membership: Membership | None,
        number: int | None = None,
    ) -> HivemindDirectory:
        """Join as the peer of that number, which announces itself, or as a reader."""
        identity = None if number is None else identity_of(number)
        options: dict[str, Any] = {"client_mode": number is None, "membership": membership}
        directory = await HivemindDirectory.join(
            addresses, identity=identity, clock=CLOCK, **options
        )
        self._directories.append(directory)
        if number is not None:
            await self.announce(directory, number)
        return directory

    async def announce(self, directory: HivemindDirectory, number: int) -> None:
        await directory.announce(sign(make_announcement(number), number))

    async def close(self, *directories: HivemindDirectory) -> None:
        for directory in directories or tuple(self._directories):
            await directory.close()


def run(story: Any) -> None:
    async def main() -> None:
        swarms = Swarms()
        try:
            await story(swarms)
        finally:
            await swarms.close()

    asyncio.run(main())


async def peers_found(directory: HivemindDirectory) -> set[str]:
    return {announcement.peer_id for announcement in await directory.lookup(MODEL)}


def ids(*numbers: int) -> set[str]:
    return {identity_of(number).peer_id for number in numbers}


@pytest.mark.slow
def test_members_find_each_other_and_others_are_told_that_they_are_none() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)
        await swarms.join(first.addresses, OWNER, 2)
        user = await swarms.join(first.addresses, USER)

        assert await peers_found(user) == ids(1, 2)
        with pytest.raises(WrongSwarmError, match=r"wrong secret: .* ask for a new code"):
            await swarms.join(first.addresses, STRANGER.as_role(Role.USE))
        with pytest.raises(WrongSwarmError, match=r"not a member: .* private swarm; ask"):
            await swarms.join(first.addresses, None)

    run(story)


@pytest.mark.slow
def test_stranger_who_joins_the_dht_all_the_same_finds_nobody_and_is_not_found() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)
        outsider = await HivemindDirectory.join([], identity=identity_of(3), clock=CLOCK)
        await intrude(outsider, first.addresses)
        try:
            await swarms.announce(outsider, 3)
            user = await swarms.join(first.addresses, USER)

            assert await peers_found(user) == ids(1)
            assert await peers_found(outsider) == ids(3)
        finally:
            await outsider.close()

    run(story)


@pytest.mark.slow
def test_newcomer_joins_through_whoever_of_a_code_is_left() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)
        second = await swarms.join(first.addresses, SERVER, 2)
        addresses = [*first.addresses, *second.addresses]
        await swarms.close(first)

        third = await swarms.join(addresses, SERVER, 3)
        user = await swarms.join(addresses, USER)

        assert ids(2, 3) <= await peers_found(user)
        assert ids(2, 3) <= await peers_found(third)

    run(story)


def test_user_is_told_that_serving_takes_another_code() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)
        with pytest.raises(UsageError, match="only allows using"):
            await swarms.join(first.addresses, USER, 2)

    run(story)


@pytest.mark.slow
def test_revoked_peer_disappears_though_the_owner_leaves() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)
        second = await swarms.join(first.addresses, SERVER, 2)
        owner = await swarms.join(first.addresses, OWNER)

        revoked = await owner.revoke([identity_of(2).peer_id])
        await swarms.close(owner)
        await swarms.announce(first, 1)  # hands the list on
        user = await swarms.join(first.addresses, USER)

        assert revoked.peer_ids == ids(2)
        assert await peers_found(user) == ids(1)
        await second.lookup(MODEL)
        with pytest.raises(DirectoryError, match="has revoked"):
            await swarms.announce(second, 2)

    run(story)


def test_only_the_owner_revokes() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], SERVER, 1)

        with pytest.raises(UsageError, match="owner's code"):
            await first.revoke([identity_of(1).peer_id])

    run(story)


@pytest.mark.slow
def test_public_swarm_is_learned_from_the_peer_that_one_joins_through() -> None:
    async def story(swarms: Swarms) -> None:
        first = await swarms.join([], None, 1)
        other = await swarms.join([], None, 2)
        reader = await swarms.join(first.addresses, None)

        assert reader.membership == first.membership != other.membership
        assert await peers_found(reader) == ids(1)
        with pytest.raises(WrongSwarmError, match="different swarms"):
            await swarms.join([*first.addresses, *other.addresses], None)

    run(story)
