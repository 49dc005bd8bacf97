"""A small version of bench.real_hosts: libp2p hosts in processes that are killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.common.host_parts import part_processes
from bench.common.host_swarm import Swarm, all_know, shared_out

pytestmark = pytest.mark.slow


def test_all_reach_all_a_newcomer_routes_and_the_dead_are_given_up(tmp_path: Path) -> None:
    """Each looks for two connections, so most are not connected."""
    with part_processes() as make:
        swarm = Swarm(make, tmp_path, peers=2)
        staying, dying = swarm.part(), swarm.part()
        swarm.start(shared_out([f"host{number}" for number in range(8)], [staying, dying]))
        swarm.until(all_know)
        assert min(swarm.look().degrees) < 7

        newcomer = swarm.part(clock_wrong_s=-12 * 3600)
        swarm.start({newcomer: ["newcomer"]})
        swarm.until(all_know)
        others = {known.node_id for name, (_, known) in swarm.hosts.items() if name != "newcomer"}
        stranger = min(others - newcomer.do("connected", "newcomer"))
        # On a busy machine a first dial may be too late.
        swarm.until(lambda _: newcomer.do("ask", "newcomer", stranger) is not None)

        lost = [swarm.hosts[name][1].node_id for name in swarm.names(dying)]
        for node_id in lost:
            swarm.until(lambda _, node_id=node_id: newcomer.do("ask", "newcomer", node_id) is not None)
        swarm.kill(dying)
        for node_id in lost:
            assert newcomer.do("ask", "newcomer", node_id) is None
            assert "newcomer" not in newcomer.do("reaching", node_id)
        swarm.publish("newcomer", "news")
        swarm.until(all_know)
