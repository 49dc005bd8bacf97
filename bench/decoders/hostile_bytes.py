"""Bytes that almost mean something: golden vectors damaged a little, and right shapes with wrong values.

Three kinds, because each reaches code the others do not: noise, golden bytes with a few of them changed,
inserted, removed or repeated, and well-formed JSON and MessagePack with one value replaced. Shared by the
fuzz test of the protocol, with a small budget, and by `bench.fuzz`, with a large one.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec

from swarmllm_proto.frames import Frame, FrameDecoder

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors"

NASTY: list[Any] = [
    *(None, True, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), -0.0, 1e308),
    *("", "x" * 300, "\0", "layer", "Load", [], [[]], [[0, 0]], [0] * 300, {}, {"": {}}, {"type": "Load"}),
]
NESTINGS = (b"[", b'{"a":', b"\x91", b"\x81\xa1a")
"""JSON and MessagePack that goes one level deeper."""
MESSAGE_PACK = ("record/", "request/", "response/", "neighbour/", "job/")


def frames_of(data: bytes) -> list[Frame]:
    return FrameDecoder(header_max=1 << 16, payload_max=1 << 16).feed(data)


def golden() -> dict[str, bytes]:
    """Golden files, and the bare headers of those that are frames."""
    found = {str(path.relative_to(VECTORS)): path.read_bytes() for path in sorted(VECTORS.rglob("*.bin"))}
    headers = {
        f"{name} header": frames_of(data)[0].header
        for name, data in found.items()
        if name.startswith(("ipc/", "job/"))
    }
    return found | headers


def noise(rng: random.Random) -> bytes:
    return rng.randbytes(rng.choice((0, 1, 4, 8, 30, 200)))


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    if rng.random() < 0.03:
        # More layers than any decoder can hold in its head; in the place of a value, if it meets one.
        at = rng.randrange(len(changed) + 1)
        changed[at : at + rng.randint(0, 2)] = rng.choice(NESTINGS) * rng.choice((200, 3000))
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(changed) + 1)
        match rng.randrange(5):
            case 0 if changed:
                changed[at % len(changed)] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xFF, rng.randrange(256)))
            case 1 if changed:
                changed[at % len(changed)] ^= 1 << rng.randrange(8)
            case 2:
                changed[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                del changed[at : at + rng.randint(1, 8)]
            case _:
                changed[at:at] = changed[: rng.randint(0, 40)]
    return bytes(changed)


def with_wrong_value(value: Any, rng: random.Random) -> Any:
    """The same structure with one node replaced."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: with_wrong_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], with_wrong_value(value[index], rng), *value[index + 1 :]]
    return rng.choice(NASTY)


def reshaped(name: str, data: bytes, rng: random.Random) -> bytes | None:
    """The same structure with a wrong value in it; None for golden bytes that have no such structure."""
    if name.endswith(".json") or (name.startswith("ipc/") and name.endswith("header")):
        return json.dumps(with_wrong_value(json.loads(data), rng)).encode()
    if name.startswith(MESSAGE_PACK) and (name.endswith("header") or not name.startswith("job/")):
        return msgspec.msgpack.encode(with_wrong_value(msgspec.msgpack.decode(data), rng))
    return None
