"""Who is let in: hosts, origins, content types, sizes, addresses to listen on."""

from __future__ import annotations

import contextlib
import itertools
import socket
from pathlib import Path

import pytest
import trio
from api_fakes import serve_node
from deadlines import DEADLINE_S

from swarmllm.api.http.auth import Origins, check_host, is_loopback
from swarmllm.api.http.endpoint import bind
from swarmllm.api.http.errors import Forbidden
from swarmllm.api.http.limits import HttpLimits
from swarmllm.config import ApiTable, Config
from swarmllm.errors import ConfigError
from swarmllm.models import LayerRange

CHAT = "/v1/chat/completions"
WEBSOCKET = (
    b"GET /v1/models HTTP/1.1\r\nHost: evil.com\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@pytest.mark.parametrize(
    "host",
    ["localhost", "localhost:8800", "127.0.0.1:1", "127.9.9.9", "[::1]:8800", "LOCALHOST", "node.lan:80"],
)
def test_hosts_of_this_machine_are_let_in(host: str) -> None:
    check_host(host, {"node.lan"})


@pytest.mark.parametrize(
    "host",
    [
        "",
        "evil.com",
        "evil.com:8800",
        "localhost.evil.com",
        "127.0.0.1.evil.com",
        "192.0.2.1",
        "localhost/x",
        "user@localhost",
        "localhost:port",
        "[::1",
        "localhost#",
        "0.0.0.0:8800",
    ],
)
def test_other_hosts_are_kept_out(host: str) -> None:
    with pytest.raises(Forbidden):
        check_host(host, {"node.lan"})


def test_only_our_own_origin_is_let_in() -> None:
    Origins().check(None, "localhost:8800", CHAT)
    Origins().check("http://localhost:8800", "localhost:8800", CHAT)
    for origin in ("null", "http://evil.com", "http://localhost:9999", "http://localhost", ""):
        with pytest.raises(Forbidden):
            Origins().check(origin, "localhost:8800", CHAT)
    assert not Origins(["https://app.example"]).lets_in("https://app.example.evil.com", CHAT)


def test_loopback_addresses() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "::1", "127.1.2.3"]))
    assert not any(map(is_loopback, ["0.0.0.0", "192.168.1.1", "::", "localhost.evil.com"]))


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.1", "::", "example.org"])
def test_the_api_does_not_listen_beyond_this_machine_without_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="swarmllm key create") as caught:
        bind(host, 0)
    assert caught.value.field == "api.host"


def test_a_port_that_is_taken_is_an_error_with_a_remedy() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(ConfigError, match=r"api\.port"):
            bind("127.0.0.1", other.getsockname()[1])


