"""Smaller things that scripts of PETALS say, which have to mean the same here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from adapter_scene import make_adapter
from tuning_scene import ONE_HOP, assert_close, open_model

import shoal.client
from shoal.client import (
    AutoDistributedConfig,
    AutoDistributedModel,
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForSequenceClassification,
    ClientConfig,
    DistributedBloomForCausalLM,
    DistributedLlamaConfig,
    DistributedLlamaForCausalLM,
    RemotePastKeyValues,
    UsageError,
    load_pretrained_block,
)
from shoal.client.settings.pretrained_arguments import make_client_config

IDS = torch.tensor([[5, 9, 60, 3]])


@pytest.mark.parametrize("family", ["Bloom", "Falcon", "Llama", "Mixtral"])
def test_classes_have_the_names_of_families_too(family: str) -> None:
    named: dict[str, type] = {
        f"Distributed{family}Config": AutoDistributedConfig,
        f"Distributed{family}Model": AutoDistributedModel,
        f"Distributed{family}ForCausalLM": AutoDistributedModelForCausalLM,
        f"Distributed{family}ForSequenceClassification": (
            AutoDistributedModelForSequenceClassification
        ),
    }
    for name, of_all in named.items():
        assert name in shoal.client.__all__
        assert getattr(shoal.client, name) is of_all


@pytest.mark.parametrize(
    ("variant", "kind"),
    [("bloom", DistributedBloomForCausalLM), ("gpt2", AutoDistributedModelForCausalLM)],
)
def test_model_is_of_the_class_of_its_family(tiny_models: Any, variant: str, kind: Any) -> None:
    with open_model(tiny_models.get(variant), ONE_HOP) as model:
        assert isinstance(model, kind)


@pytest.mark.parametrize("base", [DistributedLlamaForCausalLM, AutoDistributedModelForCausalLM])
def test_subclass_keeps_its_methods(tiny_models: Any, base: Any) -> None:
    class Greedy(base):
        def generate(self, *inputs: Any, **options: Any) -> Any:
            return super().generate(*inputs, do_sample=False, **options)

        def write(self) -> Any:
            return self.generate(IDS, max_new_tokens=3)

    with open_model(tiny_models.get(), ONE_HOP, Greedy) as model, torch.no_grad():
        assert isinstance(model, base)
        found = model.write()

    expected = tiny_models.get().reference.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(found, expected)


def test_settings_of_petals_are_understood() -> None:
    with pytest.warns(UserWarning, match=r"without effect: max_retries \(failover_timeout"):
        config = make_client_config(
            (), {"max_retries": 3, "update_period": 5, "use_server_to_server": False}
        )

    assert config == ClientConfig(refresh_seconds=5, delivery="star")
    with pytest.raises(UsageError, match="does not know maximal_retries"):
        make_client_config((), {"maximal_retries": 3})
    with pytest.raises(UsageError, match="allowed_servers must be a list of peer ids"):
        make_client_config((), {"allowed_servers": "12D3"})


def test_settings_can_be_changed_before_anybody_joins(tiny_models: Any) -> None:
    config = DistributedLlamaConfig.from_pretrained(tiny_models.get().directory)
    config.initial_peers = ["/ip4/127.0.0.1/tcp/1"]
    config.wire_dtype = "bf16"
    config.pad_token_id = 7
    assert isinstance(config, DistributedLlamaConfig)

    assert config.initial_peers == config.client.initial_peers == ("/ip4/127.0.0.1/tcp/1",)
    assert config.wire_dtype == config.client.wire_dtype == "bf16"
    assert config.pad_token_id == config.model.pad_token_id == 7
    config.use_server_to_server = False
    config.update_period = 7
    assert (config.delivery, config.client.refresh_seconds) == ("star", 7)
    with pytest.warns(UserWarning, match=r"without effect: max_retries"):
        config.max_retries = 3
    assert not hasattr(config.model, "max_retries")
    with pytest.raises(UsageError, match="wire_dtype must be one of"):
        config.wire_dtype = "fp8"


def test_past_key_values_stand_for_the_session(tiny_models: Any) -> None:
    with open_model(tiny_models.get(), ONE_HOP) as model, torch.no_grad():
        expected = model(IDS).logits
        assert model(IDS, past_key_values=RemotePastKeyValues()).past_key_values is None
        with model.inference_session(max_length=4) as session:
            assert session.past_key_values is None
            past = RemotePastKeyValues()
            assert past.get_seq_length() == 0
            first = model(IDS[:, :3], past_key_values=past)
            assert first.past_key_values is session.past_key_values is past
            assert past.get_seq_length() == session.position == 3
            second = model(IDS[:, 3:], past_key_values=past)
            assert session.num_blocks == 4

    assert_close(torch.cat([first.logits, second.logits], dim=1), expected)


def test_newest_token_can_be_another(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    with (
        open_model(tiny, ONE_HOP) as model,
        model.inference_session(max_length=9) as session,
    ):
        with pytest.raises(UsageError, match="no newest token"):
            session.last_token_id = torch.tensor([[11]])
        model.generate(IDS, max_new_tokens=2, do_sample=False)
        session.last_token_id = torch.tensor([[11]])
        found = model.generate(None, max_new_tokens=3, do_sample=False)
        text = session.output_ids

    assert text[0, 5] == 11
    expected = tiny.reference.generate(text[:, :6], max_new_tokens=3, do_sample=False)
    assert torch.equal(text, expected)
    assert torch.equal(found, expected[:, 6:])


def test_adapter_follows_the_configuration(tiny_models: Any, tmp_path: Path) -> None:
    with open_model(tiny_models.get(), ONE_HOP) as model, torch.no_grad():
        adapter = make_adapter(model)
        adapter.save(tmp_path)
        plain, adapted = model(IDS).logits, model(IDS, active_adapter=adapter).logits
        assert not torch.allclose(plain, adapted, atol=1e-2)

        model.config.active_adapter = str(tmp_path)
        assert_close(model(IDS).logits, adapted)
        with model.transformer.h.inference_session(max_length=4):
            assert_close(model(IDS).logits, adapted)
        model.config.active_adapter = None
        assert_close(model(IDS).logits, plain)

        digest = model.publish_adapter(adapter)
        model.active_adapter = digest
        assert model.config.active_adapter == digest
        model.active_adapter = adapter
        assert model.config.active_adapter is None
        assert_close(model(IDS).logits, adapted)
        model.config.active_adapter = "no such folder"
        for _ in range(2):
            with pytest.raises(UsageError, match="neither an existing folder nor"):
                model(IDS)


def test_configuration_of_a_model_says_where_it_is(tiny_models: Any) -> None:
    tiny = tiny_models.get()
    with open_model(tiny, ONE_HOP) as model:
        assert model.config.initial_peers == []
        config = AutoDistributedConfig.from_pretrained(tiny.directory)
        assert model.config.dht_prefix == config.dht_prefix


@pytest.mark.parametrize(
    "variant",
    ["llama", "falcon", "mixtral", "bloom", "gpt2", "gemma", "gemma2", "gemma3", "phi3",
     "mistral-window-in-some"],
)  # fmt: skip
def test_remote_block_is_what_a_local_one_is(tiny_models: Any, variant: str) -> None:
    tiny = tiny_models.get(variant)
    hidden = torch.randn(2, 20, 64, generator=torch.Generator().manual_seed(1), requires_grad=True)
    with open_model(tiny, ((0, 4),)) as model:
        for index in (0, 3):
            block = load_pretrained_block(tiny.directory, index, torch_dtype=torch.float32)
            (output,) = block(hidden)
            remote = model.transformer.h[index](hidden)
            assert_close(remote.detach(), output.detach())
            grads = [torch.autograd.grad(one.square().sum(), hidden)[0] for one in (remote, output)]
            assert_close(*grads)

            _, past = block(hidden[:, :12], use_cache=True)
            (rest,) = block(hidden[:, 12:], past)
            assert_close(rest.detach(), output[:, 12:].detach())


def test_local_block_has_the_dtype_asked_for(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    for dtype in (torch.float32, torch.float16):
        block = load_pretrained_block(directory, 1, torch_dtype=dtype)
        assert {weight.dtype for weight in block.parameters()} == {dtype}
    with pytest.raises(UsageError, match="blocks 0:4"):
        load_pretrained_block(directory, 4)
