"""What a relay promises is bounded, and its messages are what others understand."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.swarm.discovery.addresses import Address, CircuitAddress
from swarmllm.swarm.discovery.relay.messages import (
    MESSAGE_MAX_BYTES,
    Hop,
    Punch,
    Status,
    Stop,
    decode_hop,
    decode_punch,
    decode_stop,
    encode_hop,
    encode_punch,
    encode_stop,
)
from swarmllm.swarm.discovery.relay.service import (
    CIRCUITS_PER_NODE,
    RESERVED_S,
    RelayBook,
)
from swarmllm.swarm.peers.peer_table import Parts
from swarmllm.swarm.settings import RELAY_LIMITS, RelayLimits
from swarmllm_proto.errors import BadMessage

from ..dht.swarm_of import contacts

NODE = contacts(1)[0].node_id


def test_reservations_end_are_renewed_and_are_limited() -> None:
    book = RelayBook(limits=RelayLimits(reservations=3))
    assert all(book.reserve(str(n), 0.0) is Status.OK for n in range(3))
    assert book.reserve("late", 0.0) is Status.RESERVATION_REFUSED
    assert book.reserve("0", RESERVED_S / 2) is Status.OK
    assert book.reserve("late", RESERVED_S) is Status.OK
    assert book.holders() == {"0", "late"}
    assert book.begin("x", "1", RESERVED_S) is Status.NO_RESERVATION
    assert book.begin("x", "0", RESERVED_S) is Status.OK
    book.lost("0")
    book.lost("never there")
    assert book.begin("x", "0", RESERVED_S) is Status.NO_RESERVATION


def test_circuits_are_limited_for_each_end_and_together() -> None:
    book, n_circuits = RelayBook(), RELAY_LIMITS.circuits
    for n in range(n_circuits):
        book.reserve(str(n), 0.0)
    assert book.begin("0", "0", 0.0) is Status.PERMISSION_DENIED
    for n in range(CIRCUITS_PER_NODE):
        assert book.begin(f"dialler {n}", "0", 0.0) is Status.OK
        assert book.begin("greedy", str(n + 1), 0.0) is Status.OK
    assert book.begin("one more", "0", 0.0) is Status.RESOURCE_LIMIT_EXCEEDED
    assert book.begin("greedy", "40", 0.0) is Status.RESOURCE_LIMIT_EXCEEDED
    n = 0
    while book.begin(f"other {n}", str(n % 8 + 20), 0.0) is Status.OK:
        n += 1
    assert book.n_circuits == n_circuits
    book.end("greedy", "1")
    assert book.begin("other", "40", 0.0) is Status.OK
    assert book.begin("greedy", "41", 0.0) is Status.RESOURCE_LIMIT_EXCEEDED, "all circuits are taken"
    assert repr(book) == f"<RelayBook {n_circuits} reservations, {n_circuits} circuits>"


def test_an_end_of_a_circuit_that_ended_may_have_another_one_and_nothing_is_kept_of_it() -> None:
    n_of_node: Parts[int] = Parts.alone()
    book = RelayBook(n_circuits=n_of_node)
    book.reserve("target", 0.0)
    for n in range(CIRCUITS_PER_NODE):
        assert book.begin(f"dialler {n % 2}", "target", 0.0) is Status.OK
    assert book.begin("dialler 0", "target", 0.0) is Status.RESOURCE_LIMIT_EXCEEDED
    book.end("dialler 1", "target")
    assert book.begin("dialler 0", "target", 0.0) is Status.OK
    assert n_of_node.get("dialler 0") == CIRCUITS_PER_NODE / 2 + 1
    book.reserve("idle", 0.0)
    assert book.users() == {"idle", "target", "dialler 0", "dialler 1"}
    for n in range(CIRCUITS_PER_NODE):
        book.end("dialler 0" if n <= CIRCUITS_PER_NODE / 2 else "dialler 1", "target")
    assert book.n_circuits == 0
    assert list(n_of_node) == []


@pytest.mark.parametrize("status", Status)
def test_messages_come_back_as_they_were(status: Status) -> None:
    for hop in (
        Hop("reserve"),
        Hop("connect", NODE),
        Hop("status", status=status, expires_at=1 + status, data_bytes=7),
    ):
        assert decode_hop(encode_hop(hop, duration_s=5)) == hop
    for stop in (Stop("connect", NODE), Stop("status", status=status)):
        assert decode_stop(encode_stop(stop)) == stop
    where = (Address("192.0.2.1", 8810), Address("2001:db8::1", 1))
    for punch in (Punch("connect", where), Punch("sync")):
        assert decode_punch(encode_punch(punch)) == punch


@pytest.mark.parametrize("decode", [decode_hop, decode_stop, decode_punch])
@given(content=st.binary(max_size=300))
def test_no_bytes_raise_anything_but_bad_message(decode: object, content: bytes) -> None:
    assert callable(decode)
    with contextlib.suppress(BadMessage):
        decode(content)
    with pytest.raises(BadMessage):
        decode(content + bytes(MESSAGE_MAX_BYTES))


def test_a_circuit_address_is_a_relays_address_and_a_mark() -> None:
    where = f"/ip4/192.0.2.1/tcp/8810/p2p/{NODE}/p2p-circuit"
    assert CircuitAddress.parse(where) == CircuitAddress(Address("192.0.2.1", 8810), NODE)
    for other in (
        where.removesuffix("/p2p-circuit"),
        f"{where}/p2p/{NODE}",
        "/ip4/192.0.2.1/tcp/8810/p2p-circuit",
        "/p2p-circuit",
        f"/dns4/x/tcp/1/p2p/{NODE}/p2p-circuit",
    ):
        assert CircuitAddress.parse(other) is None


@pytest.mark.parametrize("n_more", [0, 1])
def test_the_largest_message_is_read_and_no_larger_one(n_more: int) -> None:
    content = encode_stop(Stop("connect", NODE))
    padding = MESSAGE_MAX_BYTES + n_more - len(content) - 3
    field_15 = bytes((15 << 3 | 2, padding & 0x7F | 0x80, padding >> 7)) + bytes(padding)
    content += field_15
    assert len(content) == MESSAGE_MAX_BYTES + n_more
    if n_more:
        with pytest.raises(BadMessage):
            decode_stop(content)
    else:
        assert decode_stop(content).node_id == NODE
