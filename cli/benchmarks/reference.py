"""What everything is compared with: plain transformers in one process, bf16, two threads."""

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from .benchmark_model import BenchmarkModel
from .figures import compute_median
from .timing import time_calls

CONTEXT_TOKENS = 16
_NUM_THREADS = 2


class Reference:
    """Measures one model. Afterwards torch has one thread again: that of a client."""

    def __init__(self, model: BenchmarkModel, num_calls: int) -> None:
        self._model = model
        self._num_calls = num_calls
        self._loaded: Any = None

    def measure_generate(self, num_rows: int, num_tokens: int) -> float:
        """Return tokens per second of all rows of a batch together, embedding and head included."""
        tokens_BT = self._model.make_tokens(num_rows, CONTEXT_TOKENS)
        settings = make_text_settings(tokens_BT, num_tokens)
        seconds = self._time(lambda model: model.generate(tokens_BT, **settings))
        return num_rows * num_tokens / seconds

    def measure_prompt(self, num_tokens: int) -> float:
        """Return tokens per second of a prompt, without the head."""
        tokens_BT = self._model.make_tokens(1, num_tokens)
        return num_tokens / self._time(lambda model: model.model(tokens_BT))

    def measure_training(self, num_rows: int, num_tokens: int) -> float:
        """Return tokens per second forward and back to what goes into the blocks, all frozen."""

        def train(model: Any) -> None:
            model.requires_grad_(False)
            inputs_BTH, grads_BTH = (
                self._model.make_hidden(num_tokens, num_rows).bfloat16() for _ in range(2)
            )
            inputs_BTH.requires_grad_()
            output = model.model(inputs_embeds=inputs_BTH, use_cache=False)
            output.last_hidden_state.backward(grads_BTH)

        return num_rows * num_tokens / self._time(train, torch.enable_grad)

    def _time(self, call: Any, mode: Any = torch.inference_mode) -> float:
        """Return the median seconds of a call with the model."""
        if self._loaded is None:
            self._loaded = AutoModelForCausalLM.from_pretrained(
                self._model.directory, dtype=torch.bfloat16
            )
        torch.set_num_threads(_NUM_THREADS)
        try:
            with mode():
                return compute_median(time_calls(lambda: call(self._loaded), self._num_calls))
        finally:
            torch.set_num_threads(1)


def make_text_settings(tokens_BT: Tensor, num_tokens: int) -> dict[str, Any]:
    """Return what lets `generate` write so many tokens behind a prompt, whatever they are."""
    return {
        "attention_mask": torch.ones_like(tokens_BT),
        "max_new_tokens": num_tokens,
        "min_new_tokens": num_tokens,
        "do_sample": False,
    }
