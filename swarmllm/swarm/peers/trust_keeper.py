"""Drives a TrustBook: the clock, the disk, and one place where events are noted."""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from swarmllm.errors import StoreLocked
from swarmllm.log_filter import provoked_by
from swarmllm.shared_ticks import REST_TICK_S, sleep_until_tick
from swarmllm.supervision import supervise
from swarmllm.swarm.membership.peer_lists import NO_LISTS, PeerLists
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.store import PeerStore
from swarmllm.swarm.peers.trust import (
    EFFECTS,
    NEUTRAL,
    Explanation,
    Reputation,
    TrustBook,
    TrustEvent,
    may_connect,
    may_work,
)
from swarmllm_proto.identifiers import NodeId

log = logging.getLogger(__name__)

_SAVE_EVERY_S = REST_TICK_S


class Trust:
    """`clock` is in seconds since the epoch. Without a store nothing outlives the process."""

    def __init__(
        self,
        lists: PeerLists = NO_LISTS,
        store: PeerStore | None = None,
        *,
        peers: Parts[Reputation] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._book = TrustBook(lists, peers)
        self._store = store
        self._clock = clock
        self._is_loaded = store is None

    def note(self, node_id: NodeId, event: TrustEvent, detail: str = "") -> None:
        score = self._book.note(node_id, event, self._clock(), detail)
        if (reputation := self._book.reputation(node_id)) is not None:
            reputation.is_unsaved = True
        if not EFFECTS[event].rises:
            provoked_by(log, node_id).info("node %s: %s; trust is now %.2f", node_id, event, score)

    def score(self, node_id: NodeId) -> float:
        return self._book.score(node_id, self._clock())

    def has_merit(self, node_id: NodeId) -> bool:
        """Whether it is trusted more than a node that was never met."""
        return self.score(node_id) > NEUTRAL

    def may_work(self, node_id: NodeId) -> bool:
        """Whether a node may have a part in pipelines and be asked for bytes."""
        return may_work(self.score(node_id))

    def may_connect(self, node_id: NodeId) -> bool:
        """Whether a node may have a connection at all."""
        return may_connect(self.score(node_id))

    def count(self, node_id: NodeId, event: TrustEvent) -> int:
        known = self._book.reputation(node_id)
        return known.counts.get(event, 0) if known else 0

    def explain(self, node_id: NodeId) -> Explanation:
        return self._book.explain(node_id, self._clock())

    def known(self) -> frozenset[NodeId]:
        return self._book.known()

    async def load(self) -> None:
        """While another process holds the file, nothing is known; `save` loads it later, before it writes."""
        if self._store is None or self._is_loaded:
            return
        try:
            known = await trio.to_thread.run_sync(self._store.reputations)
        except StoreLocked as error:
            log.warning("trust is loaded later: %s", error.message)
            return
        # Of what was noted meanwhile the worse counts.
        self._book.restore(
            (node_id, stored)
            for node_id, stored in known
            if (noted := self._book.reputation(node_id)) is None or stored.score < noted.score
        )
        self._is_loaded = True

    async def run(self, every_s: float = _SAVE_EVERY_S) -> None:
        """Save now and then, until cancelled, and once more at the end."""
        try:
            while True:
                await sleep_until_tick(every_s)
                await self.save()
        finally:
            with trio.CancelScope(shield=True):
                await self.save()

    async def save(self) -> None:
        await self.load()
        unsaved = self._book.unsaved()
        if self._store is None or not self._is_loaded or not unsaved:
            return
        # Copied here, because events go on while the thread writes.
        copies = {node_id: reputation.copy() for node_id, reputation in unsaved.items()}
        for reputation in unsaved.values():
            reputation.is_unsaved = False
        try:
            await trio.to_thread.run_sync(self._store.keep_reputations, copies)
        except (sqlite3.Error, StoreLocked) as error:
            log.warning("trust could not be saved: %s", error)
            for reputation in unsaved.values():
                reputation.is_unsaved = True


@asynccontextmanager
async def open_trust(
    data_dir: Path, lists: PeerLists = NO_LISTS, peers: Parts[Reputation] | None = None
) -> AsyncIterator[Trust]:
    """As this node left it, and kept until the context is left."""
    trust = Trust(lists, await trio.to_thread.run_sync(PeerStore, data_dir), peers=peers)
    await trust.load()
    async with trio.open_nursery() as nursery:
        supervise(nursery, "trust", trust.run)
        yield trust
        nursery.cancel_scope.cancel()
