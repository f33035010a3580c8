"""The adapters that clients have brought to a peer, for as long as somebody uses them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from ..protocol.errors import ErrorCode, RefusedError
from ..protocol.fair_share import BUSY_SECONDS, Holder, compute_share
from ..protocol.ids import AdapterId
from ..protocol.net.clock import Clock
from .engine.adapters import Adapter
from .engine.trained_adapter import TrainedAdapter
from .shared_bytes import SharedBytes

KEEP_SECONDS = 300.0
"""How long an adapter is kept that nobody uses: whoever trains one uses it every few seconds."""

MAX_BYTES_OF_ADAPTERS = 2**29
"""Of all adapters together, as they were brought. One client may have half of that and a bit."""

_TIMES_FREE = 3

_Key = tuple[AdapterId, Holder | None]
"""Without a holder it is for everybody."""


@dataclass
class Kept:
    """One adapter, and who has brought it. It counts while `num_users` have it."""

    adapter: Adapter
    holder: Holder
    num_bytes: int
    used_at: float
    num_users: int = 0
    """Sessions, and passes that are not over."""
    is_given_up: bool = False
    trained: TrainedAdapter | None = None
    """The same one, where this peer is to train it."""


class AdapterShelf:
    """Keeps adapters by their digest; a private one is found by whoever brought it alone.

    Their bytes are shared fairly between clients, from when the first one is announced.
    """

    def __init__(self, clock: Clock) -> None:
        self.shared = SharedBytes(MAX_BYTES_OF_ADAPTERS, _TIMES_FREE)
        self._clock = clock
        self._kept: dict[_Key, Kept] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<AdapterShelf {len(self._kept)} kept, {self.shared!r}>"

    def __len__(self) -> int:
        return len(self._kept)

    def reserve(self, holder: Holder, num_bytes: int, num_freed: int = 0) -> None:
        """Count the bytes of an adapter that is about to come.

        Who has just freed as many may have them, whoever else has come meanwhile: training would
        end in the middle.

        Raises RefusedError with NO_ROOM_FOR_ADAPTER, and when to ask again if that may help.
        """
        if num_bytes > compute_share(holder, {}, MAX_BYTES_OF_ADAPTERS, _TIMES_FREE):
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                f"the adapter has {num_bytes} bytes, more than this peer keeps for one client",
            )
        if num_bytes > num_freed and not self.shared.has_room_for(holder, num_bytes):
            raise RefusedError(
                ErrorCode.NO_ROOM_FOR_ADAPTER,
                f"this peer has no room for {num_bytes} bytes of adapters of yours at present",
                BUSY_SECONDS,
            )
        self.shared.count(holder, num_bytes)

    def release(self, holder: Holder, num_bytes: int) -> None:
        """Count the bytes of one no longer that has not come."""
        self.shared.count(holder, -num_bytes)

    def put(
        self,
        name: AdapterId,
        adapter: Adapter | TrainedAdapter,
        holder: Holder,
        num_bytes: int,
        is_published: bool,
    ) -> None:
        """Keep an adapter whose bytes are counted; of two of one name the first one stays."""
        key = (name, None if is_published else holder)
        trained = None if isinstance(adapter, Adapter) else adapter
        adapter = adapter if isinstance(adapter, Adapter) else adapter.adapter
        known = self._kept.get(key)
        if known is not None:
            self.release(holder, num_bytes)
            known.used_at = self._clock.now()
            return
        self._kept[key] = Kept(adapter, holder, num_bytes, self._clock.now(), trained=trained)
        if self._timer is None:
            self._look_after(KEEP_SECONDS)

    def find(self, name: AdapterId, holder: Holder) -> Kept:
        """Return an adapter that a holder may use, which is used from now on.

        Raises RefusedError with UNKNOWN_ADAPTER: nobody learns of those of others.
        """
        kept = self._kept.get((name, holder)) or self._kept.get((name, None))
        if kept is None:
            raise RefusedError(
                ErrorCode.UNKNOWN_ADAPTER,
                f"this peer has no adapter {name.hex():.12}… of yours, and nobody published it "
                f"or used it in the last {KEEP_SECONDS / 60:.0f} minutes",
            )
        kept.used_at = self._clock.now()
        return kept

    def has(self, name: AdapterId, holder: Holder) -> bool:
        """Return whether a private adapter is here, which is used from now on then."""
        kept = self._kept.get((name, holder))
        if kept is not None:
            kept.used_at = self._clock.now()
        return kept is not None

    def replace(
        self, name: AdapterId, new_name: AdapterId, holder: Holder, updated: TrainedAdapter
    ) -> None:
        """Let what an update has made of an adapter take its place.

        Raises RefusedError with NO_ROOM_FOR_ADAPTER, and keeps the old one, where passes hold on
        to that and there is no room for both.
        """
        if self.has(new_name, holder):
            return
        old = self.find(name, holder)
        num_freed = 0 if old.num_users else old.num_bytes
        self.reserve(holder, old.num_bytes, num_freed)
        self.give_up(name, holder)
        self.put(new_name, updated, holder, old.num_bytes, is_published=False)

    def give_up(self, name: AdapterId, holder: Holder) -> int:
        """Forget a private adapter that its holder has replaced; return how many bytes are free.

        Passes and sessions that have it go on with it, and it counts until they are over.
        """
        kept = self._kept.pop((name, holder), None)
        if kept is None:
            return 0
        self._count_out(kept)
        return 0 if kept.num_users else kept.num_bytes

    def use(self, kept: Kept) -> None:
        """Let an adapter stay until `leave`; whoever holds on to one says so here."""
        kept.num_users += 1

    def leave(self, kept: Kept) -> None:
        """Note that a session or a pass is over that had an adapter."""
        kept.num_users -= 1
        kept.used_at = self._clock.now()
        if kept.is_given_up and not kept.num_users:
            self.release(kept.holder, kept.num_bytes)

    def _count_out(self, kept: Kept) -> None:
        """Count an adapter no longer: at once, or when the last one that has it is over."""
        kept.is_given_up = True
        if not kept.num_users:
            self.release(kept.holder, kept.num_bytes)

    def _look_after(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._expire)

    def _expire(self) -> None:
        """Forget what nobody has used for too long, and look again when the next one may be."""
        self._timer = None
        now = self._clock.now()
        for key, kept in list(self._kept.items()):
            if not kept.num_users and now - kept.used_at >= KEEP_SECONDS:
                del self._kept[key]
                self._count_out(kept)
        if self._kept:
            ages = [now - kept.used_at for kept in self._kept.values() if not kept.num_users]
            self._look_after(KEEP_SECONDS - max(ages, default=0.0))
