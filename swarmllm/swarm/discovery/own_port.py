"""Dials from a port that this node listens on.

A NAT or firewall lets in packets that look like answers: so what is dialled is to be able to dial this node
back at the port from which it was dialled, and a router that keeps one outer port for each inner one shows
the outer port of this one.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from struct import Struct

import trio

from swarmllm.errors import NodeUnreachable
from swarmllm.swarm.discovery.addresses import Address, family_of

CONNECT_S = 4.0
"""A first packet that is dropped is sent again after 1 s and after 3 s."""
_LINGER = Struct("ii")


async def connect_from(
    listening: Sequence[str], port: int, address: Address, *, connect_s: float = CONNECT_S
) -> trio.SocketStream:
    """`listening`: the IPs of this node's listeners; the one on `port` has to share it (see `share_port`).
    Raises NodeUnreachable."""
    family = family_of(address.ip)
    own_ip = next((ip for ip in listening if family_of(ip) == family), None)
    if own_ip is None:
        raise NodeUnreachable(f"{address} is of a family that this node does not listen on")
    connecting = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        # Two sockets may share the port if both say so.
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        connecting.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # "::" would mean IPv4 as well, where this node listens by another socket.
            connecting.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        await connecting.bind((own_ip, port))
        with trio.fail_after(connect_s):
            await connecting.connect((address.ip, address.port))
        return trio.SocketStream(connecting)
    except (OSError, trio.TooSlowError) as error:
        connecting.close()
        raise NodeUnreachable(f"{address} does not answer: {type(error).__name__}") from None
    except BaseException:
        connecting.close()
        raise


def share_port(listener: trio.socket.SocketType) -> None:
    """From now on this process may dial from the listener's port. Its bind was a plain one, so the port was
    nobody else's; and nobody else gets it now, because a plain bind is still refused."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def forget_at_close(connected: trio.socket.SocketType) -> None:
    """Its pair of ports is free again at once when it is closed; what is unsent then is lost."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER.pack(1, 0))
