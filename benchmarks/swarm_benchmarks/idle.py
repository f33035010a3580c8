"""What a peer costs while nobody uses it: processor time and memory, those of its p2pd included."""

import time

from measuring.processes import list_with_children, read_process_bytes, sum_cpu_seconds
from shoal.cli.benchmarking.figure import Figure
from shoal.peer.local_swarm.swarm import LocalSwarm
from swarm_benchmarks.setting import Setting

_SETTLING_SECONDS = 30.0
_SECONDS = 60.0
_PERIOD_SECONDS = 30.0
"""Between announcements, as `shoal serve` has it."""


def measure(setting: Setting) -> list[Figure]:
    """Watch two peers of the bundled model without a client."""
    scale = 1.0 if setting.effort.num_calls > 1 else 0.01
    model, spans = setting.tiny_model.directory, [(0, 4), (4, 8)]
    with LocalSwarm(model, spans=spans, announce_period_seconds=_PERIOD_SECONDS) as swarm:
        pids = [pid for peer in swarm.peers for pid in list_with_children(peer.pid)]
        setting.say("idling")
        time.sleep(scale * _SETTLING_SECONDS)
        started_at, before = time.perf_counter(), sum_cpu_seconds(pids)
        time.sleep(scale * _SECONDS)
        cpu_seconds = sum_cpu_seconds(pids) - before
        fraction = cpu_seconds / (time.perf_counter() - started_at) / len(swarm.peers)
        num_bytes = sum(map(read_process_bytes, pids)) / len(swarm.peers)
    return [
        Figure("an idle peer, of one core", 100 * fraction, "%"),
        Figure("its memory", num_bytes / 2**20, "MiB"),
    ]
