"""A wire cuts what comes into messages, whatever pieces it comes in."""

from __future__ import annotations

import random
import socket
from types import SimpleNamespace
from typing import Any

import trio

from swarmllm.swarm.data.wire import PLAINTEXT_MAX, NoiseWire

TAG = bytes(16)


class Plain:
    """In the place of a cipher: a tag, and nothing hidden."""

    cipher: Any = SimpleNamespace()

    def encrypt_with_ad(self, _: bytes, plaintext: bytes | memoryview) -> bytes:
        return bytes(plaintext) + TAG

    def decrypt_with_ad(self, _: bytes, ciphertext: memoryview) -> bytes:
        assert ciphertext[-16:] == TAG
        return bytes(ciphertext[:-16])


async def test_messages_of_all_lengths_come_as_they_were_sent() -> None:
    """Their ends lie anywhere in the buffer: what is left of one at its end moves to the beginning."""
    rng = random.Random(1)
    messages = [rng.randbytes(rng.choice((0, 1, 100, 40_000, PLAINTEXT_MAX))) for _ in range(200)]
    pair = socket.socketpair()
    for each in pair:
        each.setblocking(False)
    writer, reader = (NoiseWire(each, Plain(), Plain()) for each in pair)

    async def write() -> None:
        for message in messages:
            await writer.write([message])

    with trio.fail_after(30):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(write)
            for message in messages:
                assert await reader.receive() == message
    writer.abort()
    reader.abort()
