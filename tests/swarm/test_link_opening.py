"""Links between two real routers: who gets which end, and who gets none."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import trio
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.router import LinkEnd

from .conftest import DEADLINE_S
from .test_data_plane import ELSEWHERE, exchange, two_nodes

pytestmark = pytest.mark.slow


class Taker:
    """Keeps the ends that are given to it, as a worker would."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.given: list[tuple[str, str]] = []
        self.connection: socket.socket | None = None
        self.key = b""
        self.nonce = -1

    async def __call__(self, sender: str, purpose: str, end: LinkEnd) -> bool:
        self.given.append((sender, purpose))
        if self.takes:
            self.connection = end.connection.dup()
            self.key, self.nonce = end.key, end.nonce
        return self.takes


def seal(key: bytes, nonce: int, text: bytes) -> bytes:
    sealed = ChaCha20Poly1305(key).encrypt(bytes(4) + nonce.to_bytes(8, "little"), text, None)
    return len(sealed).to_bytes(2, "big") + sealed


async def test_both_ends_go_on_where_the_handshake_left_them(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        taker = Taker()
        b.serve_links(taker)
        with trio.fail_after(DEADLINE_S):
            end = await a.open_link(b.node_id, "a model")
        assert taker.given == [(a.node_id, "a model")]
        assert (end.key, end.nonce) == (taker.key, taker.nonce)
        assert len(end.key) == 32
        # Whatever the daemons still do with their copies, the connection lives.
        sealed = seal(end.key, end.nonce, b"straight on")
        end.connection.send(sealed)
        end.close()
        assert taker.connection is not None
        taker.connection.settimeout(DEADLINE_S)
        assert taker.connection.recv(4096) == sealed
        taker.connection.close()


async def test_a_link_is_no_connection_of_the_data_plane(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, b):
        taker = Taker()
        b.serve_links(taker)
        end = await a.open_link(b.node_id, "a model")
        await exchange(a, b, [b"one", b"two"])
        end.close()
        assert taker.connection is not None
        taker.connection.close()
        await exchange(a, b, [b"three"])
        assert a.connected() == {b.node_id}


async def test_a_key_is_not_shown(tmp_path: Path) -> None:
    end = LinkEnd(socket.socket(), b"k" * 32, 1)
    assert "kkk" not in repr(end)
    end.close()


@pytest.mark.parametrize("serves", [True, False])
async def test_who_does_not_take_a_link_says_so_at_once(tmp_path: Path, serves: bool) -> None:
    async with two_nodes(tmp_path) as (a, b):
        if serves:
            b.serve_links(Taker(takes=False))
        with trio.fail_after(DEADLINE_S), pytest.raises(NodeUnreachable, match="takes no link"):
            await a.open_link(b.node_id, "a model")
        await exchange(a, b, [b"the data plane is not touched"])


async def test_without_a_data_port_there_are_no_links(tmp_path: Path) -> None:
    async with two_nodes(tmp_path, announce=(ELSEWHERE,)) as (a, b):
        b.serve_links(Taker())
        with pytest.raises(NodeUnreachable, match="no data port"):
            await a.open_link(b.node_id, "a model")


async def test_a_stranger_gets_none(tmp_path: Path) -> None:
    async with two_nodes(tmp_path) as (a, _):
        with pytest.raises(NodeUnreachable, match="not connected"):
            await a.open_link("12D3KooWHdiAxVd8uMQR1hGWXccidmfCwLqcMpGwR6QcTP6QRMuD", "a model")
