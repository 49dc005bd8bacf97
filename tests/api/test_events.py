"""/api/events: what a reader gets, when, and what happens to those who do not read."""

from __future__ import annotations

import itertools
import json
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
from api_fakes import Script, Stand, serve_node
from deadlines import DEADLINE_S
from node_ids import NODE_A, node_id_named

from swarmllm.api.admin import events
from swarmllm.api.admin.events import NodeSections
from swarmllm.api.http import app
from swarmllm.api.http.endpoint import open_api
from swarmllm.api.http.limits import HttpLimits
from swarmllm.errors import NodeUnreachable
from swarmllm.keys import KeyFile
from swarmllm.swarm.records import departures

SECTIONS = {"node", "peers", "models", "requests", "downloads", "shares", "work"}


class Reader:
    """HTTP/1.0 on a bare connection: the body comes as it is, without chunks around it."""

    def __init__(self, connection: trio.SocketStream) -> None:
        self._connection = connection
        self._pending = b""
        self.status = 0
        self.state: dict[str, Any] = {}
        self.names: list[str] = []

    async def read_until(self, condition: Callable[[dict[str, Any]], Any]) -> None:
        with trio.fail_after(DEADLINE_S):
            while not (self.state.keys() >= SECTIONS and condition(self.state)):
                name, _, data = (await self._take(b"\n\n")).partition("\n")
                if name.startswith("event: "):
                    self.names.append(name.removeprefix("event: "))
                    self.state[self.names[-1]] = json.loads(data.removeprefix("data: "))

    async def read_head(self) -> None:
        with trio.fail_after(DEADLINE_S):
            head = await self._take(b"\r\n\r\n")
        self.status = int(head.split()[1])
        assert ("text/event-stream" in head) == (self.status == 200)

    async def _take(self, mark: bytes) -> str:
        while mark not in self._pending:
            data = await self._connection.receive_some(65536)
            assert data, "the stream ended"
            self._pending += data
        taken, _, self._pending = self._pending.partition(mark)
        return taken.decode()


@asynccontextmanager
async def reading(stand: Stand, *headers: str, url: str = "") -> AsyncIterator[Reader]:
    host, port = (url or stand.url).removeprefix("http://").split(":")
    async with trio.SocketStream(trio.socket.socket()) as connection:
        await connection.socket.connect((host, int(port)))
        lines = ["GET /api/events HTTP/1.0", f"Host: {host}:{port}", *headers, "", ""]
        await connection.send_all("\r\n".join(lines).encode())
        reader = Reader(connection)
        await reader.read_head()
        yield reader


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "INTERVAL_S", 0.02)


@pytest.fixture
def made_sections(monkeypatch: pytest.MonkeyPatch) -> list[NodeSections]:
    """The sections of every application that is made."""
    made: list[NodeSections] = []

    def make(*parts: Any) -> NodeSections:
        made.append(NodeSections(*parts))
        return made[-1]

    monkeypatch.setattr(app, "NodeSections", make)
    return made


async def ask(stand: Stand, **fields: Any) -> httpx.Response:
    body = {"model": "guide", "messages": [{"role": "user", "content": "hush"}]} | fields
    return await stand.http.post("/v1/chat/completions", json=body)


