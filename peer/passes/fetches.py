"""Fetches published adapters from the peers that hold them, for clients that name them.

A copy that was fetched is for everybody at this peer, and served to no other peer. It is forgotten
when no holder says any more that it is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from ...protocol.errors import RefusedError, RemoteProtocolError, UnavailableError
from ...protocol.fair_share import BUSY_SECONDS, Tenant, check_share
from ...protocol.ids import AdapterId, PeerId
from ...protocol.messages.adapters import KEEP_SECONDS, Manifest
from ...protocol.net.clock import Clock
from ...protocol.net.tasks import cancel_all
from ...protocol.records.announcements import Announcement
from ...protocol.spans import Span
from ..engine.adapters.adapter import Adapter
from ..engine.adapters.adapter_file import read_leaves
from ..engine.adapters.adapter_store import AdapterStore, KeptAdapter, make_unknown
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from .holders import Holders

_logger = logging.getLogger(__name__)

_MAX_FETCHES = 8
"""Fetches under way at a time; a single address gets half of them and one."""

_MAX_REMEMBERED = 256
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0
"""An adapter that was just published may not be announced yet."""

_AGAIN_SECONDS = 2.0
"""How long to say why an adapter was not fetched before that is tried again."""

_ASK_AGAIN_SECONDS = 1.0
"""When to ask again for what is being fetched."""

_CONFIRM_SECONDS = 60.0
"""How often to confirm that a copy is still published: so long it may outlive a withdrawal."""

ReadLeaves = Callable[[bytes, Mapping[int, bytearray]], Awaitable[Adapter]]
"""Makes an adapter of its configuration and the leaves of blocks; raises RefusedError."""


@dataclass(eq=False)
class _Fetch:
    """One adapter on its way for one client; `error` is why it did not come."""

    task: asyncio.Task[None]
    address: str
    error: RefusedError | None = None
    again_at: float = 0.0


@dataclass(eq=False)
class _Found:
    """The leaves of an adapter that have arrived, and the bytes counted for them."""

    manifest: Manifest | None = None
    num_bytes: int = 0
    files: dict[int, bytearray] = field(default_factory=dict[int, bytearray])
    sources: set[PeerId] = field(default_factory=set[PeerId])
    until: float = float("inf")


class Fetches:
    """The published adapters that one span fetches, and has fetched. Close it with the span."""

    def __init__(
        self,
        holders: Holders,
        adapter_store: AdapterStore,
        span: Span,
        read: ReadLeaves,
        clock: Clock,
    ) -> None:
        self._holders = holders
        self._store = adapter_store
        self._span = span
        self._read = read
        self._clock = clock
        self._fetches: dict[tuple[AdapterId, Tenant], _Fetch] = {}
        self._confirming: asyncio.Task[None] | None = None
        self._sources: dict[AdapterId, set[PeerId]] = {}
        adapter_store.on_lack = self.request

    def request(self, name: AdapterId, tenant: Tenant) -> RefusedError:
        """Begin to fetch an adapter for a client that pays for it; return what to say meanwhile."""
        wait = make_unknown(name, _ASK_AGAIN_SECONDS)
        known = self._fetches.get((name, tenant))
        if known is not None and not (known.task.done() and self._clock.now() >= known.again_at):
            return known.error or wait
        running = {key: one for key, one in self._fetches.items() if not one.task.done()}
        if any(other == name for other, _ in running):
            return wait
        try:
            addresses = [one.address for one in running.values()]
            check_share(tenant.address, addresses, _MAX_FETCHES, "adapters to fetch")
        except RefusedError:
            return make_unknown(name, BUSY_SECONDS)
        task = asyncio.create_task(self._run(name, tenant))
        task.add_done_callback(_log_failure)
        self._fetches.pop((name, tenant), None)
        self._fetches[name, tenant] = _Fetch(task, tenant.address)
        over = [key for key, one in self._fetches.items() if one.task.done()]
        for key in over[: max(0, len(self._fetches) - _MAX_REMEMBERED)]:
            del self._fetches[key]
        return wait

    async def close(self) -> None:
        """Fetch nothing any more."""
        tasks = [fetch.task for fetch in self._fetches.values()]
        await cancel_all(tasks if self._confirming is None else [*tasks, self._confirming])

    async def _run(self, name: AdapterId, tenant: Tenant) -> None:
        fetch = self._fetches[name, tenant]
        try:
            await self._fetch(name, tenant)
        except RefusedError as error:
            fetch.error, fetch.again_at = error, self._clock.now() + _AGAIN_SECONDS
        else:
            del self._fetches[name, tenant]
            if self._confirming is None or self._confirming.done():
                self._confirming = asyncio.create_task(self._confirm_all())
                self._confirming.add_done_callback(_log_failure)

    async def _fetch(self, name: AdapterId, tenant: Tenant) -> None:
        """Fetch an adapter, and keep it. Raises RefusedError if there is none, or no room."""
        found = _Found()
        try:
            for attempt in range(_ATTEMPTS):
                if attempt:
                    await asyncio.sleep(_PAUSE_SECONDS)
                for peer in await self._holders.list_holders(name, self._span):
                    if self._list_missing(found) != []:
                        await self._fetch_from(peer, name, tenant, found)
                if self._list_missing(found) == []:
                    break
            if found.manifest is None or self._list_missing(found):
                raise make_unknown(name)
            adapter = await self._read(found.manifest.config, found.files)
        except BaseException:
            self._store.release(tenant, found.num_bytes)
            raise
        now = self._clock.now()
        kept = KeptAdapter(name, adapter, tenant, found.num_bytes, now, until=found.until)
        self._store.put(kept, is_published=True)
        self._sources[name] = found.sources

    async def _fetch_from(
        self, peer: Announcement, name: AdapterId, tenant: Tenant, found: _Found
    ) -> None:
        """Fetch from one peer what is missing; nothing changes if it does not have that."""
        span = self._span
        if missing := self._list_missing(found):
            span = Span(missing[0], missing[-1] + 1)
        wanted = span.overlap(peer.span)
        if wanted is None:
            if found.manifest is not None:
                return
            wanted = span  # nothing may be missing: the manifest says so

        def charge(manifest: Manifest) -> None:
            if found.manifest is None:
                num_bytes = manifest.num_bytes + manifest.count_bytes(self._span)
                self._store.reserve(tenant, num_bytes)
                found.manifest, found.num_bytes = manifest, num_bytes

        try:
            leaves = await self._holders.fetch(peer, name, wanted, charge)
        except (UnavailableError, RemoteProtocolError) as error:
            _logger.info("peer …%s does not serve an adapter: %s", peer.peer_id[-6:], error)
            return
        found.files.update(leaves.files)
        found.sources.add(peer.peer_id)
        until = self._clock.now() + min(leaves.keep_seconds, KEEP_SECONDS)
        found.until = min(found.until, until)

    def _list_missing(self, found: _Found) -> list[int] | None:
        """Return the blocks whose leaves have not come; None while that is not known."""
        if found.manifest is None:
            return None
        leaves = found.manifest.select(self._span)
        return [leaf.block for leaf in leaves if leaf.block not in found.files]

    async def _confirm_all(self) -> None:
        """Confirm again and again that copies are still published, as long as there are any."""
        while copies := self._store.list_fetched():
            self._sources = {kept.name: self._sources.get(kept.name, set()) for kept in copies}
            await asyncio.sleep(_CONFIRM_SECONDS)
            await asyncio.gather(*map(self._confirm, self._store.list_fetched()))

    async def _confirm(self, kept: KeptAdapter) -> None:
        known = self._sources.get(kept.name, ())
        seconds = await self._holders.fetch_keep_seconds(kept.name, self._span, known)
        if seconds is not None and not kept.is_given_up:
            self._store.note_published(kept, seconds)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _logger.error("an adapter could not be fetched: %r", error)


async def read_published(
    engine: Engine, compute: ComputeThread, config: bytes, files: Mapping[int, bytearray]
) -> Adapter:
    """Return the adapter of leaves, as the engine needs it; raises RefusedError."""
    adapter = await asyncio.to_thread(read_leaves, config, files, engine.spec)
    return await compute.call(lambda: adapter.move_to(engine.device.torch_device))
