"""Steps of sessions with adapters: each row is what it would be alone."""

from __future__ import annotations

import json
from typing import Any

import pytest
import safetensors.torch
import torch
from pass_scene import check_close, draw, load_engine
from torch import Tensor

from shoal.kernels.linear.quantize import WeightFormat
from shoal.peer.engine import steps
from shoal.peer.engine.adapters.adapter import Adapter
from shoal.peer.engine.adapters.adapter_file import read_adapter
from shoal.peer.engine.engine import Engine
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.peer.engine.steps import StepWork

HIDDEN = 64
PATH = "base_model.model.model.layers.{}.{}.lora_{}.weight"
LINEARS = {
    "self_attn.q_proj": (64, 64),
    "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64),
    "mlp.gate_proj": (96, 64),
    "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}


def make_adapter(engine: Engine, seed: int, rank: int) -> Adapter:
    matrices: dict[str, Tensor] = {}
    for block in range(4):
        for number, (name, (outputs, inputs)) in enumerate(LINEARS.items()):
            place = 1000 * seed + 10 * block + number
            matrices[PATH.format(block, name, "A")] = 0.2 * draw(rank, inputs, seed=place)
            matrices[PATH.format(block, name, "B")] = 0.2 * draw(outputs, rank, seed=place + 500)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4}
    files = json.dumps(config).encode(), safetensors.torch.save(matrices)
    return read_adapter(*files, engine.spec, engine.span)


class Session:
    """One session of an engine, which is stepped alone or together with others."""

    def __init__(self, engine: Engine, adapter: Adapter | None, num_rows: int = 1) -> None:
        self.engine = engine
        self.adapter = adapter
        self.cache = engine.pool.open(num_rows, 64, engine.span)

    def plan(self, hidden: Tensor, decoded: bool = False) -> StepWork:
        return StepWork(
            self.cache,
            self.cache.length,
            hidden,
            decoded=decoded,
            adapter=self.adapter,
        )


def step(*works: StepWork, engine: Engine) -> list[Tensor]:
    results = engine.execute(works)
    assert all(isinstance(result, Tensor) for result in results), results
    return results  # pyright: ignore[reportReturnType]


@pytest.mark.parametrize("weights", [WeightFormat.FP32, WeightFormat.INT8])
def test_steps_are_those_of_a_pass(tiny_models: Any, weights: WeightFormat) -> None:
    engine = load_engine(tiny_models.get(), weights)
    adapter, texts = make_adapter(engine, 1, 3), draw(2, 9, HIDDEN)
    expected = engine.passes.run_forward(
        PassWork(engine.span, texts, adapters=(adapter, adapter)), lambda: None
    )
    session = Session(engine, adapter, num_rows=2)
    (prompt,) = step(session.plan(texts[:, :6]), engine=engine)
    tokens = [
        step(session.plan(texts[:, place : place + 1], decoded=True), engine=engine)[0]
        for place in range(6, 9)
    ]

    tolerance = 1e-4 if weights is WeightFormat.FP32 else 0.05
    check_close(torch.cat([prompt, *tokens], dim=1), expected, tolerance)


def test_row_does_not_depend_on_company(tiny_models: Any) -> None:
    """To the bit where weights are int8: with the same adapter, another one, or none."""
    engine = load_engine(tiny_models.get(), WeightFormat.INT8)
    one, other = make_adapter(engine, 1, 3), make_adapter(engine, 2, 8)
    prompt, token = draw(1, 7, HIDDEN), draw(1, 1, HIDDEN, seed=2)

    def run(companions: list[Adapter | None]) -> list[Tensor]:
        mine = Session(engine, one)
        sessions = [Session(engine, adapter, num_rows=3) for adapter in companions]
        outputs: list[Tensor] = []
        for hidden, decoded, seed in ((prompt, False, 3), (token, True, 4)):
            company = [
                session.plan(draw(3, hidden.shape[1], HIDDEN, seed=seed + 10 * number), decoded)
                for number, session in enumerate(sessions)
            ]
            middle = len(company) // 2
            works = [*company[:middle], mine.plan(hidden, decoded), *company[middle:]]
            outputs.append(step(*works, engine=engine)[middle])
        for session in (mine, *sessions):
            session.cache.close()
        return outputs

    alone = run([])
    companies: list[list[Adapter | None]] = [[one], [None, other], [other, one, None, one, other]]
    for companions in companies:
        for found, expected in zip(run(companions), alone, strict=True):
            assert torch.equal(found, expected)
    plain = Session(engine, None)
    (without,) = step(plain.plan(prompt), engine=engine)
    assert not torch.allclose(without, alone[0], atol=1e-2)


