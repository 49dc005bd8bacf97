"""Nodes that listen on IPv6, alone and beside IPv4."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path

import pytest
import trio

from swarmllm import operating_system
from swarmllm.errors import ConfigError, NodeUnreachable
from swarmllm.swarm.discovery import addresses as addresses_module
from swarmllm.swarm.discovery.address_race import first_to_answer
from swarmllm.swarm.discovery.addresses import EVERYWHERE, Address, own_addresses
from swarmllm.swarm.libp2p.host import open_listeners, refuse_taken_port
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.envelope import ADDRESSES_MAX

from .conftest import DEADLINE_S, meet
from .handlers import Inbox, no_request


def _has_ipv6_loopback() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not _has_ipv6_loopback(), reason="this machine has no IPv6")


@asynccontextmanager
async def node(
    folder: Path, listen_host: str, *bootstrap: str, ports: tuple[int, int] = (0, 0)
) -> AsyncIterator[Libp2pRouter]:
    settings = SwarmSettings(folder, listen_host, *ports, bootstrap=bootstrap, mdns=False)
    async with open_libp2p_router(settings) as router:
        yield router


@contextmanager
def ports_of_ipv6_alone() -> Iterator[tuple[int, int]]:
    """Two on which nobody listens on IPv4, and nobody begins to: they are bound there."""
    with ExitStack() as stack:
        found: list[int] = []
        while len(found) < 2:
            port = _bound(stack, socket.AF_INET, "0.0.0.0", 0)
            with ExitStack() as probe:
                try:
                    found.append(_bound(probe, socket.AF_INET6, "::", port))
                except OSError:
                    continue  # Somebody has it on IPv6.
        yield found[0], found[1]


def _bound(stack: ExitStack, family: socket.AddressFamily, ip: str, port: int) -> int:
    bound = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
    if family == socket.AF_INET6:
        bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    bound.bind((ip, port))
    return int(bound.getsockname()[1])


async def connects(ip: str, port: int) -> bool:
    with trio.fail_after(DEADLINE_S):
        try:
            stream = await trio.open_tcp_stream(ip, port)
        except OSError:
            return False
    await stream.aclose()
    return True


async def send_one(source: Libp2pRouter, target: Libp2pRouter) -> None:
    inbox = Inbox()
    target.serve(no_request, inbox)
    await source.send(target.node_id, b"header", b"payload")
    await inbox.wait_for(1)
    assert inbox.messages == [(source.node_id, b"header", b"payload")]


@needs_ipv6
@pytest.mark.slow
async def test_two_nodes_meet_and_talk_directly_over_ipv6_alone(tmp_path: Path) -> None:
    async with node(tmp_path / "a", "::1") as a:
        assert [each.split("/p2p")[0] for each in a.addresses] == [f"/ip6/::1/tcp/{a.host.port}"]
        async with node(tmp_path / "b", "::1", *a.addresses) as b:
            await meet(a, b)
            await send_one(a, b)
            await send_one(b, a)
            assert [peer.data_plane for peer in (*a.peers(), *b.peers())] == ["direct", "direct"]
            assert a.host.remote_ip(b.node_id) == "::1"


@needs_ipv6
@pytest.mark.slow
async def test_a_node_listens_on_both_families_with_the_same_ports(tmp_path: Path) -> None:
    async with node(tmp_path / "a", EVERYWHERE) as a:
        for ip in ("127.0.0.1", "::1"):
            assert await connects(ip, a.host.port)
            assert await connects(ip, a.plane.port)
        door = f"/ip6/::1/tcp/{a.host.port}/p2p/{a.node_id}"
        async with node(tmp_path / "b", "::1", door) as b:
            await meet(a, b)
            assert b.host.remote_ip(a.node_id) == "::1"
        door = f"/ip4/127.0.0.1/tcp/{a.host.port}/p2p/{a.node_id}"
        async with node(tmp_path / "c", "127.0.0.1", door) as c:
            await meet(a, c)
            assert a.host.remote_ip(c.node_id) == "127.0.0.1", "and no address of IPv6 that stands for it"


@needs_ipv6
@pytest.mark.slow
async def test_the_wildcard_of_one_family_takes_nobody_of_the_other(tmp_path: Path) -> None:
    with ports_of_ipv6_alone() as ports:
        await takes_nobody_of_ipv4(tmp_path, ports)


async def takes_nobody_of_ipv4(folder: Path, ports: tuple[int, int]) -> None:
    async with node(folder / "a", "::", ports=ports) as a:
        assert (a.host.port, a.plane.port) == ports
        assert [await connects("::1", port) for port in (a.host.port, a.plane.port)] == [True, True]
        assert [await connects("127.0.0.1", port) for port in (a.host.port, a.plane.port)] == [False, False]


@needs_ipv6
@pytest.mark.slow
async def test_no_hole_is_tried_for_an_address_of_a_family_that_the_node_does_not_listen_on(
    tmp_path: Path,
) -> None:
    async with node(tmp_path / "a", "127.0.0.1") as a, node(tmp_path / "b", "::1") as b:
        with pytest.raises(NodeUnreachable, match="does not listen on"):
            await a.host.dial_from_listening_port(b.node_id, Address("::1", b.host.port), as_listener=False)


@pytest.mark.slow
async def test_a_data_port_is_found_behind_addresses_of_others(tmp_path: Path) -> None:
    """One where nobody is, one that is somebody else's by now."""
    async with node(tmp_path / "a", "127.0.0.1") as a, node(tmp_path / "b", "127.0.0.1", *a.addresses) as b:
        await meet(a, b)
        nobodys, somebodys = Address("127.1.2.3", 1), Address("127.0.0.1", a.plane.port)
        own = Address("127.0.0.1", b.plane.port)
        a.plane.addresses_of = lambda _: [nobodys, somebodys, own]  # type: ignore[method-assign]
        connection = await a.plane.dial(b.node_id)
        assert connection is not None
        assert connection.wire_kind == "direct"
        a.plane.addresses_of = lambda _: [nobodys, somebodys]  # type: ignore[method-assign]
        assert await a.plane.dial(b.node_id) is None


