"""Opens the shell of a model: the one that transformers builds of its config.json, if it fits.

Builds it without memory for weights (torch's meta device) from installed classes; code in a
checkpoint is never run. Everything that peers rely on is checked before the shell is returned.
"""

import copy
import json
import math
from collections.abc import Mapping, Sequence, Sized
from dataclasses import replace
from functools import lru_cache
from typing import Any, cast

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from ...protocol.errors import ModelError
from ...protocol.limits import MAX_HIDDEN_SIZE
from ..families.registry import FAMILIES
from ..specs.config_reader import MAX_HEADS, MAX_POSITIONS, ConfigReader, limit_to_exact_positions
from ..specs.model_spec import WrappedShape
from .shell import Shell
from .shell_calls import gives_blocks_the_same_alone
from .step_cache import CACHE_NAME, CacheShape, OtherStateError, Shapes, StepCache
from .tables import TableError, count_table_bytes, fill_tables, has_tables

UNSAFE_FIELDS = frozenset(
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
"""Fields by which a configuration chooses code, some of it from the Hub."""

MAX_LAYERS = 4096
"""Far above any model, like the next one: transformers' configurations build lists as long as some
of the numbers in a config.json, layer by layer."""

_MAX_LABELS = 2**16
"""Transformers makes a name for each label."""

_MAX_NUMBER = 2**24
"""Positions of the longest texts, sizes of vocabularies."""

_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "head_dim", "num_attention_heads",
    "num_key_value_heads",
)  # fmt: skip
"""Names of numbers that are at least one wherever they are given."""

_ANY_NUMBER = (
    "theta", "seed", "position", "length", "token", "param", "flos", "base", "window",
)  # fmt: skip
"""In the names of numbers that may be larger, because nothing is counted up to them."""

_SMALL_TABLE_BYTES = 2**24
"""A block may always have tables of this size: masks of 4096 positions."""

_MAX_REASON_CHARACTERS = 200

