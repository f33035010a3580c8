"""A peer of hivemind's averaging, for comparison: it averages numbers for each line on stdin.

Run as a module by `averaging.py`. hivemind forks a process for its DHT and one for its averager.
"""

import json
import os
import sys
import time
from typing import Any

import torch
from hivemind import DHT, DecentralizedAverager


def _main() -> None:
    settings: dict[str, Any] = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    dht = DHT(
        initial_peers=settings["addresses"],
        host_maddrs=[f"/ip4/{settings['host']}/tcp/0"],
        start=True,
    )
    numbers = torch.zeros(settings["num_numbers"])
    # hivemind's context manager has no type.
    averager: Any = DecentralizedAverager(
        [numbers],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=settings["num_members"] if settings["knows_size"] else None,
        min_group_size=settings["num_members"],
        min_matchmaking_time=settings["matchmaking_seconds"],
        request_timeout=settings["request_seconds"],
    )
    print(json.dumps([str(address) for address in dht.get_visible_maddrs()]), flush=True)
    for line in sys.stdin:
        with averager.get_tensors() as (tensor,):
            tensor.fill_(float(line))
        begun_at = time.perf_counter()
        averager.step(timeout=60.0)
        ended_at = time.perf_counter()
        with averager.get_tensors() as (tensor,):
            mean = float(tensor.mean())
        print(json.dumps([begun_at, ended_at, mean]), flush=True)
    os._exit(0)  # whoever started this process ends those that it has forked


if __name__ == "__main__":
    _main()