def test_replay_of_generated_tokens_is_exact(tiny_models: Any) -> None:
    engine = load_engine(tiny_models.get(), WeightFormat.INT8)
    adapter, tokens = make_adapter(engine, 1, 5), draw(1, 6, HIDDEN)
    first, again = Session(engine, adapter), Session(engine, adapter)
    one_by_one = [
        step(first.plan(tokens[:, place : place + 1], decoded=True), engine=engine)[0]
        for place in range(6)
    ]
    (at_once,) = step(again.plan(tokens, decoded=True), engine=engine)

    assert torch.equal(at_once, torch.cat(one_by_one, dim=1))


@pytest.mark.parametrize("variant", ["gpt2", "bloom", "falcon", "phi3"])
def test_fused_linears_are_changed_where_peft_changes_them(tiny_models: Any, variant: str) -> None:
    """What passes make of such adapters is compared with peft elsewhere."""
    from shoal.client.training.lora import LoraAdapter

    tiny_model = tiny_models.get(variant)
    engine = load_engine(tiny_model)
    trained = LoraAdapter.create(tiny_model.reference, rank=3)
    with torch.no_grad():
        for number, matrix in enumerate(trained.parameters()):
            matrix.copy_(0.1 * draw(*matrix.shape, seed=number))
    version = trained.take_version()
    cut = version.cut(engine.span)
    assert cut is not None
    adapter = read_adapter(cut.config, cut.tensors, engine.spec, engine.span)
    texts = draw(1, 9, HIDDEN)
    expected = engine.passes.run_forward(
        PassWork(engine.span, texts, adapters=(adapter,)), lambda: None
    )

    (found,) = step(Session(engine, adapter).plan(texts), engine=engine)
    check_close(found, expected)


def test_tokens_of_others_are_computed_between_the_products_of_an_adapter(tiny_models: Any) -> None:
    engine = load_engine(tiny_models.get(), WeightFormat.INT8)
    adapter, prompt = make_adapter(engine, 1, 8), draw(1, 9, HIDDEN)
    hidden = [draw(1, 1, HIDDEN, seed=seed) for seed in range(2, 40)]
    expected = step(Session(engine, adapter).plan(prompt), engine=engine)
    tokens = [Session(engine, None).plan(one, decoded=True) for one in hidden]
    expected_tokens = [step(one, engine=engine)[0] for one in tokens]
    waiting = [Session(engine, None).plan(one, decoded=True) for one in hidden]
    computed: list[Tensor] = []

    def give_way() -> None:
        computed.extend(step(waiting[len(computed)], engine=engine))

    results = engine.execute([Session(engine, adapter).plan(prompt)], give_way)

    assert len(computed) == 4 * (1 + len(LINEARS))  # before each block and each linear's product
    for found, alone in zip([*results, *computed], [*expected, *expected_tokens], strict=False):
        assert torch.equal(expect_tensor(found), alone)


def test_large_products_of_an_adapter_are_cut_into_rows(
    tiny_models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "COST_BETWEEN_PAUSES", 2**15)
    engine = load_engine(tiny_models.get(), WeightFormat.INT8)
    adapter, prompt = make_adapter(engine, 1, 32), draw(1, 40, HIDDEN)
    (expected,) = step(Session(engine, adapter).plan(prompt), engine=engine)
    calls: list[None] = []

    (found,) = engine.execute([Session(engine, adapter).plan(prompt)], lambda: calls.append(None))

    # Of the smallest linear, three rows cost more than that; of the largest one.
    assert 4 * 6 * 40 / 3 < len(calls) <= 4 * (1 + 6 * 40)
    assert torch.equal(expect_tensor(found), expected)


def expect_tensor(result: object) -> Tensor:
    assert isinstance(result, Tensor), result
    return result
