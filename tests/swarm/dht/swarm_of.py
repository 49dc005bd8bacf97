"""Made-up node ids, and DHTs whose messages are handed over in memory."""

from __future__ import annotations

import random

from libp2p.peer.id import ID

from swarmllm.swarm.discovery.addresses import Address
from swarmllm.swarm.discovery.dht.messages import Contact

HERE = (Address("192.0.2.1", 8810),)


def made_up_id(source: random.Random) -> str:
    """Of the form that an Ed25519 key gives."""
    return str(ID(b"\x00\x24\x08\x01\x12\x20" + source.randbytes(32)))


def contacts(n: int, seed: int = 0) -> list[Contact]:
    source = random.Random(seed)
    return [Contact(made_up_id(source), HERE) for _ in range(n)]