async def test_every_door_is_guarded_over_http(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        rebound = await stand.http.get("/api/admin/stats", headers={"Host": "evil.com"})
        foreign = await stand.http.get("/v1/models", headers={"Origin": "https://evil.com"})
        form = await stand.http.post(CHAT, content="{}", headers={"Content-Type": "text/plain"})
        large = await stand.http.post(
            CHAT, content=b" " * 70_000, headers={"Content-Type": "application/json"}
        )
        path = await stand.http.get("/v1/nothing")
        method = await stand.http.get(CHAT)
        still = await stand.http.get("/health")
    assert [answer.status_code for answer in (rebound, foreign, form, large, path, method, still)] == [
        403,
        403,
        415,
        413,
        404,
        405,
        200,
    ]
    for answer in (rebound, foreign, form, large, path, method):
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
    assert "POST" in method.headers["allow"]


@pytest.mark.parametrize("allowed", ["https://app.example/", "*"])
async def test_a_page_of_a_site_that_is_let_in_may_use_models_and_no_more(
    tmp_path: Path, allowed: str
) -> None:
    page = {"Origin": "https://app.example"}
    before = page | {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    config = Config(api=ApiTable(port=0, allowed_origins=(allowed,)))
    async with serve_node(tmp_path, config=config) as stand:
        asked = await stand.http.request("OPTIONS", CHAT, headers=before)
        said = await stand.http.post(CHAT, json={"model": "nobody", "messages": []}, headers=page)
        admin = await stand.http.get("/api/admin/stats", headers=page)
        before_admin = await stand.http.request("OPTIONS", "/api/admin/stats", headers=before)
        other = await stand.http.get("/v1/models", headers={"Origin": "https://evil.com"})
    assert (asked.status_code, said.status_code) == (200, 400)
    assert asked.headers["access-control-allow-headers"] == "authorization,content-type"
    for answer in (asked, said):
        assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-swarm-route" in said.headers["access-control-expose-headers"]
    assert (admin.status_code, before_admin.status_code) == (403, 403)
    assert "access-control-allow-origin" not in admin.headers
    assert other.status_code == (200 if allowed == "*" else 403)


async def test_a_body_without_end_is_answered_and_then_cut_off(tmp_path: Path) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = bytearray()
    async with serve_node(tmp_path) as stand:
        connection = await trio.open_tcp_stream("127.0.0.1", int(stand.url.rpartition(":")[2]))

        async def send_for_ever() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_all(head + b"Transfer-Encoding: chunked\r\n\r\n")
                while True:
                    await connection.send_all(b"1000\r\n" + b" " * 4096 + b"\r\n")

        with trio.fail_after(DEADLINE_S):
            async with connection, trio.open_nursery() as nursery:
                nursery.start_soon(send_for_ever)
                with contextlib.suppress(trio.BrokenResourceError):
                    async for data in connection:
                        answer += data
        assert (await stand.http.get("/health")).status_code == 200
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"request_too_large" in answer


async def test_an_idle_connection_is_closed_after_a_request_too(
    tmp_path: Path,
) -> None:
    async with serve_node(tmp_path, limits=HttpLimits(idle_s=1.0)) as stand:
        connection = await trio.open_tcp_stream("127.0.0.1", int(stand.url.rpartition(":")[2]))
        with trio.fail_after(DEADLINE_S):
            async with connection:
                await connection.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                answer = b"".join([data async for data in connection])
    assert answer.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("pause_s", [0.0, 0.02], ids=["flood", "dribble"])
async def test_a_header_without_end_is_cut_off(tmp_path: Path, pause_s: float) -> None:
    """By its size, or, a few bytes at a time, by the time in which a request has to begin."""
    n_sent = 0
    async with serve_node(tmp_path, limits=HttpLimits(header_s=1.0)) as stand:
        connection = await trio.open_tcp_stream("127.0.0.1", int(stand.url.rpartition(":")[2]))
        with trio.fail_after(DEADLINE_S), contextlib.suppress(trio.BrokenResourceError):
            async with connection:
                await connection.send_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
                while True:
                    line = b"X-Padding: a\r\n" * (1 if pause_s else 100)
                    await connection.send_all(line)
                    n_sent += len(line)
                    await trio.sleep(pause_s)
        assert (await stand.http.get("/health")).status_code == 200
        assert stand.node.admission.n_active == 0
    assert n_sent < 16 * 2**20, "more than the sockets' buffers hold has been taken"


async def test_the_ipv6_loopback_works_too() -> None:
    listener = bind("::1", 0)
    try:
        assert listener.getsockname()[0] == "::1"
    finally:
        listener.close()


async def test_broken_http_does_not_disturb_others(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        port = int(stand.url.rpartition(":")[2])
        for garbage in (
            b"\x00" * 100,
            b"GET / HTTP/9.9\r\n\r\n",
            b"GET " + b"a" * 70_000,
            b"GET /health HTTP/1.1\r\n\r\n",
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 200,
            WEBSOCKET,
        ):
            connection = await trio.open_tcp_stream("127.0.0.1", port)
            with trio.fail_after(DEADLINE_S):
                async with connection:
                    await connection.send_all(garbage)
                    await connection.send_eof()
                    answer = b"".join([data async for data in connection])
            assert b" 200 " not in answer
            assert b" 101 " not in answer
        assert (await stand.http.get("/health")).status_code == 200


ADMIN = "/api/admin/models/guide/unload"
FORMS = ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", "", None)
"""What a page of another site can send without being asked, and nothing at all."""


async def test_another_sites_page_administers_nothing_whatever_headers_it_leaves_out(
    tmp_path: Path,
) -> None:
    kinds = (*FORMS, "text/plain; application/json", "application/json-seq", "json")
    paths = (ADMIN, "/api/admin/downloads", "/api/admin/nothing", "/api//admin/models")
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        for kind, content, path in itertools.product(kinds, (b"", b"{}", b'{"x":"=y"}'), paths):
            headers = {} if kind is None else {"Content-Type": kind}
            answer = await stand.http.post(path, content=content, headers=headers)
            assert answer.status_code in (308, 415), (kind, content, path)
            assert list(stand.pool.models().values()) == [(LayerRange(0, 12),)]
        # And not because nothing could be unloaded.
        assert (await stand.http.post(ADMIN, json={})).status_code == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "CROSS-SITE", "something new"])
async def test_what_another_site_caused_is_refused_by_the_browsers_own_word(
    tmp_path: Path, site: str
) -> None:
    async with serve_node(tmp_path) as stand:
        headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Mode": "no-cors"}
        chat = {"model": "guide", "messages": [{"role": "user", "content": "hi"}]}
        answers = [
            await stand.http.post(CHAT, json=chat, headers=headers),
            await stand.http.post("/api/chat", json=chat, headers=headers),
            await stand.http.post(ADMIN, json={}, headers=headers),
            await stand.http.delete("/api/admin/models/guide", headers=headers),
            await stand.http.get("/v1/models", headers=headers),
            await stand.http.get("/v1/models", headers=headers | {"Sec-Fetch-Mode": "navigate"}),
        ]
        link = await stand.http.get("/", headers=headers | {"Sec-Fetch-Mode": "navigate"})
    assert [answer.status_code for answer in answers] == [403] * len(answers)
    assert all("Another site" in answer.text for answer in answers)
    assert link.status_code == 200
    assert not stand.pipelines.calls


@pytest.mark.parametrize("site", ["same-origin", "none"])
async def test_the_dashboard_and_the_address_bar_are_let_in(tmp_path: Path, site: str) -> None:
    async with serve_node(tmp_path) as stand:
        headers = {"Sec-Fetch-Site": site, "Origin": stand.url}
        assert (await stand.http.get("/v1/models", headers=headers)).status_code == 200
        await stand.load_guide()
        assert (await stand.http.post(ADMIN, json={}, headers=headers)).status_code == 200


@pytest.mark.parametrize("path", [ADMIN, "/api/admin/models/guide", "/api/events", "/api/admin/downloads"])
@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "BREW"])
async def test_no_preflight_for_administration_is_granted(tmp_path: Path, path: str, method: str) -> None:
    config = Config(api=ApiTable(port=0, allowed_origins=("*",)))
    async with serve_node(tmp_path, config=config) as stand:
        asks = {"Access-Control-Request-Method": method, "Access-Control-Request-Headers": "content-type"}
        for origin in ("https://evil.com", "null", "http://["):
            answer = await stand.http.request("OPTIONS", path, headers=asks | {"Origin": origin})
            assert answer.status_code == 403
            assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "origin",
    [
        "http://[",
        "http://[::1",
        "http://localhost:port",
        "http://localhost@evil.com",
        "http://evil.com#localhost",
        "ftp://localhost",
        "//localhost",
        "localhost",
        "http://",
        "://",
        "\u00e9",
        "%",
        "http://localhost/",
        "x" * 5000,
    ],
)
async def test_an_origin_that_is_none_is_a_foreign_one(tmp_path: Path, origin: str) -> None:
    async with serve_node(tmp_path) as stand:
        headers = {"Host": "localhost", "Origin": origin.encode("latin1")}
        answer = await stand.http.get("/v1/models", headers=headers)
    assert (answer.status_code, answer.json()["error"]["param"]) == (403, "Origin")


