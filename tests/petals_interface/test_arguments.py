"""Arguments of PETALS and transformers: they act, change nothing, or are refused by name."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from adapter_scene import make_adapter
from tuning_scene import ONE_HOP, assert_close, make_batch, open_model

from shoal.client import (
    AutoDistributedConfig,
    AutoDistributedModel,
    AutoDistributedModelForCausalLM,
    ModelError,
    UsageError,
)
from shoal.peer.local_swarm.loopback import LoopbackSwarm

IDS = torch.tensor([[5, 9, 60, 3]])
DUMMY = torch.empty(0)
COMMIT = "a" * 40


class Multiaddr:
    """As that of the package multiaddr, which hivemind hands out."""

    def __str__(self) -> str:
        return "/ip4/127.0.0.1/tcp/1"


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the Hub's client look into its cache only, however the tests were started."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def put_on_hub(folder: Path, cache: Path, name: str) -> Path:
    """Lay files out as the Hub's client keeps them; return the folder of the commit."""
    kept = cache / f"models--{name.replace('/', '--')}"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    shutil.copytree(folder, kept / "snapshots" / COMMIT)
    return kept / "snapshots" / COMMIT


@pytest.mark.parametrize("kind", [AutoDistributedModelForCausalLM, AutoDistributedModel])
def test_arguments_that_change_nothing_are_accepted(tiny_models: Any, kind: Any) -> None:
    harmless: dict[str, Any] = dict.fromkeys(
        ["attention_mask", "head_mask", "past_key_values", "inputs_embeds", "use_cache"]
    )
    with open_model(tiny_models.get(), ONE_HOP, kind) as model, torch.no_grad():
        expected = model(IDS)[0]
        found = model(
            IDS,
            **harmless,
            position_ids=torch.arange(4)[None],
            output_attentions=False,
            output_hidden_states=None,
        )[0]
        assert_close(found, expected)
        with model.transformer.h.inference_session(max_length=4):
            model(IDS[:, :3], position_ids=torch.arange(3))
            rest = model(IDS[:, 3:], position_ids=torch.tensor([[3]]))[0]
    assert_close(rest, expected[:, 3:])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output_attentions": True}, "does not take output_attentions: attention is computed"),
        ({"output_hidden_states": True}, "does not take output_hidden_states"),
        ({"head_mask": torch.ones(4)}, "does not take head_mask"),
        ({"position_ids": torch.arange(1, 5)[None]}, "positions 0 to 3; leave position_ids out"),
        ({"position_ids": torch.arange(3)[None]}, "positions 0 to 3; leave position_ids out"),
    ],
)
def test_arguments_that_would_change_something_are_refused(
    tiny_models: Any, arguments: dict[str, Any], message: str
) -> None:
    with open_model(tiny_models.get(), ONE_HOP) as model:
        with pytest.raises(UsageError, match=message):
            model(IDS, **arguments)
        with pytest.raises(TypeError, match="'no_such_argument'"):
            model(IDS, no_such_argument=None)


def test_padding_has_any_positions(tiny_models: Any) -> None:
    ids, mask, _ = make_batch()
    positions = (mask.cumsum(1) - 1).masked_fill(mask == 0, 7)
    with open_model(tiny_models.get(), ONE_HOP) as model, torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        found = model(ids, attention_mask=mask, position_ids=positions).logits
        assert_close(found[mask == 1], expected[mask == 1])
        with pytest.raises(UsageError, match="leave position_ids out"):
            model(ids, position_ids=positions)


@pytest.mark.parametrize("variant", ["llama", "bloom", "wrapped-opt"])
def test_inner_model_returns_hidden_states(tiny_models: Any, variant: str) -> None:
    tiny = tiny_models.get(variant)
    with open_model(tiny, ONE_HOP) as model, torch.no_grad():
        assert model.model is model.transformer
        found = model.transformer(IDS).last_hidden_state
        with model.inference_session(max_length=4):
            parts = [model.model(part)[0] for part in (IDS[:, :3], IDS[:, 3:])]
        expected = tiny.decoder(IDS).last_hidden_state

    assert_close(found, expected)
    assert_close(torch.cat(parts, dim=1), expected)


def test_empty_tensors_stand_for_nothing(tiny_models: Any) -> None:
    hidden = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(1))
    with open_model(tiny_models.get(), ONE_HOP) as model, torch.no_grad():
        blocks = model.transformer.h
        expected = blocks(hidden)
        assert_close(blocks(hidden, DUMMY, DUMMY), expected)
        with blocks.inference_session(max_length=3) as session:
            assert_close(session.step(hidden, prompts=DUMMY, hypo_ids=DUMMY.long()), expected)


