"""The ports that this node listens on: which they are, and that they are nobody else's."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import trio

from swarmllm.errors import ConfigError


def listening_port(swarm: Any) -> int:
    for listener in swarm.listeners.values():
        for address in listener.get_addrs():
            return int(address.value_for_protocol("tcp"))
    raise ConfigError("libp2p listens on no port", field="libp2p_port")


def refuse_taken_port(listen_host: str, port: int) -> None:
    """libp2p listens with SO_REUSEPORT and would share a taken port without a word; a plain bind is
    refused."""
    family = socket.AF_INET6 if ":" in listen_host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((listen_host, port))
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {listen_host} port {port}: {error.strerror}", field="libp2p_port"
            ) from error


async def open_listeners(listen_host: str, port: int) -> Sequence[trio.SocketListener]:
    """Raises ConfigError when the port is taken."""
    try:
        return await trio.open_tcp_listeners(port, host=listen_host)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {listen_host} port {port}: {error.strerror}", field="data_port"
        ) from error
