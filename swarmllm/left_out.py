"""Keeps out of memory what packages import when they are imported, and this project never uses: of py-libp2p
its QUIC transport (with aioquic) and automatic TLS certificates (with requests), of dnspython DNS over QUIC
and over HTTPS (with a second HTTP client), of httpx its command line (with rich). That is a ninth of a
daemon's memory.

Stand-ins have the names that the rest of a package imports of these modules. They can do nothing, and say
so. The version of py-libp2p is pinned (pyproject.toml); `tests/test_left_out.py` looks whether each name is
there.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
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
}
"""By module: what others import of it."""
HTTPX_COMMAND_LINE: Final = "httpx._main"
"""httpx does without it where it cannot be imported."""


class LeftOut(Exception):
    """What a name stands for is left out. An exception, because some of them are caught by others."""

    def __init__(self, *_arguments: object, **_options: object) -> None:
        raise NotImplementedError(f"{type(self).__name__} is left out (swarmllm.left_out)")


def leave_out() -> None:
    """Before the packages are imported. What is in use already stays."""
    if "libp2p" not in sys.modules:
        for name, names in STAND_INS.items():
            sys.modules[name] = _stand_in(name, names)
    if "dns.quic" not in sys.modules:
        with suppress(ImportError):
            dns = importlib.import_module("dns")
            dns.quic = sys.modules["dns.quic"] = _stand_in("dns.quic", ())  # type: ignore[attr-defined]
            # Its version is not pinned: whatever dnspython's own modules name is there.
            dns.quic.__dict__.update(have_quic=False, __getattr__=_left_out)
            # Its own switch for what an installation has or lacks.
            importlib.import_module("dns._features").force("doh", False)
    if "httpx" not in sys.modules:
        sys.modules[HTTPX_COMMAND_LINE] = None  # type: ignore[assignment]


def _stand_in(name: str, names: tuple[str, ...]) -> ModuleType:
    module = ModuleType(name)
    module.__dict__.update({each: _left_out(each) for each in names})
    return module


def _left_out(name: str) -> type[LeftOut]:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (LeftOut,), {})
