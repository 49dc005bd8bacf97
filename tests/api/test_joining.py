"""How another machine joins: told to those who administer the node, the secret only to those with a key."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from api_fakes import open_node
from deadlines import DEADLINE_S
from node_ids import NODE_A

from swarmllm.api.http.endpoint import open_api
from swarmllm.config import ApiTable, Config, NodeTable
from swarmllm.keys import KeyFile
from swarmllm.swarm.in_memory.router import InMemoryRouter
from swarmllm.swarm.membership.invitation import from_text
from swarmllm.swarm.membership.network_key import NetworkFile, private_network

LOOPBACK, OUTWARD = (f"/ip4/{ip}/tcp/8810/p2p/{NODE_A}" for ip in ("127.0.0.1", "192.0.2.7"))
SECRET = bytes(range(32))
JOIN, INVITATIONS = "/api/admin/join", "/api/admin/invitations"


@asynccontextmanager
async def node(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *addresses: str
) -> AsyncIterator[httpx.AsyncClient]:
    monkeypatch.setattr(InMemoryRouter, "addresses", addresses)
    config = Config(api=ApiTable(port=0), node=NodeTable(data_dir=str(folder)))
    async with (
        open_node(folder, config=config) as stand,
        open_api(stand.node, config, KeyFile(folder)) as url,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=DEADLINE_S) as http,
    ):
        yield http


@pytest.mark.parametrize(
    ("addresses", "told"),
    [
        ((LOOPBACK, OUTWARD), {"reachable": True, "command": f"swarmllm daemon --bootstrap {OUTWARD}"}),
        ((LOOPBACK,), {"reachable": False, "command": ""}),
    ],
)
async def test_an_open_swarm_is_joined_by_an_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, addresses: tuple[str, ...], told: dict[str, object]
) -> None:
    async with node(tmp_path, monkeypatch, *addresses) as http:
        assert (await http.get(JOIN)).json() == {"private": False} | told
        made = (await http.post(INVITATIONS, json={"expires_days": 1})).json()
    invited = from_text(made["invitation"], time.time())
    assert (invited.secret, invited.addresses) == (b"", addresses[-1:])
    assert made["expires_at"] - time.time() == pytest.approx(86_400, abs=60)


async def test_the_key_of_a_private_swarm_goes_to_an_admin_key_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    NetworkFile(tmp_path).change(lambda known: private_network(SECRET))
    async with node(tmp_path, monkeypatch, LOOPBACK, OUTWARD) as http:
        assert (await http.get(JOIN)).json() == {"private": True, "reachable": True, "command": ""}
        refused = await http.post(INVITATIONS, json={})
        assert refused.status_code == 403
        assert "swarmllm invite" in refused.json()["error"]["message"]
        assert "swarmllm-join" not in refused.text
    _, user = KeyFile(tmp_path).create("user")
    _, admin = KeyFile(tmp_path).create("operator", is_admin=True)
    async with node(tmp_path, monkeypatch, LOOPBACK, OUTWARD) as http:
        for headers, status in (({}, 401), ({"x-api-key": user}, 403)):
            assert (await http.post(INVITATIONS, json={}, headers=headers)).status_code == status
        answer = await http.post(INVITATIONS, json={}, headers={"x-api-key": admin})
    made = answer.json()
    invited = from_text(made["invitation"], time.time())
    assert (invited.secret, invited.addresses) == (SECRET, (OUTWARD,))
    assert made["command"] == f"swarmllm join {made['invitation']}"
    assert answer.headers["Cache-Control"] == "no-store"
    assert made["invitation"] not in caplog.text
