"""The HTTP server under attack: raw sockets, a real application behind it, an honest client beside it."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import h11
import httpx
import pytest
import quart
import trio
from api_fakes import Script, Stand, serve_node
from deadlines import DEADLINE_S
from http_attacks import ATTACKS, CHAT, H2_KILL, JSON, Attack, head

from swarmllm.api.http import app as app_module
from swarmllm.api.http import exchange as http_exchange
from swarmllm.api.http import server as http_server
from swarmllm.api.http import wire as http_wire
from swarmllm.api.http.limits import HttpLimits
from swarmllm.api.http.request_tasks import RequestTasks
from swarmllm.api.http.server import HttpServer
from swarmllm.api.openai import chat
from swarmllm.config import ApiTable, Config
from swarmllm.log_filter import LogLimitFilter

QUICK = HttpLimits(handshake_s=1, header_s=1, idle_s=1, body_s=1, body_bytes=65536, write_s=1, linger_s=0.2)


async def connect(stand: Stand) -> trio.SocketStream:
    return await trio.open_tcp_stream("127.0.0.1", int(stand.url.rpartition(":")[2]))


async def all_of(connection: trio.abc.ReceiveStream) -> bytes:
    """All that comes until the server closes."""
    answer = b""
    with trio.fail_after(DEADLINE_S), contextlib.suppress(trio.BrokenResourceError):
        while data := await connection.receive_some(65536):
            answer += data
    return answer


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def test_attacks_end_their_own_connections_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them at once, from http_attacks."""
    answers: dict[str, bytes] = {}

    async def attack_with(attack: Attack) -> None:
        async with await connect(stand) as connection:
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_all(attack.data)
            answers[attack.name] = await all_of(connection)

    async with serve_node(tmp_path, limits=QUICK) as stand:
        async with trio.open_nursery() as nursery:
            for attack in ATTACKS:
                nursery.start_soon(attack_with, attack)
        assert (await stand.http.get("/health")).status_code == 200
    wrong = {
        attack.name: answers[attack.name][:300]
        for attack in ATTACKS
        if status_of(answers[attack.name]) not in attack.statuses
        or b"HTTP/1.1 101 " in answers[attack.name]
        or b"HTTP/1.1 500 " in answers[attack.name]
    }
    assert not wrong
    assert len(answers) == len(ATTACKS)
    assert not [record for record in caplog.records if record.exc_info or record.levelno >= logging.WARNING]


WORDS = "secret words"


class Fault(Exception):
    pass


class WorseFault(BaseException):
    """No `Exception`: a nursery's `except Exception` does not catch it."""


