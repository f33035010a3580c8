"""The adapters that clients have brought to a peer, for as long as those clients use them."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from ....protocol.errors import ErrorCode, RefusedError
from ....protocol.fair_share import BUSY_SECONDS, SharedBytes, Tenant, compute_share
from ....protocol.ids import AdapterId
from ....protocol.messages.adapters import KEEP_SECONDS, Manifest
from ....protocol.net.clock import Clock
from .adapter import Adapter
from .trained_adapter import TrainedAdapter

_KEEPS_NONE = (
    "this peer accepts no adapters: it has no memory for them (--adapter-memory); another peer "
    "must serve its blocks"
)

_TIMES_FREE = 3


@dataclass(eq=False)
class KeptAdapter:
    """One adapter, and its tenants. It counts while it is kept or used by a session or pass.

    `payer` is whose bytes it is: its tenant's until that one gives it up, then those of somebody
    who goes on using it.
    """

    name: AdapterId
    adapter: Adapter
    tenant: Tenant
    num_bytes: int
    used_at: float
    """When the tenant used it last, or published it again."""
    payer: Tenant = field(init=False)
    users: Counter[Tenant] = field(default_factory=Counter[Tenant])
    """Sessions, and passes that are not over."""
    is_given_up: bool = False
    trained: TrainedAdapter | None = None
    """The same one, where this peer is to train it."""
    manifest: Manifest | None = None
    files: Mapping[int, bytearray] = field(default_factory=dict[int, bytearray])
    """Of a publication that this peer holds for others: its leaves, which the matrices lie in."""
    until: float = math.inf
    """Of a copy that was fetched: until when it is known to be published."""

    def __post_init__(self) -> None:
        self.payer = self.tenant

    @property
    def is_fetched(self) -> bool:
        """Whether it came from another peer, and not from its publisher."""
        return self.until < math.inf


class AdapterStore:
    """Keeps adapters by their digest; a private one is found by whoever brought it alone.

    Their bytes are shared fairly between clients, from when the first one is announced. Of one that
    several have published, each has a copy to pay for, which nobody else keeps alive. A copy that
    was fetched belongs to the client that asked for it first.
    """

    on_lack: Callable[[AdapterId, Tenant], RefusedError]
    """Returns what to say to a client that names an adapter which is not here."""

    on_change: Callable[[], None]
    """Hears that other publications are held here now."""

    def __init__(self, clock: Clock, num_bytes: int) -> None:
        self.shared = SharedBytes(num_bytes, _TIMES_FREE)
        self._num_bytes = num_bytes
        self._clock = clock
        self._private: dict[tuple[AdapterId, Tenant], KeptAdapter] = {}
        self._published: dict[AdapterId, dict[Tenant, KeptAdapter]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False
        self.on_lack = lambda name, tenant: make_unknown(name)
        self.on_change = lambda: None

    def limit(self, num_bytes: int) -> None:
        """Take new adapters up to so many bytes from now on; those that are here stay."""
        self.shared.budget_bytes = self._num_bytes = num_bytes

    def __len__(self) -> int:
        return len(list(self._list()))

    def reserve(self, tenant: Tenant, num_bytes: int, replaces: AdapterId | None = None) -> None:
        """Count the bytes of an adapter that is about to come, and give up the one it replaces.

        The tenant may have as many as that frees, whoever else has come meanwhile: training would
        end in the middle. Passes and sessions go on with a private adapter that is given up, and it
        counts until they are over.

        Raises RefusedError with NO_ROOM_FOR_ADAPTER, and when to ask again if that may help; then
        the old one stays.
        """
        old = self._private.get((replaces, tenant)) if replaces else None
        num_freed = 0 if old is None or old.users else old.num_bytes
        most_bytes = compute_share(tenant, {}, self._num_bytes, _TIMES_FREE)
        if not most_bytes:
            raise RefusedError(ErrorCode.NO_ROOM_FOR_ADAPTER, _KEEPS_NONE)
        if num_bytes > most_bytes:
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                f"the adapter takes {_in_words(num_bytes)}, and this peer accepts at most "
                f"{_in_words(most_bytes)} per client; use a lower rank or fewer target modules",
            )
        num_more = num_bytes - num_freed
        if num_more > 0 and not self.shared.has_room_for(tenant, num_more):
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                self._describe_lack(tenant, num_bytes),
                BUSY_SECONDS,
            )
        if old is not None:
            self._forget(old)
        self.shared.count(tenant, num_bytes)

    def release(self, tenant: Tenant, num_bytes: int) -> None:
        """Count the bytes of one no longer that has not come."""
        self.shared.count(tenant, -num_bytes)

    def put(self, kept: KeptAdapter, is_published: bool) -> None:
        """Keep an adapter whose bytes are counted.

        Of two of one name and tenant the first one stays, unless that is a copy of a publication.
        """
        known = self._find_own(kept.name, kept.tenant, is_published)
        if known is not None and known.is_fetched:
            self._forget(known)
            known = None
        if known is not None or self._is_closed:
            self.release(kept.tenant, kept.num_bytes)
            if known is not None:
                known.used_at = self._clock.now()
        elif is_published:
            self._published.setdefault(kept.name, {})[kept.tenant] = kept
        else:
            self._private[kept.name, kept.tenant] = kept
        self._look_after()
        if kept.manifest is not None and not self._is_closed:
            self.on_change()

    def find(self, name: AdapterId, tenant: Tenant) -> KeptAdapter:
        """Return an adapter that a tenant may use, which its tenant uses from now on.

        Raises RefusedError with UNKNOWN_ADAPTER: nobody learns of those of others.
        """
        own = self._find_own(name, tenant, False) or self._find_own(name, tenant, True)
        if own is not None:
            own.used_at = self._clock.now()
            return own
        for kept in self._published.get(name, {}).values():
            return kept
        if not self._num_bytes:
            raise RefusedError(ErrorCode.UNKNOWN_ADAPTER, _KEEPS_NONE)
        raise self.on_lack(name, tenant)

    def find_held(self, name: AdapterId, tenant: Tenant) -> KeptAdapter:
        """Return a publication that this peer holds for others, which its publisher renews by this.

        Raises RefusedError with UNKNOWN_ADAPTER where it holds none.
        """
        copies = self._published.get(name, {})
        held = {one.tenant: one for one in copies.values() if one.manifest is not None}
        if not held:
            raise make_unknown(name)
        if tenant in held:
            held[tenant].used_at = self._clock.now()
        return held.get(tenant) or max(held.values(), key=lambda kept: kept.used_at)

    def count_seconds(self, kept: KeptAdapter) -> float:
        """Return for how long a publication stays here unless its publisher renews it."""
        if kept.users[kept.tenant]:
            return KEEP_SECONDS
        return max(0.0, kept.used_at + KEEP_SECONDS - self._clock.now())

    def list_held(self) -> list[AdapterId]:
        """Return the publications that this peer holds for others, the newest last."""
        return [
            name
            for name, copies in self._published.items()
            if any(kept.manifest is not None for kept in copies.values())
        ]

    def list_fetched(self) -> list[KeptAdapter]:
        """Return the copies of publications that other peers hold."""
        return [kept for kept in self._list() if kept.is_fetched]

    def note_published(self, kept: KeptAdapter, seconds: float) -> None:
        """Note for how long a copy is known to be published from now on."""
        kept.until = self._clock.now() + min(seconds, KEEP_SECONDS)
        self._expire()

    def has(self, name: AdapterId, tenant: Tenant, is_published: bool = False) -> bool:
        """Return whether a tenant has brought an adapter here, which it uses from now on then.

        A copy that was fetched for it does not count: it is served to no other peer.
        """
        kept = self._find_own(name, tenant, is_published)
        if kept is None or kept.is_fetched:
            return False
        kept.used_at = self._clock.now()
        return True

    def replace(
        self, name: AdapterId, new_name: AdapterId, tenant: Tenant, updated: TrainedAdapter
    ) -> None:
        """Let what an update has made of an adapter take its place.

        Raises RefusedError with NO_ROOM_FOR_ADAPTER, and keeps the old one, where passes hold on
        to that and there is no room for both.
        """
        if self.has(new_name, tenant):
            return
        num_bytes = self.find(name, tenant).num_bytes
        self.reserve(tenant, num_bytes, replaces=name)
        now = self._clock.now()
        kept = KeptAdapter(new_name, updated.adapter, tenant, num_bytes, now, trained=updated)
        self.put(kept, is_published=False)

    def withdraw(self, name: AdapterId, tenant: Tenant) -> bool:
        """Forget an adapter that its tenant withdraws, private or published; return if it was here.

        Passes and sessions that have it go on with it, on the account of one of them.
        """
        copies = [self._find_own(name, tenant, is_published) for is_published in (False, True)]
        found = [kept for kept in copies if kept is not None]
        for kept in found:
            self._forget(kept)
        return bool(found)

    def use(self, kept: KeptAdapter, user: Tenant) -> None:
        """Hold an adapter until `leave`."""
        if kept.is_given_up and not kept.users:  # since it was found
            kept.payer = user
            self.shared.count(user, kept.num_bytes)
        kept.users[user] += 1

    def leave(self, kept: KeptAdapter, user: Tenant) -> None:
        """Note that a session or a pass is over that had an adapter."""
        kept.users[user] -= 1
        if not kept.users[user]:
            del kept.users[user]
        if user == kept.tenant:
            kept.used_at = self._clock.now()
        if kept.is_given_up:
            self._settle(kept)

    def close(self) -> None:
        """Forget everything at once, but for what sessions and passes hold on to until they end.

        Nothing is kept here any more: the memory is for the next span.
        """
        self._is_closed = True
        for kept in list(self._list()):
            self._forget(kept)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _describe_lack(self, tenant: Tenant, num_bytes: int) -> str:
        """Return why there is no room for an adapter at present, and what makes some."""
        held_bytes, share_bytes = self.shared.find_share(tenant)
        said = f"this peer has no memory for an adapter of {_in_words(num_bytes)} at present: "
        if not held_bytes:
            return (
                f"{said}others leave you {_in_words(share_bytes)}; use a lower rank or fewer "
                "target modules"
            )
        return (
            f"{said}your adapters take {_in_words(held_bytes)} of your {_in_words(share_bytes)}; "
            "withdraw a published adapter, use a published one by its digest, which takes no "
            "further memory, or use a lower rank"
        )

    def _find_own(self, name: AdapterId, tenant: Tenant, is_published: bool) -> KeptAdapter | None:
        if is_published:
            return self._published.get(name, {}).get(tenant)
        return self._private.get((name, tenant))

    def _list(self) -> Iterator[KeptAdapter]:
        yield from self._private.values()
        for copies in self._published.values():
            yield from copies.values()

    def _forget(self, kept: KeptAdapter) -> None:
        """Let nobody find an adapter any more; it counts until nobody has it."""
        if self._private.get((kept.name, kept.tenant)) is kept:
            del self._private[kept.name, kept.tenant]
        else:
            copies = self._published[kept.name]
            del copies[kept.tenant]
            if not copies:
                del self._published[kept.name]
        kept.is_given_up = True
        self._settle(kept)
        if kept.manifest is not None and not self._is_closed:
            self.on_change()

    def _settle(self, kept: KeptAdapter) -> None:
        """Charge an adapter that was given up to one of its users; to nobody if it has none."""
        if kept.payer in kept.users:
            return
        self.release(kept.payer, kept.num_bytes)
        for user in kept.users:
            kept.payer = user
            self.shared.count(user, kept.num_bytes)
            return

    def _look_after(self) -> None:
        """Look when the next one may have to be forgotten."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ends = [self._find_end(kept) for kept in self._list()]
        if ends:
            seconds = max(0.0, min(ends) - self._clock.now())
            self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _find_end(self, kept: KeptAdapter) -> float:
        """Return when an adapter is forgotten that is not used, or renewed, from now on.

        By its tenant: what strangers do with it keeps nothing alive that somebody else pays for.
        """
        used_at = self._clock.now() if kept.users[kept.tenant] else kept.used_at
        return min(used_at + KEEP_SECONDS, kept.until)

    def _expire(self) -> None:
        """Forget what was not used for too long."""
        for kept in list(self._list()):
            if self._find_end(kept) <= self._clock.now():
                self._forget(kept)
        self._look_after()


def make_unknown(name: AdapterId, retry_after_seconds: float | None = None) -> RefusedError:
    """Return what to say to a client that names an adapter which is not here."""
    return RefusedError(
        ErrorCode.UNKNOWN_ADAPTER,
        f"this peer has no adapter {name.hex():.12}… that you may use: its digest is mistyped, it "
        "was withdrawn, or its publisher has ended. If it was published just now, try again",
        retry_after_seconds,
    )


def _in_words(num_bytes: int) -> str:
    """Return a size for people.

    >>> _in_words(4_995_281), _in_words(1000)
    ('4.8 MiB', '1.0 KiB')
    """
    unit, name = (2**20, "MiB") if num_bytes >= 2**20 else (2**10, "KiB")
    return f"{num_bytes / unit:,.1f} {name}"
