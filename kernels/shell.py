"""Transformers' own implementation of a model, with only those weights that are asked for.

Serves families that have no implementation here. Builds the model without memory for weights
(torch's meta device) from classes that are installed: code in a checkpoint is never run.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from .checkpoint import CheckpointError
from .conversion import ConvertedCheckpoint

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
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What transformers raises for configurations that it cannot use, or not in this way."""


OWN_FAMILIES = (
    "bloom", "falcon", "gemma", "gemma2", "gemma3_text", "gpt2", "llama", "mistral", "mixtral",
    "phi3", "qwen2", "qwen3", "qwen3_moe",
)  # fmt: skip
"""What peers and clients compute themselves, for the sentence that says what is supported."""


class ShellError(ValueError):
    """There is no shell of the model; the message is a sentence that says why."""


class _UnfitError(Exception):
    """A family cannot run block by block; half a sentence says why."""


Put = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Writes keys and values [B, G, T, D] at a position; returns all up to them."""


class StepCache(DynamicCache):
    """Keys and values of one step in one block, for transformers' attention.

    `put` writes at `position` of some memory and returns everything up to there. Without it, this
    only remembers what shape would be written.
    """

    def __init__(self, position: int, put: Put | None = None) -> None:
        super().__init__()
        self.shapes: list[tuple[torch.Size, torch.Size]] = []
        self._position = position
        self._put = put

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [B, G, T, D] and return all up to them."""
        self.shapes.append((key_states.shape, value_states.shape))
        if self._put is None:
            return key_states, value_states
        return self._put(self._position, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens lie before the step."""
        return self._position

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the number of keys after the step, and the position of the first."""
        return self._position + query_length, 0


@dataclass(frozen=True)
class Shell:
    """A causal language model without memory for weights, taken apart at its blocks.

    A block keeps `num_kv_heads` keys and as many values of size `head_dim` of each token. What the
    embedding returns is to be multiplied by `embedding_multiplier` before the first block.
    """

    model: PreTrainedModel
    layers_name: str
    norm_name: str
    num_kv_heads: int = 0
    head_dim: int = 0
    embedding_multiplier: float = 1.0

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

    def load_layer(
        self, checkpoint: ConvertedCheckpoint, index: int, dtype: torch.dtype | None
    ) -> None:
        """Give one block its weights; None keeps the checkpoint's dtype."""
        layer = self.layers[index]
        self.load(checkpoint, layer, f"{self.layers_name}.{index}.", dtype)

    def load(
        self,
        checkpoint: ConvertedCheckpoint,
        module: nn.Module,
        name: str,
        dtype: torch.dtype | None,
    ) -> None:
        """Give a module of the decoder its weights; `name` is what they begin with there."""
        tensors = {}
        for local_name, empty in module.state_dict().items():
            tensor = self.read(checkpoint, name + local_name, tuple(empty.shape))
            keeps_dtype = dtype is None or not tensor.is_floating_point()
            tensors[local_name] = tensor.to(tensor.dtype if keeps_dtype else dtype, copy=True)
        module.load_state_dict(tensors, assign=True)
        module.requires_grad_(False).eval()

    def read(self, checkpoint: ConvertedCheckpoint, name: str, shape: tuple[int, ...]) -> Tensor:
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

    Raises ShellError for a family that transformers does not know or that does more than hand
    hidden states from block to block: whoever gets a shell here can serve the model and use it.
    """
    name = config.get("model_type")
    if name is None or name == "":
        raise ShellError("config.json has no model_type, which says what family the model is of")
    if not isinstance(name, str):
        raise ShellError(f"config.json: model_type must be a text, got {name!r:.60}")
    if config.get("quantization_config") is not None:
        raise ShellError("this checkpoint is quantized already; use the original one")
    try:
        return _open(_build(name, config))
    except _UnfitError as reason:
        raise ShellError(
            f"models of type {name!r:.60} are not supported: {reason}; supported are "
            f"{', '.join(OWN_FAMILIES)}, and others whose blocks transformers can run one by one"
        ) from reason


def open_block_shell(config: Mapping[str, object]) -> Shell:
    """Return the shell of a model whose blocks are to be run alone, on what they are given.

    Of families with an implementation here whatever lies between embedding and blocks is made of
    zeros; its outputs have to be passed over. Raises ShellError for others like `open_shell`.
    """
    name = config.get("model_type")
    if name not in OWN_FAMILIES or config.get("quantization_config") is not None:
        return open_shell(config)
    try:
        # What has windows in some blocks only is another family in transformers.
        is_ministral = name == "mistral" and config.get("layer_types")
        model = _build("ministral" if is_ministral else str(name), config)
        lists, norms = _find_parts(model)
        shell = Shell(model, lists[0], norms[-1])
        for part_name, part in shell.decoder.named_children():
            if part is model.get_input_embeddings():
                setattr(shell.decoder, part_name, nn.Identity())
        _fill_tables(shell)
    except _UnfitError as reason:
        raise ShellError(f"blocks of models of type {name!r} do not run alone: {reason}") from None
    for part in shell.decoder.children():
        if part is not shell.layers:
            for names in (part._parameters, part._buffers):
                for local_name, tensor in names.items():
                    if tensor is not None and tensor.is_meta:
                        zeros = torch.zeros_like(tensor, device="cpu")
                        setattr(part, local_name, nn.Parameter(zeros, requires_grad=False))
    return shell


def _find_parts(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return what a decoder calls its lists of blocks, and its norms."""
    children = list(model.base_model.named_children())
    num_layers = model.config.num_hidden_layers
    lists = [
        name
        for name, module in children
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    return lists, [name for name, module in children if "norm" in type(module).__name__.lower()]


def _open(model: PreTrainedModel) -> Shell:
    decoder = model.base_model
    lists, norms = _find_parts(model)
    if decoder is model or len(lists) != 1 or len(norms) != 1:
        raise _UnfitError("it is not a list of blocks between an embedding and a norm")
    multiplier = _take_multiplier(decoder)
    shell = Shell(model, lists[0], norms[0], embedding_multiplier=multiplier)
    _check_parts(shell)
    num_kv_heads, head_dim = _probe_cache_shape(shell)
    _fill_tables(shell)
    _check_nothing_is_around_blocks(shell)
    return replace(shell, num_kv_heads=num_kv_heads, head_dim=head_dim)


def _take_multiplier(decoder: Any) -> float:
    """Return by what a decoder multiplies its input (Granite), and have it do so no longer."""
    multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
    if multiplier != 1.0:
        decoder.embedding_multiplier = 1.0
    return multiplier


def _check_parts(shell: Shell) -> None:
    """Raise _UnfitError unless blocks, embedding, norm and head are all that has weights."""
    embedding = shell.model.get_input_embeddings()
    head = shell.model.get_output_embeddings()
    if type(embedding) is not nn.Embedding or not isinstance(head, nn.Linear):
        raise _UnfitError("its embedding or head is a special one")
    norm = getattr(shell.decoder, shell.norm_name)
    known = {id(w) for part in (shell.layers, embedding, norm, head) for w in part.parameters()}
    if any(id(weight) not in known for weight in shell.model.parameters()):
        raise _UnfitError("it has more weights than those of blocks, embedding, norm and head")
    if any(buffer.is_meta for name, buffer in _transient_buffers(shell.layers)):
        raise _UnfitError("its blocks keep tables that are in no checkpoint")


def _probe_cache_shape(shell: Shell) -> tuple[int, int]:
    """Return the key-value heads of a block and their size; _UnfitError if blocks differ.

    Runs on shapes alone, before anything but shapes is there.
    """
    shapes = {_probe_block(shell, index) for index in range(len(shell.layers))}
    if len(shapes) != 1:
        raise _UnfitError("its blocks differ in the keys and values that they keep")
    keys, values = shapes.pop()
    if keys != values:
        raise _UnfitError("its keys and values differ in shape")
    return keys[1], keys[3]


def _build(name: str, config: Mapping[str, object]) -> Any:
    if name not in CONFIG_MAPPING:
        raise _UnfitError("transformers does not know it")
    fields = {name: value for name, value in config.items() if name not in _UNSAFE_FIELDS}
    try:
        model_config = CONFIG_MAPPING[name].from_dict(fields)
        if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _UnfitError("it is no causal language model")
        for field, maximum in (("num_hidden_layers", _MAX_LAYERS), ("hidden_size", _MAX_SIZE)):
            if not 0 < getattr(model_config, field) <= maximum:
                raise ShellError(f"config.json: {field} must be a number from 1 to {maximum}")
        model_config._attn_implementation = "eager"
        with torch.device("meta"):
            model = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)])(model_config)
    except ShellError:
        raise
    except _BUILD_ERRORS as error:
        raise ShellError(
            f"transformers cannot build a model of type {name!r} from this config.json; check its "
            "values, or download it again"
        ) from error
    return model.eval()


