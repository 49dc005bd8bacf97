"""What a node remembers of others between its runs: reputations, and where they were last found.

One small sqlite file in the data folder, written in a thread, in transactions. It is a memory, not a truth:
a file that is damaged is set aside and a new one begun, because nothing in it is needed to run.
"""

from __future__ import annotations

import logging
import sqlite3
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path

import msgspec

from swarmllm.swarm.trust import KEPT_DEEDS, NODES_MAX, Deed, Entry, Reputation

log = logging.getLogger(__name__)

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
_Recent = tuple[tuple[float, Deed, str, float], ...]


class PeerStore:
    """Every method blocks."""

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / FILE_NAME
        try:
            self._prepare()
        except sqlite3.DatabaseError as error:
            log.warning("%s is damaged (%s); a new one is begun", self._path, error)
            self._path.replace(self._path.with_suffix(".damaged"))
            self._prepare()

    def reputations(self) -> list[tuple[str, Reputation]]:
        with self._open() as database:
            rows = database.execute("SELECT node_id, score, at, counts, recent FROM trust").fetchall()
        found = []
        for node_id, score, at, counts, recent in rows:
            try:
                entries = [Entry(*entry) for entry in msgspec.json.decode(recent, type=_Recent)]
                known = msgspec.json.decode(counts, type=dict[Deed, int])
            except msgspec.MsgspecError:
                log.warning("the reputation of %s cannot be read and is forgotten", node_id)
                continue
            found.append((node_id, Reputation(score, at, known, deque(entries, KEPT_DEEDS))))
        return found

    def keep_reputations(self, reputations: Mapping[str, Reputation]) -> None:
        rows = [
            (
                node_id,
                reputation.score,
                reputation.at,
                msgspec.json.encode(reputation.counts).decode(),
                msgspec.json.encode([(e.at, e.deed, e.detail, e.score) for e in reputation.recent]).decode(),
            )
            for node_id, reputation in reputations.items()
        ]
        with self._open() as database, database:
            database.executemany("INSERT OR REPLACE INTO trust VALUES (?, ?, ?, ?, ?)", rows)
            self._bound(database, "trust", "at")

    def peers(self, network_id: str, since: float) -> list[tuple[str, tuple[str, ...]]]:
        """(node id, addresses) of those that were connected after `since`, the latest first."""
        with self._open() as database:
            rows = database.execute(
                "SELECT node_id, addresses FROM peers WHERE network_id = ? AND seen_at > ? "
                "ORDER BY seen_at DESC, rowid",
                (network_id, since),
            ).fetchall()
        return [(node_id, tuple(addresses.split())) for node_id, addresses in rows]

    def keep_peers(self, network_id: str, peers: Iterable[tuple[str, Iterable[str]]], now: float) -> None:
        rows = [
            (network_id, node_id, " ".join(list(where)[:ADDRESSES_PER_NODE]), now) for node_id, where in peers
        ]
        with self._open() as database, database:
            database.executemany("INSERT OR REPLACE INTO peers VALUES (?, ?, ?, ?)", rows)
            self._bound(database, "peers", "seen_at")

    def _bound(self, database: sqlite3.Connection, table: str, age: str) -> None:
        database.execute(
            f"DELETE FROM {table} WHERE node_id NOT IN "
            f"(SELECT node_id FROM {table} ORDER BY {age} DESC LIMIT {NODES_MAX})"
        )

    def _prepare(self) -> None:
        with self._open() as database, database:
            database.executescript(_SCHEMA)
        self._path.chmod(0o600)

    def _open(self) -> closing[sqlite3.Connection]:
        return closing(sqlite3.connect(self._path, timeout=10.0))
