"""The process of a canary: `python -m shoal.cli.monitoring.canary_process`, started by a monitor.

The first line of its input has its settings, JSON. For each line after it, it generates a text and
answers with one line of JSON; it ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

from ...protocol.errors import ShoalError
from ...protocol.net.clock import SystemClock
from ..remote_models.generation_options import Sampling
from ..remote_models.live_text import OnSession, OnToken
from ..remote_models.opening import load_tokenizer, open_model
from ..remote_models.routes import describe_failover
from ..remote_models.text_generation import generate_text
from ..terminal.interrupts import stop_on_sigterm

_PROMPT = "Once upon a time"
_NUM_TOKENS = 8
_WAIT_SECONDS = 15.0
"""How long blocks are waited for that nobody serves."""


class _Canary:
    """One model over its swarm, opened for the first text."""

    def __init__(self, model: str, initial_peers: list[str], join: str) -> None:
        self._name = model
        self._initial_peers = initial_peers
        self._join = join
        self._model: Any = None
        self._tokenizer: Any = None
        self.model_id = ""

    def generate(self) -> dict[str, object]:
        """Return what one text took; raises ShoalError."""
        self._open()
        return measure_text(self._model, self._tokenizer)

    def _open(self) -> None:
        if self._model is not None:
            return
        self._tokenizer, revision = load_tokenizer(self._name)
        from ...client.model.local_layers import open_checkpoint

        _, config = open_checkpoint(self._name, revision=revision)
        self.model_id = config.dht_prefix
        self._model = open_model(
            self._name,
            self._initial_peers,
            revision=revision,
            join=self._join or None,
            failover_timeout_seconds=_WAIT_SECONDS,
        )

    def close(self) -> None:
        """Leave the swarm."""
        if self._model is not None:
            self._model.close()


def measure_text(
    model: Any,
    tokenizer: Any,
    on_session: OnSession = lambda session: None,
    on_token: OnToken = lambda piece: None,
) -> dict[str, object]:
    """Return what one text took, and which peers were lost meanwhile; raises ShoalError."""
    from ...client.trace.trace import Recorder
    from ...client.trace.trace_summary import summarize

    recorder = Recorder(SystemClock())

    def record(session: Any) -> None:
        session.record(recorder)
        on_session(session)

    sampling = Sampling(max_new_tokens=_NUM_TOKENS)
    generation = generate_text(model, tokenizer, _PROMPT, sampling, on_token, record)
    summary = summarize(recorder.make_trace())
    return {
        "text": generation.text,
        "first_token_seconds": generation.first_token_seconds,
        "tokens_per_second": generation.tokens_per_second or None,
        "failovers": [describe_failover(failover) for failover in generation.failovers],
        "hops": [
            {
                "peer_id": part.hop.peer.peer_id,
                "span": str(part.hop.span),
                "queue_seconds": part.breakdown.queue_seconds / part.breakdown.num_exchanges,
                "compute_seconds": part.breakdown.compute_seconds / part.breakdown.num_exchanges,
                "network_seconds": part.breakdown.network_seconds / part.breakdown.num_exchanges,
            }
            for part in summary.hops
        ],
    }


def main() -> None:
    """Answer until the input ends."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    settings: Mapping[str, Any] = json.loads(sys.stdin.readline())
    canary = _Canary(**settings)
    try:
        for _ in sys.stdin:
            try:
                facts = canary.generate()
            except ShoalError as error:
                facts = {"error": str(error)}
            print(json.dumps({"model_id": canary.model_id, **facts}), file=answers, flush=True)
    finally:
        canary.close()


if __name__ == "__main__":
    with stop_on_sigterm():
        try:
            main()
        except KeyboardInterrupt:
            sys.exit(0)
