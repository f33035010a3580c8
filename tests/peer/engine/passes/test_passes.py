"""Passes without a cache: their results and gradients are those of transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from pass_scene import check_close, differentiate_reference, draw, embed, share_engine, stay
from torch import nn
from transformers.pytorch_utils import Conv1D

from shoal.kernels.linear.linear import RowPrecision
from shoal.kernels.linear.quantize import WeightFormat, dequantize_int8, quantize_int8
from shoal.peer.engine.blocks import batch
from shoal.peer.engine.passes import span_passes
from shoal.peer.engine.passes.span_passes import PassWork
from shoal.protocol.spans import Span


@pytest.mark.slow
@pytest.mark.parametrize("prompt_rows", [pytest.param(1, marks=pytest.mark.thorough), 3])
def test_passes_equal_transformers(tiny_family, prompt_rows: int) -> None:
    """All variants run below in small pieces, where they differ; prompts are the same to all."""
    engine = share_engine(tiny_family)
    hidden = embed(tiny_family, 3, 40)
    size = hidden.shape[-1]
    prompts = 0.3 * draw(4, prompt_rows, 5, size)
    grads = draw(3, 40, size, seed=2)
    expected = differentiate_reference(tiny_family.decoder, hidden, prompts, grads)

    work = PassWork(engine.span, hidden, prompts)
    output = engine.passes.run_forward(work, stay)
    found = engine.passes.run_backward(work, grads, stay)

    check_close(output, expected[0])
    check_close(found.hidden_BTH, expected[1])
    check_close(found.prompts_LBPH, expected[2])


@pytest.mark.parametrize("num_tokens", [pytest.param(1, marks=pytest.mark.thorough), 40])
def test_short_and_long_texts_in_small_pieces_equal_transformers(
    another_of_family, num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_small_pieces(another_of_family, num_tokens, monkeypatch)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "bloom", "mixtral", "wrapped-stablelm"])
def test_text_of_one_token_equals_transformers(
    tiny_models, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_small_pieces(tiny_models.get(variant), 1, monkeypatch)


def check_small_pieces(tiny_model: Any, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span_passes, "COST_BETWEEN_PAUSES", 2**16)
    monkeypatch.setattr(span_passes, "TOKENS_AT_ONCE", dict.fromkeys(WeightFormat, 30))
    engine = share_engine(tiny_model)
    hidden = embed(tiny_model, 2, num_tokens)
    grads = draw(*hidden.shape, seed=2)
    expected = differentiate_reference(tiny_model.decoder, hidden, None, grads)

    work = PassWork(engine.span, hidden)

    check_close(engine.passes.run_forward(work, stay), expected[0])
    found = engine.passes.run_backward(work, grads, stay)
    check_close(found.hidden_BTH, expected[1])
    assert found.prompts_LBPH is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "variant", ["mistral-window-in-some", "gemma3", "qwen3-moe", "bloom", "wrapped-cohere2"]
)
def test_hops_pass_on_what_one_peer_computes(tiny_models, variant: str) -> None:
    """Also where blocks differ, by windows, rotations or experts."""
    tiny_model = tiny_models.get(variant)
    whole = share_engine(tiny_model)
    hidden = embed(tiny_model, 2, 20)
    prompts, grads = 0.3 * draw(4, 1, 3, hidden.shape[-1]), draw(*hidden.shape, seed=2)
    expected = whole.passes.run_backward(PassWork(whole.span, hidden, prompts), grads, stay)
    spans = [Span(block, block + 1) for block in range(4)]
    # The last hop hosts more than it is asked for.
    engines = [share_engine(tiny_model, span=span) for span in spans[:-1]] + [whole]

    works = []
    for engine, span in zip(engines, spans, strict=True):
        works.append(PassWork(span, hidden, prompts[span.start : span.stop]))
        hidden = engine.passes.run_forward(works[-1], stay)
    prompt_grads = []
    for engine, work in reversed(list(zip(engines, works, strict=True))):
        found = engine.passes.run_backward(work, grads, stay)
        assert found.prompts_LBPH is not None
        grads, prompt_grads = found.hidden_BTH, [found.prompts_LBPH, *prompt_grads]

    check_close(grads, expected.hidden_BTH, 1e-6)
    check_close(torch.cat(prompt_grads), expected.prompts_LBPH, 1e-6)


def round_weights(decoder: Any) -> Any:
    """Return a copy of a decoder with the weights that int8 blocks have."""
    decoder = copy.deepcopy(decoder)
    for layer in decoder.layers if hasattr(decoder, "layers") else decoder.h:
        for name, weight in layer.named_parameters():
            module = layer.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.Linear) and weight.dim() == 2:
                weight.data = dequantize_int8(quantize_int8(weight.data))
            elif isinstance(module, Conv1D) and weight.dim() == 2:
                weight.data = dequantize_int8(quantize_int8(weight.data.t())).t().contiguous()
    return decoder


DENSE = ["llama", "qwen3", "gemma2", "falcon", "falcon-alibi", "bloom", "gpt2", "phi3"]


@pytest.mark.parametrize("variant", DENSE)
@pytest.mark.parametrize(
    ("precision", "tolerance"),
    # Gradients are those of the forward pass as it was: as far off as its activations are.
    [(RowPrecision.ONE_DIGIT, 0.1), (RowPrecision.TWO_DIGITS, 1e-3)],
)
def test_int8_gradients_are_those_of_the_quantized_weights(
    tiny_models,
    variant: str,
    precision: RowPrecision,
    tolerance: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(batch, "PASS_PRECISION", precision)
    tiny_model = tiny_models.get(variant)
    engine = share_engine(tiny_model, WeightFormat.INT8)
    hidden = embed(tiny_model, 2, 40)
    prompts, grads = 0.3 * draw(4, 1, 5, hidden.shape[-1]), draw(*hidden.shape, seed=2)
    decoder = round_weights(tiny_model.decoder)
    expected = differentiate_reference(decoder, hidden, prompts, grads)

    work = PassWork(engine.span, hidden, prompts)
    found = engine.passes.run_backward(work, grads, stay)

    check_close(engine.passes.run_forward(work, stay), expected[0], tolerance)
    check_close(found.hidden_BTH, expected[1], tolerance)
    check_close(found.prompts_LBPH, expected[2], tolerance)


@pytest.mark.parametrize("variant", ["llama", "gemma2", "mixtral", "bloom", "wrapped-stablelm"])
def test_bfloat16_gradients_are_close(tiny_models, variant: str) -> None:
    tiny_model = tiny_models.get(variant)
    engine = share_engine(tiny_model, WeightFormat.BF16)
    hidden = embed(tiny_model, 2, 40)
    prompts, grads = 0.3 * draw(4, 2, 5, hidden.shape[-1]), draw(*hidden.shape, seed=2)
    expected = differentiate_reference(tiny_model.decoder, hidden, prompts, grads)

    found = engine.passes.run_backward(PassWork(engine.span, hidden, prompts), grads, stay)

    assert found.hidden_BTH.dtype is torch.bfloat16
    assert found.prompts_LBPH is not None
    # Experts are chosen otherwise where two of them are equally good.
    tolerance = 0.3 if variant == "mixtral" else 0.05
    check_close(found.hidden_BTH, expected[1], tolerance)
    check_close(found.prompts_LBPH, expected[2], tolerance)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe", "gemma3"])
def test_int8_rows_are_the_same_to_the_bit_in_any_microbatch(tiny_models, variant: str) -> None:
    engine = share_engine(tiny_models.get(variant), WeightFormat.INT8)
    hidden, grads = draw(4, 33, 64), draw(4, 33, 64, seed=2)
    prompts = 0.3 * draw(4, 4, 5, 64, seed=3)
    works = [
        PassWork(engine.span, hidden[rows], prompts[:, rows])
        for rows in (slice(0, 4), slice(0, 1), slice(1, 4))
    ]

    output, *parts = (engine.passes.run_forward(work, stay) for work in works)
    whole, first, rest = (
        engine.passes.run_backward(work, part, stay)
        for work, part in zip(works, (grads, grads[:1], grads[1:]), strict=True)
    )

    assert torch.equal(torch.cat(parts), output)
    assert torch.equal(torch.cat([first.hidden_BTH, rest.hidden_BTH]), whole.hidden_BTH)
    assert whole.prompts_LBPH is not None
    joined = torch.cat([part.prompts_LBPH for part in (first, rest)], dim=1)  # type: ignore[arg-type]
    assert torch.equal(joined, whole.prompts_LBPH)


def test_inputs_of_any_dtype_stay_as_they_were(tiny_models) -> None:
    engine = share_engine(tiny_models.get())
    work = PassWork(engine.span, draw(2, 9, 64).half(), draw(4, 1, 3, 64, seed=2).bfloat16())
    grads = draw(2, 9, 64, seed=3)
    before = [tensor.clone() for tensor in (work.hidden_BTH, work.prompts_LBPH, grads)]  # type: ignore[union-attr]

    with torch.inference_mode():
        engine.passes.run_forward(work, stay)
        found = engine.passes.run_backward(work, grads, stay)

    assert not found.hidden_BTH.requires_grad
    for tensor, copied in zip((work.hidden_BTH, work.prompts_LBPH, grads), before, strict=True):
        assert tensor is not None
        assert torch.equal(tensor, copied)