async def test_reading_changes_nothing(tmp_path: Path) -> None:
    """GET and HEAD of all that administers: refused, or without effect."""
    async with serve_node(tmp_path) as stand:
        await stand.load_guide()
        paths = [ADMIN, *(f"/api/admin/models/guide/{action}" for action in ("load", "verify", "pin"))]
        for path in (*paths, "/api/admin/models/guide", "/api/admin/downloads/1"):
            for method in ("GET", "HEAD"):
                assert (await stand.http.request(method, path)).status_code in (404, 405)
        assert list(stand.pool.models().values()) == [(LayerRange(0, 12),)]


async def test_a_page_of_this_machine_is_let_in_by_name(tmp_path: Path) -> None:
    page = "http://localhost:3000"
    preflight = {
        "Origin": page,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type, authorization",
    }
    async with serve_node(tmp_path / "a") as stand:
        refused = await stand.http.options(CHAT, headers=preflight)
        assert refused.status_code == 403
        assert "add the origin to api.allowed_origins" in refused.json()["error"]["message"]
    config = Config(api=ApiTable(port=0, allowed_origins=(page,)))
    async with serve_node(tmp_path / "b", config=config) as stand:
        answer = await stand.http.options(CHAT, headers=preflight)
        assert answer.status_code == 200
        assert answer.headers["Access-Control-Allow-Origin"] == page
        assert answer.headers["Access-Control-Allow-Headers"] == "content-type, authorization"
        asked = {"model": "guide", "messages": [{"role": "user", "content": "hi"}], "unknown": 1}
        told = await stand.http.post(CHAT, json=asked, headers={"Origin": page})
        assert (told.status_code, told.headers["x-swarm-ignored"]) == (200, "unknown")
        assert "x-swarm-ignored" in told.headers["Access-Control-Expose-Headers"]


@pytest.mark.parametrize(
    ("origin", "is_let_in"),
    [
        ("http://localhost", True),
        ("https://localhost:5173", True),
        ("http://127.0.0.1:3000", True),
        ("http://[::1]:3000", True),
        ("http://localhost.evil.com", False),
        ("http://notlocalhost", False),
        ("http://evil.com", False),
        ("http://localhost:3000@evil.com", False),
        ("http://127.0.0.1.evil.com", False),
        ("http://[", False),
    ],
)
async def test_pages_of_the_browsers_machine_can_be_let_in_at_every_port(
    tmp_path: Path, origin: str, is_let_in: bool
) -> None:
    config = Config(api=ApiTable(port=0, allowed_origins=("localhost",)))
    asks = {"Access-Control-Request-Method": "POST", "Origin": origin}
    async with serve_node(tmp_path, config=config) as stand:
        answer = await stand.http.options(CHAT, headers=asks)
        admin = await stand.http.options(ADMIN, headers=asks)
    assert answer.status_code == (200 if is_let_in else 403)
    assert answer.headers.get("Access-Control-Allow-Origin") == (origin if is_let_in else None)
    assert admin.status_code == 403
