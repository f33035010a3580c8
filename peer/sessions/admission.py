"""The sessions of a peer: opened at once, after a wait, or not at all; and closed."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from ...protocol.errors import CacheFullError, ErrorCode, LocalProtocolError, RefusedError
from ...protocol.fair_share import SharedBytes, Tenant, check_share, may_displace
from ...protocol.ids import ModelId, SessionId
from ...protocol.messages.session import Open
from ...protocol.net.clock import Clock
from ...protocol.session.session_state import SessionState
from ..engine.adapters.adapter_store import AdapterStore, KeptAdapter
from ..engine.cache.kv_cache import IDLE_SECONDS, KVCachePool, PrefixCopy, SessionCache
from ..engine.compute_thread import ComputeThread
from ..engine.engine import Engine
from ..pushing.session_outputs import PushResources, SessionOutputs
from ..streams.stream_host import Limits, ServiceCounts
from .held_session import HeldSession

_logger = logging.getLogger(__name__)

_LONGEST_WAIT_SECONDS = 300.0
"""The longest wait, whatever a client asks for; it may ask again."""

_LOOK_AGAIN_SECONDS = 1.0
"""How often a waiter looks for sessions that have become idle; that makes no other sign."""

_SMOOTHING = 0.1

MAX_PROMPT_BYTES = 2**28
"""Deep prompts of all sessions."""

Post = Callable[[bytes], None]
"""Sends a frame to the client of a session."""

_TEMPORARY_CODES = frozenset({ErrorCode.BUSY, ErrorCode.CACHE_FULL, ErrorCode.UNKNOWN_ADAPTER})


@dataclass(eq=False)
class SessionResources:
    """Resources that the sessions of a peer share with each other and with its other workloads."""

    model_id: ModelId
    max_sessions: int
    adapter_store: AdapterStore
    pushing: PushResources
    note_change: Callable[[], None]
    """To be called when a session is over, or does not wait any more."""
    counts: ServiceCounts = field(default_factory=ServiceCounts)
    prompts: SharedBytes = field(
        default_factory=lambda: SharedBytes(MAX_PROMPT_BYTES, 3, "deep prompts")
    )


class Admission:
    """Opens and closes sessions, and keeps clients that wait for one in order of arrival.

    Those that wait are woken before a new client is heard, so nobody is overtaken except by clients
    that hold less than their share.
    """

    def __init__(
        self, engine: Engine, compute: ComputeThread, clock: Clock, resources: SessionResources
    ) -> None:
        self.sessions: dict[SessionId, HeldSession] = {}
        self.is_draining = False
        self.engine = engine
        self.compute = compute
        self.clock = clock
        self.resources = resources
        self._opening: dict[SessionId, Tenant] = {}
        self._waiting: dict[asyncio.Event, Tenant] = {}
        self._copying = asyncio.Lock()  # which is taken in order of arrival
        self._lifetime_seconds: float | None = None

    @property
    def num_waiting(self) -> int:
        """How many sessions wait for room."""
        return len(self._waiting)

    @property
    def num_opening(self) -> int:
        """How many sessions are being opened right now."""
        return len(self._opening)

    def close(self, session: SessionId, held: HeldSession) -> None:
        """Drop what a session still waits for and free its cache, unless that was done.

        Another session may have its id by now: that one stays.
        """
        if self.sessions.get(session) is not held:
            return
        del self.sessions[session]
        held.outputs.close()
        if held.adapter is not None:
            self.resources.adapter_store.leave(held.adapter, held.tenant)
        self.resources.prompts.count(held.tenant, -held.num_prompt_bytes)
        for future in held.cache.running:
            future.cancel()
        closing = self.compute.call(partial(_close, held.cache, self.engine.pool))
        closing.add_done_callback(lambda _: self._note_closed(held))
        self.resources.note_change()

    def _note_closed(self, held: HeldSession) -> None:
        """Note how long a session was held, and let waiting clients try again."""
        seconds = self.clock.now() - held.opened_at
        average = self._lifetime_seconds
        self._lifetime_seconds = (
            seconds if average is None else average + _SMOOTHING * (seconds - average)
        )
        self.look_again()

    def look_again(self) -> None:
        """Wake all that wait, in their order."""
        for waiter in self._waiting:
            waiter.set()

    def limit(self, limits: Limits) -> None:
        """Hold at most so many sessions, with so much memory; those that wait may try again."""
        self.resources.max_sessions = limits.max_sessions
        limiting = self.compute.call(partial(self.engine.pool.limit, limits.kv_bytes))
        limiting.add_done_callback(lambda _: self.look_again())

    def may_wait(self, tenant: Tenant) -> bool:
        """Return whether a tenant may have one more session wait: each gets its share."""
        try:
            most = self.resources.max_sessions
            check_share(tenant, list(self._waiting.values()), most, "waiting ones")
        except RefusedError:
            return False
        return True

    async def open(self, message: Open, tenant: Tenant, post: Post) -> tuple[HeldSession, int]:
        """Hold a session; return it and how many more tokens its tenant may have.

        `post` is how the session says what it was not asked.

        Raises RefusedError; one that may pass says in `retry_after_seconds` when to ask again.
        """
        try:
            return await self._open(message, tenant, post)
        except RefusedError as refusal:
            if not _may_pass(refusal) or refusal.code is ErrorCode.UNKNOWN_ADAPTER:
                raise  # an adapter that is being fetched does not wait for a session to end
            raise _with_retry(refusal, self.estimate_wait_seconds()) from refusal

    async def wait(self, message: Open, tenant: Tenant, post: Post) -> tuple[HeldSession, int]:
        """Hold a session as soon as there is room, within the time that the message allows.

        Returns, and raises, what `open` does.
        """
        clock = self.clock
        deadline = clock.now() + min(message.max_wait_seconds, _LONGEST_WAIT_SECONDS)
        woken = asyncio.Event()
        self._waiting[woken] = tenant
        try:
            while (seconds := deadline - clock.now()) > 0:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(seconds, _LOOK_AGAIN_SECONDS)):
                        await woken.wait()
                woken.clear()
                with contextlib.suppress(_StillFullError):
                    return await self._try_again(message, tenant, post)
        finally:
            del self._waiting[woken]
            self.resources.note_change()
        return await self.open(message, tenant, post)

    def estimate_wait_seconds(self) -> float:
        """Estimate how long one more session would have to wait.

        Sessions that live T seconds end every T/n seconds where there are n of them (Little's law).
        """
        now = self.clock.now()
        ages = [now - held.opened_at for held in self.sessions.values()]
        lifetime_seconds = self._lifetime_seconds
        if lifetime_seconds is None:
            lifetime_seconds = sum(ages) / len(ages) if ages else 0.0
        num_before = len(self._waiting) + 1
        return max(_LOOK_AGAIN_SECONDS, lifetime_seconds * num_before / max(1, len(ages)))

    async def _try_again(
        self, message: Open, tenant: Tenant, post: Post
    ) -> tuple[HeldSession, int]:
        try:
            return await self._open(message, tenant, post)
        except RefusedError as refusal:
            if _may_pass(refusal):
                raise _StillFullError from refusal
            raise

    async def _open(self, message: Open, tenant: Tenant, post: Post) -> tuple[HeldSession, int]:
        self.check(message)
        parent = self._find_parent(message, tenant)
        adapter = self._find_adapter(message, tenant, parent)
        if parent is not None and parent.adapter is not adapter:
            detail = "a fork must use the adapter of its parent session"
            raise RefusedError(ErrorCode.BAD_VALUES, detail)
        self._make_room_for(tenant)
        self._opening[message.session] = tenant
        try:
            cache, free_tokens = await self._open_cache(message, tenant, parent)
            if self.is_draining:  # by now; nobody would tell the client to leave again
                self.compute.post(cache.close)
                self.check(message)
        finally:
            del self._opening[message.session]
            self.resources.note_change()
        state = SessionState(
            message.num_rows, message.max_tokens, message.epoch, message.prefix_tokens
        )
        outputs = SessionOutputs(message.session, tenant, self.resources.pushing, post)
        held = HeldSession(
            state, cache, message.dtype, self.clock.now(), tenant, outputs,
            message.capability, adapter,
        )  # fmt: skip
        if adapter is not None:
            self.resources.adapter_store.use(adapter, tenant)
        self.sessions[message.session] = held
        self.resources.counts.num_opened += 1
        if message.next is not None:
            log = None if parent is None else parent.outputs.fork_log(message.prefix_tokens)
            outputs.open(message.next, log, message.prefix_tokens)
        return held, free_tokens

    def check(self, message: Open) -> None:
        """Raise RefusedError for what this peer can never open, or not any more."""
        engine = self.engine
        if self.is_draining:
            raise RefusedError(ErrorCode.DRAINING, "the peer is about to leave")
        if message.model_id != self.resources.model_id:
            raise RefusedError(ErrorCode.WRONG_MODEL, "the peer serves another model")
        if not engine.span.covers(message.span):
            detail = f"the peer serves blocks {engine.span}, not {message.span}"
            raise RefusedError(ErrorCode.WRONG_SPAN, detail)
        if message.max_tokens > engine.spec.max_positions:
            detail = (
                f"{message.max_tokens} tokens, the model's limit is {engine.spec.max_positions}"
            )
            raise RefusedError(ErrorCode.TOO_LONG, detail)
        engine.pool.check_can_hold(
            message.num_rows, message.max_tokens, message.span, message.kv_format
        )
        if message.session in self.sessions or message.session in self._opening:
            raise RefusedError(ErrorCode.BAD_FRAME, "the session is open already")

    def _find_adapter(
        self, message: Open, tenant: Tenant, parent: HeldSession | None
    ) -> KeptAdapter | None:
        """Return the adapter of a session; a fork has that of its parent, forgotten or not."""
        if not message.adapter:
            return None
        inherited = None if parent is None else parent.adapter
        if inherited is not None and inherited.name == message.adapter:
            return inherited
        return self.resources.adapter_store.find(message.adapter, tenant)

    def _find_parent(self, message: Open, tenant: Tenant) -> HeldSession | None:
        """Return the session whose prefix is asked for; nobody learns of those of others."""
        if message.parent is None:
            return None
        parent = self.sessions.get(message.parent)
        if parent is None or parent.tenant != tenant:
            detail = "the parent session is not open at this peer"
            raise RefusedError(ErrorCode.UNKNOWN_SESSION, detail)
        parent.used_at = self.clock.now()
        parent.cache.touch()
        return parent

    def _make_room_for(self, tenant: Tenant) -> None:
        """See that `tenant` may have one more session, if need be in place of an idle one."""
        while True:
            tenants = [*self._opening.values()]
            # Those whose pages were taken while they were idle only wait to hear of it.
            sessions = self.sessions.values()
            tenants += [held.tenant for held in sessions if held.cache.is_open]
            try:
                most = self.resources.max_sessions
                return check_share(tenant, tenants, most, "sessions")
            except RefusedError:
                session = self._find_idle(tenant, Counter(tenants))
                if session is None:
                    raise
                self.close(session, self.sessions[session])

    def _find_idle(self, tenant: Tenant, num_held: Counter[Tenant]) -> SessionId | None:
        """Return the session that is idle for longest, of those that `tenant` may displace."""
        idle_since = self.clock.now() - IDLE_SECONDS
        candidates = {
            session: held.used_at
            for session, held in self.sessions.items()
            if held.used_at <= idle_since
            and not held.cache.running
            and may_displace(tenant, held.tenant, num_held, 1)
        }
        return min(candidates, key=candidates.__getitem__, default=None)

    async def _open_cache(
        self, message: Open, tenant: Tenant, parent: HeldSession | None
    ) -> tuple[SessionCache, int]:
        """Return a new cache and how many tokens its tenant may have beside it."""
        compute, engine = self.compute, self.engine

        def open_on_thread() -> _OpenedCache:
            kv_format = message.kv_format
            cache = engine.pool.open(
                message.num_rows, message.max_tokens, message.span, tenant, kv_format
            )
            copy = None if parent is None else _begin_copy(parent.cache, cache, message)
            return _OpenedCache(cache, copy, engine.pool.count_free_tokens(tenant, kv_format))

        opening = compute.call(open_on_thread)
        try:
            opened = await asyncio.shield(opening)
            if opened.copy is not None:
                await self._finish_copy(opened.copy)
            return opened.cache, opened.free_tokens
        except BaseException as error:
            # Also when the stream broke while the cache was being opened: nobody will hold it.
            opening.add_done_callback(lambda done: _discard_cache(done, compute))
            if isinstance(error, RefusedError) or not isinstance(error, Exception):
                raise
            _logger.exception("a session could not be opened")
            raise RefusedError(ErrorCode.INTERNAL, "the peer failed to open a session") from error

    async def _finish_copy(self, copy: PrefixCopy) -> None:
        """Bring the copy of a prefix to its end, a piece at a time: forks take turns, and steps go
        in between. Raises RefusedError when the parent does not last as long.

        A caller that is cancelled, or gets an error, closes the cache behind it on the compute
        thread: a piece may be on its way into it.
        """
        is_done = False
        while not is_done:
            async with self._copying:
                is_done = await self.compute.call(copy.advance)


@dataclass(frozen=True, slots=True)
class _OpenedCache:
    """A new cache, and what is still to be copied into it."""

    cache: SessionCache
    copy: PrefixCopy | None
    free_tokens: int


class _StillFullError(Exception):
    """There is still no room for a session that waits."""


def _may_pass(refusal: RefusedError) -> bool:
    return refusal.code in _TEMPORARY_CODES and refusal.retry_after_seconds is not None


def _with_retry(refusal: RefusedError, seconds: float) -> RefusedError:
    if isinstance(refusal, CacheFullError):
        return CacheFullError(str(refusal), seconds)
    return RefusedError(refusal.code, str(refusal), seconds)


def _begin_copy(parent: SessionCache, cache: SessionCache, message: Open) -> PrefixCopy:
    """Let a new cache begin with the prefix of its parent, or close it again."""
    try:
        return cache.begin_with(parent, message.prefix_tokens)
    except BaseException:
        cache.close()
        raise


def _discard_cache(opening: asyncio.Future[_OpenedCache], compute: ComputeThread) -> None:
    if not opening.cancelled() and opening.exception() is None:
        compute.post(opening.result().cache.close)


def _close(cache: SessionCache, pool: KVCachePool) -> None:
    """Close a cache. Where it was the last one, say loudly if the account does not add up."""
    cache.close()
    if not pool.num_sessions:
        try:
            pool.check_integrity()
        except LocalProtocolError:
            _logger.exception("the KV memory accounting is wrong; this is a bug in shoal")
