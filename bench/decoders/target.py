"""One decoder of bytes from outside: what may be raised, and what to start from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swarmllm_proto.errors import ProtocolError

Decode = Callable[[bytes], object]
NODE_ID = "12D3KooWD3eckifWpRn9wQpMG9R9hX3sD158z7EqHWmweQAJU5SA"
ADDRESS = f"/ip4/192.0.2.7/tcp/8810/p2p/{NODE_ID}"


@dataclass(frozen=True)
class Target:
    """`decode(data)` may return anything; `refusals` are the only exceptions it may raise."""

    decode: Decode
    refusals: tuple[type[Exception], ...] = (ProtocolError,)
    seeds: Mapping[str, bytes] = field(default_factory=dict)
    """Name -> bytes to damage, a name that ends in .json for JSON."""
