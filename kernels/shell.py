"""Transformers' own implementation of a model, with only those weights that are asked for.

Serves families that have no implementation here. Builds the model without memory for weights
(torch's meta device) from classes that are installed: code in a checkpoint is never run.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .checkpoint import Checkpoint, CheckpointError

_UNSAFE_FIELDS = frozenset(
    {
        "auto_map",
        "attn_implementation",
        "_attn_implementation",
        "_attn_implementation_internal",
        "experts_implementation",
        "_experts_implementation",
        "_experts_implementation_internal",
    }
)
"""What lets a configuration choose code, and some of it from the Hub."""

_MAX_LAYERS = 4096
_MAX_SIZE = 2**20
"""Far above any model: what a damaged config.json can make us allocate."""

_BUILD_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises for configurations that it cannot use, or not in this way."""


class ShellError(ValueError):
    """The model cannot run block by block; the message says why."""


class StepCache(DynamicCache):
    """Keys and values of one step in one block, for transformers' attention.

    Writes at `position` of memory that it is given and shows everything before. Without memory
    it only remembers what shape would be written.
    """

    def __init__(self, position: int, memory: tuple[Tensor, Tensor] | None = None) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.Size]] = []
        self._position = position
        self._memory = memory

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, T, D] and return all up to them."""
        self.shapes.append((key_states.shape, value_states.shape))
        if self._memory is None:
            return key_states, value_states
        keys_BGSD, values_BGSD = self._memory
        stop = self._position + key_states.shape[2]
        keys_BGSD[:, :, self._position : stop] = key_states
        values_BGSD[:, :, self._position : stop] = value_states
        return keys_BGSD[:, :, :stop], values_BGSD[:, :, :stop]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens lie before the step."""
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys after the step, and the position of the first."""
        return self._position + query_length, 0


@dataclass(frozen=True)
class Shell:
    """A causal language model without memory for weights, taken apart at its blocks.

    A block keeps `num_kv_heads` keys and as many values of size `head_dim` of each token.
    """

    model: PreTrainedModel
    layers_name: str
    norm_name: str
    num_kv_heads: int = 0
    head_dim: int = 0

    @property
    def config(self) -> PreTrainedConfig:
        """Transformers' configuration of the model."""
        return self.model.config

    @property
    def decoder(self) -> PreTrainedModel:
        """The model below its head."""
        return cast(PreTrainedModel, self.model.base_model)

    @property
    def layers(self) -> nn.ModuleList:
        """All blocks, without memory."""
        return cast(nn.ModuleList, getattr(self.decoder, self.layers_name))

    def cut(self, indices: list[int], *, has_norm: bool) -> PreTrainedModel:
        """Return a decoder with these blocks only; it shares its modules with the shell."""
        decoder = copy.copy(self.decoder)
        decoder._modules = dict(self.decoder._modules)
        config = decoder.config = copy.deepcopy(self.decoder.config)
        config.num_hidden_layers = len(indices)
        if config.__dict__.get("layer_types"):
            # Decoders look the type of a block up by its place in the list.
            config.layer_types = [config.layer_types[index] for index in indices]
        setattr(decoder, self.layers_name, nn.ModuleList([self.layers[i] for i in indices]))
        if not has_norm:
            setattr(decoder, self.norm_name, nn.Identity())
        return decoder

    def load_layer(self, checkpoint: Checkpoint, index: int, dtype: torch.dtype) -> None:
        """Give one block its weights."""
        layer = self.layers[index]
        if any(buffer.is_meta for name, buffer in _transient_buffers(layer)):
            raise ShellError("its blocks keep tables that are in no checkpoint")
        self.load(checkpoint, layer, f"{self.layers_name}.{index}.", dtype)

    def load(
        self, checkpoint: Checkpoint, module: nn.Module, name: str, dtype: torch.dtype | None
    ) -> None:
        """Give a module of the decoder its weights; `name` is what they begin with there."""
        tensors = {}
        for local_name, empty in module.state_dict().items():
            tensor = self.read(checkpoint, name + local_name, tuple(empty.shape))
            keeps_dtype = dtype is None or not tensor.is_floating_point()
            tensors[local_name] = tensor.to(tensor.dtype if keeps_dtype else dtype, copy=True)
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False).eval()

    def read(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor of the decoder, whether or not its name says that it is one."""
        full_name = f"{self.model.base_model_prefix}.{name}"
        full_name = full_name if checkpoint.has(full_name) or not checkpoint.has(name) else name
        tensor = checkpoint.load(full_name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"tensor {full_name} has shape {tuple(tensor.shape)}, config.json makes it {shape}"
            )
        return tensor


def open_shell(config: Mapping[str, object]) -> Shell:
    """Return the shell of the model with this `config.json` content.

    Raises ShellError, as half a sentence, for a family that transformers does not know or that
    does more than hand hidden states from block to block.
    """
    model = _build(config)
    decoder = model.base_model
    num_layers = model.config.num_hidden_layers
    lists = [
        name
        for name, module in decoder.named_children()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    norms = [
        name for name, module in decoder.named_children() if "norm" in type(module).__name__.lower()
    ]
    if decoder is model or len(lists) != 1 or len(norms) != 1:
        raise ShellError("it is not a list of blocks between an embedding and a norm")
    shell = Shell(model, lists[0], norms[0])
    num_kv_heads, head_dim = _probe_cache_shape(shell)
    _fill_tables(shell)
    _check_nothing_is_around_blocks(shell)
    return replace(shell, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _probe_cache_shape(shell: Shell) -> tuple[int, int]:
    """Return the key-value heads of a block and their size; ShellError if blocks differ.

    Runs on shapes alone, before anything but shapes is there.
    """
    shapes = {_probe_block(shell, index) for index in range(len(shell.layers))}
    if len(shapes) != 1:
        raise ShellError("its blocks differ in the keys and values that they keep")
    keys, values = shapes.pop()
    if keys != values:
        raise ShellError("its keys and values differ in shape")
    return keys[1], keys[3]


def _build(config: Mapping[str, object]) -> Any:
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise ShellError("transformers does not know it")
    if config.get("quantization_config") is not None:
        raise ShellError("this checkpoint is quantized already; use the original one")
    fields = {name: value for name, value in config.items() if name not in _UNSAFE_FIELDS}
    try:
        model_config = CONFIG_MAPPING[model_type].from_dict(fields)
        if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise ShellError("it is no causal language model")
        for name, maximum in (("num_hidden_layers", _MAX_LAYERS), ("hidden_size", _MAX_SIZE)):
            if not 0 < getattr(model_config, name) <= maximum:
                raise ShellError(f"its {name} must be a number from 1 to {maximum}")
        model_config._attn_implementation = "eager"
        with torch.device("meta"):
            model = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)])(model_config)
    except ShellError:
        raise
    except _BUILD_ERRORS as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ShellError(f"transformers cannot build it from config.json ({reason})") from error
    return model.eval()


def _transient_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return buffers that no checkpoint holds."""
    stored = module.state_dict()
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in stored]


