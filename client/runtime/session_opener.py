"""Opens the sessions of one client."""

from __future__ import annotations

import secrets
from collections.abc import Callable

from ...protocol.errors import UsageError
from ...protocol.ids import SessionId
from ...protocol.limits import MAX_SESSION_TOKENS
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.spans import Span
from ..adapters.adapter_versions import SentAdapter
from ..concurrency.tasks import Closer
from ..passes.pass_asking import PassAsker, SessionAdapter
from ..session.handoff import Mover
from ..session.session import RemoteSession
from ..session.standby import Standbys
from ..session.state import Routes, SessionContext, SessionFacts
from ..settings.config import ClientConfig, make_whole, read_kv_format


class SessionOpener:
    """Opens the sessions of a client, and holds what they share. Owned by the client's loop."""

    def __init__(
        self,
        swarm: Routes,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
        secret: bytes = b"",
    ) -> None:
        """Sessions of one `secret` count as those of one client."""
        self._swarm = swarm
        self._transport = transport
        self._clock = clock
        self._config = config
        self._secret = secret
        self._closer = Closer()

    def prepare(
        self,
        max_length: int,
        span: Span,
        hidden_size: int,
        kv_format: str | None,
        adapter: SentAdapter | None,
        asker: PassAsker,
    ) -> Callable[[], RemoteSession]:
        """Return what opens a session; its route is chosen with the first step.

        Raises UsageError for a length or a format that no session may have.
        """
        sent = None if adapter is None else SessionAdapter(adapter, asker)
        known_format = read_kv_format(self._config.kv_format if kv_format is None else kv_format)
        max_length = make_whole("max_length", max_length)
        if max_length < 1:
            raise UsageError(f"a session needs a length of at least one token, not {max_length}")
        if max_length > MAX_SESSION_TOKENS:
            raise UsageError(
                f"max_length is at most {MAX_SESSION_TOKENS} tokens, whatever the model, not "
                f"{max_length}"
            )

        def open_remote() -> RemoteSession:
            facts = SessionFacts(
                SessionId(secrets.token_bytes(16)),
                self._swarm.book.view.model_id,
                span,
                hidden_size,
                max_length,
                self._secret,
                known_format,
                sent,
            )
            return self.open(facts)

        return open_remote

    def open(self, facts: SessionFacts, kind: type[RemoteSession] = RemoteSession) -> RemoteSession:
        """Return a session with everything that works beside its steps."""
        state = SessionContext(
            facts, self._swarm, self._transport, self._clock, self._config, self._closer
        )
        session = kind(state)
        state.observers.append(Mover(session))
        if self._config.standby:
            standbys = Standbys(session)
            state.observers.append(standbys)
            session.rely_on(standbys)
        return session

    async def close(self) -> None:
        """Wait until every peer was told that its sessions are over."""
        await self._closer.finish()
