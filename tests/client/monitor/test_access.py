"""The probe of a monitor: it dials a peer, and compares the answer with the announcement."""

from __future__ import annotations

from pathlib import Path

from run_swarm import RunSwarm, run_in_swarm
from training_runs import open_run

from shoal.client.monitor.access import make_access


def test_peer_of_a_run_is_found_as_announced(tmp_path: Path) -> None:
    async def scene(swarm: RunSwarm) -> None:
        (peer,) = await swarm.list_announcements()
        transport = swarm.make_network("monitor").make_transport()
        result = await make_access(None).probe(peer, transport)
        assert result.fault == ""
        assert result.rtt_seconds is not None
        await transport.close()

    run_in_swarm(open_run(tmp_path)[0], tmp_path, scene, num_peers=1)
