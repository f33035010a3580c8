"""What everything is compared with: plain transformers in one process, bf16, two threads."""

import statistics
from functools import partial
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from measuring.benchmark_model import BenchmarkModel
from shoal.cli.benchmarking.swarm_speed import CONTEXT_TOKENS, make_text_settings, time_calls

_NUM_THREADS = 2
_PROBE_TOKENS = 16


class Reference:
    """Measures one model. Afterwards torch has one thread again: that of a client."""

    def __init__(self, model: BenchmarkModel, num_calls: int) -> None:
        self._model = model
        self._num_calls = num_calls
        self._loaded: dict[torch.dtype, Any] = {}

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

    def measure_training(self, num_rows: int, num_tokens: int) -> tuple[float, torch.dtype]:
        """Return tokens per second forward and back to what goes into the blocks, all frozen.

        And in which dtype: in float32 where torch is quicker with that, as on processors that have
        no instructions for bf16.
        """
        probe = partial(self._measure_training, 1, _PROBE_TOKENS)
        dtype = max((torch.bfloat16, torch.float32), key=probe)
        return self._measure_training(num_rows, num_tokens, dtype), dtype

    def _measure_training(self, num_rows: int, num_tokens: int, dtype: torch.dtype) -> float:
        def train(model: Any) -> None:
            model.requires_grad_(False)
            inputs_BTH, grads_BTH = (
                self._model.make_hidden(num_tokens, num_rows).to(dtype) for _ in range(2)
            )
            inputs_BTH.requires_grad_()
            output = model.model(inputs_embeds=inputs_BTH, use_cache=False)
            output.last_hidden_state.backward(grads_BTH)

        return num_rows * num_tokens / self._time(train, torch.enable_grad, dtype)

    def _time(
        self,
        call: Any,
        mode: Any = torch.inference_mode,
        dtype: torch.dtype = torch.bfloat16,
    ) -> float:
        """Return the median seconds of a call with the model."""
        if dtype not in self._loaded:
            self._loaded[dtype] = AutoModelForCausalLM.from_pretrained(
                self._model.directory, dtype=dtype
            )
        torch.set_num_threads(_NUM_THREADS)
        try:
            with mode():
                return statistics.median(
                    time_calls(lambda: call(self._loaded[dtype]), self._num_calls)
                )
        finally:
            torch.set_num_threads(1)
