"""Finds nodes on the local network: DNS-SD under `_swarmllm._udp.local.`, with zeroconf.

py-libp2p's own mDNS is left alone: it runs its upkeep in a system task, where an exception ends the process,
and announces addresses nobody can dial. zeroconf runs in threads of its own; this module passes what it finds
to trio. Where there is no multicast (in a container), nodes are found by bootstrap addresses and gossip
alone.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable

import trio
from blake3 import blake3
from zeroconf import Error as ZeroconfError
from zeroconf import ServiceBrowser, ServiceInfo, ServiceListener, Zeroconf

from swarmllm.errors import InvalidRequest, reason_of
from swarmllm.log_filter import provoked_by
from swarmllm.swarm.discovery.addresses import Address, family_of, is_loopback
from swarmllm_proto.identifiers import NodeId, is_node_id

log = logging.getLogger(__name__)

SERVICE = "_swarmllm._udp.local."
_NODE_ID_KEY = b"id"
_NETWORK_KEY = b"net"
_RESOLVE_MS = 3000
_NAME_MAX = 63

Found = Callable[[NodeId, list[Address]], None]


class _Listener(ServiceListener):
    def __init__(self, token: trio.lowlevel.TrioToken, network: bytes, found: Found) -> None:
        self._token = token
        self._network = network
        self._found = found

    def add_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        try:
            info = zc.get_service_info(type_, name, timeout=_RESOLVE_MS)
        except (ZeroconfError, RuntimeError, AssertionError) as error:
            # Closed meanwhile, or slower than it is allowed to be; this is a thread of zeroconf's own. It
            # asserts that its loop runs.
            provoked_by(log, "mDNS").debug("mDNS answer not looked up: %s", type(error).__name__)
            return
        if info is None or info.port is None or (info.properties.get(_NETWORK_KEY) or b"") != self._network:
            return
        node_id = (info.properties.get(_NODE_ID_KEY) or b"").decode("ascii", "replace")
        if not is_node_id(node_id):
            log.debug("mDNS answer without a node id")
            return
        addresses: list[Address] = []
        for ip in info.parsed_addresses():
            try:
                addresses.append(Address.parse(str(Address(ip, info.port))))
            except (InvalidRequest, ValueError):
                provoked_by(log, "mDNS").debug("mDNS answer with an unusable address")
        if addresses:
            try:
                self._token.run_sync_soon(self._found, node_id, addresses)
            except trio.RunFinishedError:
                provoked_by(log, "mDNS").debug("mDNS answer after the end")

    def update_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        self.add_service(zc, type_, name)

    def remove_service(self, zc: Zeroconf, type_: str, name: str) -> None:
        """Who leaves is noticed on the connection, sooner and surely."""


async def run_mdns(node_id: NodeId, network_id: str, ips: list[str], port: int, found: Found) -> None:
    """Announce `ips`, which are this machine's own, and listen there until cancelled; returns where that is
    not possible. `found` runs on the trio thread."""
    outward = [ip for ip in ips if not is_loopback(ip)]
    if not outward:
        return
    token = trio.lowlevel.current_trio_token()
    zeroconf = await trio.to_thread.run_sync(_start, token, node_id, network_id, outward, port, found)
    if zeroconf is None:
        return
    try:
        await trio.sleep_forever()
    finally:
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(zeroconf.close)


def _listening_at(ips: list[str]) -> Zeroconf | None:
    """Where it cannot be had on IPv6, on IPv4 alone."""
    try:
        return Zeroconf(interfaces=ips)
    except (OSError, RuntimeError) as error:  # RuntimeError: an address has gone meanwhile
        log.info("no mDNS at %s: %s", ", ".join(ips), reason_of(error))
    ips4 = [ip for ip in ips if family_of(ip) == socket.AF_INET]
    return _listening_at(ips4) if ips4 and ips4 != ips else None


def _start(
    token: trio.lowlevel.TrioToken, node_id: NodeId, network_id: str, ips: list[str], port: int, found: Found
) -> Zeroconf | None:
    # Enough that two networks on one wire do not dial each other in vain, and nothing to join with.
    network = blake3(network_id.encode()).hexdigest(length=8).encode() if network_id else b""
    zeroconf = _listening_at(ips)
    if zeroconf is None:
        return None
    try:
        zeroconf.register_service(
            ServiceInfo(
                SERVICE,
                f"{node_id[-_NAME_MAX:]}.{SERVICE}",
                port=port,
                addresses=[socket.inet_pton(family_of(ip), ip) for ip in ips],
                properties={_NODE_ID_KEY: node_id.encode(), _NETWORK_KEY: network},
            )
        )
        ServiceBrowser(zeroconf, SERVICE, _Listener(token, network, found))
    except Exception as error:
        log.warning("mDNS failed: %s", reason_of(error))
        zeroconf.close()
        return None
    return zeroconf
