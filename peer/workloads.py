"""The kinds of work that a peer does, made anew for each span that it serves."""

from __future__ import annotations

import asyncio

from ..protocol.ids import PeerId
from ..protocol.net.clock import Clock
from .accounts.adapter_shelf import AdapterShelf
from .accounts.shared_bytes import SharedBytes
from .hosting.span_loader import ServedSpan, SpanLoader
from .passes.accounts import TrainingAccounts
from .passes.training import TrainingWorkload
from .pushing.neighbours import Neighbours
from .pushing.session_outputs import MAX_LOGGED_BYTES, PushResources
from .sessions.admission import Admission
from .sessions.held_session import SessionResources
from .sessions.session_prompts import MAX_PROMPT_BYTES
from .sessions.sessions import SessionWorkload
from .streams.conversation import StreamHost
from .streams.service import MAX_PENDING_BYTES, Service

_STREAMS_PER_SESSION = 4
"""Streams that a peer serves for each session it may hold: a session uses two, and some streams
have none yet. By default far fewer than the listener takes, so that a refusal can be told."""


def make_service(
    peer_id: PeerId, loader: SpanLoader, neighbours: Neighbours, clock: Clock, served: ServedSpan
) -> Service:
    """Return what serves streams from a span that is loaded."""
    engine, compute = served.engine, served.compute
    model, config = loader.model, loader.model.config
    changed = asyncio.Event()
    pending = SharedBytes(MAX_PENDING_BYTES)
    shelf = AdapterShelf(clock, model.adapter_bytes)
    host = StreamHost(
        peer_id=peer_id,
        model_id=model.model_id,
        span=served.span,
        clock=clock,
        idle_seconds=config.session_idle_seconds,
        pending=pending,
        parked=neighbours.parked,
    )
    for_sessions = SessionResources(
        model_id=model.model_id,
        max_sessions=config.max_sessions,
        shelf=shelf,
        pushing=PushResources(neighbours, pending, SharedBytes(MAX_LOGGED_BYTES, times_free=3)),
        prompts=SharedBytes(MAX_PROMPT_BYTES, times_free=3),
        note_change=changed.set,
    )
    for_training = TrainingAccounts(
        model.model_id, model.pass_bytes, shelf, model.read_free_bytes, changed.set
    )
    workloads = (
        SessionWorkload(Admission(engine, compute, clock, for_sessions)),
        TrainingWorkload(engine, compute, clock, for_training),
    )
    return Service(host, workloads, _STREAMS_PER_SESSION * config.max_sessions, changed)
