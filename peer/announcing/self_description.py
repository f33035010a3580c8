"""The content of a peer's announcements: its span, its speeds and its present load."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...kernels.linear.quantize import WeightFormat
from ...protocol.endpoints import Endpoint, is_local_endpoint
from ...protocol.errors import DirectoryError
from ...protocol.ids import ModelId
from ...protocol.limits import MAX_LOCAL_ENDPOINTS
from ...protocol.net.network import Presence
from ...protocol.records.announcements import (
    Announcement,
    ComputeDtype,
    PeerState,
    is_model_name,
)
from ...protocol.spans import Span
from ...protocol.versions import MAX_VERSION, MIN_VERSION, SOFTWARE
from ..engine.devices.device import COMPUTE_DTYPES
from ..process.background import LoopLag
from ..process.config import PeerConfig, PeerEvent, Report
from .announcer import LIFETIME_PERIODS, Announcer

_logger = logging.getLogger(__name__)

_MEASURED = ("queue_seconds", "pass_queue_seconds", "loaded_decode_steps_per_second")

_LOOK_FOR_RELAYS_SECONDS = 3.0
_LEAST_ADDRESSES_SECONDS = 10.0
"""How often to see whether relays are there. A step of a client waits for twenty seconds."""

Describe = Callable[[Announcement], Announcement]
"""Adds to an announcement of the peer what one part of it knows."""

_DTYPE_NAMES: dict[torch.dtype, ComputeDtype] = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}


def make_template(
    config: PeerConfig,
    model_id: ModelId,
    num_blocks: int,
    presence: Presence,
    block_bytes: int = 0,
) -> Announcement:
    """Return the announcement without what changes; of its dates only the lifetime counts.

    The span is all blocks, until one is planned or served.
    Of kernels it says nothing: which are fastest is measured with the threads that the engine gets.
    """
    weights = WeightFormat(config.weights)
    folder = Path(config.model).expanduser()
    # Of a path only the last part is told: the rest is nobody's business.
    model_name = folder.resolve().name if folder.is_dir() else config.model
    return Announcement(
        model_name=model_name if is_model_name(model_name) else "",
        peer_id=presence.identity.peer_id,
        model_id=model_id,
        num_blocks=num_blocks,
        span=Span(0, num_blocks),
        state=PeerState.JOINING,
        **describe_place(presence),
        min_version=MIN_VERSION,
        max_version=MAX_VERSION,
        software=SOFTWARE,
        weights=weights.value,
        compute_dtype=_DTYPE_NAMES[COMPUTE_DTYPES[weights]],
        sequence=0,
        issued_at=0.0,
        expires_at=LIFETIME_PERIODS * config.announce_period_seconds,
        takes_passes=config.pass_bytes != 0,
        name=config.name,
        block_bytes=block_bytes,
    )


def describe_place(presence: Presence) -> dict[str, Any]:
    """Return where others reach the peer: behind relays it is dialled by its own network only."""
    endpoints, relays = tuple(presence.addresses.endpoints), tuple(presence.relays)
    local = filter(is_local_endpoint, endpoints if relays else ())
    return {
        "endpoints": () if relays else endpoints,
        "local_endpoints": tuple(local)[:MAX_LOCAL_ENDPOINTS],
        "relays": relays,
        "relay_port": presence.addresses.relay_port,
        "directory_port": presence.directory_port,
    }


class SelfDescription:
    """Makes announcements from a template; adds measurements once there are any."""

    def __init__(
        self,
        template: Announcement,
        lag: LoopLag,
        work: Sequence[float],
        describe_connections: Sequence[Describe] = (),
    ) -> None:
        """Take everything but state, sequence, load and dates from `template`.

        An announcement lives as long as the template does. `work` is what a step costs in each
        block of the model. `describe_connections` add how the peer reaches others.
        """
        self._template = template
        self._describe_connections = describe_connections
        self._lifetime_seconds = template.expires_at - template.issued_at
        self._lag = lag
        self._work = work
        self._describe_load: Sequence[Describe] = ()
        self.planned: Span | None = None
        """The span that the peer intends to serve, told with what is known of the speed; None: it
        stays."""

    @property
    def model_id(self) -> ModelId:
        """The model whose blocks are served."""
        return self._template.model_id

    def begin_serving(
        self,
        span: Span,
        kernels: str,
        device: str,
        decode_steps_per_second: float,
        prefill_tokens_per_second: float,
        describe_load: Sequence[Describe],
    ) -> None:
        """From now on tell what is served, how fast, and the load that `describe_load` add."""
        self.planned = None
        self._template = replace(self._template, span=span, kernels=kernels, device=device)
        self.change_speed(decode_steps_per_second, prefill_tokens_per_second)
        self._describe_load = describe_load

    def change_speed(
        self, decode_steps_per_second: float, prefill_tokens_per_second: float
    ) -> None:
        """From now on tell another speed of what is served."""
        self._template = replace(
            self._template,
            decode_steps_per_second=_round(decode_steps_per_second),
            prefill_tokens_per_second=_round(prefill_tokens_per_second),
        )

    @property
    def endpoint(self) -> Endpoint:
        """Where others reach the peer first."""
        return self._template.all_endpoints[0]

    def move(self, presence: Presence) -> None:
        """From now on tell where others reach the peer now."""
        self._template = replace(self._template, **describe_place(presence))

    def end_serving(self) -> None:
        """From now on tell of no load: there is nothing that has one."""
        self._describe_load = ()

    def describe(self, state: PeerState, sequence: int, now: float) -> Announcement:
        """Return the announcement of this moment; `now` is wall seconds."""
        now = round(now, 3)
        announcement = replace(
            self._template if self.planned is None else self._move(self.planned),
            state=state,
            sequence=sequence,
            issued_at=now,
            expires_at=now + self._lifetime_seconds,
            queue_seconds=self._lag.mean_seconds,
        )
        for describe in self._describe_connections:
            announcement = describe(announcement)
        # A peer that leaves has no load to tell.
        for describe in self._describe_load if state is not PeerState.OFFLINE else ():
            announcement = describe(announcement)
        measured = {name: getattr(announcement, name) for name in _MEASURED}
        rounded = {name: _round(number) for name, number in measured.items() if number is not None}
        return replace(announcement, **rounded)

    def _move(self, span: Span) -> Announcement:
        """Return what the peer would say at another span, given the speed at this one."""
        template = self._template
        ratio = self._sum_work(template.span) / self._sum_work(span)
        decode, prefill = template.decode_steps_per_second, template.prefill_tokens_per_second
        return replace(
            template,
            span=span,
            decode_steps_per_second=None if decode is None else ratio * decode,
            prefill_tokens_per_second=None if prefill is None else ratio * prefill,
        )

    def _sum_work(self, span: Span) -> float:
        return sum(self._work[span.start : span.stop])


def _round(number: float) -> float:
    """Return a measured number as it is announced: the other digits are noise, and bytes."""
    return float(f"{number:.4g}")


async def watch_relays(
    presence: Presence,
    model_id: ModelId,
    description: SelfDescription,
    announcer: Announcer,
    report: Report,
) -> None:
    """See to it that relays carry streams to us; announce and report the new ones (`relayed`)."""
    while True:
        try:
            if await presence.renew_relays(model_id):
                description.move(presence)
                announcer.renew_now()
                report(PeerEvent("relayed", {"relays": [str(relay) for relay in presence.relays]}))
        except DirectoryError as error:
            _logger.warning("could not renew the relays of this peer: %s", error)
        await asyncio.sleep(_LOOK_FOR_RELAYS_SECONDS)


async def watch_addresses(
    presence: Presence, description: SelfDescription, announcer: Announcer, report: Report
) -> None:
    """Look again and again where others reach us; announce and report changes (`addresses`).

    A machine may start before its network, and change it while it runs.
    """
    while True:
        await asyncio.sleep(max(announcer.period_seconds, _LEAST_ADDRESSES_SECONDS))
        before = presence.addresses
        if await presence.renew_addresses():
            description.move(presence)
            announcer.renew_now()
        facts = presence.addresses.facts
        changed = {name for name in facts if facts[name] != before.facts.get(name)}
        if changed & {"endpoints", "reach"} and not presence.relays:
            report(PeerEvent("addresses", dict(facts)))
        elif "join_codes" in changed:
            report(PeerEvent("join_codes", {"join_codes": facts["join_codes"]}))