@pytest.mark.parametrize("fault", [Fault, WorseFault, SystemExit])
@pytest.mark.parametrize(
    "layer", ["socket", "h11", "server", "quart", "before", "handler", "after", "stream"]
)
async def test_a_fault_in_any_layer_ends_its_own_connection_only(
    tmp_path: Path,
    layer: str,
    fault: type[BaseException],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    is_armed = [True]

    def strike(*_: Any, **__: Any) -> None:
        if is_armed[0]:
            raise fault(WORDS)

    def before(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def struck(*arguments: Any, **options: Any) -> Any:
            strike()
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, struck)

    async with serve_node(tmp_path) as stand:
        match layer:
            case "socket":
                before(HttpServer, "_serve_one")
            case "h11":
                before(h11.Connection, "next_event")
            case "server":
                before(http_exchange.Exchange, "_send_head")
            case "quart":
                before(RequestTasks, "handle_request")
            case "before":
                before(app_module, "check_upgrade")
            case "handler":
                before(chat, "_model")
            case "after":
                before(quart.Quart, "finalize_request")
            case "stream":
                before(http_wire.HttpWire, "write")
        async with await connect(stand) as connection:
            await connection.send_all(head(b"GET", b"/v1/models", b"Connection: close"))
            answer = await all_of(connection)
        is_armed[0] = False
        assert (await stand.http.get("/v1/models")).status_code == 200
    # The client hears of an ordinary exception where there is still a way to it.
    is_told = fault is Fault and layer not in ("socket", "stream")
    assert status_of(answer) == (500 if is_told else 0)
    assert b"secret" not in answer
    assert WORDS not in caplog.text
    assert "Traceback" not in caplog.text


async def test_a_client_that_makes_faults_does_not_fill_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.handler.addFilter(LogLimitFilter())
    async with serve_node(tmp_path) as stand:

        async def broken(*_: Any) -> None:
            raise Fault

        monkeypatch.setattr(http_server.HttpConnection, "run", broken)
        for _ in range(50):
            async with await connect(stand) as connection:
                assert await all_of(connection) == b""
    assert 1 <= sum("failed: Fault" in record.getMessage() for record in caplog.records) <= 6


TRICKLES = {
    "header": (b"GET /health HTTP/1.1\r\n", b"X: a\r\n"),
    "header's first line": (b"GET /", b"a"),
    "body": (head(b"POST", CHAT, JSON[:-2], b"Content-Length: 60000"), b" "),
    "chunked body": (head(b"POST", CHAT, JSON[:-2], b"Transfer-Encoding: chunked"), b"1\r\n \r\n"),
    "header that begins on an idle connection": (head(b"GET", b"/health"), b"a"),
    "header after a request": (head(b"GET", b"/health") + b"GET /", b"a"),
}


@pytest.mark.parametrize("trickle", TRICKLES)
async def test_a_trickle_is_cut_off_however_steady_it_is(tmp_path: Path, trickle: str) -> None:
    first, each = TRICKLES[trickle]
    async with serve_node(tmp_path, limits=QUICK) as stand, await connect(stand) as connection:
        answer = b""
        if "idle" in trickle:
            await connection.send_all(first)
            assert b" 200 " in await connection.receive_some()
            first = b""

        async def send_for_ever() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_all(first)
                while True:
                    await connection.send_all(each)
                    await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(send_for_ever)
            answer = await all_of(connection)
            nursery.cancel_scope.cancel()
        assert len(stand.node.requests.live()) == 0
    assert b" 408 " in answer
    assert b"request_timeout" in answer


async def test_a_large_body_has_the_time_that_its_size_takes(tmp_path: Path) -> None:
    """At twice the slowest pace, and longer than the deadline for a body of no size."""
    limits = HttpLimits(body_s=0.5, body_bytes_per_s=10_000, body_bytes=2**20)
    async with serve_node(tmp_path, limits=limits) as stand, await connect(stand) as connection:
        await connection.send_all(
            head(b"POST", CHAT, JSON[:-2], b"Content-Length: 30000", b"Connection: close")
        )
        for _ in range(30):
            await connection.send_all(b" " * 1000)
            await trio.sleep(0.05)
        assert status_of(await all_of(connection)) == 400


@pytest.mark.parametrize("is_first", [True, False])
async def test_a_silent_connection_is_closed(tmp_path: Path, is_first: bool) -> None:
    async with serve_node(tmp_path, limits=QUICK) as stand, await connect(stand) as connection:
        if not is_first:
            await connection.send_all(head(b"GET", b"/health"))
        answer = await all_of(connection)
    assert status_of(answer) == (0 if is_first else 200)


async def test_a_body_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    """Announced: not a byte. Chunked: what the limit allows, and what the sockets' buffers hold."""
    for lines in ([b"Content-Length: 250000000"], [b"Transfer-Encoding: chunked"]):
        n_sent = 0
        async with serve_node(tmp_path, limits=QUICK) as stand, await connect(stand) as connection:
            answer = b""

            async def send(connection: trio.SocketStream, lines: list[bytes]) -> None:
                nonlocal n_sent
                with contextlib.suppress(trio.BrokenResourceError):
                    await connection.send_all(head(b"POST", CHAT, JSON[:-2], *lines))
                    for _ in range(250_000_000 // 65536):
                        await connection.send_all(b"10000\r\n" + b" " * 65536 + b"\r\n")
                        n_sent += 65536

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send, connection, lines)
                answer = await all_of(connection)
                nursery.cancel_scope.cancel()
        assert status_of(answer) == 413
        assert b"request_too_large" in answer
        assert n_sent < 32 * 2**20


async def test_bodies_are_charged_before_they_are_read_and_given_back(tmp_path: Path) -> None:
    limits = HttpLimits(body_bytes=100_000, bodies_bytes=150_000, bodies_bytes_of_client=150_000)
    held = head(b"POST", CHAT, JSON[:-2], b"Content-Length: 100000") + b" " * 90_000
    async with serve_node(tmp_path, limits=limits) as stand:
        async with await connect(stand) as first:
            await first.send_all(held)
            with trio.fail_after(DEADLINE_S):
                while True:
                    async with await connect(stand) as second:
                        await second.send_all(held)
                        await second.send_all(b" " * 10_000)
                        answer = await second.receive_some(4096)
                    if status_of(answer) == 503:
                        break
            assert b"bodies_too_large" in answer
        with trio.fail_after(DEADLINE_S):
            while True:
                async with await connect(stand) as third:
                    await third.send_all(held + b" " * 10_000)
                    if status_of(await third.receive_some(4096)) == 400:
                        break


@asynccontextmanager
async def crowd(stand: Stand, n: int, data: bytes) -> AsyncIterator[list[trio.SocketStream]]:
    """`n` connections that have sent `data`, and say no more."""
    async with contextlib.AsyncExitStack() as stack:
        connections = []
        for _ in range(n):
            connection = await stack.enter_async_context(await connect(stand))
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_all(data)
            connections.append(connection)
        yield connections


@pytest.mark.parametrize("data", [b"", b"GET /health HTTP/1.1\r\nX:", head(b"GET", b"/health")])
async def test_connections_that_wait_take_no_place_of_others(tmp_path: Path, data: bytes) -> None:
    async with (
        serve_node(tmp_path, limits=HttpLimits(connections=8)) as stand,
        crowd(stand, 20, data) as them,
    ):
        assert (await stand.http.get("/health")).status_code == 200
        # The oldest had to go.
        await all_of(them[0])


async def test_requests_of_one_client_are_bounded(tmp_path: Path) -> None:
    limits = HttpLimits(requests_of_client=3)
    stream = head(b"GET", b"/api/events")
    async with serve_node(tmp_path, limits=limits) as stand, crowd(stand, 3, stream) as them:
        for connection in them:
            assert status_of(await connection.receive_some(4096)) == 200
        assert (await stand.http.get("/health")).status_code == 429


async def test_a_connection_with_a_request_keeps_its_place(tmp_path: Path) -> None:
    async with (
        serve_node(tmp_path, limits=HttpLimits(connections=3)) as stand,
        crowd(stand, 3, head(b"GET", b"/api/events")) as them,
    ):
        for connection in them:
            assert status_of(await connection.receive_some(4096)) == 200
        async with await connect(stand) as late:
            with contextlib.suppress(trio.BrokenResourceError):
                await late.send_all(head(b"GET", b"/health"))
            assert await all_of(late) == b""


async def test_a_reader_that_takes_nothing_is_cut_and_its_turn_is_free(tmp_path: Path) -> None:
    """The generation goes on for ever: only the reader's end can end it."""
    async with serve_node(tmp_path, limits=HttpLimits(write_s=1.0), max_concurrent_requests=1) as stand:

        async def at_once() -> None:
            await trio.lowlevel.checkpoint()

        stand.pipelines.script = Script(texts=["x" * 1000] * 10_000_000, between=at_once)
        body = b'{"model":"guide","stream":true,"messages":[{"role":"user","content":"hi"}]}'
        connection = trio.SocketStream(trio.socket.socket())
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        await connection.socket.connect(("127.0.0.1", int(stand.url.rpartition(":")[2])))
        async with connection:
            await connection.send_all(
                head(b"POST", CHAT, JSON[:-2], b"Content-Length: %d" % len(body)) + body
            )
            await stand.pipelines.started.wait()
            stand.pipelines.script = Script()
            # Waits for the one turn that there is.
            other = await stand.http.post(
                CHAT.decode(), json={"model": "guide", "messages": [{"role": "user", "content": "hi"}]}
            )
        assert other.status_code == 200
        assert stand.pipelines.calls[0].outcome == "Cancelled"


async def test_clients_leave_in_every_phase_and_leave_nothing(tmp_path: Path) -> None:
    body = b'{"model":"guide","stream":true,"messages":[{"role":"user","content":"hello"}]}'
    request = head(b"POST", CHAT, JSON[:-2], b"Content-Length: %d" % len(body)) + body
    async with serve_node(tmp_path) as stand:
        for end in range(0, len(request) + 1, 7):
            async with await connect(stand) as connection:
                await connection.send_all(request[:end])
                if end % 2:
                    await trio.lowlevel.checkpoint()
        with trio.fail_after(DEADLINE_S):
            while stand.node.admission.n_active or stand.node.requests.live():
                await trio.lowlevel.checkpoint()
        assert (await stand.http.get("/health")).status_code == 200


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand, await connect(stand) as connection:
        await connection.send_all(
            head(b"GET", b"/health")
            + head(b"GET", b"/nothing")
            + head(b"POST", CHAT, JSON[:-2], b"Content-Length: 2")
            + b"{}"
            + head(b"GET", b"/health", b"Connection: close")
        )
        answer = await all_of(connection)
    assert [int(part[:3]) for part in answer.split(b"HTTP/1.1 ")[1:]] == [200, 404, 400, 200]


async def test_head_has_no_body_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with serve_node(tmp_path) as stand:
        for _ in range(3):
            answer = await stand.http.head("/health")
            assert (answer.status_code, answer.content) == (200, b"")


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@asynccontextmanager
async def serving_tls(
    folder: Path, certificate: tuple[Path, Path]
) -> AsyncIterator[tuple[Stand, ssl.SSLContext]]:
    cert, key = certificate
    config = Config(api=ApiTable(port=0, certfile=str(cert), keyfile=str(key)))
    async with serve_node(folder, config=config, limits=QUICK) as stand:
        yield stand, ssl.create_default_context(cafile=str(cert))


async def test_no_failed_handshake_and_no_http2_disturbs_others_under_tls(
    tmp_path: Path, certificate: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    async with serving_tls(tmp_path, certificate) as (stand, trust):
        for garbage in (
            b"\xff" * 500,
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x00\x05\x01\x00\x00\x01\x00",
            b"",
        ):
            # The last two wait until the deadline of the handshake.
            async with await connect(stand) as connection:
                await connection.send_all(garbage)
                await all_of(connection)
        trust.set_alpn_protocols(["h2", "http/1.1"])
        async with trio.SSLStream(await connect(stand), trust, server_hostname="127.0.0.1") as secure:
            await secure.send_all(H2_KILL)
            assert secure.selected_alpn_protocol() == "http/1.1"
            assert status_of(await secure.receive_some(4096)) == 505
        async with httpx.AsyncClient(verify=trust, trust_env=False) as http:
            assert (await http.get(f"{stand.url}/health")).status_code == 200
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
