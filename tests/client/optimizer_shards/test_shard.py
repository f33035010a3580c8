"""What a shard of an optimizer remembers, so that another peer can go on in place of a lost one."""

from __future__ import annotations

from dataclasses import replace

import torch
from announcements import make_announcement

from shoal.client.adapters.adapter_versions import PublishedAdapter, ShardedVersion
from shoal.client.adapters.learned_states import LearnedState
from shoal.client.optimizer_shards.shard import (
    AppliedUpdate,
    LoggedPass,
    LoggedUpdate,
    Shard,
    list_stages,
)
from shoal.client.passes.microbatches import Texts
from shoal.client.routing.route import Hop
from shoal.protocol.ids import AdapterId
from shoal.protocol.messages.adapters import LoraConfig, OptimizerKind, OptimizerSettings
from shoal.protocol.spans import Span

SETTINGS = OptimizerSettings(OptimizerKind.SGD, 0.1)
FIRST, SECOND = AdapterId(b"1" * 32), AdapterId(b"2" * 32)
VERSION = ShardedVersion("lineage", 1, is_trained=True)


def make_state(span: Span, num_updates: int = 0) -> LearnedState:
    """Return an adapter with one matrix for each block, and its momentum."""
    names = [
        f"model.layers.{block}.mlp.up_proj.lora_A.weight" for block in range(span.start, span.stop)
    ]
    matrices = {name: torch.full((2, 4), float(number)) for number, name in enumerate(names)}
    moments = {name: -matrix for name, matrix in matrices.items()}
    return LearnedState(LoraConfig(2, 4.0), OptimizerKind.SGD, matrices, (moments,), num_updates)


def make_shard(span: Span, num_updates: int = 0) -> Shard:
    return Shard(span, make_state(span, num_updates), [LoggedUpdate(1)], name=FIRST)


def make_pass(part: int, num_prompts: int = 0) -> LoggedPass:
    texts = Texts(torch.zeros(2, 3, 4), adapters=(VERSION, None))
    if num_prompts:
        texts = replace(texts, prompts_LBPH=torch.zeros(1, 2, num_prompts, 4))
    return LoggedPass(Span(0, 2), texts, torch.zeros(2, 3, 4), part)


def test_gradients_are_named_by_the_parts_that_their_peer_has_accumulated() -> None:
    shard = make_shard(Span(0, 2))

    for part in (7, 2, 5):
        shard.note_pass(make_pass(part))

    gradients = shard.gradients
    assert (gradients.adapter, gradients.number, gradients.parts) == (FIRST, 1, (2, 5, 7))


def test_log_of_passes_counts_hidden_states_gradients_and_prompts() -> None:
    shard = make_shard(Span(0, 2))

    shard.note_pass(make_pass(1))
    shard.note_pass(make_pass(2, num_prompts=5))

    hidden = 2 * 3 * 4 * 4  # rows, tokens, hidden size, bytes
    assert shard.num_bytes == 4 * hidden + 2 * 5 * 4 * 4


def test_update_begins_another_sum_under_the_name_of_what_came_of_it() -> None:
    shard = make_shard(Span(0, 2), num_updates=3)
    shard.note_pass(make_pass(1))
    shard.square_sum = 2.5

    shard.note_update(AppliedUpdate(SETTINGS, 0.5), SECOND)

    assert shard.num_updates == 4
    assert [(one.number, len(one.passes)) for one in shard.log] == [(1, 1), (2, 0)]
    assert shard.log[0].applied == AppliedUpdate(SETTINGS, 0.5)
    assert (shard.name, shard.square_sum) == (SECOND, None)
    assert shard.gradients.parts == ()


def test_saved_state_takes_the_place_of_the_updates_that_led_to_it_and_keeps_later_passes() -> None:
    shard = make_shard(Span(0, 2))
    shard.note_pass(make_pass(1))
    shard.note_update(AppliedUpdate(SETTINGS, 1.0), SECOND)
    shard.note_pass(make_pass(2))

    shard.note_saved(make_state(Span(0, 2), num_updates=1))

    assert shard.num_updates == 1
    assert [one.part for update in shard.log for one in update.passes] == [2]


def test_dropped_gradients_leave_updates_that_were_made() -> None:
    shard = make_shard(Span(0, 2))
    shard.note_pass(make_pass(1))
    shard.note_update(AppliedUpdate(SETTINGS, 1.0), SECOND)
    shard.note_pass(make_pass(2))
    shard.square_sum = 2.5

    shard.drop_gradients(9)

    assert [(one.number, len(one.passes)) for one in shard.log] == [(1, 1), (9, 0)]
    assert (shard.num_updates, shard.square_sum) == (1, None)


def test_cut_shard_has_the_matrices_and_moments_of_its_blocks_only() -> None:
    shard = make_shard(Span(0, 4), num_updates=2)
    shard.note_pass(make_pass(1))
    peer = make_announcement(span=Span(1, 3), weights="int8")

    part = shard.cut(Hop(peer, Span(1, 3)))

    assert (part.span, part.weights, part.held_at.peer) == (Span(1, 3), "int8", peer)
    assert part.saved.span == Span(1, 3)
    assert part.saved.moments[0].keys() == part.saved.matrices.keys()
    assert (part.num_updates, part.gradients.number, part.gradients.parts) == (2, 1, ())
    assert not part.is_empty
    outside = shard.cut(Hop(peer, Span(4, 5)))
    assert outside.is_empty


def test_rows_name_the_adapter_as_the_peer_does_and_not_at_all_without_matrices() -> None:
    shard, texts = make_shard(Span(0, 2)), make_pass(1).texts
    texts = replace(texts, trains_adapters=True)

    named = shard.name_rows(texts)
    plain = shard.cut(Hop(make_announcement(), Span(4, 5))).name_rows(texts)

    assert named.adapters == (PublishedAdapter(FIRST), None)
    assert named.trains_adapters
    assert (plain.adapters, plain.trains_adapters) == ((), False)


def test_stages_of_a_span_are_the_shards_that_overlap_it() -> None:
    shards = [make_shard(Span(0, 2)), make_shard(Span(2, 4)), make_shard(Span(6, 8))]

    assert list_stages(shards, Span(1, 7)) == [
        (shards[0], Span(1, 2)),
        (shards[1], Span(2, 4)),
        (shards[2], Span(6, 7)),
    ]
    assert list_stages(shards, Span(4, 6)) == []
