"""A database that another process has locked: the caller is told, nothing is put aside, nothing ends."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import trio
from node_ids import A as OTHER
from running_daemon import config_of, daemon

import swarmllm.database
from swarmllm.errors import StoreLocked
from swarmllm.models import Catalogue
from swarmllm.swarm.peers.store import FILE_NAME, SAVE_AGAIN_S, KnownPeers, PeerStore
from swarmllm.swarm.peers.trust import Reputation, TrustEvent
from swarmllm.swarm.peers.trust_keeper import Trust
from swarmllm_proto.identifiers import NodeId

NODE = "12D3KooWGQvqiXtv6Q98UKj5fAfYPXYLrj1vN8teFDeADmDg5sqR"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(swarmllm.database, "BUSY_TIMEOUT_S", 0.01)


@contextmanager
def locked(path: Path) -> Iterator[None]:
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        yield
        other.execute("ROLLBACK")


def test_a_locked_catalogue_says_so_and_is_whole_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    catalogue = Catalogue(path)
    with locked(path), pytest.raises(StoreLocked, match="locked by another process") as raised:
        catalogue.list()
    assert raised.value.http_status == 503
    assert catalogue.list() == ()


def test_a_catalogue_that_is_locked_at_the_start_is_not_called_damaged(tmp_path: Path) -> None:
    path = tmp_path / "catalogue.sqlite"
    Catalogue(path)
    with locked(path), pytest.raises(StoreLocked):
        Catalogue(path)


def test_a_locked_peer_database_is_not_put_aside(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    store.keep_peers("", [(NODE, ["/ip4/192.0.2.1/tcp/1"])], 1.0)
    with locked(tmp_path / FILE_NAME):
        with pytest.raises(StoreLocked):
            store.peers("", 0.0)
        with pytest.raises(StoreLocked):
            store.keep_peers("", [(NODE, [])], 2.0)
        again = PeerStore(tmp_path)
    assert not list(tmp_path.glob("*.damaged"))
    assert again.peers("", 0.0) == [(NODE, ("/ip4/192.0.2.1/tcp/1",))]


def test_a_damaged_peer_database_is_still_put_aside(tmp_path: Path) -> None:
    (tmp_path / FILE_NAME).write_bytes(b"no database" * 1000)
    assert PeerStore(tmp_path).peers("", 0.0) == []
    assert list(tmp_path.glob("*.damaged"))


async def test_trust_that_could_not_be_saved_is_saved_later(tmp_path: Path) -> None:
    trust = Trust(store=PeerStore(tmp_path), clock=lambda: 1.0)
    await trust.load()
    trust.note(NODE, TrustEvent.BROKE_PROTOCOL, "test")
    with locked(tmp_path / FILE_NAME):
        await trust.save()
    await trust.save()
    assert [node_id for node_id, _ in PeerStore(tmp_path).reputations()] == [NODE]


async def test_trust_that_is_locked_at_the_start_is_loaded_later_and_never_overwritten(
    tmp_path: Path,
) -> None:
    before = Trust(store=PeerStore(tmp_path), clock=lambda: 1.0)
    await before.load()
    for _ in range(5):
        before.note(NODE, TrustEvent.BROKE_PROTOCOL, "test")
    await before.save()
    trust = Trust(store=PeerStore(tmp_path), clock=lambda: 1.0)
    with locked(tmp_path / FILE_NAME):
        await trust.load()
        trust.note(NODE, TrustEvent.SERVED)
        await trust.save()
    assert trust.score(NODE) > before.score(NODE)
    await trust.save()
    assert trust.score(NODE) == before.score(NODE)


async def test_trust_that_was_never_loaded_is_not_saved_over_what_is_stored(tmp_path: Path) -> None:
    class Unreadable(PeerStore):
        def reputations(self) -> list[tuple[NodeId, Reputation]]:
            raise StoreLocked("just then")

    trust = Trust(store=Unreadable(tmp_path), clock=lambda: 1.0)
    await trust.load()
    trust.note(NODE, TrustEvent.SERVED)
    await trust.save()
    assert PeerStore(tmp_path).reputations() == []


async def test_known_peers_of_a_locked_database_are_unknown_this_time_only(tmp_path: Path) -> None:
    store = PeerStore(tmp_path)
    store.keep_peers("", [(NODE, ["/ip4/192.0.2.1/tcp/1"])], 100.0)
    with locked(tmp_path / FILE_NAME):
        memory = KnownPeers(store, "", clock=lambda: 100.0)
        assert not memory.known
        with trio.move_on_after(0):
            await memory.run(lambda: [(NODE, ("/ip4/192.0.2.1/tcp/2",))])
    assert [node_id for node_id, _ in KnownPeers(store, "", clock=lambda: 100.0).known] == [NODE]


async def test_known_peers_are_written_when_they_change_and_once_an_hour(tmp_path: Path) -> None:
    written: list[str] = []

    class Watched(PeerStore):
        def keep_peers(self, network_id: str, peers: Iterable[tuple[str, Iterable[str]]], now: float) -> None:
            kept = [(node_id, list(addresses)) for node_id, addresses in peers]
            super().keep_peers(network_id, kept, now)
            written.extend(address for _, addresses in kept for address in addresses)

    now = 100.0
    memory = KnownPeers(Watched(tmp_path), "", clock=lambda: now)

    async def saved(connected: dict[NodeId, tuple[str, ...]]) -> list[str]:
        written.clear()
        with trio.move_on_after(0):
            await memory.run(lambda: list(connected.items()))
        return list(written)

    first, second, moved = ("/ip4/192.0.2.1/tcp/1",), ("/ip4/192.0.2.2/tcp/2",), ("/ip4/192.0.2.2/tcp/3",)
    assert await saved({NODE: first, OTHER: second}) == [*first, *second]
    assert await saved({NODE: first, OTHER: second}) == []
    assert await saved({NODE: first, OTHER: moved}) == [*moved]
    assert await saved({NODE: first}) == []
    now += SAVE_AGAIN_S
    assert await saved({NODE: first, OTHER: moved}) == [*first, *moved]
    now -= 10 * SAVE_AGAIN_S
    assert await saved({NODE: first}) == [*first], "the clock was set back"
    with locked(tmp_path / FILE_NAME):
        assert await saved({NODE: second}) == []
    assert await saved({NODE: second}) == [*second], "it was not written"


@pytest.mark.slow
async def test_a_daemon_whose_databases_are_locked_refuses_and_goes_on(tmp_path: Path) -> None:
    async with daemon(config_of(tmp_path, "solo", ["guide"])) as node:
        await node.answers()
        with locked(tmp_path / "solo" / "catalogue.sqlite"), locked(tmp_path / "solo" / FILE_NAME):
            refused = await node.chat()
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "store_locked"
            assert (await node.http.get("/health")).status_code == 200
        assert (await node.chat()).status_code == 200
        assert not [task.name for task in node.supervision.statuses() if task.n_failures]
        assert not any(node.supervision.scope_failures().values())


@pytest.mark.slow
async def test_a_daemon_waits_at_its_start_for_a_locked_catalogue(tmp_path: Path) -> None:
    async with daemon(config_of(tmp_path, "solo", [])):
        pass
    with locked(tmp_path / "solo" / "catalogue.sqlite"), trio.move_on_after(1):
        async with daemon(config_of(tmp_path, "solo", [])):
            pytest.fail("it started with a locked catalogue")
    async with daemon(config_of(tmp_path, "solo", ["guide"])) as node:
        await node.answers()
