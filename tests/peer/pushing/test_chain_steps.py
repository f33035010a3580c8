"""A peer in the middle of a chain: who may push to it, where it pushes, what it sends again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from service_scene import (
    MODEL_ID,
    SPAN,
    Peer,
    Talk,
    assert_declined,
    compute_alone,
    draw_hidden,
    expect_output,
    make_session,
    make_step,
    with_peer,
)
from torch import Tensor

from shoal.kernels.wire_tensors import decode_tensor
from shoal.peer.engine.engine import Engine
from shoal.protocol.endpoints import Endpoint
from shoal.protocol.errors import ErrorCode
from shoal.protocol.fair_share import RecentCosts, SharedBytes
from shoal.protocol.identity import Identity
from shoal.protocol.ids import Capability, SessionId
from shoal.protocol.limits import MAX_HOPS
from shoal.protocol.messages.codec import decode_frame, encode_frame
from shoal.protocol.messages.fields import Message
from shoal.protocol.messages.session import (
    Admit,
    Attach,
    Declined,
    Gap,
    Hello,
    HopSeconds,
    Mirror,
    NextHop,
    Output,
    Probe,
    Redirect,
    Status,
    Step,
    Welcome,
)
from shoal.protocol.net.memory.loopback import Link, LoopbackTransport
from shoal.protocol.net.transport import Stream

KEY, NEW_KEY, NEXT_KEY = (Capability(bytes([n]) * 16) for n in (1, 2, 3))
NEXT, HEIR = Identity(bytes([9]) * 32), Identity(bytes([8]) * 32)
NEXT_SESSION = SessionId(b"the one behind..")


@dataclass
class NextPeer:
    """Stands where outputs are pushed, and hears everything."""

    transport: LoopbackTransport
    identity: Identity
    endpoint: Endpoint = field(init=False)
    heard: list[Message] = field(default_factory=list)
    num_streams: int = 0
    news: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[Stream] = field(default_factory=list)
    declines: bool = False

    async def serve(self, stream: Stream) -> None:
        self.num_streams += 1
        self.streams.append(stream)
        while (frame := await stream.receive()) is not None:
            message = decode_frame(frame)
            if isinstance(message, Hello):
                welcome = Welcome(2, "next", self.identity.peer_id, MODEL_ID, SPAN, 0.0)
                await stream.send(encode_frame(welcome))
                continue
            self.heard.append(message)
            self.news.set()
            if self.declines and isinstance(message, Attach):
                no = Declined(message.session, 0, ErrorCode.UNKNOWN_SESSION, "not open here")
                await stream.send(encode_frame(no))

    @property
    def steps(self) -> list[Step]:
        return [message for message in self.heard if isinstance(message, Step)]

    async def wait_for(self, num_steps: int) -> list[Step]:
        async with asyncio.timeout(60):
            while len(self.steps) < num_steps:
                self.news.clear()
                await self.news.wait()
        return self.steps

    def name(self, **changes: Any) -> NextHop:
        following = NextHop(self.identity.peer_id, (self.endpoint,), NEXT_SESSION, 5, NEXT_KEY)
        return replace(following, **changes)


async def start_next(peer: Peer, host: str = "next") -> NextPeer:
    transport = LoopbackTransport(peer.network, host)
    peer.clients.append(transport)
    following = NextPeer(transport, HEIR if host == "heir" else NEXT)
    listener = await transport.listen(host, 0, following.serve)
    following.endpoint = listener.endpoint
    await peer.announce(following.identity, following.endpoint)
    return following


def read(step: Step) -> Tensor:
    return decode_tensor(step.hidden.data, torch.float32, step.hidden.shape)


async def attach(peer: Peer, key: Capability = KEY, host: str = "upstream") -> Talk:
    """Return a stream of another peer that has shown a capability."""
    talk = await peer.at_host(host).greet()
    await talk.say(Attach(make_session(1), 1, key))
    return talk


# ---- who may push


@with_peer()
async def test_steps_are_taken_from_who_shows_the_capability_and_answered_to_the_client(
    peer: Peer, engine: Engine
) -> None:
    client = await peer.open(capability=KEY)
    upstream = await attach(peer)
    prompt = draw_hidden(1, 1, 3)

    await upstream.say(make_step(1, 0, prompt))

    (expected,) = compute_alone(engine, prompt)
    assert torch.equal(expect_output(await client.hear()), expected)


@pytest.mark.parametrize("key", [None, NEW_KEY])
@with_peer()
async def test_who_shows_no_or_another_capability_is_turned_down(
    peer: Peer, key: Capability | None
) -> None:
    client = await peer.open(capability=KEY)
    stranger = await peer.at_host("stranger").greet()
    if key is not None:
        refusal = await stranger.ask(Attach(make_session(1), 1, key))
        assert_declined(refusal, ErrorCode.UNKNOWN_SESSION)

    answer = await stranger.ask(make_step(1, 0, draw_hidden(1)))

    assert_declined(answer, ErrorCode.UNKNOWN_SESSION)
    status = await client.ask(Probe(make_session(1), 1))
    assert status == Status(make_session(1), 1, 0, 0)


@with_peer()
async def test_capability_is_of_no_use_where_a_session_has_none(peer: Peer) -> None:
    await peer.open()
    stranger = await peer.at_host("stranger").greet()

    answer = await stranger.ask(Attach(make_session(1), 1, KEY))

    assert_declined(answer, ErrorCode.UNKNOWN_SESSION)


@with_peer()
async def test_who_was_replaced_can_push_no_more_whatever_epoch_it_claims(peer: Peer) -> None:
    client, zombie = await peer.open(capability=KEY), await attach(peer)
    await zombie.say(make_step(1, 0, draw_hidden(1)))
    await client.hear()

    status = await client.ask(Admit(make_session(1), 2, NEW_KEY))

    assert status == Status(make_session(1), 2, 1, 1, 1)
    for epoch in (1, 9):
        answer = await zombie.ask(make_step(2, 1, draw_hidden(2), epoch=epoch))
        assert_declined(answer, ErrorCode.UNKNOWN_SESSION)
    heir = await attach(peer, NEW_KEY, "heir")
    await heir.say(make_step(2, 1, draw_hidden(3), epoch=1))  # what it was sent before
    await heir.say(make_step(3, 1, draw_hidden(3), epoch=2))
    answer = await client.hear()
    assert isinstance(answer, Output)
    assert answer.sequence == 3


@with_peer()
async def test_hop_that_pushes_cannot_count_epochs(peer: Peer) -> None:
    """Or what it made up would outlive it: no later step would be of that epoch."""

    client, liar = await peer.open(capability=KEY), await attach(peer)

    await liar.say(make_step(1, 0, draw_hidden(1), epoch=2**32 - 1))

    assert_declined(await client.hear(), ErrorCode.BAD_FRAME)
    status = await client.ask(Admit(make_session(1), 2, NEW_KEY))
    assert status == Status(make_session(1), 2, 0, 0)
    heir = await attach(peer, NEW_KEY, "heir")
    await heir.say(make_step(1, 0, draw_hidden(1), epoch=2))
    expect_output(await client.hear())


@pytest.mark.parametrize("has_second_stream", [False, True])
@with_peer()
async def test_client_counts_epochs_on_both_streams(peer: Peer, has_second_stream: bool) -> None:
    client = await peer.open(capability=KEY)
    talk = client
    if has_second_stream:
        talk = await peer.greet()
        await talk.say(Attach(make_session(1), 1, KEY))

    await talk.say(make_step(1, 0, draw_hidden(1), epoch=3))

    expect_output(await client.hear())
    assert await client.ask(Probe(make_session(1), 3)) == Status(make_session(1), 3, 1, 1, 1)


@pytest.mark.parametrize("message", [Admit(make_session(1), 9, NEW_KEY), Probe(make_session(1), 1)])
@with_peer()
async def test_only_the_stream_that_opened_a_session_steers_it(
    peer: Peer, message: Message
) -> None:
    await peer.open(capability=KEY)
    upstream = await attach(peer)

    assert_declined(await upstream.ask(message), ErrorCode.UNKNOWN_SESSION)


@with_peer()
async def test_gap_and_refusal_of_a_pushed_step_are_told_to_the_client(peer: Peer) -> None:
    client, upstream = await peer.open(capability=KEY), await attach(peer)

    await upstream.say(make_step(1, 4, draw_hidden(1)))
    assert await client.hear() == Gap(make_session(1), 1, 1, 0)
    await upstream.say(make_step(2, 0, torch.full((1, 1, 64), float("nan"))))
    assert_declined(await client.hear(), ErrorCode.BAD_VALUES)


# ---- where outputs go


@with_peer()
async def test_outputs_are_pushed_with_everything_that_belongs_to_the_step(
    peer: Peer, engine: Engine
) -> None:
    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name(), num_rows=2)
    prompt, token = draw_hidden(1, 2, 3), draw_hidden(2, 2, 1)

    await client.say(make_step(1, 0, prompt, last_token_only=True))
    await client.say(make_step(2, 3, token, row_map=(1, 0), is_decoded=True))
    first, second = await following.wait_for(2)

    assert following.heard[0] == Attach(NEXT_SESSION, 5, NEXT_KEY)
    assert (first.session, first.epoch, first.sequence, first.position) == (NEXT_SESSION, 5, 1, 0)
    assert first.last_token_only
    assert first.hidden.tokens == 3
    assert (second.row_map, second.is_decoded, second.position) == ((1, 0), True, 3)
    assert len(second.before) == 1
    (expected,) = compute_alone(engine, prompt)
    assert torch.equal(read(first), expected)
    status = await client.ask(Probe(make_session(1), 1))  # and nothing before it
    assert status == Status(make_session(1), 1, 2, 4, 2)


@with_peer()
async def test_step_that_went_over_every_hop_a_route_may_have_is_not_taken(peer: Peer) -> None:
    """Computed first, it could not be pushed on: the next hop would never hear of it."""

    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name())
    before = (HopSeconds(0.0, 0.0),) * MAX_HOPS

    await client.say(make_step(1, 0, draw_hidden(1), before=before))

    assert_declined(await client.hear(), ErrorCode.BAD_VALUES)
    assert await client.ask(Probe(make_session(1), 1)) == Status(make_session(1), 1, 0, 0)
    await client.say(make_step(2, 0, draw_hidden(1), before=before[1:]))
    (step,) = await following.wait_for(1)
    assert len(step.before) == MAX_HOPS


@with_peer()
async def test_replay_ends_here_and_is_answered_with_its_last_tokens(
    peer: Peer, engine: Engine
) -> None:
    following = await start_next(peer)
    client = await peer.open(next=following.name(first_sequence=7), capability=KEY)
    prompt, token = draw_hidden(1, 1, 3), draw_hidden(2)

    answer = await client.ask(make_step(1, 0, prompt, last_token_only=True))
    await client.say(make_step(7, 3, token, is_decoded=True))

    expected, behind = compute_alone(engine, prompt, token)
    assert torch.equal(expect_output(answer), expected[:, -1:])
    (pushed,) = await following.wait_for(1)
    assert pushed.sequence == 7
    assert torch.allclose(read(pushed), behind, atol=1e-5)
    # What was not pushed is there for the next one all the same.
    status = await client.ask(
        Redirect(make_session(1), 2, 7, following.name(session=SessionId(KEY)))
    )
    assert isinstance(status, Status)
    assert status.num_replayed == 1


@with_peer()
async def test_redirect_pushes_what_the_new_hop_lacks_in_order(peer: Peer) -> None:
    lost, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=lost.name())
    parts = [draw_hidden(seed, 1, tokens) for seed, tokens in ((1, 3), (2, 1), (3, 1))]
    await client.say(make_step(1, 0, parts[0]))
    await client.say(make_step(2, 3, parts[1], is_decoded=True))
    await client.say(make_step(3, 4, parts[2], is_decoded=True, last_token_only=True))
    before = await lost.wait_for(3)
    peer.network.kill("next")

    status = await client.ask(Redirect(make_session(1), 2, 3, heir.name(epoch=2)))

    assert isinstance(status, Status)
    assert status.num_replayed == 2
    steps = await heir.wait_for(3)
    assert [(step.sequence, step.position, step.is_decoded) for step in steps] == [
        (1, 0, False),
        (2, 3, True),
        (3, 4, True),
    ]
    assert {(step.session, step.epoch, step.is_piece) for step in steps} == {
        (NEXT_SESSION, 2, True)
    }
    for new, old in zip(steps, before, strict=True):
        assert torch.equal(read(new), read(old))
    peer.network.revive("next")


@with_peer()
async def test_redirect_to_the_client_answers_with_the_steps_under_way(peer: Peer) -> None:
    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name())
    await client.say(make_step(1, 0, draw_hidden(1, 1, 3)))
    await client.say(make_step(2, 3, draw_hidden(2), is_decoded=True))
    _, pushed = await following.wait_for(2)

    again = await client.ask(Redirect(make_session(1), 2, 2, None))

    assert isinstance(again, Output)
    assert again.sequence == 2
    assert torch.equal(expect_output(again), read(pushed))
    assert isinstance(await client.hear(), Status)
    expect_output(await client.ask(make_step(3, 4, draw_hidden(3), is_decoded=True)))
    assert peer.service.pushing.logged.used_bytes == 0
    refusal = await client.ask(Redirect(make_session(1), 3, 4, following.name()))
    assert_declined(refusal, ErrorCode.LOG_INCOMPLETE)


@with_peer()
async def test_session_without_room_for_its_log_says_so_when_it_is_asked_for(peer: Peer) -> None:
    following = await start_next(peer)
    prompt = draw_hidden(1, 1, 8)
    room = SharedBytes(prompt.nbytes)  # one client gets a part of it
    peer.service.pushing = replace(peer.service.pushing, logged=room)
    client = await peer.open(capability=KEY, next=following.name())

    await client.say(make_step(1, 0, prompt))
    await client.say(make_step(2, 8, draw_hidden(2), is_decoded=True))

    await following.wait_for(2)
    assert room.used_bytes == 0
    refusal = await client.ask(Redirect(make_session(1), 2, 2, following.name()))
    assert_declined(refusal, ErrorCode.LOG_INCOMPLETE)


@with_peer()
async def test_redirects_do_not_have_a_log_sent_over_and_over(peer: Peer) -> None:
    following = await start_next(peer)
    links: Any = peer.service.push_links
    # The least that a replay counts is a quarter of a MiB.
    links.replayed = RecentCosts(2**20, 60.0)
    client = await peer.open(capability=KEY, next=following.name())
    await client.say(make_step(1, 0, draw_hidden(1, 1, 3)), make_step(2, 3, draw_hidden(2)))
    await following.wait_for(2)

    answers = [
        await client.ask(Redirect(make_session(1), 2, 1, following.name(epoch=epoch)))
        for epoch in (2, 3, 4)
    ]

    assert [type(answer) for answer in answers] == [Status, Status, Declined]
    assert_declined(answers[-1], ErrorCode.LOG_INCOMPLETE)
    await asyncio.sleep(60)
    num_before = len(following.steps)
    again = Redirect(make_session(1), 5, 1, following.name(epoch=5))
    assert isinstance(await client.ask(again), Status)
    await following.wait_for(num_before + 2)


@with_peer()
async def test_hop_that_declined_is_sent_nothing_more(peer: Peer) -> None:
    following = await start_next(peer)
    following.declines = True
    for ends in (("peer", "next"), ("next", "peer")):
        peer.network.set_link(*ends, Link(delay_seconds=0.02))
    client = await peer.open(capability=KEY, next=following.name())
    await client.say(make_step(1, 0, draw_hidden(1)))
    assert_declined(await client.hear(), ErrorCode.NEXT_UNREACHABLE)

    for number in range(1, 10):
        await client.say(make_step(number + 1, number, draw_hidden(number)))
        assert_declined(await client.hear(), ErrorCode.NEXT_UNREACHABLE)

    assert [step.sequence for step in following.steps] == [1]
    redirect = Redirect(make_session(1), 2, 1, following.name(epoch=2))
    assert isinstance(await client.ask(redirect), Status)
    assert_declined(await client.hear(), ErrorCode.NEXT_UNREACHABLE)
    await asyncio.sleep(1)
    assert len(following.steps) == 2

    following.declines = False
    redirect = Redirect(make_session(1), 3, 1, following.name(epoch=3))
    assert isinstance(await client.ask(redirect), Status)
    steps = await following.wait_for(12)
    assert [step.sequence for step in steps[2:]] == list(range(1, 11))


@with_peer()
async def test_log_gives_back_what_is_rolled_back_and_all_at_the_end(peer: Peer) -> None:
    following, logged = await start_next(peer), peer.service.pushing.logged
    client = await peer.open(capability=KEY, next=following.name())
    prompt, token = draw_hidden(1, 1, 3), draw_hidden(2)

    await client.say(make_step(1, 0, prompt), make_step(2, 3, token), make_step(3, 3, token))
    await following.wait_for(3)
    assert logged.used_bytes == prompt.nbytes + token.nbytes

    await client.stream.close()
    await peer.wait_until_empty()
    assert logged.used_bytes == 0


# ---- push links


@with_peer()
async def test_sessions_share_one_connection_which_ends_when_idle(peer: Peer) -> None:
    following = await start_next(peer)
    talks: list[Talk] = []
    for number in (1, 2, 3):
        session = SessionId(bytes([number]) * 16)
        talks.append(await peer.open(number, capability=KEY, next=following.name(session=session)))
        await talks[-1].say(make_step(1, 0, draw_hidden(number), number))
    await following.wait_for(3)
    assert following.num_streams == 1

    await asyncio.sleep(60)
    assert len(peer.service.push_links._known) == 1
    for talk in talks:
        await talk.stream.close()
    await asyncio.sleep(60)
    assert not peer.service.push_links._known


@pytest.mark.parametrize("what", ["nobody", "another peer", "another certificate", "not announced"])
@with_peer()
async def test_next_hop_that_cannot_be_reached_is_told_to_the_client(peer: Peer, what: str) -> None:
    following, named = await start_next(peer), HEIR
    announced = {
        "nobody": Endpoint("nowhere", 1, "a" * 64),
        "another peer": following.endpoint,
        "another certificate": replace(following.endpoint, fingerprint="b" * 64),
        "not announced": None,
    }[what]
    if announced is not None:
        await peer.announce(named, announced)
    client = await peer.open(capability=KEY, next=following.name(peer_id=named.peer_id))

    await client.say(make_step(1, 0, draw_hidden(1)))

    declined = assert_declined(await client.hear(), ErrorCode.NEXT_UNREACHABLE)
    # In the same words, whatever the reason: they tell nothing of what is at the endpoint.
    assert declined.detail == f"peer …{named.peer_id[-6:]} cannot be reached from here"
    assert following.heard == []


@with_peer()
async def test_fault_of_this_peer_is_not_blamed_on_the_next_hop(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name())
    await client.say(make_step(1, 0, draw_hidden(1)), make_step(2, 1, draw_hidden(2)))
    await following.wait_for(2)

    def encode_as(*_: object) -> bytes:
        raise ValueError("a bug")

    monkeypatch.setattr("shoal.peer.pushing.session_outputs.encode_as", encode_as)
    redirect = Redirect(make_session(1), 2, 2, following.name(epoch=2))
    assert isinstance(await client.ask(redirect), Status)

    assert_declined(await client.hear(), ErrorCode.INTERNAL)


@with_peer()
async def test_break_of_a_connection_is_told_to_every_session_on_it(peer: Peer) -> None:
    following = await start_next(peer)
    talks: list[Talk] = []
    for number in (1, 2):
        session = SessionId(bytes([number]) * 16)
        talks.append(await peer.open(number, capability=KEY, next=following.name(session=session)))
        await talks[-1].say(make_step(1, 0, draw_hidden(number), number))
    await following.wait_for(2)

    peer.network.kill("next")

    for talk in talks:
        assert_declined(await talk.hear(), ErrorCode.NEXT_UNREACHABLE)
    peer.network.revive("next")


@with_peer()
async def test_lanes_keep_parts_of_a_step_together(peer: Peer) -> None:
    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name())
    bulk = await peer.greet()
    await bulk.say(Attach(make_session(1), 1, KEY))

    for number in range(4):
        await bulk.say(make_step(number + 1, number, draw_hidden(number), is_piece=True))

    steps = await following.wait_for(4)
    assert [step.sequence for step in steps] == [1, 2, 3, 4]
    assert following.num_streams == 2  # one was dialled at once, for tokens
    await client.stream.close()


@with_peer(gate="execute")
async def test_step_that_is_computed_meanwhile_does_not_overtake_the_replay(peer: Peer) -> None:
    peer.engine.leave.set()

    lost, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=lost.name())
    await client.say(make_step(1, 0, draw_hidden(1, 1, 3)))
    await lost.wait_for(1)
    peer.engine.leave.clear()
    peer.engine.entered.clear()
    await client.say(make_step(2, 3, draw_hidden(2), is_decoded=True))
    await peer.engine.wait_entered()

    status = await client.ask(Redirect(make_session(1), 2, 2, heir.name(epoch=2)))
    peer.engine.leave.set()

    assert isinstance(status, Status)
    assert (status.sequence, status.done_sequence, status.num_replayed) == (2, 1, 1)
    steps = await heir.wait_for(2)
    assert [(step.sequence, step.is_piece) for step in steps] == [(1, True), (2, True)]
    assert heir.num_streams == 1
    assert len(lost.steps) == 1


# ---- a new hop beside the next one


async def push_three(client: Talk, following: NextPeer) -> list[Step]:
    await client.say(make_step(1, 0, draw_hidden(1, 1, 3)))
    await client.say(make_step(2, 3, draw_hidden(2), is_decoded=True))
    await client.say(make_step(3, 4, draw_hidden(3), is_decoded=True))
    return await following.wait_for(3)


@with_peer()
async def test_mirror_gets_a_replay_and_all_that_is_pushed_behind_it(peer: Peer) -> None:
    leaving, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=leaving.name())
    before = await push_three(client, leaving)

    status = await client.ask(Mirror(make_session(1), 1, heir.name(epoch=2)))
    await client.say(make_step(4, 5, draw_hidden(4), is_decoded=True))

    assert status == Status(make_session(1), 1, 3, 5, 3, num_replayed=2)
    pushed = (await leaving.wait_for(4))[3]
    steps = await heir.wait_for(3)
    assert [(step.sequence, step.position, step.hidden.tokens) for step in steps] == [
        (1, 0, 3),
        (2, 3, 2),
        (4, 5, 1),
    ]
    assert {(step.epoch, step.is_piece) for step in steps} == {(2, True)}  # in order
    assert torch.equal(read(steps[1])[:, :1], read(before[1]))
    assert torch.equal(read(steps[2]), read(pushed))


@with_peer()
async def test_redirect_to_a_mirror_sends_nothing_again(peer: Peer) -> None:
    leaving, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=leaving.name())
    await push_three(client, leaving)
    await client.ask(Mirror(make_session(1), 1, heir.name(epoch=2)))
    await heir.wait_for(2)

    status = await client.ask(Redirect(make_session(1), 2, 4, heir.name(epoch=2)))
    await client.say(make_step(4, 5, draw_hidden(4), is_decoded=True))
    await heir.wait_for(3)
    await client.say(make_step(5, 6, draw_hidden(5), is_decoded=True))

    assert isinstance(status, Status)
    assert status.num_replayed == 0
    assert [step.sequence for step in await heir.wait_for(4)] == [1, 2, 4, 5]
    assert [step.is_piece for step in heir.steps[-2:]] == [True, False]
    assert len(leaving.steps) == 3


@with_peer()
async def test_what_is_on_its_way_to_a_mirror_arrives_in_order_when_it_becomes_the_next_hop(
    peer: Peer,
) -> None:
    """Whoever steers answers 0 then: the hop has all, or will have before what comes next."""

    lost, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=lost.name())
    await push_three(client, lost)

    await client.say(Mirror(make_session(1), 1, heir.name(epoch=2)))
    await client.say(make_step(4, 5, draw_hidden(4), is_decoded=True))
    await client.say(Redirect(make_session(1), 2, 6, heir.name(epoch=2)))
    await client.say(make_step(5, 6, draw_hidden(5), is_decoded=True))
    await client.say(make_step(6, 7, draw_hidden(6), is_decoded=True))

    assert [step.sequence for step in await heir.wait_for(5)] == [1, 2, 4, 5, 6]


@with_peer()
async def test_redirect_to_the_next_hop_there_is_only_changes_the_key_and_the_beginning(
    peer: Peer,
) -> None:
    """So begins a new hop whose steps were a replay until now."""

    following = await start_next(peer)
    client = await peer.open(capability=KEY, next=following.name(first_sequence=2**63))
    expect_output(await client.ask(make_step(1, 0, draw_hidden(1, 1, 3))))

    admitted = following.name(epoch=7, capability=NEW_KEY, first_sequence=2)
    await client.ask(Redirect(make_session(1), 7, 2, admitted))
    await client.say(make_step(2, 3, draw_hidden(2), is_decoded=True))

    (step,) = await following.wait_for(1)
    assert (step.sequence, step.epoch) == (2, 7)
    assert following.heard[-2] == Attach(NEXT_SESSION, 7, NEW_KEY)


@with_peer()
async def test_mirror_that_cannot_be_reached_disturbs_nobody(peer: Peer) -> None:
    following, heir = await start_next(peer), await start_next(peer, "heir")
    client = await peer.open(capability=KEY, next=following.name())
    await push_three(client, following)
    peer.network.kill("heir")

    status = await client.ask(Mirror(make_session(1), 1, heir.name()))
    assert isinstance(status, Status)
    await asyncio.sleep(30)
    await client.say(make_step(4, 5, draw_hidden(4), is_decoded=True))

    assert len(await following.wait_for(4)) == 4
    status = await client.ask(Probe(make_session(1), 1))  # and nothing before it
    assert isinstance(status, Status)
    peer.network.revive("heir")


@with_peer()
async def test_mirror_gets_nothing_where_the_log_is_gone(peer: Peer) -> None:
    following, heir = await start_next(peer), await start_next(peer, "heir")
    peer.service.pushing = replace(peer.service.pushing, logged=SharedBytes(0))
    client = await peer.open(capability=KEY, next=following.name())
    await push_three(client, following)

    status = await client.ask(Mirror(make_session(1), 1, heir.name()))
    await client.say(make_step(4, 5, draw_hidden(4), is_decoded=True))

    assert isinstance(status, Status)
    assert status.num_replayed == 0
    assert len(await following.wait_for(4)) == 4
    assert heir.heard == []
