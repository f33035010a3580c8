"""Run files: what they may hold, the parts of updates, and learning rates."""

from collections.abc import Iterator
from datetime import date
from typing import Any, cast

import pytest
from training_runs import MODEL, NO_SHARD, describe_run

from shoal.protocol.errors import UsageError
from shoal.protocol.identity import Identity
from shoal.protocol.runs.run_record import sign_run
from shoal.protocol.runs.training_run import PartId, read_run
from shoal.protocol.spans import Span

OTHER_SHARD = NO_SHARD | {"path": "other", "sha256": "1" * 64}
HELD_OUT = {"shards": [NO_SHARD], "sequence_length": 4, "held_out": [OTHER_SHARD]}
TOKENIZER = {"path": "tokenizer.json", "sha256": "4" * 64}


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"name": "No Name"}, "run file: name: must be 1 to 63 lower-case letters, digits and"),
        ({"seed": -1}, "run file: seed: must be greater than or equal to 0"),
        ({"rows_per_part": "2"}, "run file: rows_per_part: must be a valid integer"),
        ({"parts_per_update": 2**13}, "run file: parts_per_update: must be less than or equal to"),
        ({"nonsense": 1}, "run file: nonsense: a run has no such setting"),
        ({"sequence_length": 4}, "no such setting; did you mean corpus.sequence_length?"),
        ({"stage_borders": [2, 2]}, "run file: stage_borders must increase"),
        ({"stage_borders": 2}, "run file: stage_borders: must be a list"),
        ({"optimizer": "adamw"}, "run file: optimizer: must be a table"),
        (
            {"optimizer": {"learning_rate": 0.1, "name": "sgd", "betas": [0.9, 0.9]}},
            "run file: optimizer: betas is a setting of muon, adamw, adamw8bit; sgd ignores it",
        ),
        ({"schedule": {"warmup_updates": 4}}, "schedule.warmup_updates must be less than num_upd"),
        (
            {"model": MODEL | {"rms_norm_eps": float("nan")}},
            "run file: model: rms_norm_eps must be without dates, NaN and infinity",
        ),
        ({"model": MODEL | {"made": date(2026, 1, 1)}}, "made must be without dates"),
        ({"optimizer": {"learning_rate": 0.0}}, "optimizer.learning_rate: must be greater than 0"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate: must be"),
        ({"optimizer": {"learning_rate": 0.1, "name": "lion"}}, "optimizer.name: must be 'muon'"),
        ({"optimizer": {"learning_rate": 0.1, "betas": [0.9, 1.0]}}, "optimizer.betas.1: must be"),
        ({"corpus": {"shards": [], "sequence_length": 4}}, "corpus.shards: "),
        (
            {"corpus": {"shards": [NO_SHARD | {"sha256": "0"}], "sequence_length": 4}},
            "corpus.shards.0.sha256: must be 64 hexadecimal digits in lower case",
        ),
        (
            {"corpus": {"shards": [NO_SHARD | {"path": "a/../../b"}], "sequence_length": 4}},
            "corpus.shards.0.path: ",
        ),
        (
            {"corpus": {"shards": [NO_SHARD | {"path": "/etc/passwd"}], "sequence_length": 4}},
            "corpus.shards.0.path: must be below the folder of the corpus",
        ),
        (
            {"corpus": {"shards": [NO_SHARD], "sequence_length": 10_000}},
            "run file: corpus has 1 rows of 10000 tokens, one part takes 2",
        ),
        (
            {"corpus": {**HELD_OUT, "tokenizer": [TOKENIZER | {"path": "config.json"}]}},
            "run file: corpus.tokenizer.0.path: must be 'tokenizer.json'",
        ),
        (
            {"corpus": {**HELD_OUT, "tokenizer": [TOKENIZER] * 2}},
            "run file: corpus: tokenizer: a file is named twice",
        ),
        (
            {"corpus": {**HELD_OUT, "tokenizer": [TOKENIZER] * 9}},
            "run file: corpus.tokenizer: must have at most 8 items, not 9",
        ),
        ({"held_out_every": 2}, "run file: held_out_every: corpus.held_out names no shards"),
        (
            {"corpus": {**HELD_OUT, "held_out": [NO_SHARD | {"path": "again"}]}},
            "run file: corpus: held_out: again is the same text as none, which is trained on",
        ),
        (
            {
                "rows_per_part": 4,
                "corpus": {**HELD_OUT, "held_out": [OTHER_SHARD | {"num_tokens": 9}]},
            },
            "run file: corpus.held_out has 2 rows of 4 tokens, which must be 1 to 4096 parts of 4",
        ),
        (
            {"corpus": {**HELD_OUT, "held_out": [OTHER_SHARD | {"num_tokens": 2**20}]}},
            "run file: corpus.held_out has 262143 rows of 4 tokens, which must be 1 to 4096 parts",
        ),
    ],
)
def test_complaints_name_the_field(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UsageError) as error:
        read_run(describe_run(**changes))

    assert complaint in str(error.value)


