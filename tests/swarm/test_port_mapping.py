"""When the gateway is asked, what of its answer is believed, and when a forwarding is given up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import trio
import trio.testing

from swarmllm.swarm import libp2p_router
from swarmllm.swarm.discovery import port_mapping, reachability
from swarmllm.swarm.discovery.gateway_process import Answer, Question
from swarmllm.swarm.discovery.port_mapping import (
    AGAIN_S,
    CHECKS,
    DENIALS,
    LEASE_S,
    LOOK_EVERY_S,
    RENEW_AGAIN_S,
    STOP_S,
    GatewayFailed,
    PortMapping,
    is_needed,
    mapped_addresses,
)
from swarmllm.swarm.libp2p_router import open_libp2p_router
from swarmllm.swarm.router import PortMappingState, Reachability
from swarmllm.swarm.settings import SwarmSettings
from tests.node_ids import A

from .conftest import DEADLINE_S
from .test_data_plane import ELSEWHERE

OUTER = "198.51.100.7"
INNER = "/ip4/192.168.1.2/tcp/8810"
CONTROL, DATA = f"/ip4/{OUTER}/tcp/8810", f"/ip4/{OUTER}/tcp/8811"
PORTS = [(8810, 8810), (8811, 8811)]
MAPPED = Answer("", OUTER, PORTS)
VAIN = Reachability(1.0, A, ((INNER, False), ("/ip4/127.0.0.1/tcp/8810", False)), (), OUTER)


class Gateway:
    def __init__(self) -> None:
        self.answer: Answer | str = MAPPED
        self.asked: list[Question] = []

    async def ask(self, question: Question) -> Answer:
        self.asked.append(question)
        await trio.lowlevel.checkpoint()
        if question.op == "unmap":
            return Answer()
        if isinstance(self.answer, str):
            raise GatewayFailed(self.answer)
        return self.answer

    @property
    def ops(self) -> list[str]:
        return [question.op for question in self.asked]


class Node:
    """Both protocols that a PortMapping uses."""

    def __init__(self) -> None:
        self.plain_addresses: tuple[str, ...] = (INNER, "/ip4/127.0.0.1/tcp/8810")
        self.announced: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
        self.result: Reachability | None = VAIN
        self.sees_mapped: bool | None = None
        """What peers find from now on at the outer address."""

    async def also_at(self, addresses: tuple[str, ...], data_addresses: tuple[str, ...]) -> None:
        self.announced.append((addresses, data_addresses))

    async def check(self) -> bool:
        await trio.lowlevel.checkpoint()
        if self.sees_mapped is None or self.result is None:
            return False
        control = (*VAIN.control, (CONTROL, self.sees_mapped))
        self.result = replace(self.result, checked_at=self.result.checked_at + 1, control=control)
        return True


def mapping_of(node: Node, gateway: Gateway) -> PortMapping:
    return PortMapping(node, node, lambda: (8810, 8811), gateway.ask)


PUBLIC = "/ip4/203.0.113.5/tcp/8810"
PUBLIC6 = "/ip6/2001:db8::1/tcp/8810"


@pytest.mark.parametrize(
    ("found", "own", "expected"),
    [
        (VAIN, [INNER], True),
        (None, [INNER], False),
        # This machine has a public address, or a person has given one.
        (VAIN, [INNER, PUBLIC], False),
        (VAIN, [INNER, PUBLIC6], True),
        # Nobody outside has tried: a swarm of one local network.
        (replace(VAIN, observed_ip="192.168.1.2"), [INNER], False),
        (replace(VAIN, observed_ip="100.64.0.9"), [INNER], False),
        (replace(VAIN, observed_ip=""), [INNER], False),
        (replace(VAIN, observed_ip="2001:db8::1"), [INNER], False),
        (replace(VAIN, observed_ip="nonsense"), [INNER], False),
        # A way is there, or nothing was tried.
        (replace(VAIN, control=((INNER, True),)), [INNER], False),
        (replace(VAIN, control=()), [INNER], False),
        (replace(VAIN, control=(("nonsense", False),)), [INNER], False),
        (replace(VAIN, control=((PUBLIC6, True), (INNER, False))), [INNER, PUBLIC6], True),
    ],
)
def test_only_who_is_dialled_in_vain_from_outside_asks(
    found: Reachability | None, own: Sequence[str], expected: bool
) -> None:
    assert is_needed(found, own) is expected


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer("no library"), "miniupnpc is not installed"),
        (Answer("no answer"), "does not speak UPnP"),
        (Answer("refused", OUTER), "does not forward these ports"),
        (Answer("refused", "100.64.3.2"), "double NAT"),
        (Answer("refused", ""), "double NAT"),
        (Answer("", "100.64.3.2", PORTS), "double NAT: the gateway's own outer address, 100.64.3.2, is not"),
        (Answer("", "192.168.0.9", PORTS), "double NAT"),
        (Answer("", "127.0.0.1", PORTS), "double NAT"),
        (Answer("", "0.0.0.0", PORTS), "double NAT"),
        # Somebody else's address.
        (Answer("", "203.0.113.80", PORTS), f"double NAT: peers see this node at {OUTER}, not at"),
        (Answer("", "", PORTS), "outer address is none"),
        (Answer("", "nonsense", PORTS), "outer address is none"),
        (Answer("", "2001:db8::1", PORTS), "outer address is none"),
        (Answer("", OUTER, []), "other ports"),
        (Answer("", OUTER, PORTS[:1]), "other ports"),
        (Answer("", OUTER, [(22, 8810), (8811, 8811)]), "other ports"),
        (Answer("", OUTER, [(8810, 0), (8811, 8811)]), "nobody asked for"),
        (Answer("", OUTER, [(8810, 1023), (8811, 8811)]), "nobody asked for"),
        (Answer("", OUTER, [(8810, 65536), (8811, 8811)]), "nobody asked for"),
        (Answer("", OUTER, [(8810, -1), (8811, 8811)]), "nobody asked for"),
    ],
)
def test_an_answer_is_not_believed_beyond_what_peers_see(answer: Answer, why: str) -> None:
    with pytest.raises(GatewayFailed, match=why):
        mapped_addresses(answer, (8810, 8811), OUTER)


async def test_a_forwarding_is_announced_and_taken_back_at_the_end(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node, gateway = Node(), Gateway()
    mapping = mapping_of(node, gateway)
    assert mapping.state.state == "off"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapping.run)
        await trio.sleep(1)
        assert gateway.asked == [Question("map", PORTS, LEASE_S)]
        assert node.announced == [((CONTROL,), (DATA,))]
        assert mapping.state.state == "mapped"
        assert CONTROL in mapping.state.detail
        nursery.cancel_scope.cancel()
    assert gateway.asked[1:] == [Question("unmap", PORTS)]


async def test_who_is_stopped_while_it_asks_takes_back_what_it_asked_for(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node, gateway = Node(), Gateway()
    asked: list[Question] = []

    async def ask(question: Question) -> Answer:
        asked.append(question)
        await trio.sleep_forever()
        raise AssertionError

    async with trio.open_nursery() as nursery:
        nursery.start_soon(PortMapping(node, node, lambda: (8810, 8811), ask).run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert asked == [Question("map", PORTS, LEASE_S), Question("unmap", PORTS)]
    assert trio.current_time() < 1 + STOP_S + 1
    assert gateway.asked == []


async def test_a_node_that_never_asked_takes_nothing_back(autojump_clock: trio.testing.MockClock) -> None:
    node, gateway = Node(), Gateway()
    node.result = None
    mapping = mapping_of(node, gateway)
    with trio.move_on_after(100):
        await mapping.run()
    assert gateway.asked == []
    assert mapping.state.state == "idle"


async def test_it_is_renewed_at_half_of_its_time(autojump_clock: trio.testing.MockClock) -> None:
    node, gateway = Node(), Gateway()
    node.sees_mapped = True
    mapping = mapping_of(node, gateway)
    await mapping.look()
    await trio.sleep(LEASE_S / 2 - 1)
    await mapping.look()
    assert len(gateway.asked) == 1
    await trio.sleep(1)
    await mapping.look()
    assert gateway.ops == ["map", "map"]
    assert len(node.announced) == 1
    # In vain, and again a while later.
    gateway.answer = "the gateway cannot be asked"
    await trio.sleep(LEASE_S / 2)
    await mapping.look()
    await trio.sleep(RENEW_AGAIN_S - 1)
    await mapping.look()
    assert gateway.ops == ["map"] * 3
    assert mapping.state.state == "mapped"
    while mapping.state.state == "mapped":
        await trio.sleep(1)
        await mapping.look()
    # It has not ended before it was given up.
    assert trio.current_time() <= 2 * LEASE_S
    assert node.announced[1:] == [((), ())]
    assert gateway.ops[-1] == "unmap"


async def test_ports_that_the_gateway_chose_are_asked_for_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node, gateway = Node(), Gateway()
    given = [(8810, 16729), (8811, 8811)]
    gateway.answer = Answer("", OUTER, given)
    mapping = mapping_of(node, gateway)
    await mapping.look()
    assert node.announced == [((f"/ip4/{OUTER}/tcp/16729",), (DATA,))]
    await trio.sleep(LEASE_S / 2)
    await mapping.look()
    assert gateway.asked[-1] == Question("map", given, LEASE_S)


@pytest.mark.parametrize("answer", [Answer("", "203.0.113.80", PORTS), Answer("", "100.64.0.2", PORTS)])
async def test_a_false_outer_address_is_never_announced(
    autojump_clock: trio.testing.MockClock, answer: Answer
) -> None:
    node, gateway = Node(), Gateway()
    gateway.answer = answer
    mapping = mapping_of(node, gateway)
    await mapping.look()
    assert node.announced == []
    assert gateway.ops == ["map", "unmap"]
    assert mapping.state.state == "failed"
    assert "double NAT" in mapping.state.detail
    await trio.sleep(AGAIN_S - 1)
    await mapping.look()
    assert len(gateway.asked) == 2
    await trio.sleep(1)
    await mapping.look()
    assert len(gateway.asked) == 4


async def test_what_a_killed_process_may_have_done_is_undone() -> None:
    node, gateway = Node(), Gateway()
    gateway.answer = "the gateway takes too long to answer"
    mapping = mapping_of(node, gateway)
    await mapping.look()
    assert gateway.asked[-1] == Question("unmap", PORTS)


async def test_an_address_that_peers_cannot_dial_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    node, gateway = Node(), Gateway()
    node.sees_mapped = False
    mapping = mapping_of(node, gateway)
    await mapping.look()  # one peer looks at once
    assert mapping.state.state == "mapped"
    n_looks = 0
    while mapping.state.state == "mapped":
        await mapping.look()
        n_looks += 1
    assert n_looks == DENIALS  # of the checks, one at once, and the last look gives up
    assert node.announced == [((CONTROL,), (DATA,)), ((), ())]
    assert gateway.ops == ["map", "unmap"]
    assert "could not dial" in mapping.state.detail
    await mapping.look()
    assert gateway.ops == ["map", "unmap"]


async def test_one_peer_that_denies_it_is_not_enough() -> None:
    node, gateway = Node(), Gateway()
    node.sees_mapped = False
    mapping = mapping_of(node, gateway)
    await mapping.look()
    node.sees_mapped = True
    await mapping.look()
    node.sees_mapped = False
    await node.check()
    await mapping.look()
    await mapping.look()
    assert mapping.state.state == "failed"
    # It worked before: the outer address is another one now, or the router has started anew.
    await mapping.look()
    assert gateway.ops == ["map", "unmap", "map"]


async def test_who_looks_from_inside_does_not_judge() -> None:
    node, gateway = Node(), Gateway()
    mapping = mapping_of(node, gateway)
    await mapping.look()
    node.sees_mapped = False
    node.result = replace(VAIN, observed_ip="192.168.1.2")
    for _ in range(20):
        await mapping.look()
    assert mapping.state.state == "mapped"
    # They are not asked for ever.
    assert node.result.checked_at - VAIN.checked_at == CHECKS - 1
    # Nor does one that has not heard of the address yet.
    node.sees_mapped = None
    node.result = replace(VAIN, checked_at=99.0)
    for _ in range(5):
        await mapping.look()
    assert mapping.state.state == "mapped"


async def test_a_renewal_while_only_peers_inside_answer_keeps_the_address(
    autojump_clock: trio.testing.MockClock,
) -> None:
    node, gateway = Node(), Gateway()
    mapping = mapping_of(node, gateway)
    await mapping.look()
    node.result = replace(VAIN, observed_ip="192.168.1.2")
    await trio.sleep(LEASE_S / 2)
    await mapping.look()
    assert gateway.ops == ["map", "map"]
    assert len(node.announced) == 1


def test_a_look_is_more_often_than_what_it_looks_for() -> None:
    assert LOOK_EVERY_S < RENEW_AGAIN_S < port_mapping.LEASE_S / 2


@pytest.mark.slow
async def test_a_node_that_is_dialled_in_vain_announces_what_its_gateway_forwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its listener stands for the gateway's outer port, and peers see it at 127.0.0.1."""
    gateway = Gateway()
    monkeypatch.setattr(port_mapping, "ask_gateway", gateway.ask)
    monkeypatch.setattr(port_mapping, "is_public", lambda ip: ip == "127.0.0.1")
    monkeypatch.setattr(port_mapping, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(reachability, "DIAL_BACK_EVERY_S", 0.1)
    monkeypatch.setattr(reachability, "_FIRST_CHECK_S", 0.2)
    monkeypatch.setattr(libp2p_router, "is_loopback", lambda ip: False)

    def settings(name: str, *bootstrap: str, maps: bool = True) -> SwarmSettings:
        return SwarmSettings(
            tmp_path / name,
            "127.0.0.1",
            0,
            0,
            bootstrap=bootstrap,
            mdns=False,
            announce=(ELSEWHERE,) if bootstrap else (),
            port_mapping=maps,
        )

    async with open_libp2p_router(settings("a", maps=False)) as a:
        async with open_libp2p_router(settings("b", *a.addresses)) as b:
            ports = [int(each.split("/tcp/")[1].split("/")[0]) for each in (*b.addresses, *b.data_addresses)]
            outer = [f"/ip4/127.0.0.1/tcp/{port}" for port in ports]
            gateway.answer = Answer("", "127.0.0.1", [(port, port) for port in ports])
            with trio.fail_after(DEADLINE_S):
                while b.reachability is None or (outer[0], True) not in b.reachability.control:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert b.port_mapping == PortMappingState(
                "mapped", f"the gateway forwards {outer[0]} and {outer[1]} to this node (UPnP)"
            )
            assert (outer[1], True) in b.reachability.data
            envelope = a.spread.envelope(b.node_id)
            assert envelope is not None
            assert envelope.addresses[1:2] == (outer[0],)
            assert envelope.data_addresses[1:] == (outer[1],)
            assert b.addresses[1].startswith(outer[0])
        assert gateway.ops == ["map", "unmap"]
        assert a.port_mapping.state == "off"
