"""Data connections that both ends dial at the same moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from node_ids import A, B
from trio.testing import MockClock

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.data import holes
from swarmllm.swarm.data.holes import ANSWER_EVERY_S, AT_ONCE_MAX, Holes, HoleTurn
from swarmllm.swarm.discovery import reachability
from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.own_port import connect_from
from swarmllm.swarm.discovery.relay import client
from swarmllm.swarm.discovery.relay.messages import Punch, encode_punch
from swarmllm.swarm.libp2p.host import open_listeners
from swarmllm.swarm.libp2p.stream_framing import framed
from swarmllm.swarm.libp2p_router import Libp2pRouter, open_libp2p_router
from swarmllm.swarm.membership.connection_gater import ConnectionGater
from swarmllm.swarm.membership.identity import load_or_create_identity
from swarmllm.swarm.settings import SwarmSettings
from swarmllm_proto.identifiers import NodeId

from .conftest import DEADLINE_S, until

pytestmark = pytest.mark.slow

NOWHERE = "127.77.0.1"
"""On this machine, and nobody listens there."""


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(reachability, "_FIRST_CHECK_S", 0.2)
    monkeypatch.setattr(reachability, "_RETRY_S", 0.2)
    monkeypatch.setattr(reachability, "DIAL_BACK_EVERY_S", 0.1)


@asynccontextmanager
async def node(
    folder: Path, name: str, *bootstrap: str, relays: bool = False, punches: bool = True
) -> AsyncIterator[Libp2pRouter]:
    (folder / name).mkdir()
    settings = SwarmSettings(
        folder / name,
        "127.0.0.1",
        0,
        0,
        bootstrap=bootstrap,
        mdns=False,
        announce=() if relays else (NOWHERE,),
        relay_service=relays,
        hole_punching=punches,
    )
    async with open_libp2p_router(settings) as router:
        yield router


@asynccontextmanager
async def two_that_meet_at_a_relay(
    folder: Path, *, punches: bool = True
) -> AsyncIterator[tuple[Libp2pRouter, Libp2pRouter, Libp2pRouter]]:
    async with (
        node(folder, "relay", relays=True) as relay,
        node(folder, "a", relay.addresses[0]) as a,
        node(folder, "b", relay.addresses[0], punches=punches) as b,
    ):
        await until(b, lambda: a.node_id in b.connected())
        await until(a, lambda: b.node_id in a.connected())
        yield relay, a, b


async def test_the_outer_address_that_a_peer_saw_is_told_and_leads_to_the_data_port(tmp_path: Path) -> None:
    async with two_that_meet_at_a_relay(tmp_path) as (_, a, b):
        assert a.plane._holes is not None
        punched = a.plane._holes
        is_told = False
        with trio.fail_after(DEADLINE_S):
            while not is_told:
                # A busy peer may take longer than it is waited for.
                async with punched._seen(b.node_id) as seen, punched._seen(b.node_id) as again:
                    # While the first connection stands there can be no second one, nor need there be one.
                    is_told = seen is not None
                    assert again == seen or seen is None
                    assert seen in (None, Address("127.0.0.1", a.plane.port))
                await trio.sleep(0.05)
        with trio.fail_after(DEADLINE_S):
            while not (a.plane.has_direct(b.node_id) and b.plane.has_direct(a.node_id)):  # noqa: ASYNC110
                await trio.sleep(0.05)


async def test_a_node_that_punches_no_holes_is_left_alone(tmp_path: Path) -> None:
    async with two_that_meet_at_a_relay(tmp_path, punches=False) as (_, a, b):
        assert b.plane._holes is None
        assert a.plane._holes is not None
        assert await a.plane._holes._ask(b.node_id) is None
        assert not a.plane.has_direct(b.node_id)


class Alone:
    """A host and a data plane without connections."""

    node_id = B
    port = 8811
    listening = ("0.0.0.0",)

    def serve(self, _protocol: str, _handler: object) -> None: ...

    def addresses_of(self, _node_id: NodeId) -> tuple[Address, ...]:
        return (Address("10.0.0.9", 8811),)

    def own_addresses(self) -> tuple[Address, ...]:
        return (Address("198.51.100.9", 8811),)

    def observers(self) -> tuple[NodeId, ...]:
        return ()

    def seen_by(self, _node_id: NodeId) -> str:
        return ""

    def has_direct(self, _node_id: NodeId) -> bool:
        return False


class Asking:
    """A stream on which all that has to be said comes at once."""

    muxed_conn: Any = None
    muxed_stream: Any = None

    def __init__(self, *addresses: Address) -> None:
        said = [Punch("connect", addresses), Punch("sync"), Punch("sync")]
        self._unread = b"".join(framed(encode_punch(each)) for each in said)
        self.was_reset = False

    async def read(self, n: int | None = None) -> bytes:
        read, self._unread = self._unread[:n], self._unread[n:]
        return read

    async def write(self, data: bytes) -> None: ...

    async def close(self) -> None: ...

    async def reset(self) -> None:
        self.was_reset = True


async def test_a_peer_has_this_node_dial_nobody_inside_its_network_and_not_too_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: MockClock
) -> None:
    dialled: list[Address] = []

    async def from_port(_listening: object, _port: int, address: Address) -> trio.SocketStream:
        dialled.append(address)
        raise NodeUnreachable("nobody")

    async def ordinarily(addresses: Sequence[Address]) -> tuple[Address, trio.SocketStream]:
        dialled.extend(addresses)
        raise NodeUnreachable("nobody")

    monkeypatch.setattr(holes, "connect_from", from_port)
    monkeypatch.setattr(holes, "first_to_answer", ordinarily)
    alone: Any = Alone()
    victim = Holes(load_or_create_identity(tmp_path), ConnectionGater(), alone, alone)
    public, known = Address("198.51.100.1", 8811), Address("10.0.0.9", 8811)
    inside = [Address("10.0.0.1", 8811), Address("198.51.100.1", 22), Address("127.0.0.1", 8811)]
    await victim._answer(A, Asking(*inside, public, known))
    assert Counter(dialled) == {public: 2, known: 2}
    dialled.clear()
    too_soon = Asking(public)
    await victim._answer(A, too_soon)
    assert (too_soon.was_reset, dialled) == (True, [])
    await trio.sleep(ANSWER_EVERY_S)
    await victim._answer(A, Asking(public))
    assert dialled == [public] * 2
    victim._answering.update(NodeId(f"peer{number}") for number in range(AT_ONCE_MAX))
    await trio.sleep(ANSWER_EVERY_S)
    one_more = Asking(public)
    await victim._answer(A, one_more)
    assert one_more.was_reset


async def test_a_listener_shares_its_port_with_dials_of_this_process_only() -> None:
    (listener,) = await open_listeners(["127.0.0.1"], 0)
    (other,) = await open_listeners(["127.0.0.1"], 0)
    async with listener, other:
        port, there = (each.socket.getsockname()[1] for each in (listener, other))
        stream = await connect_from(["127.0.0.1"], port, Address("127.0.0.1", there))
        assert stream.socket.getsockname() == ("127.0.0.1", port)
        await stream.aclose()
        with pytest.raises(Exception, match="cannot listen"):
            await open_listeners(["127.0.0.1"], port)
        with pytest.raises(NodeUnreachable):
            await connect_from(["127.0.0.1"], port, Address("2001:db8::1", there))


def test_a_turn_is_kept_while_it_limits_something() -> None:
    turn = HoleTurn(answered_at_s=0.0)
    assert not turn.is_over(holes.ANSWER_EVERY_S - 1)
    turn.n_failures, turn.again_at_s = 1, 60.0
    assert not turn.is_over(60.0)
    assert turn.is_over(60.0 + holes.AGAIN_MAX_S)