def _fill_tables(shell: Shell) -> None:
    """Compute what the decoder itself keeps beside weights: frequencies of rotations, mostly."""
    for name, child in shell.decoder.named_children():
        if name != shell.layers_name and not child.state_dict() and _transient_buffers(child):
            # Modules of this kind are made from the configuration alone, in every family.
            setattr(shell.decoder, name, type(child)(config=shell.config))


@torch.no_grad()
def _check_nothing_is_around_blocks(shell: Shell) -> None:
    """Raise ShellError unless a decoder without blocks returns what it is given.

    A decoder that scales or adds anything before its first block would do so on every peer.
    """
    hidden_BTH = torch.linspace(-3, 3, 2 * 3 * shell.config.hidden_size).view(2, 3, -1)
    try:
        decoder = shell.cut([], has_norm=False)
        output = decoder(inputs_embeds=hidden_BTH, past_key_values=StepCache(0), use_cache=True)
    except _BUILD_ERRORS as error:
        raise ShellError(f"its decoder does not run without blocks ({error})") from error
    if not torch.equal(output.last_hidden_state, hidden_BTH):
        raise ShellError("it changes hidden states before its first block")


@torch.no_grad()
def _probe_block(shell: Shell, index: int) -> tuple[torch.Size, torch.Size]:
    """Return the shapes [1, G, 1, D] of the keys and values that a block keeps of one token."""
    cache = StepCache(0)
    try:
        hidden_BTH = torch.empty(1, 1, shell.config.hidden_size, device="meta")
        decoder = shell.cut([index], has_norm=False)
        decoder(inputs_embeds=hidden_BTH, past_key_values=cache, use_cache=True)
    except _BUILD_ERRORS as error:
        raise ShellError(f"its blocks do not run alone ({error})") from error
    if len(cache.shapes) != 1:
        raise ShellError("its blocks do not keep keys and values")
    return cache.shapes[0]
