"""The nodes this one was connected to, kept over restarts: used at start beside the bootstrap addresses, and
told to newcomers.

A network changes less than a daemon restarts: whoever was there yesterday is the best guess today, also when
the bootstrap node is gone for good.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import trio

from swarmllm.errors import StoreLocked
from swarmllm.swarm.peers.parts import Parts
from swarmllm.swarm.peers.store import PeerStore
from swarmllm_proto.identifiers import Multiaddr, NodeId

log = logging.getLogger(__name__)

REMEMBERED_S = 30 * 86_400.0
_SAVE_EVERY_S = 30.0

Addresses = tuple[Multiaddr, ...]
Connected = Callable[[], Iterable[tuple[NodeId, Addresses]]]
"""(node id, addresses) of the peers connected now."""


class KnownPeers:
    """Of each peer that an earlier run left, its addresses. `network_id`: nodes of other networks are not
    mixed."""

    def __init__(
        self,
        store: PeerStore,
        network_id: str,
        peers: Parts[Addresses] | None = None,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._network_id = network_id
        self._clock = clock
        self._known: Parts[Addresses] = Parts.alone() if peers is None else peers
        try:
            for node_id, addresses in store.peers(network_id, clock() - REMEMBERED_S):
                self._known.put(node_id, addresses)
        except StoreLocked as error:
            log.warning("the nodes of earlier runs are not known this time: %s", error.message)

    @property
    def known(self) -> list[tuple[NodeId, Addresses]]:
        """Latest first."""
        return list(self._known.items())

    async def run(self, connected: Connected) -> None:
        """Save now and then, until cancelled, and once more at the end."""
        try:
            while True:
                await trio.sleep(_SAVE_EVERY_S)
                await self._save(connected)
        finally:
            with trio.CancelScope(shield=True):
                await self._save(connected)

    async def _save(self, connected: Connected) -> None:
        peers = [(node_id, addresses) for node_id, addresses in connected() if addresses]
        if not peers:
            return
        try:
            await trio.to_thread.run_sync(self._store.keep_peers, self._network_id, peers, self._clock())
        except (sqlite3.Error, StoreLocked) as error:
            log.warning("peers could not be remembered: %s", error)


def open_peer_memory(data_dir: Path, network_id: str, peers: Parts[Addresses] | None = None) -> KnownPeers:
    """Blocking."""
    return KnownPeers(PeerStore(data_dir), network_id, peers)