_BUILD_ERRORS = (
    StrictDataclassError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Errors of transformers for configurations that it cannot use, or not in this way."""

_INDEX_FIELDS = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number"})
"""In which modules of a block keep its index. By another name it makes each block its own kind."""

_OWN_FIELDS = frozenset(vars(nn.Module()))
_PLAIN = str | int | float | tuple | list | dict | set | torch.dtype | None

_NOT_KNOWN_YET = CacheShape(0, 0)

_NO_LIST = "it is not a list of blocks between an embedding and a norm"


class _UnfitError(Exception):
    """A family cannot run block by block; the message is the second half of a sentence."""


def read_shape(shell: Shell, config: Mapping[str, object]) -> WrappedShape:
    """Return the shape of a model with this shell and `config.json` content."""
    # Under the names that all families share, whatever their own are.
    names = ("num_attention_heads", "max_position_embeddings", "rope_parameters")
    settings = ConfigReader({name: getattr(shell.config, name, None) for name in names})
    rope = {"rope_type": "default", **settings.mapping("rope_parameters")}
    positions = settings.count("max_position_embeddings", MAX_POSITIONS, MAX_POSITIONS)
    return WrappedShape(
        family=str(config["model_type"]),
        hidden_size=shell.config.hidden_size,
        num_blocks=len(shell.layers),
        num_kv_heads=shell.cache_shape.num_heads,
        head_dim=shell.cache_shape.head_dim,
        max_positions=limit_to_exact_positions(rope, positions)[1],
        dtype=ConfigReader(config).dtype(),
        num_heads=settings.count("num_attention_heads", MAX_HEADS, shell.cache_shape.num_heads),
        block_parameters=tuple(
            sum(weight.numel() for weight in layer.parameters()) for layer in shell.layers
        ),
        block_table_bytes=tuple(count_table_bytes(layer) for layer in shell.layers),
    )


def open_shell(config: Mapping[str, object]) -> Shell:
    """Return the shell of the model with this `config.json` content.

    Raises ModelError for a family that transformers does not know, or whose decoder does more than
    pass hidden states from block to block. Every model with a shell can be served and used.
    """
    name = config.get("model_type")
    if name is None or name == "":
        raise ModelError("config.json has no model_type; check that it belongs to this model")
    if not isinstance(name, str):
        raise ModelError(f"config.json: model_type must be a string, got {name!r:.60}")
    if config.get("quantization_config") is not None:
        raise ModelError("this checkpoint is quantized already; use the original one")
    try:
        shell, _ = _take_apart(_build(name, config))
        cache_shape, positions_name = _probe(json.dumps(dict(config)))
        _fill_tables(shell)
        return replace(shell, cache_shape=cache_shape, positions_name=positions_name)
    except _UnfitError as reason:
        raise ModelError(
            f"models of type {name!r:.60} are not supported: {reason}; supported are "
            f"{', '.join(FAMILIES)}, and others whose blocks transformers can run one by one"
        ) from reason


def open_block_shell(config: Mapping[str, object]) -> Shell:
    """Return the shell of a model whose blocks are to be run alone, on what they are given.

    Works for families with a file here, too: their modules between embedding and blocks consist of
    zeros, and callers ignore the outputs of these. Raises ModelError like `open_shell`.
    """
    name = config.get("model_type")
    if name not in FAMILIES or config.get("quantization_config") is not None:
        return open_shell(config)
    try:
        # Transformers has another family for windows in some blocks only.
        is_ministral = name == "mistral" and config.get("layer_types")
        model = _build("ministral" if is_ministral else str(name), config)
        decoder_name, layers_name = _find_layers(model)
        decoder = model.get_submodule(decoder_name)
        norms = _list_norms(decoder)
        shell = Shell(model, decoder_name, layers_name, norms[-1], _NOT_KNOWN_YET)
        for part_name, part in decoder.named_children():
            if part is model.get_input_embeddings():
                setattr(decoder, part_name, nn.Identity())
        _fill_tables(shell)
    except _UnfitError as reason:
        raise ModelError(
            f"blocks of models of type {name!r} cannot run one by one: {reason}"
        ) from None
    for part in decoder.children():
        if part is not shell.layers:
            for names in (part._parameters, part._buffers):
                for local_name, tensor in names.items():
                    if tensor is not None and tensor.is_meta:
                        zeros = torch.zeros_like(tensor, device="cpu")
                        setattr(part, local_name, nn.Parameter(zeros, requires_grad=False))
    return shell


def _list_norms(decoder: nn.Module) -> list[str]:
    return [
        name for name, module in decoder.named_children() if "norm" in type(module).__name__.lower()
    ]


def _take_apart(model: PreTrainedModel) -> tuple[Shell, list[str]]:
    """Return a shell that was not run yet, and the children that `_check_parts` returns."""
    decoder_name, layers_name = _find_layers(model)
    decoder = model.get_submodule(decoder_name)
    norms = _list_norms(decoder)
    if decoder is model or len(norms) != 1:
        raise _UnfitError(_NO_LIST)
    shell = Shell(
        model, decoder_name, layers_name, norms[0], _NOT_KNOWN_YET,
        embedding_multiplier=_take_multiplier(decoder),
    )  # fmt: skip
    return shell, _check_parts(shell)


@lru_cache(maxsize=128)
def _probe(config_json: str) -> tuple[CacheShape, str | None]:
    """Run the parts of a model; return what its blocks keep and which module adds positions.

    That takes longer than all the rest, and a peer opens a shell several times while it starts:
    the answer is kept. It is the same for the same config.json in the same process.
    """
    config = json.loads(config_json)
    shell, others = _take_apart(_build(config["model_type"], config))
    cache_shape = CacheShape.of([_probe_block(shell, index) for index in _choose_probed(shell)])
    _fill_tables(shell)
    shell = replace(shell, cache_shape=cache_shape, positions_name=_find_positions(shell, others))
    if not gives_blocks_the_same_alone(shell):
        raise _UnfitError("its decoder passes other inputs to a single block than to all")
    return shell.cache_shape, shell.positions_name


def _find_layers(model: PreTrainedModel) -> tuple[str, str]:
    """Return the names of the decoder in a model and of the list of blocks in the decoder.

    Some families wrap the decoder more than once.
    """
    parents, module = list[str](), model
    while True:
        lists = [
            name
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
        ]
        models = {
            name: child
            for name, child in module.named_children()
            if isinstance(child, PreTrainedModel)
        }
        if lists or len(models) != 1:
            break
        ((name, module),) = models.items()
        parents.append(name)
    if len(lists) != 1:
        raise _UnfitError(_NO_LIST)
    return ".".join(parents), lists[0]


def _take_multiplier(decoder: Any) -> float:
    """Return the factor of a decoder for its input (Granite), and set it to one there."""
    multiplier = float(getattr(decoder, "embedding_multiplier", 1.0))
    if multiplier != 1.0:
        decoder.embedding_multiplier = 1.0
    return multiplier


def _check_parts(shell: Shell) -> list[str]:
    """Return the children of the decoder that have weights beside blocks, embedding and norm.

    Raises _UnfitError unless there is one at most, and the head has the only other ones.
    """
    embedding = shell.model.get_input_embeddings()
    head = shell.model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or not isinstance(head, nn.Linear):
        raise _UnfitError("its embedding is no nn.Embedding or its head no nn.Linear")
    if {embedding.embedding_dim, head.in_features} != {shell.config.hidden_size}:
        raise _UnfitError("its embedding or head is of another size than its hidden states")
    norm = getattr(shell.decoder, shell.norm_name)
    known = {id(w) for part in (shell.layers, embedding, norm, head) for w in part.parameters()}
    others = [
        name
        for name, child in shell.decoder.named_children()
        if any(id(weight) not in known for weight in child.parameters())
    ]
    known |= {id(w) for name in others for w in getattr(shell.decoder, name).parameters()}
    if len(others) > 1 or any(id(weight) not in known for weight in shell.model.parameters()):
        raise _UnfitError("it has weights outside its blocks, embedding, positions, norm and head")
    return others


def _build(name: str, config: Mapping[str, object]) -> Any:
    if name not in CONFIG_MAPPING:
        raise _UnfitError("transformers does not know it")
    fields = {name: value for name, value in config.items() if name not in UNSAFE_FIELDS}
    try:
        check_bounds(fields)
        for field in _SIZES:
            if isinstance(size := fields.get(field), int) and size < 1:
                raise ModelError(f"config.json: {field} must be at least 1, got {size}")
        model_config = CONFIG_MAPPING[name].from_dict(fields)
        if type(model_config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            raise _UnfitError("it is no causal language model")
        if model_config.is_encoder_decoder:
            raise _UnfitError("its decoder attends to an encoder")
        text_config = model_config.get_text_config()
        if text_config is not model_config:
            raise _UnfitError(
                f"its text model of type {text_config.model_type!r} is only a part of it"
            )
        for field, maximum in (("num_hidden_layers", MAX_LAYERS), ("hidden_size", MAX_HIDDEN_SIZE)):
            if not 0 < getattr(model_config, field) <= maximum:
                raise ModelError(f"config.json: {field} must be a number from 1 to {maximum}")
        model_config._attn_implementation = "eager"
        with torch.device("meta"):
            model = cast(Any, MODEL_FOR_CAUSAL_LM_MAPPING[type(model_config)])(model_config)
    except ModelError:
        raise
    except _BUILD_ERRORS as error:
        raise ModelError(
            f"transformers cannot build a model of type {name!r} from this config.json: "
            f"{_find_reason(error)}; check its values, or download it again"
        ) from error
    return model.eval()


def _find_reason(error: BaseException) -> str:
    """Return what an error of a library says, or the one that it was raised from: that is nearer
    to the value that is wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    said = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {said:.{_MAX_REASON_CHARACTERS}}"


def _fill_tables(shell: Shell) -> None:
    """Compute the tables of the decoder; those of blocks are only tried."""
    everything = copy.copy(shell.decoder)
    everything._modules = dict(shell.decoder._modules)
    setattr(everything, shell.layers_name, nn.ModuleList())
    kinds = {tuple(map(type, layer.modules())): layer for layer in shell.layers}
    for layer in shell.layers:
        num_weights = sum(weight.numel() for weight in layer.parameters())
        if count_table_bytes(layer) > max(_SMALL_TABLE_BYTES, 2 * num_weights):
            raise _UnfitError("its blocks have buffers that are larger than their weights")
    try:
        fill_tables(shell.model, everything)
        for layer in kinds.values():
            fill_tables(shell.model, copy.deepcopy(layer))
    except TableError as error:
        raise _UnfitError(str(error)) from error
    except _BUILD_ERRORS as error:
        raise _UnfitError("it has buffers that no checkpoint contains") from error


def _find_positions(shell: Shell, others: list[str]) -> str | None:
    """Return the name of the module that adds positions before the first block, if there is one.

    Without that module, a decoder without blocks must return its input: one that scales or adds
    anything before its first block would do so on every peer. `others` names the other modules
    with weights, which must add positions: we know of no other use.
    """
    tables = [name for name, child in shell.decoder.named_children() if has_tables(child)]
    names: list[str | None] = [*others] or [None, *tables]
    for name in names:
        if name != shell.layers_name and _changes_nothing(replace(shell, positions_name=name)):
            return name
    raise _UnfitError("its decoder changes hidden states outside its blocks")


@torch.no_grad()
def _changes_nothing(shell: Shell) -> bool:
    """Return whether a decoder without blocks and positions returns its input."""
    hidden_BTH = torch.linspace(-3, 3, 2 * 3 * shell.config.hidden_size).view(2, 3, -1)
    calls = list[nn.Module]()
    try:
        decoder = shell.cut([])
        if shell.positions_name is not None:
            positions = decoder.get_submodule(shell.positions_name)
            positions.register_forward_hook(lambda module, *_: calls.append(module))
        output = decoder(inputs_embeds=hidden_BTH, use_cache=True, **{CACHE_NAME: StepCache(0)})
    except _BUILD_ERRORS:
        return False
    is_used = shell.positions_name is None or len(calls) == 1
    return is_used and torch.equal(output.last_hidden_state, hidden_BTH)


def _choose_probed(shell: Shell) -> list[int]:
    """Return the first block of each kind.

    Blocks are of one kind if all that their modules are and hold is the same, but for weights and
    the index, and if the lists in the configuration that have an item for each block agree.
    """
    lists = [
        values
        for values in vars(shell.decoder.config).values()
        if isinstance(values, list | tuple) and len(values) == len(shell.layers)
    ]
    kinds = dict[tuple[object, ...], int]()
    for index, layer in enumerate(shell.layers):
        parts = [_describe(name, module) for name, module in layer.named_modules()]
        settings = [repr(values[index]) for values in lists]
        kinds.setdefault((*parts, *settings), index)
    return list(kinds.values())


def _describe(name: str, module: nn.Module) -> tuple[object, ...]:
    tensors = {**module._parameters, **module._buffers}
    shapes = [(key, None if one is None else one.shape) for key, one in tensors.items()]
    settings = [
        # What is neither a number, a text nor a list of them is the same object or another.
        (key, repr(value) if isinstance(value, _PLAIN) else id(value))
        for key, value in vars(module).items()
        if key not in _OWN_FIELDS | _INDEX_FIELDS
    ]
    return name, type(module), tuple(shapes), tuple(settings)


@torch.no_grad()
def _probe_block(shell: Shell, index: int) -> Shapes:
    """Return the shapes [1, G, 1, D] of the keys and values that a block keeps of one token.

    Runs on shapes alone, before anything but shapes is there.
    """
    cache, order = StepCache(0), list[str]()
    try:
        # In bfloat16: without memory, torch knows the shapes of grouped products in that alone.
        decoder: Any = copy.deepcopy(shell.cut([index], has_norm=True))
        decoder.to(torch.bfloat16)
        for name in (shell.layers_name, shell.norm_name):
            part = getattr(decoder, name)
            part = part[0] if name == shell.layers_name else part
            part.register_forward_hook(lambda *_, name=name: order.append(name))
        hidden_BTH = torch.empty(
            1, 1, shell.config.hidden_size, device="meta", dtype=torch.bfloat16
        )
        decoder(inputs_embeds=hidden_BTH, use_cache=True, **{CACHE_NAME: cache})
    except OtherStateError as error:
        raise _UnfitError("its blocks cache more than keys and values") from error
    except _BUILD_ERRORS as error:
        heads, groups = (
            getattr(shell.config, name, None)
            for name in ("num_attention_heads", "num_key_value_heads")
        )
        if isinstance(heads, int) and isinstance(groups, int) and heads % groups:
            raise ModelError(
                f"config.json: num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{heads} and {groups}"
            ) from error
        raise _UnfitError("its blocks cannot run one by one") from error
    if len(cache.shapes) != 1 or any(len(shape) != 4 for shape in cache.shapes[0]):
        raise _UnfitError("its blocks do not cache keys and values")
    if order != [shell.layers_name, shell.norm_name]:
        raise _UnfitError("its final norm does not run once, after its blocks")
    return cache.shapes[0]


def check_bounds(value: object, name: str = "config.json") -> None:
    """Raise ModelError, which names the field, for a number that no model has."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_bounds(part, str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        for part in value:
            check_bounds(part, name)
        maximum = max(_MAX_NUMBER, _find_maximum(name))
        if (num_items := sum(map(_count_repeated, value))) > maximum:
            raise ModelError(
                f"config.json: {name:.60} must repeat at most {maximum} items, not {num_items}"
            )
    elif isinstance(value, float) and not math.isfinite(value):
        raise ModelError(f"config.json: {name:.60} must be a finite number, got {value}")
    elif isinstance(value, int | float) and "dropout" in name and not 0 <= value <= 1:
        raise ModelError(f"config.json: {name:.60} must be from 0 to 1, got {value!s:.60}")
    elif isinstance(value, int | float) and value > (maximum := _find_maximum(name)):
        raise ModelError(f"config.json: {name:.60} must be at most {maximum}, got {value!s:.60}")


def _count_repeated(part: object) -> int:
    """Return how many items a part of a list stands for, if it is a list and its repeat count.

    GPT-Neo gives the kinds of its blocks in this form: `[[["global", "local"], 12]]`.
    """
    match part:
        case [str() | Sequence() | Mapping() as items, int(count), *_]:
            return len(cast(Sized, items)) * max(count, 0)
        case _:
            return 0


def _find_maximum(name: str) -> float:
    if "label" in name:
        return _MAX_LABELS
    if any(part in name for part in _ANY_NUMBER):
        return math.inf
    return MAX_LAYERS if "layer" in name and "size" not in name else _MAX_NUMBER