def _transient_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return buffers that no checkpoint holds."""
    stored = module.state_dict()
    return [(name, buffer) for name, buffer in module.named_buffers() if name not in stored]


def _fill_tables(shell: Shell) -> None:
    """Compute what the decoder itself keeps beside weights: frequencies of rotations, mostly."""
    decoder = shell.decoder
    for name, child in decoder.named_children():
        if name != shell.layers_name and not child.state_dict() and _transient_buffers(child):
            try:
                # Modules of this kind are made from the configuration alone, in most families.
                setattr(decoder, name, type(child)(config=shell.config))
            except _BUILD_ERRORS as error:
                raise _UnfitError("it keeps tables that are in no checkpoint") from error
    if any(buffer.is_meta for name, buffer in _transient_buffers(decoder)):
        raise _UnfitError("it keeps tables that are in no checkpoint")


@torch.no_grad()
def _check_nothing_is_around_blocks(shell: Shell) -> None:
    """Raise _UnfitError unless a decoder without blocks returns what it is given.

    A decoder that scales or adds anything before its first block would do so on every peer.
    """
    hidden_BTH = torch.linspace(-3, 3, 2 * 3 * shell.config.hidden_size).view(2, 3, -1)
    try:
        decoder = shell.cut([], has_norm=False)
        output = decoder(inputs_embeds=hidden_BTH, past_key_values=StepCache(0), use_cache=True)
    except _BUILD_ERRORS as error:
        raise _UnfitError("its decoder does not run without blocks") from error
    if not torch.equal(output.last_hidden_state, hidden_BTH):
        raise _UnfitError("it changes hidden states before its first block")


@torch.no_grad()
def _probe_block(shell: Shell, index: int) -> tuple[torch.Size, torch.Size]:
    """Return the shapes [1, G, 1, D] of the keys and values that a block keeps of one token."""
    cache = StepCache(0)
    try:
        # In bfloat16: without memory, torch knows the shapes of grouped products in that alone.
        decoder: Any = copy.deepcopy(shell.cut([index], has_norm=False))
        decoder.to(torch.bfloat16)
        hidden_BTH = torch.empty(
            1, 1, shell.config.hidden_size, device="meta", dtype=torch.bfloat16
        )
        decoder(inputs_embeds=hidden_BTH, past_key_values=cache, use_cache=True)
    except _BUILD_ERRORS as error:
        raise _UnfitError("its blocks do not run alone") from error
    if len(cache.shapes) != 1:
        raise _UnfitError("its blocks do not keep keys and values")
    return cache.shapes[0]
