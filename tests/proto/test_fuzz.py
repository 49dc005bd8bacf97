"""Every decoder against bytes of a fixed seed: only ProtocolError may come out, and never a hang.

Three kinds of bytes, because each reaches code the others do not: noise, golden vectors with a few bytes
changed, inserted, removed or repeated, and well-formed JSON and MessagePack of the right shape with wrong
values in it."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmllm_proto import codec
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.neighbours import (
    DialBackRequest,
    DialBackResponse,
    PeerExchangeRequest,
    PeerExchangeResponse,
    decode_neighbour,
)
from swarmllm_proto.tensors import decode_tensor

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors"
N_PER_VECTOR = 250
N_NOISE = 3000

NOTHING = memoryview(b"")
NASTY: list[Any] = [
    *(None, True, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, 0.5, float("nan"), float("inf"), -0.0, 1e308),
    *("", "x" * 300, "\0", "layer", "Load", [], [[]], [[0, 0]], [0] * 300, {}, {"": {}}, {"type": "Load"}),
]


def frames_of(data: bytes) -> list[Frame]:
    return FrameDecoder(header_max=1 << 16, payload_max=1 << 16).feed(data)


def decode_worker_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_worker_message(frame)


def decode_daemon_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_daemon_message(frame)


def decode_job_stream(data: bytes) -> None:
    for frame in frames_of(data):
        codec.decode_job(frame.header, frame.payload)


DECODERS: dict[str, Callable[[bytes], object]] = {
    "worker stream": decode_worker_stream,
    "daemon stream": decode_daemon_stream,
    "worker header": lambda data: codec.decode_worker_message(Frame(data, NOTHING)),
    "daemon header": lambda data: codec.decode_daemon_message(Frame(data, NOTHING)),
    "job stream": decode_job_stream,
    "job header": codec.decode_job,
    "record": codec.decode_record,
    "request": codec.decode_request,
    "response": codec.decode_response,
    "tensor": decode_tensor,
    "peer exchange request": lambda data: decode_neighbour(data, PeerExchangeRequest),
    "peer exchange response": lambda data: decode_neighbour(data, PeerExchangeResponse),
    "dial back request": lambda data: decode_neighbour(data, DialBackRequest),
    "dial back response": lambda data: decode_neighbour(data, DialBackResponse),
}


def corpus() -> dict[str, bytes]:
    """Golden files, and the bare headers of those that are frames."""
    found = {str(path.relative_to(VECTORS)): path.read_bytes() for path in sorted(VECTORS.rglob("*.bin"))}
    headers = {
        f"{name} header": frames_of(data)[0].header
        for name, data in found.items()
        if name.startswith(("ipc/", "job/"))
    }
    return found | headers


def mutated(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
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


def hostile_bytes(rng: random.Random) -> Iterator[bytes]:
    for _ in range(N_NOISE):
        yield rng.randbytes(rng.choice((0, 1, 4, 8, 30, 200)))
    for name, data in corpus().items():
        for _ in range(N_PER_VECTOR):
            yield mutated(data, rng)
        if name.startswith("ipc/") and name.endswith("header"):
            for _ in range(N_PER_VECTOR):
                yield json.dumps(with_wrong_value(json.loads(data), rng)).encode()
        elif name.endswith("header") or name.startswith(("record/", "request/", "response/", "neighbour/")):
            for _ in range(N_PER_VECTOR):
                yield msgspec.msgpack.encode(with_wrong_value(msgspec.msgpack.decode(data), rng))


@pytest.mark.slow
def test_only_protocol_errors_escape_from_any_decoder() -> None:
    rng = random.Random(20261121)
    n_refused = dict.fromkeys(DECODERS, 0)
    n_accepted = dict.fromkeys(DECODERS, 0)
    for data in hostile_bytes(rng):
        for name, decode in DECODERS.items():
            try:
                decode(data)
            except ProtocolError as error:
                n_refused[name] += 1
                if not error.field:
                    pytest.fail(f"{name} names no field for {data!r}")
            except Exception as error:
                pytest.fail(f"{name} let {error!r} out for {data!r}")
            else:
                n_accepted[name] += 1
    assert all(n_refused.values()), n_refused
    # Mutations that stay legal prove that the corpus reaches behind the first check of every decoder.
    assert all(n_accepted.values()), n_accepted
