"""Addresses as text: /ip4/192.0.2.1/tcp/8811, with or without /p2p/ID at the end.

So little of multiaddr is needed that parsing the forms here is shorter than importing it, and stricter: an
address from another node is an IP literal and a port or it is nothing, so no name is ever resolved on its
word. What a person writes in the settings may be a name: /dns/node.example.org/tcp/8810/p2p/ID (also dns4,
dns6; whatever the name resolves to is tried).
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest

import trio

from swarmllm.errors import InvalidRequest
from swarmllm.host_names import HostName, parse_host_name
from swarmllm.operating_system import has_ipv6, interface_ips, interface_ips6
from swarmllm_proto.envelope import ADDRESSES_MAX
from swarmllm_proto.identifiers import NodeId, is_node_id, parse_port

_FORM = re.compile(
    r"/ip(?P<version>[46])/(?P<ip>[0-9A-Fa-f:.]{2,45})/tcp/(?P<port>[0-9]{1,5})"
    r"(?:/p2p/(?P<node_id>[0-9A-Za-z]{1,128}))?"
)
_NAMED_FORM = re.compile(
    r"/dns[46]?/(?P<name>[^/]{1,253})/tcp/(?P<port>[0-9]{1,5})/p2p/(?P<node_id>[0-9A-Za-z]{1,128})"
)


EVERYWHERE = "*"
"""As a host to listen on: every address of this machine, of IPv4 and of IPv6."""


@dataclass(frozen=True, slots=True)
class Address:
    ip: str
    port: int
    node_id: NodeId | None = None

    def __str__(self) -> str:
        version = ipaddress.ip_address(self.ip).version
        return f"/ip{version}/{self.ip}/tcp/{self.port}" + (f"/p2p/{self.node_id}" if self.node_id else "")

    @classmethod
    def parse(cls, text: str, *, field: str = "address") -> Address:
        """Raises InvalidRequest naming `field`."""
        found = _FORM.fullmatch(text)
        try:
            if found is None:
                raise ValueError
            ip = ipaddress.ip_address(found["ip"])
            port = parse_port(found["port"])
            if ip.version != int(found["version"]):
                raise ValueError
        except ValueError:
            raise InvalidRequest(
                f"{text[:100]!r} is not of the form /ip4/192.0.2.1/tcp/8810 or .../p2p/NODE_ID", field=field
            ) from None
        node_id = found["node_id"]
        if node_id is not None and not is_node_id(node_id):
            raise InvalidRequest(f"{text[:100]!r} names a node whose id is not valid", field=field)
        return cls(str(ip), port, node_id)


@dataclass(frozen=True, slots=True)
class CircuitAddress:
    """Where a node can be reached through a relay: the relay's own address, and what relay it is."""

    address: Address
    relay_id: NodeId

    @classmethod
    def parse(cls, text: str) -> CircuitAddress | None:
        """None where it is of another form."""
        where, found, rest = text.partition("/p2p-circuit")
        if not found or rest:
            return None
        try:
            relay = Address.parse(where)
        except InvalidRequest:
            return None
        return cls(Address(relay.ip, relay.port), relay.node_id) if relay.node_id else None


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """Where a person says a node is: an IP address or a name, and whom to expect there."""

    host: HostName
    port: int
    node_id: NodeId

    @classmethod
    def parse(cls, text: str, *, field: str) -> NodeAddress:
        """Raises InvalidRequest naming `field`."""
        named = _NAMED_FORM.fullmatch(text)
        if named is not None:
            node_id = named["node_id"]
            try:
                host, port = parse_host_name(named["name"]), parse_port(named["port"])
            except ValueError as error:
                raise InvalidRequest(f"{text[:100]!r}: {error}", field=field) from None
            if not is_node_id(node_id):
                raise InvalidRequest(f"{text[:100]!r} names a node whose id is not valid", field=field)
            return cls(host, port, node_id)
        address = Address.parse(text, field=field)
        if address.node_id is None:
            raise InvalidRequest(
                f"{text[:100]!r} must end in /p2p/NODE_ID: a node is known by its id alone", field=field
            )
        return cls(HostName(address.ip), address.port, address.node_id)

    async def resolve(self) -> list[Address]:
        """Empty when the name leads nowhere at the moment."""
        try:
            found = await trio.socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return []
        return list(dict.fromkeys(Address(str(where[0]), self.port) for *_, where in found))


_PRIVATE = tuple(
    map(
        ipaddress.ip_network,
        ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "0.0.0.0/8", "fc00::/7"),
    )
)


def is_public(ip: str) -> bool:
    """Whether it may be of a machine on the open internet."""
    address = ipaddress.ip_address(ip)
    is_special = address.is_loopback or address.is_link_local or address.is_multicast or address.is_reserved
    return not (
        is_special
        or address.is_unspecified
        or getattr(address, "ipv4_mapped", None) is not None
        or any(address in network for network in _PRIVATE if network.version == address.version)
    )


def is_loopback(ip: str) -> bool:
    return ipaddress.ip_address(ip).is_loopback


@dataclass(frozen=True, slots=True)
class OwnAddresses:
    """IPs, of IPv4 and IPv6."""

    listening: tuple[str, ...]
    """Where this node listens; a wildcard of one family stands for all addresses of that family."""
    reachable: tuple[str, ...]
    """This machine's own at which it listens, in the order in which others are to try them."""
    announced: tuple[str, ...]
    """Those, unless the settings name others."""


def own_addresses(listen_host: str, announce: Sequence[str] = ()) -> OwnAddresses:
    """For a host to listen on as the settings have it. Blocking, briefly."""
    listening = ips_to_listen_on(listen_host)
    reachable = _reachable(listening)
    return OwnAddresses(listening, reachable, tuple(announce) or reachable)


def ips_to_listen_on(listen_host: str) -> tuple[str, ...]:
    if listen_host != EVERYWHERE:
        return (listen_host,)
    return ("0.0.0.0", "::") if has_ipv6() else ("0.0.0.0",)


def family_of(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _reachable(listening: Sequence[str]) -> tuple[str, ...]:
    """A wildcard is of no use to anybody else: it becomes the addresses of this machine's interfaces, the
    loopback one last, so that nodes on one machine find each other too. IPv6 and IPv4 take turns, IPv6 first
    (RFC 8305, section 4), and a dialler waits for no address that does not answer (see
    `address_race.first_to_answer`).
    """
    wildcards = {family_of(ip) for ip in listening if ipaddress.ip_address(ip).is_unspecified}
    if not wildcards:
        return tuple(listening)
    ips6 = interface_ips6() if socket.AF_INET6 in wildcards else []
    ips4 = interface_ips() if socket.AF_INET in wildcards else []
    turns = chain.from_iterable(zip_longest(ips6, ips4))
    outward = [ip for ip in turns if ip is not None and not is_loopback(ip)]
    return (*outward[: ADDRESSES_MAX - 1], "127.0.0.1" if socket.AF_INET in wildcards else "::1")
