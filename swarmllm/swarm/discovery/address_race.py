"""Races the addresses of a node, and takes the first that answers.

A node has several addresses: of every network it is in, of bridges that nobody else reaches, of yesterday.
py-libp2p dials one of them, and never one of the loopback if there are others. So those are raced here as
in RFC 8305: the next one is tried as soon as the one before has failed, or has not answered for a moment.
"""

from __future__ import annotations

from collections.abc import Sequence

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address

HEAD_START_S = 0.25
CONNECT_S = 8.0


async def first_to_answer(addresses: Sequence[Address]) -> tuple[Address, trio.SocketStream]:
    """Raises NodeUnreachable where none does."""
    answered: list[tuple[Address, trio.SocketStream]] = []

    async def connect(address: Address, failed: trio.Event) -> None:
        try:
            stream = await trio.open_tcp_stream(address.ip, address.port)
        except OSError:
            failed.set()
            return
        answered.append((address, stream))
        racing.cancel()

    try:
        with trio.move_on_after(CONNECT_S) as racing:
            async with trio.open_nursery() as nursery:
                for address in addresses:
                    failed = trio.Event()
                    nursery.start_soon(connect, address, failed)
                    with trio.move_on_after(HEAD_START_S):
                        await failed.wait()
    except BaseException:
        for _, stream in answered:
            stream.socket.close()
        raise
    if not answered:
        raise NodeUnreachable(f"none of {', '.join(map(str, addresses))} answers")
    for _, late in answered[1:]:
        late.socket.close()
    return answered[0]
