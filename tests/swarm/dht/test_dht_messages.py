"""The DHT's messages: what libp2p means by them, and what strangers may put into them."""

from __future__ import annotations

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.kad_dht.pb import kademlia_pb2
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import (
    CONTACTS_MAX,
    KEY_MAX_BYTES,
    MESSAGE_MAX_BYTES,
    Contact,
    DhtMessageKind,
    Message,
    decode,
    encode,
    keys_of,
    model_key,
    name_key,
)
from swarmllm_proto.errors import BadMessage

from .swarm_of import contacts, made_up_id

NODE = made_up_id(random.Random(1))
_addresses = st.lists(
    st.builds(
        Address,
        st.one_of(st.ip_addresses(v=4), st.ip_addresses(v=6)).map(str),
        st.integers(min_value=1, max_value=65535),
    ),
    max_size=8,
    unique=True,
).map(tuple)
_contacts = st.lists(
    st.builds(Contact, st.integers(0, 2**32).map(lambda n: made_up_id(random.Random(n))), _addresses),
    max_size=4,
    unique_by=lambda contact: contact.node_id,
).map(tuple)


@given(
    st.builds(
        Message,
        st.sampled_from(DhtMessageKind),
        st.binary(max_size=KEY_MAX_BYTES),
        closer=_contacts,
        providers=_contacts,
    )
)
def test_a_message_comes_back_as_it_was(message: Message) -> None:
    assert decode(encode(message)) == message


def test_addresses_are_multiaddrs_to_others() -> None:
    for ip in ("192.0.2.1", "2001:db8::1"):
        address = Address(ip, 8810)
        sent = kademlia_pb2.Message.FromString(
            encode(Message(DhtMessageKind.FIND_NODE, closer=(Contact(NODE, (address,)),)))
        )
        assert str(Multiaddr(sent.closerPeers[0].addrs[0])) == str(address)
        for foreign in (str(address), f"{address}/p2p/{NODE}"):
            sent.closerPeers[0].addrs[0] = Multiaddr(foreign).to_bytes()
            assert decode(sent.SerializeToString()).closer == (Contact(NODE, (address,)),)


@pytest.mark.parametrize(
    "foreign",
    [
        "/dns4/example.org/tcp/8810",
        "/ip4/192.0.2.1/udp/8810/quic-v1",
        "/ip4/192.0.2.1/tcp/8810/ws",
        "/ip4/192.0.2.1/tcp/0",
        f"/ip4/192.0.2.1/tcp/8810/p2p/{NODE}/p2p-circuit",
    ],
)
def test_addresses_of_other_transports_are_left_out(foreign: str) -> None:
    peer = kademlia_pb2.Message.Peer(
        id=ID.from_base58(NODE).to_bytes(), addrs=[Multiaddr(foreign).to_bytes(), b"", b"\x04"]
    )
    sent = kademlia_pb2.Message(type="FIND_NODE", closerPeers=[peer])
    assert decode(sent.SerializeToString()).closer == (Contact(NODE),)


def test_what_is_no_node_id_is_left_out() -> None:
    junk = [b"", b"\x00", b"\x12\x20short", b"\xff" * 34, b"\x00\x05junk", b"\x00\x3f" + bytes(80)]
    sent = kademlia_pb2.Message(
        type="FIND_NODE", closerPeers=[kademlia_pb2.Message.Peer(id=content) for content in junk]
    )
    assert decode(sent.SerializeToString()).closer == ()


def test_more_than_is_ever_needed_is_cut() -> None:
    peers = [
        kademlia_pb2.Message.Peer(id=ID.from_base58(contact.node_id).to_bytes(), addrs=[b"\x04"] * 9)
        for contact in contacts(200)
    ]
    sent = kademlia_pb2.Message(type="FIND_NODE", closerPeers=peers, providerPeers=peers)
    decoded = decode(sent.SerializeToString())
    assert len(decoded.closer) == len(decoded.providers) == CONTACTS_MAX


def test_the_largest_message_is_read_and_none_that_is_larger() -> None:
    content = encode(Message(DhtMessageKind.PING, b"key", [], []))
    # A field that nobody knows is left out, however long it is.
    padding = MESSAGE_MAX_BYTES - len(content) - 5
    content += (
        bytes((0xFA, 0x07))
        + bytes((padding & 0x7F | 0x80, padding >> 7 & 0x7F | 0x80, padding >> 14))
        + bytes(padding)
    )
    assert len(content) == MESSAGE_MAX_BYTES
    assert decode(content).key == b"key"
    with pytest.raises(BadMessage, match="are more than"):
        decode(content + b"\x00")


@pytest.mark.parametrize(
    ("content", "field"),
    [
        (bytes(MESSAGE_MAX_BYTES + 1), "message"),
        (b"\xff\xff no protobuf", "message"),
        (b"\x08\x63", "message"),
        (kademlia_pb2.Message(type="FIND_NODE", key=bytes(65)).SerializeToString(), "key"),
    ],
    ids=["too large", "no protobuf", "unknown kind", "long key"],
)
def test_what_cannot_be_meant_is_refused(content: bytes, field: str) -> None:
    with pytest.raises(BadMessage) as refused:
        decode(content)
    assert refused.value.field == field


@given(st.binary(max_size=400))
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    with contextlib.suppress(BadMessage):
        decode(content)


def test_keys_are_multihashes_and_a_name_is_never_an_id() -> None:
    model_id = "ab" * 32
    assert model_key(model_id) == b"\x1e\x20" + bytes.fromhex(model_id)
    assert keys_of(model_id) == (model_key(model_id), name_key(model_id))
    assert keys_of("guide") == (name_key("guide"),)
    assert len(name_key("guide")) == 34
    assert model_key(model_id) != name_key(model_id)
