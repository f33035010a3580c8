"""One session on two peers, as a script has it, against plain transformers.

A step is one token's hidden state in and out through all peers, without embedding and head.
"""

import time

from ...client import AutoDistributedModelForCausalLM
from ...client.session.inference_session import InferenceSession
from .benchmark_model import BenchmarkModel
from .figures import Figure, at_least, compute_median, compute_percentile
from .reference import CONTEXT_TOKENS, make_text_settings
from .report import Findings
from .setting import Setting
from .timing import time_calls


def measure(setting: Setting) -> Findings:
    """Compare steps, and whole texts."""
    model, effort = setting.model, setting.effort
    num_tokens = effort.num_generated
    swarm = setting.start_swarm(model)
    setting.say("plain transformers")
    reference = setting.reference.measure_generate(1, num_tokens)
    connect = AutoDistributedModelForCausalLM.from_pretrained
    with connect(model.directory, initial_peers=swarm.initial_peers) as remote:
        setting.say("steps")
        num_steps = 2 * effort.num_steps
        with remote.inference_session(max_length=CONTEXT_TOKENS + num_steps) as session:
            session.step(model.make_hidden(CONTEXT_TOKENS), last_token_only=True)
            seconds = [_time_step(session, model) for _ in range(num_steps)]
        setting.say("texts")
        tokens_1T = model.make_tokens(1, CONTEXT_TOKENS)
        settings = make_text_settings(tokens_1T, num_tokens)
        text_seconds = compute_median(
            time_calls(lambda: remote.generate(tokens_1T, **settings), effort.num_calls)
        )
    steps_per_second = 1 / compute_median(seconds)
    generated = num_tokens / text_seconds
    return Findings(
        [
            Figure("plain transformers, generate", reference, "tok/s"),
            Figure("steps through the swarm", steps_per_second, "steps/s"),
            Figure("ratio to plain transformers", steps_per_second / reference, "x", at_least(2)),
            Figure("95th percentile of a step", 1000 * compute_percentile(seconds, 95), "ms"),
            Figure("generate, with embedding and head", generated, "tok/s"),
        ]
    )


def _time_step(session: InferenceSession, model: BenchmarkModel) -> float:
    hidden_BTH = model.make_hidden(1)
    started_at = time.perf_counter()
    session.step(hidden_BTH)
    return time.perf_counter() - started_at
