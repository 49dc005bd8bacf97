"""Keeps out of memory what packages import when they are imported, and this project never uses: of py-libp2p
its QUIC and WebSocket transports (with aioquic and trio-websocket), mDNS (with zeroconf) and automatic TLS
certificates (with requests), of multiaddr its resolver of names (with dnspython and a second HTTP client;
addresses are looked up in `swarm.discovery.addresses`), of httpx its command line (with rich), of
pycryptodome cffi (with pycparser), of gguf its vocabularies (with yaml), of quart and flask their templates
(jinja2). That is about a fifth of a daemon's memory.

Stand-ins have the names that the rest of a package imports of these modules. They can do nothing, and say
so. The version of py-libp2p is pinned (pyproject.toml); `tests/test_left_out.py` looks whether each name is
there. What the rest of this project uses, though a package need not, is a stand-in only while that package is
imported (`stands_in`).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Final

STAND_INS: Final[dict[str, tuple[str, ...]]] = {
    "libp2p.transport.quic": (),
    "libp2p.transport.quic.config": ("QUICTransportConfig",),
    "libp2p.transport.quic.exceptions": ("QUICStreamClosedError", "QUICStreamResetError"),
    "libp2p.transport.quic.stream": ("QUICStream",),
    "libp2p.transport.quic.transport": ("QUICTransport",),
    "libp2p.transport.quic.utils": ("is_quic_multiaddr",),
    "libp2p.security.tls.autotls.acme": ("ACMEClient", "compute_b36_peer_id"),
    "libp2p.security.tls.autotls.broker": ("BrokerClient",),
    "libp2p.transport.websocket": (),
    "libp2p.transport.websocket.transport": ("WebsocketTransport",),
    "libp2p.transport.websocket.connection": ("P2PWebSocketConnection",),
    "libp2p.discovery.mdns": (),
    "libp2p.discovery.mdns.mdns": ("MDNSDiscovery", "create_mdns_discovery"),
    "gguf.vocab": (),
    "gguf.utility": (),
    "gguf.metadata": (),
}
"""By module: what others import of it."""
TEMPLATES: Final[dict[str, tuple[str, ...]]] = {
    "jinja2": ("BaseLoader", "Environment", "FileSystemLoader", "Template", "TemplateNotFound"),
    "jinja2.loaders": ("BaseLoader",),
}
"""What quart and flask import of jinja2. They use it in templates alone, which the HTTP edge has none of."""
HTTPX_COMMAND_LINE: Final = "httpx._main"
"""httpx does without it where it cannot be imported."""
RESOLVERS: Final = "multiaddr.resolvers"
CFFI: Final = "cffi"
"""pycryptodome does without it (with ctypes); other packages use its compiled half alone."""


class LeftOut(Exception):
    """What a name stands for is left out. An exception, because some of them are caught by others."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} is left out (swarmllm.left_out)")


class NoAddresses:
    """A resolver of py-libp2p's, which makes one for each dial, that knows no name: a peer's address with a
    name is not dialled."""

    async def resolve(self, _address: object, _options: object = None) -> list[object]:
        return []


def leave_out() -> None:
    """Before the packages are imported. What is in use already stays."""
    for name, names in STAND_INS.items():
        if name.partition(".")[0] not in sys.modules:
            sys.modules[name] = _stand_in(name, names)
    if "multiaddr" not in sys.modules:
        sys.modules[RESOLVERS] = _stand_in(RESOLVERS, ())
        sys.modules[RESOLVERS].__dict__["DNSResolver"] = NoAddresses
    if "Crypto" not in sys.modules and CFFI not in sys.modules:
        sys.modules[CFFI] = None  # type: ignore[assignment]
    if "httpx" not in sys.modules:
        sys.modules[HTTPX_COMMAND_LINE] = None  # type: ignore[assignment]


@contextmanager
def stands_in(modules: dict[str, tuple[str, ...]], package: str) -> Iterator[None]:
    """While `package` is imported; `modules` can be imported for good afterwards. What is in use already
    stays."""
    if package in sys.modules or any(name in sys.modules for name in modules):
        yield
        return
    sys.modules.update({name: _stand_in(name, names) for name, names in modules.items()})
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def _stand_in(name: str, names: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update({each: _left_out(each) for each in names})
    return module


def _left_out(name: str) -> type[LeftOut]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (LeftOut,), {})