async def test_a_reader_gets_every_section_and_then_only_what_changes(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand, reading(stand) as reader:
        await reader.read_until(lambda state: True)
        assert set(reader.names) == SECTIONS
        assert reader.state["node"]["node_id"] == NODE_A
        assert reader.state["node"]["resident_bytes"] > 0
        assert [model["name"] for model in reader.state["models"]["models"]] == ["guide"]
        assert reader.state["requests"] == {"live": [], "recent": []}
        reader.names.clear()
        await stand.load_guide()
        await reader.read_until(lambda state: state["models"]["models"][0]["complete"])
        assert "work" not in reader.names
        assert "requests" not in reader.names


async def test_a_request_is_seen_while_it_runs_and_when_it_has_ended(tmp_path: Path) -> None:
    go_on = trio.Event()
    async with serve_node(tmp_path) as stand, reading(stand) as reader, trio.open_nursery() as nursery:
        stand.pipelines.script = Script(texts=["secret", "words", "here"], between=go_on.wait)
        nursery.start_soon(ask, stand)
        await reader.read_until(
            lambda state: [live["state"] for live in state["requests"]["live"]] == ["decode"]
        )
        (live,) = reader.state["requests"]["live"]
        assert (live["model"], live["route"][0]["layers"]) == ("guide", "0:12")
        go_on.set()
        await reader.read_until(lambda state: state["requests"]["recent"])
        (ended,) = reader.state["requests"]["recent"]
        assert ended["id"] == live["id"]
        assert (ended["state"], ended["generated_tokens"], ended["prompt_tokens"]) == ("completed", 3, 7)
        assert ended["tokens_per_s"] == 4.0
        assert reader.state["requests"]["live"] == []
        assert "hush" not in json.dumps(reader.state)
        assert "secret" not in json.dumps(reader.state)


async def test_who_waits_is_queued_and_who_failed_says_why(tmp_path: Path) -> None:
    async with (
        serve_node(tmp_path, max_concurrent_requests=1) as stand,
        reading(stand) as reader,
        trio.open_nursery() as nursery,
    ):
        stand.pipelines.script = Script(hold_after=0)
        nursery.start_soon(ask, stand)
        await stand.pipelines.started.wait()
        nursery.start_soon(ask, stand)
        await reader.read_until(lambda state: len(state["requests"]["live"]) == 2)
        states = [request["state"] for request in reader.state["requests"]["live"]]
        assert states == ["decode", "queued"]
        nursery.cancel_scope.cancel()
    async with serve_node(tmp_path) as stand, reading(stand) as reader:
        stand.pipelines.script = Script(fail_before=NodeUnreachable("node kitchen is gone"))
        await ask(stand)
        await reader.read_until(lambda state: state["requests"]["recent"])
        (ended,) = reader.state["requests"]["recent"]
        assert (ended["state"], ended["error"]) == ("failed", "node kitchen is gone")


async def test_a_load_is_seen_by_who_did_not_ask_for_it(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand, reading(stand) as reader, trio.open_nursery() as nursery:
        loading = trio.Event()

        async def load(model: Any, layers: Any, progress: Any, options: Any, then: Any) -> Any:
            progress(30, 100)
            await loading.wait()
            return ()

        stand.pool.load = load  # type: ignore[method-assign]
        nursery.start_soon(partial(stand.http.post, "/api/admin/models/guide/load", json={}))
        work = {"kind": "load", "model": "guide", "phase": "loading", "done_bytes": 30, "total_bytes": 100}
        await reader.read_until(lambda state: state["work"]["running"] == [work])
        loading.set()
        await reader.read_until(lambda state: not state["work"]["running"])


async def test_peers_say_what_memory_they_have(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand, reading(stand) as reader:
        await stand.tell_of_peer("node-b", "other", 4, ((0, 2),))
        await reader.read_until(lambda state: state["peers"]["peers"])
        (peer,) = reader.state["peers"]["peers"]
        assert peer["nickname"] == "node-b's name"
        assert "connected_s" not in peer
        await reader.read_until(lambda state: "other" in {each["name"] for each in state["models"]["models"]})
        other = next(model for model in reader.state["models"]["models"] if model["name"] == "other")
        assert (other["missing"], other["complete"]) == (["2:4"], False)


async def test_a_peer_that_left_is_recent_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve_node(tmp_path) as stand, reading(stand) as reader:
        await stand.tell_of_peer("node-b", "other", 4, ((0, 2),))
        await reader.read_until(lambda state: state["peers"]["peers"])
        assert reader.state["peers"]["left"] == []
        stand.network.kill(node_id_named("node-b"))
        await reader.read_until(lambda state: state["peers"]["left"])
        (left,) = reader.state["peers"]["left"]
        assert reader.state["peers"]["peers"] == []
        assert (left["nickname"], left["recently"]) == ("node-b's name", True)
        assert left["models"] == [{"name": "other", "layers": ["0:2"]}]
        assert 0 <= time.time() - left["left_at"] < DEADLINE_S
        monkeypatch.setattr(departures, "RECENT_S", 0)
        await reader.read_until(lambda state: not state["peers"]["left"][0]["recently"])


async def test_only_so_many_may_read_and_a_place_is_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_sections: list[NodeSections]
) -> None:
    monkeypatch.setattr(events, "MAX_READERS", 1)
    async with serve_node(tmp_path) as stand:
        async with reading(stand) as reader:
            await reader.read_until(lambda state: True)
            async with reading(stand) as refused:
                assert refused.status == 429
        (node_sections,) = made_sections
        with trio.fail_after(DEADLINE_S):
            while node_sections.n_readers:
                await trio.lowlevel.checkpoint()
        async with reading(stand) as reader:
            assert reader.status == 200


async def test_a_reader_that_stops_reading_is_cut_off_and_nothing_is_kept_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made_sections: list[NodeSections]
) -> None:
    monkeypatch.setattr(events, "INTERVAL_S", 0.001)
    ticks = itertools.count()
    monkeypatch.setattr(
        events,
        "stats_json",
        lambda node, models: {"tick": next(ticks), "filler": "x" * 100_000, "uptime_s": 0, "models": []},
    )
    async with serve_node(tmp_path, limits=HttpLimits(write_s=1.0)) as stand:
        host, port = stand.url.removeprefix("http://").split(":")
        client = trio.socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        await client.connect((host, int(port)))
        await client.send(f"GET /api/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        (node_sections,) = made_sections
        with trio.fail_after(DEADLINE_S):
            while not node_sections.n_readers:
                await trio.lowlevel.checkpoint()
            while node_sections.n_readers:
                await trio.lowlevel.checkpoint()
        client.close()


async def test_with_keys_it_takes_one_that_may_administer(tmp_path: Path) -> None:
    keys = KeyFile(tmp_path)
    _, user = keys.create("app")
    _, admin = keys.create("me", is_admin=True)
    async with serve_node(tmp_path) as stand, open_api(stand.node, stand.config, keys) as url:
        statuses = []
        for headers in ([], [f"Authorization: Bearer {user}"], [f"Authorization: Bearer {admin}"]):
            async with reading(stand, *headers, url=url) as reader:
                statuses.append(reader.status)
        foreign = await stand.http.get("/api/events", headers={"Origin": "https://elsewhere.example"})
    assert statuses == [401, 403, 200]
    assert foreign.status_code == 403


async def test_one_key_takes_no_more_than_its_share_of_the_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MAX_READERS_OF_KEY", 1)
    keys = KeyFile(tmp_path)
    _, greedy = keys.create("greedy", is_admin=True)
    _, other = keys.create("other", is_admin=True)
    async with (
        serve_node(tmp_path) as stand,
        open_api(stand.node, stand.config, keys) as url,
        reading(stand, f"Authorization: Bearer {greedy}", url=url) as first,
        reading(stand, f"Authorization: Bearer {greedy}", url=url) as second,
        reading(stand, f"Authorization: Bearer {other}", url=url) as third,
    ):
        assert [reader.status for reader in (first, second, third)] == [200, 429, 200]
