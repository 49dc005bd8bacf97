"""The process that asks the gateway, with the real library, and a gateway of ours that may be hostile."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from itertools import repeat

import msgspec
import pytest
import trio

from swarmllm.operating_system import gateway_of
from swarmllm.swarm.discovery import ssdp
from swarmllm.swarm.discovery.gateway_process import (
    LIFE_S,
    Answer,
    Question,
    candidates,
)
from swarmllm.swarm.discovery.port_mapping import LEASE_S, GatewayFailed, ask_gateway
from tests.swarm.fake_gateway import OUTER_IP, FakeGateway, gateway_at

pytest.importorskip("miniupnpc", reason="the package miniupnpc is not installed")

HERE = "127.0.0.1"
NUMBERS = itertools.count(1)
PORTS = [(8810, 8810), (8811, 8811)]
MAP, UNMAP = Question("map", PORTS, LEASE_S), Question("unmap", PORTS)
CHILD = """
from swarmllm.swarm.discovery import gateway_process, ssdp
gateway_process.default_gateway = lambda: "{ip}"
ssdp.SEARCH_S = ssdp.description_url.__defaults__ = (0.5,)
gateway_process.LIFE_S = {life_s}
gateway_process.main()
"""


def own_network(host: int) -> str:
    """An address of the loopback network that no other process of the tests has."""
    pid = os.getpid()
    return f"127.{64 + pid % 64}.{pid // 64 % 256}.{host}"


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    with gateway_at(own_network(1)) as gateway:
        yield gateway


@pytest.fixture
def victim() -> Iterator[FakeGateway]:
    """Another machine, to which nobody is to speak."""
    with gateway_at(own_network(2)) as victim:
        yield victim
    assert victim.paths == []
    assert victim.forwarded == {}


async def asked(gateway: FakeGateway, question: Question, life_s: float = LIFE_S) -> Answer:
    child = CHILD.format(ip=gateway.ip, life_s=int(LIFE_S))
    return await ask_gateway(question, (sys.executable, "-P", "-c", child), life_s)


async def test_ports_are_forwarded_and_taken_back(gateway: FakeGateway) -> None:
    assert await asked(gateway, MAP) == Answer("", OUTER_IP, PORTS)
    assert gateway.forwarded == {port: (HERE, port, LEASE_S) for port in (8810, 8811)}
    # Renewed.
    gateway.forwarded = {port: (HERE, port, 7) for port in (8810, 8811)}
    assert await asked(gateway, MAP) == Answer("", OUTER_IP, PORTS)
    assert gateway.forwarded == {port: (HERE, port, LEASE_S) for port in (8810, 8811)}
    gateway.forwarded[80] = (HERE, 80, 0)
    assert await asked(gateway, UNMAP) == Answer()
    assert gateway.forwarded == {80: (HERE, 80, 0)}


async def test_what_another_machine_has_had_forwarded_stays(gateway: FakeGateway) -> None:
    theirs = {8810: ("192.168.1.9", 8810, 0)}
    gateway.forwarded = dict(theirs)
    _, other, _ = candidates(8810)
    assert await asked(gateway, MAP) == Answer("", OUTER_IP, [(8810, other), (8811, 8811)])
    assert gateway.forwarded[8810] == theirs[8810]
    # Also where the process that had asked was killed, so that only the wanted ports are known.
    assert await asked(gateway, UNMAP) == Answer()
    assert gateway.forwarded == theirs


async def test_a_gateway_that_refuses_one_port_keeps_none(gateway: FakeGateway) -> None:
    gateway.ports_refused = set(candidates(8811))
    assert await asked(gateway, MAP) == Answer("refused", OUTER_IP)
    assert gateway.forwarded == {}


async def test_a_gateway_that_knows_no_leases_forwards_without_an_end(gateway: FakeGateway) -> None:
    gateway.permanent_only = True
    assert await asked(gateway, MAP) == Answer("", OUTER_IP, PORTS)
    assert gateway.forwarded == {port: (HERE, port, 0) for port in (8810, 8811)}


async def test_who_answers_for_the_gateway_is_not_heard(gateway: FakeGateway, victim: FakeGateway) -> None:
    with gateway_at(own_network(3), answers_from=own_network(4)) as silent:
        silent.location = f"{victim.url}/description.xml"
        assert await asked(silent, MAP) == Answer("no answer")
        silent.location = ""
        assert await asked(silent, MAP) == Answer("no answer")
        assert silent.paths == []


async def test_a_description_on_another_machine_is_not_fetched(
    gateway: FakeGateway, victim: FakeGateway
) -> None:
    for location in (f"{victim.url}/description.xml", "file:///etc/passwd"):
        gateway.location = location
        assert await asked(gateway, MAP) == Answer("no answer"), location
    assert gateway.paths == []


async def test_a_description_that_sends_elsewhere_is_not_followed(
    gateway: FakeGateway, victim: FakeGateway
) -> None:
    gateway.control_url = f"{victim.url}/control"
    for question in (MAP, UNMAP):
        assert await asked(gateway, question) == Answer("other host")
    assert gateway.paths == ["/description.xml"] * 2

    def redirect(request: BaseHTTPRequestHandler) -> None:
        request.send_response(302)
        request.send_header("Location", f"{victim.url}/description.xml")
        request.send_header("Content-Length", "0")
        request.end_headers()

    gateway.describe = redirect
    assert await asked(gateway, MAP) == Answer("no answer")


async def test_an_answer_that_does_not_come_is_not_waited_for(gateway: FakeGateway) -> None:
    is_over = threading.Event()
    gateway.describe = lambda request: is_over.wait() and None
    with pytest.raises(GatewayFailed, match="too long to answer"):
        await asked(gateway, MAP, life_s=1.0)
    is_over.set()


async def test_the_process_ends_by_itself_where_the_daemon_is_gone(gateway: FakeGateway) -> None:
    is_over = threading.Event()
    gateway.describe = lambda request: is_over.wait() and None
    child, given = CHILD.format(ip=gateway.ip, life_s=1), msgspec.json.encode(MAP)
    ended = await trio.run_process((sys.executable, "-c", child), stdin=given, check=False)
    assert ended.returncode == -signal.SIGALRM
    is_over.set()


async def test_an_answer_that_never_ends_takes_little_memory(gateway: FakeGateway) -> None:
    n_bytes = 0

    def pour(request: BaseHTTPRequestHandler) -> None:
        nonlocal n_bytes
        request.send_response(200)
        request.end_headers()
        for piece in repeat(b"<a>" * 20_000):
            request.wfile.write(piece)
            n_bytes += len(piece)

    gateway.describe = pour
    assert await asked(gateway, MAP) == Answer("no answer")
    assert n_bytes < 600e6


@pytest.mark.parametrize("length", ["2000000000", "-1", "99999999999999999999"])
async def test_an_answer_that_is_too_large_is_none(gateway: FakeGateway, length: str) -> None:
    def describe(request: BaseHTTPRequestHandler) -> None:
        request.send_response(200)
        request.send_header("Content-Length", length)
        request.end_headers()
        request.wfile.write(b"x" * 5000)

    gateway.describe = describe
    assert await asked(gateway, MAP) in (Answer("no answer"), Answer("no address"))


async def test_a_process_that_says_something_else_is_not_believed() -> None:
    for said in ("", "x", '{"problem":"anything"}', '{"ports":[[1,"a"]]}', "[]"):
        with pytest.raises(GatewayFailed, match="unreadable"):
            await ask_gateway(MAP, (sys.executable, "-c", f"print('''{said}''')"))
    with pytest.raises(GatewayFailed, match="too long"):
        await ask_gateway(MAP, (sys.executable, "-c", "print('x' * 9000)"))
    with pytest.raises(GatewayFailed, match="no process"):
        await ask_gateway(MAP, ("/nowhere/python",))


async def test_the_process_has_no_secrets_and_ends_with_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARMLLM_SECRET", "x")
    code = "import json, os; print(json.dumps({'external_ip': os.environ.get('SWARMLLM_SECRET', 'none')}))"
    assert (await ask_gateway(MAP, (sys.executable, "-c", code))).external_ip == "none"
    with pytest.raises(GatewayFailed, match="too long to answer"):
        await ask_gateway(MAP, (sys.executable, "-c", "import signal; signal.pause()"), life_s=0.5)


def test_the_default_gateway_is_the_one_with_the_least_metric() -> None:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    lan = "eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n"
    half = "tun0 00000000 0109A8C0 0003 0 0 0 00000080 0 0 0\n"
    without = "tun0 00000000 00000000 0001 0 0 0 00000000 0 0 0\n"
    slow = "wlan0 00000000 0102A8C0 0003 0 0 600 00000000 0 0 0\n"
    fast = "eth0 00000000 0101A8C0 0003 0 0 100 00000000 0 0 0\n"
    assert gateway_of(head + lan + half + without) is None
    assert gateway_of(head + lan + half + without + slow + fast) == "192.168.1.1"
    assert gateway_of("") is None


def test_outer_ports_are_never_those_of_the_system() -> None:
    for wanted in (0, 1, 443, 1023, 1024, 8810, 65535):
        found = list(candidates(wanted))
        assert all(1024 <= port < 65536 for port in found)
        assert len(set(found)) == 3
        assert wanted < 1024 or found[0] == wanted


@pytest.mark.parametrize(
    ("url", "is_at"),
    [
        ("http://192.168.1.1/x", True),
        ("http://192.168.1.1:5000/rootDesc.xml", True),
        ("https://192.168.1.1/x", False),
        ("http://192.168.1.1", False),
        ("http://192.168.1.10/x", False),
        ("http://192x168.1.1/x", False),
        ("http://192.168.1.1:/x", False),
        ("http://192.168.1.1:80@10.0.0.1/x", False),
        ("http://a@192.168.1.1/x", False),
        ("http://192.168.1.1@10.0.0.1/", False),
        ("http://192.168.1.1.example.org/", False),
        ("http://[::1]/", False),
        ("http://10.0.0.1/http://192.168.1.1/x", False),
        ("http://192.168.1.1/x y", False),
        ("http://192.168.1.1/x\n", False),
        ("http://192.168.1.1/" + "x" * 513, False),
    ],
)
def test_only_urls_of_the_gateway_count(url: str, is_at: bool) -> None:
    assert ssdp.is_at(url, "192.168.1.1") is is_at
    datagram = f"HTTP/1.1 200 OK\r\nLocation: {url}\r\n\r\n".encode()
    assert "\n" in url or (ssdp.location(datagram, "192.168.1.1") == url) is is_at


@pytest.mark.parametrize(
    "datagram", [b"", b"\xff" * 2000, b"HTTP/1.1 404 No\r\nLOCATION: http://192.168.1.1/\r\n\r\n"]
)
def test_other_datagrams_are_none(datagram: bytes) -> None:
    assert ssdp.location(datagram, "192.168.1.1") is None