@needs_ipv6
async def test_data_listeners_share_one_port_and_are_closed_where_one_is_taken() -> None:
    taken, *_ = await open_listeners(["::1"], 0)
    async with taken:
        port = int(taken.socket.getsockname()[1])
        with pytest.raises(ConfigError, match=f"on ::1 port {port}: .*another network.data_port"):
            await open_listeners(["127.0.0.1", "::1"], port)
        v4, *_ = await open_listeners(["127.0.0.1"], port)
        await v4.aclose()
    both = await open_listeners(["127.0.0.1", "::1"], 0)
    assert len({each.socket.getsockname()[1] for each in both}) == 1
    for each in both:
        await each.aclose()


@needs_ipv6
def test_a_port_that_is_taken_in_one_family_is_free_in_the_other() -> None:
    with socket.socket(socket.AF_INET) as listening:
        listening.bind(("0.0.0.0", 0))
        listening.listen()
        port = listening.getsockname()[1]
        refuse_taken_port("::", port)
        with pytest.raises(ConfigError, match=r"on 0\.0\.0\.0 .*another network.libp2p_port"):
            refuse_taken_port("0.0.0.0", port)


async def test_a_race_that_is_cancelled_as_somebody_answers_closes_the_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[trio.SocketStream] = []
    open_tcp_stream = trio.open_tcp_stream

    async def cancelled_meanwhile(ip: str, port: int) -> trio.SocketStream:
        opened.append(await open_tcp_stream(ip, port))
        scope.cancel()
        return opened[0]

    monkeypatch.setattr(trio, "open_tcp_stream", cancelled_meanwhile)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listeners[0]:
        with trio.CancelScope() as scope:
            await first_to_answer([Address("127.0.0.1", int(listeners[0].socket.getsockname()[1]))])
    assert scope.cancelled_caught
    assert [stream.socket.fileno() for stream in opened] == [-1]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses_module, "has_ipv6", lambda: True)
    monkeypatch.setattr(addresses_module, "interface_ips", lambda: ["127.0.0.1", "192.0.2.1", "198.51.100.1"])
    monkeypatch.setattr(addresses_module, "interface_ips6", lambda: ["2001:db8::1"])


@pytest.mark.usefixtures("interfaces")
def test_everywhere_is_ipv4_alone_where_there_is_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_addresses(EVERYWHERE).listening == ("0.0.0.0", "::")
    assert own_addresses("::").listening == ("::",)
    monkeypatch.setattr(addresses_module, "has_ipv6", lambda: False)
    assert own_addresses(EVERYWHERE).listening == ("0.0.0.0",)


@pytest.mark.usefixtures("interfaces")
def test_families_take_turns_in_what_is_announced() -> None:
    both = ("2001:db8::1", "192.0.2.1", "198.51.100.1", "127.0.0.1")
    assert own_addresses(EVERYWHERE).announced == both
    assert own_addresses("0.0.0.0").announced == ("192.0.2.1", "198.51.100.1", "127.0.0.1")
    assert own_addresses("::").announced == ("2001:db8::1", "::1")
    assert own_addresses("::1").announced == ("::1",)
    elsewhere = own_addresses(EVERYWHERE, ["203.0.113.5"])
    assert (elsewhere.announced, elsewhere.reachable) == (("203.0.113.5",), both)


@pytest.mark.usefixtures("interfaces")
def test_no_more_is_announced_than_an_envelope_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(addresses_module, "interface_ips", lambda: [f"10.0.0.{n}" for n in range(1, 40)])
    announced = own_addresses(EVERYWHERE).announced
    assert len(announced) == ADDRESSES_MAX
    assert announced[:2] == ("2001:db8::1", "10.0.0.1")
    assert announced[-1] == "127.0.0.1"


@needs_ipv6
def test_addresses_of_a_link_and_temporary_ones_are_not_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = tmp_path / "if_inet6"
    monkeypatch.setattr(operating_system, "_IPV6_ADDRESSES", table)
    monkeypatch.setattr(operating_system, "IS_LINUX", True)
    assert operating_system.interface_ips6() == []
    table.write_text(
        "20010db8000000000000000000000001 02 40 00 80     eth0\n"
        "20010db8000000000000000000000002 02 40 00 01     eth0\n"
        "20010db8000000000000000000000003 02 40 00 20     eth0\n"
        "20010db8000000000000000000000004 02 40 00 40     eth0\n"
        "20010db8000000000000000000000005 02 40 00 88     eth0\n"
        "fe800000000000000000000000000001 02 40 20 80     eth0\n"
        "fd000000000000000000000000000001 03 40 00 80    wlan0\n"
        "00000000000000000000000000000001 01 80 10 80       lo\n"
    )
    assert operating_system.interface_ips6() == ["2001:db8::1", "fd00::1"]


@needs_ipv6
def test_elsewhere_the_address_of_the_way_out_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operating_system, "IS_LINUX", False)
    monkeypatch.setattr(operating_system, "_SOMEWHERE_ELSE_6", ("::1", 9))
    assert operating_system.interface_ips6() == ["::1"]
    monkeypatch.setattr(operating_system, "has_ipv6", lambda: False)
    assert operating_system.interface_ips6() == []
