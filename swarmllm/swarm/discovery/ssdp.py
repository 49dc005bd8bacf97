"""Asks the default gateway where its UPnP description is (SSDP), and hears nobody else.

miniupnpc can search too, but it then fetches a description from whoever answers, at whatever address that
one names: any machine of the local network could have this one send requests wherever it likes. Here an
answer counts only if it comes from the gateway and names the gateway.
"""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress

SEARCH_S = 3.0
_GROUP = "239.255.255.250"
_PORT = 1900
_ANSWER_MAX_BYTES = 2048
_ANSWERS_MAX = 256
_TTL = 2
_TARGETS = (
    "urn:schemas-upnp-org:device:InternetGatewayDevice:1",
    "urn:schemas-upnp-org:device:InternetGatewayDevice:2",
    "urn:schemas-upnp-org:service:WANIPConnection:1",
    "urn:schemas-upnp-org:service:WANPPPConnection:1",
)


def is_at(url: str, gateway: str) -> bool:
    """Whether it is a plain http URL whose host is that very address."""
    form = rf"http://{re.escape(gateway)}(?::[1-9][0-9]{{0,4}})?/[!-~]{{0,512}}"
    return re.fullmatch(form, url) is not None


def location(datagram: bytes, gateway: str) -> str | None:
    """What an answer of the gateway names, if that is at the gateway."""
    first, *headers = datagram.decode("latin-1").split("\r\n")
    if not re.fullmatch(r"HTTP/1\.[01] 200( .{0,64})?", first):
        return None
    for line in headers:
        name, _, value = line.partition(":")
        if name.strip().lower() == "location":
            url = value.strip()
            return url if is_at(url, gateway) else None
    return None


def description_url(gateway: str, own_ip: str, search_s: float = SEARCH_S) -> str | None:
    """None: the gateway does not answer. Blocks that long at most. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.bind((own_ip, 0))
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton(own_ip))
        asking.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, _TTL)
        # Some gateways answer the group only, and a host's firewall may let in only who was asked itself.
        for host in (_GROUP, gateway):
            for target in _TARGETS:
                with suppress(OSError):
                    asking.sendto(_question(target), (host, _PORT))
        deadline = time.monotonic() + search_s
        for _ in range(_ANSWERS_MAX):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return None
            asking.settimeout(left_s)
            try:
                datagram, (ip, _) = asking.recvfrom(_ANSWER_MAX_BYTES)
            except TimeoutError:
                return None
            except ConnectionError:  # the gateway has no such port
                continue
            if ip == gateway and (url := location(datagram, gateway)):
                return url
    return None


def _question(target: str) -> bytes:
    lines = (
        "M-SEARCH * HTTP/1.1",
        f"HOST: {_GROUP}:{_PORT}",
        'MAN: "ssdp:discover"',
        "MX: 1",
        f"ST: {target}",
    )
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()
