"""A client that takes all it can get: `flood.py` measures another one beside it.

Run as `python -m shoal.cli.benchmarks.flooding_client` by `start_flooding_client`. Says when it has
joined, floods from one line on stdin to the next, then says what it got.
"""

import asyncio
import json
import sys
from collections import Counter
from pathlib import Path

from ...protocol.errors import RefusedError, RouteError, UnavailableError
from ...protocol.ids import ModelId
from .benchmark_model import BenchmarkModel
from .clients import Clients, SwarmAddress, join_swarm
from .helper_process import HelperProcess
from .reference import CONTEXT_TOKENS

_MAX_TOKENS = 2000
_NUM_PROMPTS = 2
"""Sessions that send a long prompt again and again; all others step."""

_PAUSE_SECONDS = 0.05
"""Between two attempts of a session that was refused."""


def start_flooding_client(
    address: SwarmAddress, num_sessions: int, num_prompt_tokens: int
) -> HelperProcess:
    """Start the process; it joins the swarm and waits."""
    return HelperProcess(
        "flooding_client",
        str(address.model.directory),
        address.model_id,
        " ".join(address.initial_peers),
        str(num_sessions),
        str(num_prompt_tokens),
    )


async def _flood(address: SwarmAddress, num_sessions: int, num_prompt_tokens: int) -> None:
    counts: Counter[str] = Counter(steps=0, prompt_tokens=0, refusals=0)
    async with join_swarm(address) as clients:
        print(json.dumps("joined"), flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        lengths = [CONTEXT_TOKENS] * num_sessions + [num_prompt_tokens] * _NUM_PROMPTS
        tasks = [
            asyncio.create_task(_live(clients, address.model, counts, length)) for length in lengths
        ]
        await asyncio.to_thread(sys.stdin.readline)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    print(json.dumps(counts), flush=True)


async def _live(
    clients: Clients, model: BenchmarkModel, counts: Counter[str], num_prompt_tokens: int
) -> None:
    """Send a prompt and decode behind a short one, again and again, until cancelled."""
    while True:
        session = clients.open(_MAX_TOKENS, "flood")
        try:
            while True:
                session.rollback(0)
                await session.step(model.make_hidden(num_prompt_tokens), last_token_only=True)
                counts["prompt_tokens"] += num_prompt_tokens
                while num_prompt_tokens == CONTEXT_TOKENS and session.position < _MAX_TOKENS:
                    await session.step(model.make_hidden(1), is_decoded=True)
                    counts["steps"] += 1
        except (RefusedError, RouteError, UnavailableError):
            counts["refusals"] += 1
            await session.close()
            await asyncio.sleep(_PAUSE_SECONDS)


def _main(
    directory: str, model_id: str, initial_peers: str, num_sessions: str, num_prompt_tokens: str
) -> None:
    model = BenchmarkModel.open(Path(directory))
    address = SwarmAddress(model, ModelId(model_id), tuple(initial_peers.split()))
    asyncio.run(_flood(address, int(num_sessions), int(num_prompt_tokens)))


if __name__ == "__main__":
    _main(*sys.argv[1:])
