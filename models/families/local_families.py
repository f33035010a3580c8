"""What each family keeps on the client's side of the blocks, and what its checkpoints call it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...kernels.layers.norm import NormKind


@dataclass(frozen=True, kw_only=True)
class LocalFamily:
    """The client's layers of one family; the defaults are Llama's.

    Names are those of modules. `norm_offset` is added to the stored weights of the final norm,
    `norm_eps` is the name of its constant in `config.json`. `embedding_norm` normalizes what the
    embedding returns, `positions` are added to it, and `scales_embedding` multiplies it by the
    root of the hidden size.
    """

    embedding: str = "model.embed_tokens"
    embedding_norm: str | None = None
    positions: str | None = None
    scales_embedding: bool = False
    norm: str = "model.norm"
    norm_kind: NormKind = NormKind.RMS
    norm_eps: str = "rms_norm_eps"
    norm_offset: float = 0.0
    head: str = "lm_head"


_LLAMA = LocalFamily()
_GEMMA = LocalFamily(norm_offset=1.0, scales_embedding=True)
_FALCON = LocalFamily(
    embedding="transformer.word_embeddings",
    norm="transformer.ln_f",
    norm_kind=NormKind.LAYER,
    norm_eps="layer_norm_epsilon",
)

LOCAL_FAMILIES: Mapping[str, LocalFamily] = {
    "bloom": replace(_FALCON, embedding_norm="transformer.word_embeddings_layernorm"),
    "falcon": _FALCON,
    "gemma": _GEMMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "gpt2": replace(_FALCON, embedding="transformer.wte", positions="transformer.wpe"),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "phi3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": _LLAMA,
}
"""By the `model_type` of `config.json`."""
