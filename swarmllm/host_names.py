"""Parses names of hosts before anything resolves them.

A name that breaks the rules of DNS is refused where it is read: resolvers raise UnicodeError for it, which is
no error of a network.
"""

from __future__ import annotations

import ipaddress
from typing import NewType

import idna

from swarmllm_proto.identifiers import is_dns_name, parse_ip

HostName = NewType("HostName", str)
"""An IP address without brackets, or a DNS name in its ASCII form and in lower case."""


def parse_host_name(text: str) -> HostName:
    """Names in other alphabets become their xn-- form. Raises ValueError that says what is wrong."""
    try:
        return HostName(str(parse_ip(text)))
    except ValueError:
        if ":" in text or "%" in text:
            raise ValueError("an IP address of the host is not valid") from None
    name = text.lower()
    if not name.isascii() or "xn--" in name:
        try:
            name = idna.encode(name, uts46=True).decode("ascii")
        except UnicodeError:
            raise ValueError("the name of the host is not valid (IDNA)") from None
    if not is_dns_name(name):
        raise ValueError(
            "the name of the host is not valid: labels of 1 to 63 letters, digits and hyphens between dots"
        )
    if name.rstrip(".").rpartition(".")[2].isdigit():
        raise ValueError("an IP address of the host is not valid")
    return HostName(name)


def is_loopback_host(host: HostName) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
