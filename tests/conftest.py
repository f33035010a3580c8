"""Fixtures for everybody: tiny random checkpoints of every family that shoal knows."""

from __future__ import annotations

import gc
import logging
import math
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import warm_python
import warm_workers

from shoal.peer.local_swarm.swarm import LocalPeer

pytest_plugins = ["async_tests"]

# A shell that starts the tests in the background has them ignore Ctrl-C, nohup the end of the
# terminal, and so does every process that they start. Some of them are about these.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Without a device, programs in Triton run in its interpreter. Triton asks when it is imported, and
# transformers imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="module", autouse=True)
def old_objects() -> None:
    """What was there before the tests of a file, modules above all, is no garbage of theirs.

    Many tests look for garbage when they end; among half a million objects that takes longer than
    the test.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give tests a home of their own, where addresses of swarms are kept."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm_peers(home: None) -> Iterator[None]:
    """Peers of local swarms start without imports, but for those of tests about the start."""
    LocalPeer.Popen = warm_python.Popen
    yield
    warm_python.forge.stop()


@pytest.fixture
def plain_peers(warm_peers: None) -> Iterator[None]:
    """Peers that this test starts start as they do elsewhere."""
    LocalPeer.Popen = subprocess.Popen
    yield
    LocalPeer.Popen = warm_python.Popen


@pytest.fixture
def shipped_p2pd(monkeypatch: pytest.MonkeyPatch) -> None:
    """The p2pd of this test's own process is the one that hivemind brings, as users have it."""
    monkeypatch.setattr("hivemind.p2p.p2p_daemon.P2PD_FILENAME", "p2pd")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--one-case", action="store_true", help="run only the first case of a parametrized test"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Let one process import what all workers need."""
    if sys.platform == "linux":
        config.add_cleanup(warm_workers.warm(specs))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import everything without looking for garbage, which takes a quarter of that time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Have torch's loggers pass on what they are told.

    pytest attaches to all that do not, six times in each test, and torch brings fifty.
    """
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch.") and isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long files first: begun last, one of them would run on all alone.

    The longest start processes and wait for them half of the time. They take turns with those that
    only compute, so that cores are neither idle nor shared by too many. Short are the files whose
    tests are all quick.
    """
    # Workers send each other the names, several times.
    assert max((len(item.nodeid) for item in items), default=0) < 500
    if config.getoption("--one-case"):
        usual = [item for item in items if not item.get_closest_marker("thorough")]
        first = {item.nodeid.partition("[")[0]: item for item in reversed(usual)}
        items[:] = [item for item in usual if first[item.nodeid.partition("[")[0]] is item]
    waiting, slow = (
        list(dict.fromkeys(item.path for item in items if item.get_closest_marker(mark)))
        for mark in ("network", "slow")
    )
    computing = [path for path in slow if path not in waiting]
    turns = {path: number for paths in (waiting, computing) for number, path in enumerate(paths)}
    items.sort(key=lambda item: turns.get(item.path, math.inf))


NUM_BLOCKS = 4
SEED = 20240229

_SHAPE = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": NUM_BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 2.0}

_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 20,
    "kv_lora_rank": 18,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
}
"""Of DeepSeek's attention and experts."""

_THETAS = {
    "layer_rope_theta": [1e4, 50.0, 0, 50.0],
    "layer_types": ["full_attention", *["sliding_attention"] * 2, "full_attention"],
    "sliding_window": 13,
}

_GEMMA = {"head_dim": 24, "query_pre_attn_scalar": 40, "sliding_window": 13}
_LONG_ROPE = {"rope_type": "linear", "rope_theta": 5e4, "factor": 4.0}

