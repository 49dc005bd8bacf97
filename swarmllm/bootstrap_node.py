"""`swarmllm bootstrap`: the parts of a daemon through which other nodes find each other, without those that
compute.

No worker, catalogue or pipeline is opened, so none can be used or attacked. The node has a router
(connections, records, DHT), its relay, and an HTTP endpoint with health and metrics.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

import trio

from swarmllm import __version__
from swarmllm.api import open_bootstrap_api
from swarmllm.config import Config
from swarmllm.daemon import (
    DaemonInfo,
    Reread,
    apply_to_swarm,
    daemon_file,
    follow_sighup,
)
from swarmllm.daemon_settings import swarm_settings
from swarmllm.keys import KeyFile
from swarmllm.loop_watchdog import LoopWatchdog
from swarmllm.node.bootstrap_node import BootstrapNode
from swarmllm.node.data_dir import prepare_data_dir
from swarmllm.sd_notify import ServiceManager
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.peers.directory import PeerDirectory
from swarmllm.swarm.peers.trust_keeper import open_trust
from swarmllm.swarm.settings import RelayLimits, SwarmSettings

log = logging.getLogger(__name__)

CONNECTIONS_MAX: Final = 2000
RELAY_LIMITS: Final = RelayLimits(reservations=1024, circuits=256)


def bootstrap_settings(config: Config, data_dir: Path) -> SwarmSettings:
    """Whatever the configuration says of the DHT and the relay: they are what this mode is for. Raises
    ConfigError."""
    return replace(
        swarm_settings(config, data_dir),
        dht="on",
        relay_service=True,
        relay_limits=RELAY_LIMITS,
        max_connections=config.network.max_connections or CONNECTIONS_MAX,
    )


@asynccontextmanager
async def open_bootstrap_node(
    config: Config,
    reread: Reread = None,
    manager: ServiceManager | None = None,
    on_open: Callable[[BootstrapNode], None] = lambda node: None,
) -> AsyncIterator[DaemonInfo]:
    """A running bootstrap node; leaving the block stops it. `on_open` gets it.

    Raises ConfigError where folder or ports are taken.
    """
    data_dir = await trio.to_thread.run_sync(prepare_data_dir, config.data_dir)
    settings = await trio.to_thread.run_sync(bootstrap_settings, config, data_dir)
    watchdog, directory = LoopWatchdog(), PeerDirectory()
    async with (
        open_trust(data_dir, settings.lists, directory.trust) as trust,
        open_libp2p_router(settings, trust, directory) as router,
        trio.open_nursery() as nursery,
    ):
        node = BootstrapNode(config.nickname, router, watchdog, settings.max_connections)
        await node.announce()
        async with open_bootstrap_api(node, config, KeyFile(data_dir)) as api_url:
            daemon_info = DaemonInfo(
                pid=os.getpid(),
                version=__version__,
                api_url=api_url,
                node_id=router.node_id,
                addresses=tuple(router.addresses),
            )
            log.info("bootstrap node %s (%s) serves %s", node.nickname, router.node_id, api_url)
            if reread is not None:
                apply = partial(apply_to_swarm, router=router)
                await follow_sighup(nursery, config, reread, apply, manager)
            async with daemon_file(data_dir, daemon_info):
                with watchdog.watching():
                    on_open(node)
                    yield daemon_info
        nursery.cancel_scope.cancel()
