"""The kinds of work that a peer does, made anew for each span that it serves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ..protocol.net.clock import Clock
from ..protocol.net.network import Presence
from .engine.adapters.adapter_store import AdapterStore
from .hosting.span_loader import ServedSpan, SpanLoader
from .passes.pass_workload import AccountedWorkload, PassResources, PassWorkload
from .passes.publications import PublicationWorkload
from .passes.updates import UpdateStreamWork
from .passes.uploads import UploadStreamWork
from .pushing.connections import Connections
from .pushing.session_outputs import PushResources
from .sessions.admission import Admission, SessionResources
from .sessions.sessions import SessionWorkload
from .streams.record_workload import RecordWorkload
from .streams.service import STREAMS_PER_SESSION, Service
from .streams.stream_host import MAX_PENDING_BYTES, PendingBytes, ServiceCounts, StreamHost


def make_service(
    presence: Presence,
    loader: SpanLoader,
    connections: Connections,
    announce: Callable[[], None],
    clock: Clock,
    counts: ServiceCounts,
    served: ServedSpan,
) -> Service:
    """Return what serves streams from a span that is loaded; `announce` renews the announcement.

    What it does is added to the `counts`.
    """
    engine, compute = served.engine, served.compute
    model, config = loader.model, loader.model.config
    changed = asyncio.Event()
    pending = PendingBytes(MAX_PENDING_BYTES)
    adapter_store = AdapterStore(clock, model.adapter_bytes)
    host = StreamHost(
        peer_id=presence.identity.peer_id,
        model_id=model.model_id,
        span=served.span,
        clock=clock,
        idle_seconds=config.session_idle_seconds,
        pending=pending,
        parked=connections.parked,
        counts=counts,
    )
    for_sessions = SessionResources(
        model_id=model.model_id,
        max_sessions=config.max_sessions,
        adapter_store=adapter_store,
        pushing=PushResources(connections.push_links, pending),
        note_change=changed.set,
        counts=counts,
    )
    for_passes = PassResources(
        model_id=model.model_id,
        pass_bytes=model.pass_bytes,
        adapter_store=adapter_store,
        read_free_bytes=model.read_free_bytes,
        note_change=changed.set,
    )
    passes = PassWorkload(engine, compute, clock, for_passes)
    workloads = (
        passes,
        AccountedWorkload(passes, UploadStreamWork),
        AccountedWorkload(passes, UpdateStreamWork),
        PublicationWorkload(passes, presence, announce),
        SessionWorkload(Admission(engine, compute, clock, for_sessions)),
        RecordWorkload(presence, model.model_id, clock),
    )
    service = Service(host, workloads, STREAMS_PER_SESSION * config.max_sessions, changed)
    if model.has_new_limits:  # the blocks may have been loaded under others
        service.apply_limits(model.limits)
    return service