# Every variant differs from its family's plain form in something that blocks must honour.
VARIANTS: Mapping[str, tuple[str, dict[str, Any]]] = MappingProxyType(
    {
        "llama": ("llama", {}),
        "llama-rope-llama3": ("llama", {"rope_parameters": _LLAMA3_ROPE}),
        "llama-rope-linear": ("llama", {"rope_parameters": _LINEAR_ROPE}),
        "llama-head-dim": ("llama", {"head_dim": 24}),
        "llama-one-kv-head": ("llama", {"num_key_value_heads": 1}),
        "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
        "llama-tied": ("llama", {"tie_word_embeddings": True}),
        "mistral": ("mistral", {"sliding_window": None, "head_dim": 24}),
        "mistral-window": ("mistral", {"sliding_window": 13}),
        "mistral-window-in-some": (
            "mistral",
            {
                "sliding_window": 13,
                "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
            },
        ),
        "qwen2": ("qwen2", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
        "qwen2-window": (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 13, "max_window_layers": 2},
        ),
        "qwen3": ("qwen3", {"head_dim": 24}),
        "qwen3-window": (
            "qwen3",
            {
                "head_dim": 16,
                "attention_bias": True,
                "use_sliding_window": True,
                "sliding_window": 13,
                "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
            },
        ),
        "gemma": ("gemma", {"head_dim": 24, "hidden_act": "gelu", "num_key_value_heads": 1}),
        "gemma2": (
            "gemma2",
            # Caps that bend the small scores and logits of a random model, too.
            {**_GEMMA, "attn_logit_softcapping": 0.8, "final_logit_softcapping": 1.5},
        ),
        "gemma2-no-caps": (
            "gemma2",
            {
                **_GEMMA,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "num_key_value_heads": 1,
                "attention_bias": True,
                "tie_word_embeddings": False,
            },
        ),
        "gemma3": (
            "gemma3_text",
            {
                **_GEMMA,
                "rope_parameters": {
                    "full_attention": _LONG_ROPE,
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e2},
                },
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
                "final_logit_softcapping": 2.0,
            },
        ),
        "phi3": (
            "phi3",
            {
                "sliding_window": 13,
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.75,
                },
            },
        ),
        "phi3-longrope": (
            "phi3",
            {
                "original_max_position_embeddings": 400,
                "max_position_embeddings": 3200,
                "tie_word_embeddings": True,
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "short_factor": [1.0 + pair / 4 for pair in range(8)],
                    "long_factor": [4.0] * 8,
                },
            },
        ),
        "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        "qwen3-moe": (
            "qwen3_moe",
            {
                "head_dim": 24,
                "num_experts": 5,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 40,
                "mlp_only_layers": [1],
                "norm_topk_prob": False,
            },
        ),
        "qwen3-moe-normalized": (
            "qwen3_moe",
            {
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 40,
                "decoder_sparse_step": 2,
                "norm_topk_prob": True,
                "use_sliding_window": True,
                "sliding_window": 13,
            },
        ),
        "falcon": ("falcon", {}),
        "falcon-grouped": (
            "falcon",
            {
                "new_decoder_architecture": True,
                "num_kv_heads": 2,
                "bias": True,
                "ffn_hidden_size": 80,
                "rope_parameters": _LINEAR_ROPE,
            },
        ),
        "falcon-grouped-one-norm": (
            "falcon",
            {"new_decoder_architecture": True, "num_kv_heads": 1, "num_ln_in_parallel_attn": 1},
        ),
        "falcon-alibi": (
            "falcon",
            # Slopes of six heads come from two series.
            {
                "alibi": True,
                "multi_query": False,
                "parallel_attn": False,
                "bias": True,
                "num_attention_heads": 6,
                "hidden_size": 48,
                "tie_word_embeddings": False,
            },
        ),
        "bloom": ("bloom", {}),
        "bloom-6-heads": (
            "bloom",
            {"num_attention_heads": 6, "hidden_size": 48, "tie_word_embeddings": False},
        ),
        "gpt2": ("gpt2", {}),
        "gpt2-unscaled": (
            "gpt2",
            {"scale_attn_weights": False, "n_inner": 80, "tie_word_embeddings": False},
        ),
        # Families without files here, which run through transformers' own layers.
        "wrapped-stablelm": (
            "stablelm",
            {"partial_rotary_factor": 0.25, "use_qkv_bias": True, "qk_layernorm": True},
        ),
        "wrapped-cohere2": (
            "cohere2",
            {
                "logit_scale": 0.5,
                "sliding_window": 13,
                "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
            },
        ),
        "wrapped-gpt-neox": ("gpt_neox", {"tie_word_embeddings": False}),
        # These are stored with other names, or a tensor for each expert.
        "wrapped-olmoe": ("olmoe", {"num_experts": 5, "num_experts_per_tok": 2}),
        "wrapped-granitemoe": (
            "granitemoe",
            {
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "residual_multiplier": 0.5,
                "logits_scaling": 2.0,
            },
        ),
        "wrapped-granite": (
            "granite",
            {"embedding_multiplier": 12.0, "attention_multiplier": 0.1, "logits_scaling": 8.0},
        ),
        # The decoders of these look up what a block rotates by, and some do not rotate.
        "wrapped-granite-swa": ("granite_swa", _THETAS),
        "wrapped-granitemoe-swa": (
            "granitemoe_swa",
            {**_THETAS, "num_local_experts": 4, "num_experts_per_tok": 2},
        ),
        # The decoders of these add positions before their first block: learned ones, or computed.
        "wrapped-opt": (
            "opt",
            {"word_embed_proj_dim": 64, "ffn_dim": 80, "tie_word_embeddings": False},
        ),
        "wrapped-xglm": ("xglm", {"d_model": 64, "ffn_dim": 80, "pad_token_id": 1}),
        "wrapped-biogpt": ("biogpt", {"scale_embedding": True, "pad_token_id": 1}),
        "wrapped-gpt-bigcode": ("gpt_bigcode", {"n_inner": 80, "multi_query": True}),
        "wrapped-gpt-bigcode-all-heads": (
            "gpt_bigcode",
            {"multi_query": False, "scale_attn_weights": False, "tie_word_embeddings": False},
        ),
        "wrapped-gpt-neo": (
            "gpt_neo",
            {"attention_types": [[["global", "local"], NUM_BLOCKS // 2]], "window_size": 13},
        ),
        # In the blocks of these there are tables that no checkpoint has.
        "wrapped-gptj": ("gptj", {"rotary_dim": 8, "n_inner": 80}),
        "wrapped-codegen": ("codegen", {"rotary_dim": 4}),
        # Keys and values of these differ in shape, or blocks in what they keep.
        "wrapped-deepseek-v3": ("deepseek_v3", {**_LATENT, "n_group": 2, "topk_group": 1}),
        "wrapped-deepseek-v2": (
            "deepseek_v2",
            {**_LATENT, "q_lora_rank": None, "kv_lora_rank": 22, "norm_topk_prob": True},
        ),
        "wrapped-gemma4": (
            "gemma4_text",
            {
                "head_dim": 16,
                "global_head_dim": 32,
                "num_key_value_heads": 4,
                "num_global_key_value_heads": 1,
                "attention_k_eq_v": True,
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 0,
                "sliding_window": 13,
                "layer_types": ["sliding_attention", "full_attention"] * (NUM_BLOCKS // 2),
                "final_logit_softcapping": 2.0,
            },
        ),
        # A list of blocks like any other, if in a model with a name of its own.
        "wrapped-llama4": (
            "llama4_text",
            {
                "head_dim": 16,
                "num_local_experts": 3,
                "intermediate_size_mlp": 80,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 1, 1, 0],
                "attention_chunk_size": 13,
                "floor_scale": 8,
                "attn_scale": 0.3,
            },
        ),
    }
)

_FIRST_OF_FAMILY = {family: name for name, (family, _) in reversed(list(VARIANTS.items()))}
ONE_PER_FAMILY = sorted(_FIRST_OF_FAMILY.values())
KNOWN = [name for name in VARIANTS if not name.startswith("wrapped")]

# Whatever is special about these one of the others has, too.
_COVERED = {
    "wrapped-biogpt", "wrapped-codegen", "wrapped-deepseek-v2", "wrapped-gemma4",
    "wrapped-gpt-bigcode", "wrapped-gpt-bigcode-all-heads", "wrapped-gpt-neo",
    "wrapped-granitemoe-swa", "wrapped-llama4", "wrapped-xglm",
}  # fmt: skip
_COVERED_BY_BLOCKS = {"wrapped-deepseek-v3", "wrapped-gptj"}


def _mark(variants: list[str], covered: set[str]) -> list[Any]:
    thorough = pytest.mark.thorough
    return [pytest.param(name, marks=thorough if name in covered else ()) for name in variants]


class _FirstBlockError(Exception):
    """Ends a call of a model where its first block would begin, with what that is given."""


class TinyModel:
    """A random checkpoint on disk and the same weights as a transformers model in float32."""

    def __init__(self, variant: str, directory: Path) -> None:
        self.variant = variant
        self.directory = directory
        self.num_blocks = NUM_BLOCKS

    @property
    def decoder(self) -> Any:
        """The reference without its head, whatever it is called there."""
        from transformers import PreTrainedModel

        decoder = self.reference
        while inner := [each for each in decoder.children() if isinstance(each, PreTrainedModel)]:
            (decoder,) = inner
        return decoder

    @property
    def final_norm(self) -> Any:
        """The norm before the head, whatever it is called there."""
        names = ("norm", "ln_f", "final_layer_norm", "layer_norm")
        return next(getattr(self.decoder, name) for name in names if hasattr(self.decoder, name))

    @torch.no_grad()
    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the hidden states that the reference gives to its first block."""

        def stop(block: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
            raise _FirstBlockError(*args, *options.values())

        lists = [part for part in self.decoder.children() if isinstance(part, torch.nn.ModuleList)]
        (first,) = (blocks[0] for blocks in lists if len(blocks) == self.num_blocks)
        hook = first.register_forward_pre_hook(stop, with_kwargs=True)
        try:
            self.decoder(tokens)
        except _FirstBlockError as reached:
            return reached.args[0]
        finally:
            hook.remove()
        raise AssertionError("it has returned without its blocks")

    @cached_property
    def reference(self) -> Any:
        """The transformers model (causal language model, evaluation mode)."""
        from transformers import AutoModelForCausalLM

        # Eager Falcon adds its linear biases twice; what everybody runs adds them once.
        attention = "sdpa" if self.variant == "falcon-alibi" else "eager"
        model = AutoModelForCausalLM.from_pretrained(
            self.directory, dtype=torch.float32, attn_implementation=attention
        )
        return model.eval()


class TinyModels:
    """Makes each variant once per test run."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._models: dict[str, TinyModel] = {}

    def get(self, variant: str = "llama") -> TinyModel:
        """Return the model of this variant; `VARIANTS` lists them."""
        if variant not in self._models:
            directory = self._root / variant
            save_tiny_model(directory, variant)
            self._models[variant] = TinyModel(variant, directory)
        return self._models[variant]


def save_tiny_model(directory: Path, variant: str, **save_options: Any) -> None:
    """Write a checkpoint with seeded random weights that make attention and MLP matter."""
    from transformers import AutoConfig, AutoModelForCausalLM

    family, changes = VARIANTS[variant]
    config = AutoConfig.for_model(family, **{**_SHAPE, **changes})
    model = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() >= 2:
                # Experts are stacked; their matrices are those of the last two dimensions.
                parameter.copy_(noise / parameter.shape[-1] ** 0.5)
            else:
                # Norm weights start at one, biases at zero.
                parameter.add_(noise * 0.2)
    model.save_pretrained(directory, **save_options)


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    """Tiny models by variant name: `tiny_models.get("qwen3").directory`."""
    return TinyModels(tmp_path_factory.mktemp("tiny-models"))


@pytest.fixture(scope="session")
def compared_families() -> set[str]:
    """The model types that have a variant."""
    return {family for family, _ in VARIANTS.values()}


@pytest.fixture(params=_mark(list(VARIANTS), _COVERED))
def any_tiny_model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> TinyModel:
    """Runs the test once for every variant of every family."""
    return tiny_models.get(request.param)


@pytest.fixture(params=_mark(list(VARIANTS), {*VARIANTS} - {*ONE_PER_FAMILY} | _COVERED))
def one_of_family(request: pytest.FixtureRequest, tiny_models: TinyModels) -> TinyModel:
    """Runs the test once for every family, and thorough for the rest of the variants."""
    return tiny_models.get(request.param)


@pytest.fixture(params=_mark(list(VARIANTS), {*ONE_PER_FAMILY} | _COVERED))
def another_of_family(request: pytest.FixtureRequest, tiny_models: TinyModels) -> TinyModel:
    """Runs the test for every variant but the first of a family, which is thorough."""
    return tiny_models.get(request.param)


@pytest.fixture(params=KNOWN)
def any_known_model(request: pytest.FixtureRequest, tiny_models: TinyModels) -> TinyModel:
    """Runs the test once for every variant of the families that have files here."""
    return tiny_models.get(request.param)


@pytest.fixture(params=_mark(ONE_PER_FAMILY, _COVERED | _COVERED_BY_BLOCKS))
def tiny_family(request: pytest.FixtureRequest, tiny_models: TinyModels) -> TinyModel:
    """Runs the test once for every family."""
    return tiny_models.get(request.param)