def test_missing_field_is_named() -> None:
    content = describe_run()
    del content["corpus"]

    with pytest.raises(UsageError, match="run file: corpus: this setting is required"):
        read_run(content)


def test_misspelt_field_is_told_before_the_one_that_is_missing_then() -> None:
    content = describe_run()
    content["num_update"] = content.pop("num_updates")

    with pytest.raises(UsageError, match=r"num_update: a run has no .* did you mean num_updates\?"):
        read_run(content)


def list_changed(content: object) -> Iterator[object]:
    """Yield copies of the content of a run, of which each has another value in one place."""
    match content:
        case dict():
            for key, value in content.items():
                yield from (content | {key: other} for other in list_changed(value))
        case list():
            for index, value in enumerate(content):
                for other in list_changed(value):
                    yield [*content[:index], other, *content[index + 1 :]]
        case bool():
            yield not content
        case int():
            yield content + 1
        case float():
            yield content / 2 or 0.1
        case None:
            yield 0.5
        case str():
            names = {"muon": "adamw", "exact": "int8", "fp32": "bf16"}
            names |= {"0" * 64: "2" * 64, "1" * 64: "3" * 64}
            names |= {"4" * 64: "5" * 64, "tokenizer.json": "tokenizer.model"}
            yield names.get(content, content + "1")


def test_run_id_changes_with_every_setting_and_with_nothing_else() -> None:
    owner = Identity(bytes(32))
    corpus = {**HELD_OUT, "tokenizer": [TOKENIZER]}
    optimizer = {"learning_rate": 0.01}
    run = read_run(describe_run(corpus=corpus, optimizer=optimizer, held_out_every=2))
    content = run.model_dump(mode="json")

    others = [sign_run(owner, read_run(cast(Any, other))).run_id for other in list_changed(content)]

    run_id = sign_run(owner, run).run_id
    assert sign_run(owner, read_run(content)).run_id == run_id
    assert len({run_id, *others}) == 1 + len(others)
    assert len(others) == 39


@pytest.mark.parametrize(
    ("every", "measured"), [(None, [10]), (4, [4, 8, 10]), (5, [5, 10]), (99, [10])]
)
def test_held_out_loss_is_measured_after_the_last_update_and_as_often_as_is_said(
    every: int | None, measured: list[int]
) -> None:
    run = read_run(describe_run(num_updates=10, corpus=HELD_OUT, held_out_every=every))

    assert [update for update in range(11) if run.has_held_out_loss(update)] == measured
    assert run.num_held_out_parts == 1250
    without = read_run(describe_run(num_updates=10))
    assert not any(map(without.has_held_out_loss, range(11)))


def test_stages_cover_the_model_and_begin_with_its_blocks() -> None:
    run = read_run(describe_run(stage_borders=[1, 3]))

    assert run.list_stages(4) == [Span(0, 1), Span(1, 3), Span(3, 4)]
    with pytest.raises(UsageError, match="no stage can begin with block 3"):
        run.list_stages(3)


def test_parts_take_every_row_once_and_then_in_another_order() -> None:
    run = read_run(describe_run())
    num_rows = run.corpus.num_rows
    num_updates = -(-num_rows // 8) + 2

    rows = [
        row
        for update in range(num_updates)
        for index in range(run.parts_per_update)
        for row in run.list_rows(PartId(update, index))
    ]

    assert num_rows == 625
    assert sorted(rows[:num_rows]) == list(range(num_rows))
    assert rows[:9] != list(range(9))
    assert rows[num_rows : num_rows + 9] != rows[:9]
    assert run.list_rows(PartId(0, 0)) != read_run(describe_run(seed=8)).list_rows(PartId(0, 0))


@pytest.mark.parametrize("num_tokens", [33, 50, 66, 145, 2**12 + 1])
def test_orders_of_small_corpora_are_permutations(num_tokens: int) -> None:
    shard = NO_SHARD | {"num_tokens": num_tokens}
    corpus = {"shards": [shard], "sequence_length": 16}
    run = read_run(describe_run(corpus=corpus, rows_per_part=1, parts_per_update=1))

    num_rows = run.corpus.num_rows
    rows = [run.list_rows(PartId(update, 0))[0] for update in range(num_rows)]

    assert sorted(rows) == list(range(num_rows))


def test_learning_rate_warms_up_and_falls_to_its_final_fraction() -> None:
    schedule = {"warmup_updates": 3, "final_fraction": 0.2}
    run = read_run(describe_run(num_updates=10, schedule=schedule))

    fractions = [run.compute_learning_rate_factor(update) for update in range(10)]

    assert fractions[:4] == [0.25, 0.5, 0.75, 1.0]
    assert fractions[3:] == sorted(fractions[3:], reverse=True)
    assert fractions[9] == pytest.approx(0.2)
