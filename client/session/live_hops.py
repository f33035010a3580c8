"""The hops of one session: asking them, and rebuilding a lost one from its log."""

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from ...kernels.wire_tensors import choose_decoded_dtype
from ...protocol.errors import DirectoryError, RefusedError, RouteError
from ...protocol.ids import PeerId
from ...protocol.limits import MAX_CONTROL_BYTES, MAX_FRAME_BYTES
from ...protocol.net.clock import Clock
from ...protocol.net.transport import Transport
from ...protocol.session.recovery_log import RecoveryLog
from ...protocol.spans import Span
from ...protocol.tensors import WireDtype, compute_num_bytes
from ..routing.blame import LostHopError, Refusals
from ..routing.router import Ends, Hop, Route
from ..routing.swarm import Fault, Swarm
from ..settings.config import ClientConfig
from ..trace.trace import Recorder
from .asking import Asking, BrokenSegmentError, Question
from .farewells import Farewells
from .hop_link import HopLink
from .mailbox import Mailbox
from .replay import merge_pieces
from .route_opening import LiveHop, RouteOpener, SessionFacts, Waiting
from .wiring import Wiring, cut_segments

_logger = logging.getLogger(__name__)

_MAX_PIECE_TOKENS = 2048

_RETRY_VIEW_SECONDS = 1.0
"""How old the view may be once a peer that was found in it has failed."""


@dataclass(frozen=True)
class Place:
    """Blocks of a session that need hops, and what is there around them.

    The hop `before` has pushed what the lost ones got, or, without one, the client's `log` tells.
    Steps with the sequences `pending` are under way; those of them that are missing are pushed to
    the hop `after`, which has all that is older, and nothing newer than `newest_sequence`.
    """

    span: Span
    log: RecoveryLog[Tensor]
    pending: tuple[int, ...]
    position: int = 0
    before: LiveHop | None = None
    after: LiveHop | None = None
    newest_sequence: int = 0

    @property
    def ends(self) -> Ends:
        """The peers on both sides."""
        before, after = (live and live.hop.peer for live in (self.before, self.after))
        return Ends(before, after)

    @property
    def neighbours(self) -> list[LiveHop]:
        """The hops on both sides."""
        return [live for live in (self.before, self.after) if live is not None]