def test_options_that_are_none_are_not_given(tiny_models: Any) -> None:
    names = ["token", "cache_dir", "revision", "torch_dtype", "tuning_mode", "pre_seq_len"]
    names += ["allowed_servers", "join", "initial_peers", "active_adapter", "device_map"]
    with open_model(tiny_models.get(), ONE_HOP, **dict.fromkeys(names)) as model:
        assert model.active_adapter is None


def test_configuration_may_be_overridden_where_peers_do_not_compute_with_it(
    tiny_models: Any,
) -> None:
    directory = tiny_models.get().directory
    config = AutoDistributedConfig.from_pretrained(
        directory, pad_token_id=9, num_hidden_layers=4, output_attentions=False
    )
    assert (config.pad_token_id, config.num_hidden_layers) == (9, 4)
    with pytest.raises(UsageError, match=r"num_hidden_layers is 4 in .* and cannot be 2"):
        AutoDistributedConfig.from_pretrained(directory, num_hidden_layers=2)
    with pytest.raises(UsageError, match=r"return_dict is True in .* and cannot be False"):
        AutoDistributedConfig.from_pretrained(directory, return_dict=False)
    with pytest.raises(UsageError, match=r"use_cache is True in .* and cannot be False"):
        AutoDistributedConfig.from_pretrained(directory, use_cache=False)
    with open_model(tiny_models.get(), ONE_HOP, pad_token_id=9) as model:
        assert model.config.pad_token_id == 9


def test_addresses_may_be_objects(tiny_models: Any) -> None:
    directory = tiny_models.get().directory
    for given in (Multiaddr(), [Multiaddr()], (str(Multiaddr()),)):
        config = AutoDistributedConfig.from_pretrained(directory, initial_peers=given)  # pyright: ignore[reportArgumentType]
        assert config.initial_peers == (str(Multiaddr()),)


@pytest.mark.usefixtures("offline")
def test_files_of_the_hub_come_from_the_cache_that_is_named(
    tiny_models: Any, tmp_path: Path
) -> None:
    tiny = tiny_models.get()
    put_on_hub(tiny.directory, tmp_path / "cache", "org/model")
    swarm = LoopbackSwarm(tmp_path / "cache/models--org--model/snapshots" / COMMIT, ONE_HOP)

    with pytest.raises(ModelError, match="the Hub cannot be reached"):
        AutoDistributedConfig.from_pretrained("org/model", token="secret")
    config = AutoDistributedConfig.from_pretrained(
        "org/model", cache_dir=tmp_path / "cache", token="secret", connect=swarm.connect
    )

    assert config.num_hidden_layers == 4
    assert "secret" not in repr(vars(config))


@pytest.mark.usefixtures("offline")
def test_adapter_is_opened_by_its_id_on_the_hub(tiny_models: Any, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with open_model(tiny_models.get(), ONE_HOP, cache_dir=cache) as model, torch.no_grad():
        adapter = make_adapter(model)
        adapter.save(tmp_path / "adapter")
        kept = put_on_hub(tmp_path / "adapter", cache, "org/adapter")
        expected = model(IDS, active_adapter=adapter).logits

        model.config.active_adapter = "org/adapter"
        assert_close(model(IDS).logits, expected)
        assert model.config.active_adapter == "org/adapter"
        model.config.active_adapter = "org/other"
        with pytest.raises(ModelError, match=r"org/other.*cannot be reached for adapter_config"):
            model(IDS)

        # A branch that moves on between the two files would mix two adapters.
        (kept.parent.parent / "refs" / "main").write_text("b" * 40)
        newer = kept.parent / ("b" * 40)
        newer.mkdir()
        shutil.copy(kept / "adapter_config.json", newer)
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors"):
            model.load_adapter("org/adapter")


@pytest.mark.usefixtures("offline")
def test_adapter_of_the_hub_is_opened_with_the_model(tiny_models: Any, tmp_path: Path) -> None:
    with open_model(tiny_models.get(), ONE_HOP) as model:
        make_adapter(model).save(tmp_path / "adapter")
    cache = tmp_path / "cache"
    put_on_hub(tmp_path / "adapter", cache, "org/adapter")
    with open_model(
        tiny_models.get(), ONE_HOP, cache_dir=cache, active_adapter="org/adapter"
    ) as model:
        assert model.config.active_adapter == "org/adapter"
        assert model.active_adapter is not None
