"""The golden bytes are what this version writes and reads; other versions and languages are held to the same
files."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import get_args

import msgspec
import numpy as np
import pytest

from swarmllm_proto import codec, file_digests, ipc, swarm
from swarmllm_proto.frames import Frame, FrameDecoder
from swarmllm_proto.neighbours import decode_neighbour
from swarmllm_proto.tensors import decode_tensor

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors"


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("write_vectors", VECTORS / "write_vectors.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


script = load_script()
expected: dict[str, bytes] = dict(script.vectors())


def read(path: str) -> bytes:
    return (VECTORS / path).read_bytes()


def read_frame(path: str) -> Frame:
    decoder = FrameDecoder()
    [frame] = decoder.feed(read(path))
    decoder.eof()
    return frame


def test_every_golden_file_belongs_to_a_sample_and_every_sample_has_one() -> None:
    assert {str(path.relative_to(VECTORS)) for path in VECTORS.rglob("*.bin")} == set(expected)


@pytest.mark.parametrize("path", expected)
def test_encoding_gives_the_golden_bytes(path: str) -> None:
    assert expected[path] == read(path)


@pytest.mark.parametrize(("name", "message", "payload"), script.IPC_MESSAGES)
def test_golden_ipc_frame_decodes_to_its_message(
    name: str, message: ipc.AnyDaemonMessage | ipc.AnyWorkerMessage, payload: bytes
) -> None:
    frame = read_frame(f"ipc/{name}.bin")
    decoded: object
    if isinstance(message, ipc.DaemonMessage):
        decoded = codec.decode_daemon_message(frame)
    else:
        decoded = codec.decode_worker_message(frame)
    assert decoded == message
    assert bytes(frame.payload) == payload


@pytest.mark.parametrize(("name", "message", "payload"), script.JOB_MESSAGES)
def test_golden_job_frame_decodes_to_its_message(
    name: str, message: swarm.JobMessage, payload: bytes
) -> None:
    frame = read_frame(f"job/{name}.bin")
    decoded = codec.decode_job(frame.header, frame.payload)
    if isinstance(decoded, swarm.LayerForward) and isinstance(message, swarm.LayerForward):
        assert decoded.digest == frame.header[-swarm.DIGEST_SIZE :]
        message = msgspec.structs.replace(message, digest=decoded.digest)
    assert decoded == message
    assert bytes(frame.payload) == payload


def fields_of(message: object) -> dict[str, object]:
    return {name: getattr(message, name) for name in type(message).__struct_fields__}  # type: ignore[attr-defined]


def test_golden_bodies_decode_to_their_messages() -> None:
    assert codec.decode_record(read("record/node-record.bin")) == script.RECORD
    assert codec.decode_request(read("request/pipeline-assignment.bin")) == script.REQUEST
    assert codec.decode_response(read("response/pipeline-ack.bin")) == script.RESPONSE


@pytest.mark.parametrize(("name", "array"), script.TENSORS)
def test_golden_tensor_decodes_to_its_array(
    name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    decoded = decode_tensor(read(f"tensor/{name}.bin"))
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@pytest.mark.parametrize(("name", "message"), script.NEIGHBOUR_MESSAGES)
def test_golden_neighbour_bodies_decode_to_their_messages(name: str, message: object) -> None:
    assert decode_neighbour(read(f"neighbour/{name}.bin"), type(message)) == message  # type: ignore[type-var]


def test_golden_pieces_decode_to_their_messages() -> None:
    assert codec.decode_request(read("request/fetch-piece.bin")) == script.FETCH_PIECE
    assert codec.decode_response(read("response/piece.bin")) == script.PIECE
    assert codec.decode_request(read("request/fetch-digests.bin")) == script.FETCH_DIGESTS
    assert codec.decode_response(read("response/digests.bin")) == script.DIGESTS


def test_golden_pictures_decode_to_their_messages() -> None:
    assert codec.decode_request(read("request/vision-encode.bin")) == script.VISION_ENCODE
    assert codec.decode_response(read("response/vision-encode.bin")) == script.VISION_ENCODED


def test_every_message_of_the_protocol_has_a_golden_file() -> None:
    shown = {
        *(type(message) for _, message, _ in (*script.IPC_MESSAGES, *script.JOB_MESSAGES)),
        *(type(script.RECORD), type(script.REQUEST), type(script.RESPONSE)),
        *(type(script.FETCH_PIECE), type(script.PIECE)),
        *(type(script.FETCH_DIGESTS), type(script.DIGESTS)),
        *(type(script.PROBE_STAGE), type(script.STAGE_STATE)),
        *(type(script.VISION_ENCODE), type(script.VISION_ENCODED)),
    }
    unions = (
        *(ipc.AnyDaemonMessage, ipc.AnyWorkerMessage),
        *(swarm.JobMessage, file_digests.AnyRequest, file_digests.AnyResponse),
    )
    assert shown == {
        *(message for union in unions for message in get_args(union)),
        swarm.NodeRecord,
    }


def test_every_field_takes_another_value_than_its_default_in_some_golden_file() -> None:
    messages = [message for _, message, _ in (*script.IPC_MESSAGES, *script.JOB_MESSAGES)]
    messages += [script.RECORD, script.REQUEST, script.RESPONSE, script.RECORD.capability, script.SAMPLING]
    messages += [
        script.FETCH_PIECE,
        script.PIECE,
        *script.RECORD.files,
        *script.RECORD.prefix_caches,
        script.VISION_ENCODE,
    ]
    messages += [script.FETCH_DIGESTS, script.DIGESTS, *script.FETCH_DIGESTS.known]
    unseen = {(type(m).__name__, name) for m in messages for name in type(m).__struct_fields__}
    for message in messages:
        defaults = dict(
            zip(
                reversed(type(message).__struct_fields__),
                reversed(type(message).__struct_defaults__),
                strict=False,
            )
        )
        unseen -= {
            (type(message).__name__, name)
            for name, value in fields_of(message).items()
            if name not in defaults or value != defaults[name]
        }
    # `v` moves with the protocol; the digest is filled in by the encoder; what nobody asked for has id 0.
    unasked = {
        (name, "id") for name in ("Ready", "Arrived", "Relay", "Turned", "LinkLost", "PrefixManifestUpdate")
    }
    assert {pair for pair in unseen if pair[1] not in ("v", "digest")} == unasked
