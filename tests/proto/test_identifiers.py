"""Node ids and multiaddrs: what is one, and what is refused by the name of its field."""

from __future__ import annotations

import base58
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from libp2p.peer.id import ID

from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import (
    BASE58,
    NODE_ID_HIGHEST,
    NODE_ID_LOWEST,
    NODE_ID_SIZE,
    PEER_ID_BYTES,
    NodeId,
    is_dns_name,
    is_node_id,
    parse_multiaddr,
    parse_node_id,
    require_multiaddrs,
)

PREFIX = bytes.fromhex("002408011220")
SOMEBODY = str(ID(PREFIX + bytes(range(32))))


def number(text: str) -> int:
    value = 0
    for digit in text:
        value = 58 * value + BASE58.index(digit)
    return value


def digits(value: int) -> str:
    text = ""
    while value:
        value, digit = divmod(value, 58)
        text = BASE58[digit] + text
    return BASE58[0] + text


def is_peer_id_of_an_ed25519_key(text: str) -> bool:
    """By libp2p and the definition, without the trick."""
    try:
        content = base58.b58decode(text)
    except ValueError:
        return False
    return (
        content[:6] == PREFIX and len(content) == PEER_ID_BYTES and base58.b58encode(content).decode() == text
    )


@given(st.binary(min_size=32, max_size=32))
def test_every_ed25519_peer_id_is_a_node_id(key: bytes) -> None:
    assert is_node_id(str(ID(PREFIX + key)))


@given(st.text(st.sampled_from(BASE58 + "0OIl \n"), min_size=44, max_size=44))
def test_nothing_else_of_that_form_is_one(rest: str) -> None:
    text = "12D3KooW" + rest
    assert is_node_id(text) == is_peer_id_of_an_ed25519_key(text)


@pytest.mark.parametrize("step", range(-2, 3))
@pytest.mark.parametrize("edge", [NODE_ID_LOWEST, NODE_ID_HIGHEST])
def test_the_range_ends_exactly_where_the_keys_do(edge: str, step: int) -> None:
    text = digits(number(edge) + step)
    assert is_node_id(text) == is_peer_id_of_an_ed25519_key(text)
    assert base58.b58decode(NODE_ID_LOWEST)[6:] == bytes(32)
    assert base58.b58decode(NODE_ID_HIGHEST)[6:] == b"\xff" * 32


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a",
        "0OIl0OIl0OIl0OIl",
        "1" * NODE_ID_SIZE,
        SOMEBODY[:-1],
        SOMEBODY + "1",
        SOMEBODY + "\n",
        " " + SOMEBODY[1:],
        SOMEBODY.replace(SOMEBODY[-1], "٣"),
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "16Uiu2HAmKQHJZ8nJYn4Cvyn3UnYY1EALKyFYbhGJ7Sy1ZZXYvQHy",
        "z" * 10_000,
    ],
)
def test_what_is_no_node_id_is_refused_by_its_field(text: str) -> None:
    assert not is_node_id(text)
    with pytest.raises(BadMessage, match="stages"):
        parse_node_id(text, "stages[0].node_id")
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(msgspec.msgpack.encode(text), type=NodeId)
    with pytest.raises(msgspec.ValidationError):
        msgspec.json.decode(msgspec.json.encode({text: 1}), type=dict[NodeId, int])


def test_a_node_id_passes_unchanged() -> None:
    assert parse_node_id(SOMEBODY) == SOMEBODY
    assert msgspec.msgpack.decode(msgspec.msgpack.encode((SOMEBODY,)), type=tuple[NodeId]) == (SOMEBODY,)


@pytest.mark.parametrize(
    "text",
    [
        "/ip4/192.0.2.1/tcp/8810",
        "/ip6/2001:db8::1/tcp/1",
        f"/ip4/192.0.2.1/tcp/65535/p2p/{SOMEBODY}",
        f"/ip4/192.0.2.1/tcp/8810/p2p/{SOMEBODY}/p2p-circuit",
        f"/ip4/192.0.2.1/tcp/8810/p2p/{SOMEBODY}/p2p-circuit/p2p/{SOMEBODY}",
        "/ip4/192.0.2.1/udp/8810/quic-v1",
        "/dns4/node.example.org/tcp/443/wss",
    ],
)
def test_a_multiaddr_may_be_of_any_transport(text: str) -> None:
    assert parse_multiaddr(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "/",
        "//",
        "junk",
        "junk/ip4/192.0.2.1",
        "/ip4",
        "/ip4/",
        "/ip4/192.0.2.256/tcp/1",
        "/ip4/192.0.2.01/tcp/1",
        "/ip4/::1/tcp/1",
        "/ip6/192.0.2.1/tcp/1",
        "/ip6/fe80::1%eth0/tcp/1",
        "/ip4/192.0.2.1/tcp/0",
        "/ip4/192.0.2.1/tcp/65536",
        "/ip4/192.0.2.1/tcp/+1",
        "/ip4/192.0.2.1/tcp/٣",
        "/ip4/192.0.2.1/tcp/" + "9" * 150,
        "/ip4/192.0.2.1/tcp/1/",
        "/ip4/192.0.2.1/tcp/1/p2p/0OIl0OIl0OIl",
        "/ip4/192.0.2.1/tcp/1/p2p/0OIl0OIl0OIl/p2p-circuit",
        "/ip4/192.0.2.1/tcp/1/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "/dns4/my..host/tcp/1",
        "/nonsense/1",
        "/ws" * 67,
    ],
)
def test_what_is_no_multiaddr_is_refused_by_its_field(text: str) -> None:
    with pytest.raises(ValueError, match=r"field `addresses\[1\]`"):
        require_multiaddrs(addresses=("/ip4/192.0.2.1/tcp/1", text))


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("localhost", True),
        ("my_service", True),
        ("a.b.example.", True),
        ("xn--bcher-kva.example", True),
        ("a" * 63 + ".example", True),
        ("a" * 64 + ".example", False),
        (".".join(["a" * 63] * 4), False),
        ("a..b", False),
        (".a", False),
        ("-a", False),
        ("a-.b", False),
        ("bücher.example", False),
        ("a b", False),
        ("", False),
        (".", False),
    ],
)
def test_a_dns_name_has_labels_of_the_right_length(name: str, is_one: bool) -> None:
    assert is_dns_name(name) == is_one
