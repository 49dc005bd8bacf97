"""A real UPnP gateway (miniupnpd) makes a node behind port-restricted NAT one that can be dialled."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from bench.common.namespaces import NoNamespaces
from bench.common.nat_networks import Kind, can_map_ports, homes, kind_named
from bench.nat_table import Node, State, ways_between

pytestmark = pytest.mark.skipif(not can_map_ports(), reason="miniupnpd (Debian package) is not installed")
SETTLED_S = 120.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    pytest.importorskip("miniupnpc", reason="the package miniupnpc is not installed")
    with ExitStack() as stack:
        yield stack


def two_nodes(stack: ExitStack, kind: Kind, folder: Path) -> tuple[Node, str]:
    """The one at home, and the namespace of its router; the other one is its bootstrap node."""
    try:
        home, outside = stack.enter_context(homes([kind]))
    except NoNamespaces as error:
        pytest.skip(f"needs root, ip and nft: {error}")
    meeting = Node(outside, folder / "meeting", (), stack)
    stack.callback(meeting.stop)
    where = [text for text in meeting.addresses if "127.0.0.1" not in text]
    depth = len(kind.routers) - 1
    return Node(home, folder / "home", where, stack, maps_ports=True), home.replace("home", str(depth))


def settled(node: Node, state: str) -> State:
    deadline_s = time.monotonic() + SETTLED_S
    while time.monotonic() < deadline_s:
        found = node.state()
        if found.port_mapping.state == state and (found.is_dialled or state != "mapped"):
            return found
        time.sleep(0.2)
    raise AssertionError(found)


def forwarded(router: str) -> str:
    command = ("ip", "netns", "exec", router, "nft", "list", "chain", "inet", "nat", "prerouting_miniupnpd")
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_gateway_forwards_both_ports_until_the_node_stops(tmp_path: Path, stack: ExitStack) -> None:
    node, router = two_nodes(stack, kind_named("port-restricted, UPnP"), tmp_path)
    found = settled(node, "mapped")
    assert "/ip4/192.0.1.1/tcp/8810 and /ip4/192.0.1.1/tcp/8811" in found.port_mapping.detail
    rules = forwarded(router)
    assert "dport 8810 dnat ip to 192.168.1.2:8810" in rules
    assert "dport 8811 dnat ip to 192.168.1.2:8811" in rules
    node.stop()
    assert "dnat" not in forwarded(router)


def test_behind_two_routers_nothing_is_forwarded_or_announced(tmp_path: Path, stack: ExitStack) -> None:
    node, router = two_nodes(stack, replace(kind_named("double"), maps_ports=True), tmp_path)
    found = settled(node, "failed")
    assert "double NAT" in found.port_mapping.detail
    assert not found.is_dialled
    assert "dnat" not in forwarded(router)


def test_nodes_behind_a_gateway_that_forwards_are_dialled_from_everywhere(stack: ExitStack) -> None:
    names = ("port-restricted", "symmetric", "symmetric, UPnP")
    try:
        found = ways_between([*map(kind_named, names)], punch_s=1.0)
    except NoNamespaces as error:
        pytest.skip(f"needs root, ip and nft: {error}")
    for here in names:
        for there in names:
            way = found[here, there]
            assert way.answers, (here, there, way)
            if "symmetric, UPnP" in (here, there):
                assert (way.control, way.data) == ("direct", "direct"), (here, there, way)