class LiveHops:
    """Talks to the peers of one session and counts its epochs and sequence numbers."""

    def __init__(
        self,
        facts: SessionFacts,
        swarm: Swarm,
        transport: Transport,
        clock: Clock,
        config: ClientConfig,
        farewells: Farewells,
    ) -> None:
        self.facts = facts
        self.clock = clock
        self._swarm = swarm
        self._transport = transport
        self._config = config
        self._farewells = farewells
        self._opener = RouteOpener(facts, swarm, transport, clock, config)
        self.asking = Asking(self._opener, swarm, clock, farewells)
        self.wiring = Wiring(self._opener, self.asking, swarm, config)
        self.sought: Span | None = None
        """The blocks that the session has lost and looks for a peer for, for whoever watches."""
        self._sequence = 0
        self._num_rows = 0

    @property
    def waiting(self) -> Waiting | None:
        """The peer that has no room for the session yet, for whoever watches."""
        return self._opener.waiting

    @property
    def recorder(self) -> Recorder | None:
        """Who takes down what the session does, if anybody."""
        return self._opener.recorder

    @recorder.setter
    def recorder(self, recorder: Recorder | None) -> None:
        self._opener.recorder = recorder

    @property
    def prompts_LBPH(self) -> Tensor | None:
        """The deep prompts that hops are opened with."""
        return self._opener.prompts_LBPH

    @prompts_LBPH.setter
    def prompts_LBPH(self, prompts_LBPH: Tensor | None) -> None:
        self._opener.prompts_LBPH = prompts_LBPH

    @property
    def mailbox(self) -> Mailbox:
        """Where the hops of a chain say what they have to say."""
        return self._opener.mailbox

    @property
    def num_rows(self) -> int:
        """Rows that the hops were opened with."""
        return self._num_rows

    @property
    def last_sequence(self) -> int:
        """Number of the newest step, whether it was taken or failed."""
        return self._sequence

    @property
    def wants_standbys(self) -> bool:
        """Return whether another peer is to be kept at the state of each hop."""
        return self._config.standby

    def notify(self, on_leaving: Callable[[], None]) -> None:
        """Call a function when a peer says that it will stop: see `HopLink.is_leaving`."""
        self._opener.on_leaving = on_leaving

    def make_understudy(self) -> tuple[RouteOpener, Asking]:
        """Return what opens and asks a hop beside the session, which goes on meanwhile."""
        opener = self._opener.make_twin()
        return opener, Asking(opener, self._swarm, self.clock, self._farewells)

    async def find_replica(self, hop: Hop, exclude: Collection[PeerId], ends: Ends | None) -> Hop:
        """Return a peer that computes the very same as a hop. Raises RouteError, DirectoryError."""
        route = await self._swarm.wait_for_route(
            hop.span,
            self.clock.now(),
            min(_RETRY_VIEW_SECONDS, self._config.refresh_seconds),
            (hop.peer.weights,),
            exclude,
            self.facts.count_kv_tokens(self._num_rows),
            ends,
        )
        if len(route.hops) != 1:
            raise RouteError(f"no single peer serves blocks {hop.span}", (hop.span,))
        return route.hops[0]

    def has_replica(self, hop: Hop, others: Collection[PeerId]) -> bool:
        """Return whether a peer beside those could take a hop's place alone, by what was heard."""
        return any(
            peer.span.covers(hop.span)
            and peer.weights == hop.peer.weights
            and peer.peer_id not in others
            for peer in self._swarm.view.online
        )

    def make_deadline(self) -> float:
        """Return until when lost hops may be replaced, from now."""
        return self.clock.now() + self._config.failover_timeout_seconds

    def rtt_seconds(self, peer_id: PeerId) -> float:
        """Return the round trip to a peer of a route, as last measured."""
        return self._swarm.rtt_seconds(peer_id) or 0.0

    def max_piece_tokens(self, num_rows: int) -> int:
        """Return how many tokens per row one frame should carry."""
        dtype = self._opener.wire_dtype or WireDtype.FP32
        token_bytes = compute_num_bytes(dtype, num_rows, 1, self.facts.hidden_size)
        piece_bytes = min(self._config.max_step_bytes, MAX_FRAME_BYTES - MAX_CONTROL_BYTES)
        return max(1, min(piece_bytes // token_bytes, _MAX_PIECE_TOKENS))

    def number_steps(self, num_steps: int) -> range:
        """Return the sequence numbers of the next steps: the same ones at all hops."""
        first, self._sequence = self._sequence + 1, self._sequence + num_steps
        return range(first, self._sequence + 1)

    async def hang_up(self, *lives: LiveHop) -> None:
        """Drop the links of hops; their logs stay."""
        await self.asking.hang_up(*lives)

    def accuse(self, refusals: Refusals) -> None:
        """Avoid the peers that declined what another one has taken by now."""
        for hop in refusals.contradicted:
            self._swarm.quarantine(hop.peer, Fault.BROKEN)

    def to_wire_dtype(self, hidden_BTH: Tensor) -> Tensor:
        """Round hidden states to what travels, so that a log holds exactly what was sent.

        What becomes int8 becomes the same bytes each time it is sent, and is not rounded twice.
        """
        assert self._opener.wire_dtype is not None  # chosen with the first route
        return hidden_BTH.to(choose_decoded_dtype(self._opener.wire_dtype.name))

    async def cover(
        self,
        place: Place,
        num_rows: int,
        deadline: float,
        refusals: Refusals,
        preferred: str | None = None,
    ) -> list[LiveHop]:
        """Open hops for a place and bring them to the state of its log, within the deadline.

        `preferred` is the weight format of the peer that was lost: its replica computes the
        same. Raises RouteError with the missing blocks, or the last failure, when time is up, and
        RefusedError when the peers that are there decline for good. BrokenSegmentError says that a
        hop before or after is lost, too, and StartOverError that no log will do.
        """
        self._num_rows = num_rows
        if place.position == 0:  # later, somebody waits for the next token
            await self._swarm.survey(self._transport)
        configured = self._config.weights
        weights = (configured,) if configured else tuple(dict.fromkeys((preferred, None)))
        tried: set[PeerId] = set()
        pause_seconds = 0.05
        max_wait_seconds = 0.0
        while True:
            num_tried = len(tried)
            route = await self._find_route(place, weights, deadline, refusals, tried)
            if len(tried) < num_tried:
                # Everybody was asked once. Who is full may take us into its queue now; with some
                # time left for the others, who may have room sooner.
                remaining_seconds = max(0.0, deadline - self.clock.now())
                is_alone = num_tried == 1
                max_wait_seconds = remaining_seconds / (1 if is_alone else 2 * num_tried)
                pause_seconds = min(2 * pause_seconds, 1.0)  # nobody is to be stormed
            self._opener.begin(route)
            try:
                return await self._open_route(route, place, deadline, max_wait_seconds)
            except LostHopError as lost:
                tried.add(lost.hop.peer.peer_id)
                refusals.note(lost)
                remaining_seconds = deadline - self.clock.now()
                if remaining_seconds <= 0:
                    error = lost.__cause__
                    if isinstance(error, RefusedError):
                        raise error from None
                    raise RouteError(
                        f"no peer could be reached in time for blocks {lost.hop.span}: {lost}; "
                        "run `shoal doctor` to find out why",
                        (lost.hop.span,),
                    ) from error
            await asyncio.sleep(min(pause_seconds, remaining_seconds))

    async def fork(
        self, parent: "LiveHops", hops: Sequence[LiveHop], position: int, num_rows: int
    ) -> list[LiveHop]:
        """Open the hops of another session for one that begins with its first tokens.

        The logs share their tensors. A hop that cannot go on from what its peer holds has no link:
        the first step puts one there that gets the log in a replay.
        """
        self._num_rows = num_rows
        self._opener.begin_fork(parent._opener)
        self._sequence = parent._sequence
        twins = [
            LiveHop(live.hop, None, live.log.copy(), live.feeds, live.is_log_whole) for live in hops
        ]
        for twin in twins:
            twin.log.rollback(min(position, twin.log.length))
        self.wiring.connect(twins)
        deadline = self.make_deadline()

        async def open_twin(twin: LiveHop, link: HopLink) -> None:
            try:
                await self._opener.open_link(
                    twin, num_rows, deadline, parent=link.session, prefix_tokens=position
                )
            except LostHopError as lost:
                _logger.info("replaying blocks %s: %s", twin.hop.span, lost)

        try:
            async with asyncio.TaskGroup() as tasks:
                for twin, live in zip(twins, hops, strict=True):
                    if live.link is not None:
                        tasks.create_task(open_twin(twin, live.link))
        except BaseException:
            await self.hang_up(*twins)
            raise
        return twins

    async def _find_route(
        self,
        place: Place,
        weights: Sequence[str | None],
        deadline: float,
        refusals: Refusals,
        tried: set[PeerId],
    ) -> Route:
        """Return the next route to try: over peers not tried yet, as long as there are any.

        Or else the busy one that is cheapest would be asked over and over, and others never. Then
        `tried` is emptied and the next round begins.

        Once a peer has declined for good, only others that are there now may help: who asked for
        too much should hear it at once, and that is what is raised.
        """
        # Somebody waits for the next token: the view at hand comes first, however old. If it led
        # to nobody, newcomers must be seen before silent peers are asked once more.
        max_age_seconds = math.inf if place.position > 0 else self._config.refresh_seconds
        wait = functools.partial(
            self._swarm.wait_for_route,
            place.span,
            needed_kv_tokens=self.facts.count_kv_tokens(self._num_rows),
            ends=place.ends if self._config.delivery == "chain" else None,
        )
        if tried:
            max_age_seconds = min(_RETRY_VIEW_SECONDS, self._config.refresh_seconds)
            with contextlib.suppress(RouteError, DirectoryError):
                avoided = {*tried, *refusals.peer_ids}
                return await wait(self.clock.now(), max_age_seconds, weights, avoided)
            tried.clear()
        if refusals.first is None:
            return await wait(deadline, max_age_seconds, weights)
        try:
            return await wait(self.clock.now(), 0.0, weights, refusals.peer_ids)
        except (RouteError, DirectoryError):
            raise refusals.first from None

    async def _open_route(
        self, route: Route, place: Place, deadline: float, max_wait_seconds: float
    ) -> list[LiveHop]:
        """Open all hops of a route at once, then have them computed what is behind us."""
        hops = [LiveHop(hop, None, RecoveryLog()) for hop in route.hops]
        if place.before is None:
            hops[0].log = place.log
        self.wiring.plan(hops, place)
        try:
            await self._opener.open(hops, self._num_rows, deadline, max_wait_seconds)
            try:
                await self.wiring.admit(place)
                if place.before is None:
                    await self._replay(hops)
                else:
                    num_tokens = self._num_rows * place.position
                    await self.wiring.have_replayed(place, hops, num_tokens)
            except BrokenSegmentError as broken:
                if any(live.link is None for live in place.neighbours):
                    raise
                # Two of them that cannot reach each other are not linked the next time.
                raise (
                    broken.lost[0] if broken.lost else LostHopError(hops[0].hop, str(broken))
                ) from broken
        except BaseException:
            await self.hang_up(*hops)
            raise
        return hops

    async def _replay(self, hops: list[LiveHop]) -> None:
        """Send the first hop's log through all; what comes out of a segment is the next one's."""
        segments = cut_segments(hops)
        for index, segment in enumerate(segments):
            following = segments[index + 1][0] if index + 1 < len(segments) else None
            max_tokens = self.max_piece_tokens(self._num_rows)
            pieces = merge_pieces(segment[0].log.plan_replay(), max_tokens)
            for sequence, piece in enumerate(pieces, 1):
                question = Question(
                    piece.hidden_BTH,
                    piece.position,
                    is_decoded=piece.is_decoded,
                    last_token_only=following is None,
                    is_piece=True,
                    sequence=sequence,
                )
                try:
                    output_BTH = await self.asking.ask(segment, question, is_replay=True)
                except BrokenSegmentError as broken:
                    if broken.cut is not None:
                        self.wiring.note_cut(segment[broken.cut], segment[broken.cut + 1])
                    raise
                if following is not None:
                    following.log.append(
                        piece.position, output_BTH.shape[1], output_BTH, None, piece.is_decoded
                    )
