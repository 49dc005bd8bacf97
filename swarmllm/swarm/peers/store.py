"""Stores what a node remembers of others between its runs: reputations and last known addresses.

One small sqlite file in the data folder, written in a thread, in transactions. It is a memory, not a truth:
a file that is damaged is set aside and a new one begun, because nothing in it is needed to run.

A network changes less than a daemon restarts: a peer that was there yesterday is the best guess today, also
when the bootstrap node is gone for good.
"""

from __future__ import annotations

import logging
import math
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import trio
from msgspec import Meta

from swarmllm.database import open_database
from swarmllm.errors import StoreLocked
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.peers.trust import KEPT_EVENTS, NODES_MAX, Entry, Reputation, TrustEvent
from swarmllm_proto.identifiers import Multiaddr, NodeId, usable_multiaddrs

log = logging.getLogger(__name__)

REMEMBERED_S = 30 * 86_400.0
_SAVE_EVERY_S = 30.0
SAVE_AGAIN_S: Final = 3600.0
"""What has not changed since it was saved: when it was is looked at after REMEMBERED_S."""

Addresses = tuple[Multiaddr, ...]
Connected = Callable[[], Iterable[tuple[NodeId, Addresses]]]
"""(node id, addresses) of the peers connected now."""


class KnownPeers:
    """The addresses of peers that an earlier run left. `network_id` keeps the nodes of different networks
    apart."""

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
        self._saved: dict[NodeId, Addresses] = {}
        """Of those that were connected when it was saved last."""
        self._saved_at = -math.inf
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
        now = self._clock()
        if abs(now - self._saved_at) >= SAVE_AGAIN_S:
            self._saved, self._saved_at = {}, now
        peers = {node_id: addresses for node_id, addresses in connected() if addresses}
        changed = [(who, where) for who, where in peers.items() if self._saved.get(who) != where]
        if not changed:
            self._saved = peers
            return
        try:
            await trio.to_thread.run_sync(self._store.keep_peers, self._network_id, changed, now)
        except (sqlite3.Error, StoreLocked) as error:
            log.warning("peers could not be remembered: %s", error)
        else:
            self._saved = peers


def open_peer_memory(data_dir: Path, network_id: str, peers: Parts[Addresses] | None = None) -> KnownPeers:
    """Blocking."""
    return KnownPeers(PeerStore(data_dir), network_id, peers)


FILE_NAME = "peers.sqlite"
ADDRESSES_PER_NODE = 8
_SCHEMA = """
CREATE TABLE IF NOT EXISTS trust (
    node_id TEXT PRIMARY KEY, score REAL NOT NULL, at REAL NOT NULL,
    counts TEXT NOT NULL, recent TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS peers (
    network_id TEXT NOT NULL, node_id TEXT NOT NULL, addresses TEXT NOT NULL, seen_at REAL NOT NULL,
    PRIMARY KEY (network_id, node_id)
);
"""
_Score = Annotated[float, Meta(ge=0, le=1)]
_Recent = tuple[tuple[float, TrustEvent, str, float], ...]
_TrustRow = tuple[NodeId, _Score, float, str, str]
_PeerRow = tuple[NodeId, str]
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


class PeerStore:
    """Every method blocks, and raises StoreLocked while another process holds the file."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        self._is_prepared = False
        with suppress(StoreLocked):  # Prepared before the first use, then.
            self._prepare_or_begin_anew()

    def reputations(self) -> list[tuple[NodeId, Reputation]]:
        found = []
        for row in self._rows("SELECT node_id, score, at, counts, recent FROM trust"):
            try:
                node_id, score, at, counts, recent = msgspec.convert(row, _TrustRow)
                entries = [Entry(*entry) for entry in msgspec.json.decode(recent, type=_Recent)]
                known = msgspec.json.decode(counts, type=dict[TrustEvent, int])
            except _UNREADABLE:
                log.warning("a reputation in %s cannot be read and is forgotten", self._path)
                continue
            found.append((node_id, Reputation(score, at, known, deque(entries, KEPT_EVENTS))))
        return found

    def keep_reputations(self, reputations: Mapping[NodeId, Reputation]) -> None:
        rows = [
            (
                node_id,
                reputation.score,
                reputation.at,
                msgspec.json.encode(reputation.counts).decode(),
                msgspec.json.encode(
                    [(e.at, e.trust_event, e.detail, e.score) for e in reputation.recent]
                ).decode(),
            )
            for node_id, reputation in reputations.items()
        ]
        with self._open() as database:
            database.executemany("INSERT OR REPLACE INTO trust VALUES (?, ?, ?, ?, ?)", rows)
            self._bound(database, "trust", "at")

    def peers(self, network_id: str, since: float) -> list[tuple[NodeId, tuple[Multiaddr, ...]]]:
        """(node id, addresses) of those that were connected after `since`, the latest first."""
        rows = self._rows(
            "SELECT node_id, addresses FROM peers WHERE network_id = ? AND seen_at > ? "
            "ORDER BY seen_at DESC, rowid",
            (network_id, since),
        )
        found = []
        for row in rows:
            try:
                node_id, addresses = msgspec.convert(row, _PeerRow)
            except msgspec.ValidationError:
                log.warning("an address in %s cannot be read and is forgotten", self._path)
                continue
            found.append((node_id, tuple(usable_multiaddrs(addresses.split()))))
        return found

    def keep_peers(self, network_id: str, peers: Iterable[tuple[str, Iterable[str]]], now: float) -> None:
        rows = [
            (network_id, node_id, " ".join(list(where)[:ADDRESSES_PER_NODE]), now) for node_id, where in peers
        ]
        with self._open() as database:
            database.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?)", rows)
            self._bound(database, "peers", "seen_at")

    def _bound(self, database: sqlite3.Connection, table: str, age: str) -> None:
        database.execute(
            f"DELETE FROM {table} WHERE node_id NOT IN "
            f"(SELECT node_id FROM {table} ORDER BY {age} DESC LIMIT {NODES_MAX})"
        )

    def _rows(self, query: str, parameters: tuple[object, ...] = ()) -> list[tuple[object, ...]]:
        try:
            with self._open() as database:
                return database.execute(query, parameters).fetchall()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._begin_anew(error)
            return []

    def _begin_anew(self, error: Exception) -> None:
        log.warning("%s is damaged (%s); a new one is begun", self._path, error)
        self._path.replace(self._path.with_suffix(".damaged"))
        self._prepare()

    def _prepare_or_begin_anew(self) -> None:
        try:
            self._prepare()
        except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
            self._begin_anew(error)

    def _prepare(self) -> None:
        with open_database(self._path) as database:
            database.executescript(_SCHEMA)
        self._path.chmod(0o600)
        self._is_prepared = True

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        if not self._is_prepared:
            self._prepare_or_begin_anew()
        with open_database(self._path) as database:
            yield database
