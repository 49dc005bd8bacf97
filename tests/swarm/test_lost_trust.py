"""A peer that goes on breaking the protocol loses its connections, and gets none for a while."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.peers.trust import CONNECTION_MIN, TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm.swarm.records.exchange import KIND_DIAL_BACK, KIND_ENVELOPES, KIND_PEERS
from swarmllm.swarm.settings import SwarmSettings

from .conftest import DEADLINE_S, meet, until

pytestmark = pytest.mark.slow


@asynccontextmanager
async def node(
    folder: Path, trust: Trust | None = None, bootstrap: tuple[str, ...] = ()
) -> AsyncIterator[Libp2pRouter]:
    await trio.Path(folder).mkdir()
    trust = trust or Trust()
    settings = SwarmSettings(folder, "127.0.0.1", 0, 0, bootstrap=bootstrap, mdns=False)
    async with open_libp2p_router(settings, trust) as router:
        yield router


async def test_unreadable_requests_cost_the_connection_and_nobody_elses(tmp_path: Path) -> None:
    # Every look at the clock is five seconds after the last, so that no two events are one burst.
    ticks = itertools.count(0, 5)
    trust = Trust(clock=lambda: float(next(ticks)))
    async with (
        node(tmp_path / "victim", trust) as victim,
        node(tmp_path / "honest", bootstrap=victim.addresses) as honest,
        node(tmp_path / "hostile", bootstrap=victim.addresses) as hostile,
    ):
        await meet(victim, honest, hostile)
        with trio.fail_after(DEADLINE_S):
            for kind in itertools.cycle((KIND_PEERS, KIND_ENVELOPES, KIND_DIAL_BACK)):
                if trust.score(hostile.node_id) < CONNECTION_MIN:
                    break
                try:
                    await hostile._requests.request(victim.node_id, kind, b"\xc1", timeout_s=5)
                except SwarmLLMError:
                    continue
        await until(victim, lambda: hostile.node_id not in victim.connected())
        await until(hostile, lambda: victim.node_id not in hostile.connected())
        assert trust.count(hostile.node_id, TrustEvent.BROKE_PROTOCOL) >= 5
        with pytest.raises(SwarmLLMError):
            await hostile.connect(victim.addresses[0], timeout_s=3)
        assert not victim.plane.has_connection(hostile.node_id)
        with trio.fail_after(DEADLINE_S):
            while victim.host.is_connected(hostile.node_id):  # noqa: ASYNC110 (nobody is told)
                await trio.sleep(0.01)
        assert honest.node_id in victim.connected()
        assert not trust.count(honest.node_id, TrustEvent.BROKE_PROTOCOL)


async def test_unreadable_requests_of_a_burst_cost_no_connection(tmp_path: Path) -> None:
    trust = Trust(clock=lambda: 0.0)
    async with (
        node(tmp_path / "victim", trust) as victim,
        node(tmp_path / "damaged", bootstrap=victim.addresses) as damaged,
    ):
        await meet(victim, damaged)
        for _ in range(30):
            with pytest.raises(SwarmLLMError):
                await damaged._requests.request(victim.node_id, KIND_PEERS, b"\xc1", timeout_s=5)
        assert damaged.node_id in victim.connected()
        assert trust.may_work(damaged.node_id)
