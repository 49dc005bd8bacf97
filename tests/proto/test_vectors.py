"""The golden bytes are what this version writes and reads; other versions and languages are held to the same
files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest

from swarmllm_proto import codec, file_digests, ipc, swarm
from swarmllm_proto.envelope import Details, Envelope, Heartbeat, unseal
from swarmllm_proto.file_digests import FetchDigests
from swarmllm_proto.frames import Frame, FrameDecoder, FrameKind, Hello
from swarmllm_proto.router_messages import decode_neighbour
from swarmllm_proto.tensors import Tensor, decode_tensor, unpack_rows

VECTORS = Path(__file__).resolve().parents[2] / "proto" / "vectors"


sys.path.insert(0, str(VECTORS))

import ipc_samples  # noqa: E402 (beside the golden files, in no package)
import swarm_samples  # noqa: E402
import write_vectors  # noqa: E402
from commitment_samples import COMMITTING_RECORD  # noqa: E402
from common_samples import EXACT, FINGERPRINTED, SAMPLING, SHORT_MEMORY, demo_signature  # noqa: E402

expected: dict[str, bytes] = dict(write_vectors.vectors())


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


@pytest.mark.parametrize(("name", "message", "payload"), ipc_samples.IPC_MESSAGES)
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


@pytest.mark.parametrize(("name", "message", "payload"), swarm_samples.JOB_MESSAGES)
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


def test_the_golden_record_decodes_to_its_message() -> None:
    assert codec.decode_record(read("record/node-record.bin")) == swarm_samples.RECORD
    sharing = codec.decode_record(read("record/sharing-node-record.bin"))
    assert sharing == swarm_samples.SHARING_RECORD
    assert codec.decode_record(read("record/packing-node-record.bin")) == swarm_samples.PACKING_RECORD
    accepting = codec.decode_record(read("record/accepting-node-record.bin"))
    assert accepting == swarm_samples.ACCEPTING_RECORD
    published = codec.decode_record(read("record/published-node-record.bin"))
    assert published == swarm_samples.PUBLISHED_RECORD
    spreading = codec.decode_record(read("record/spreading-node-record.bin"))
    assert spreading == swarm_samples.SPREADING_RECORD
    of_kv = codec.decode_record(read("record/kv-type-node-record.bin"))
    assert of_kv == swarm_samples.KV_TYPE_RECORD
    of_class = codec.decode_record(read("record/kernel-class-node-record.bin"))
    assert of_class == swarm_samples.KERNEL_CLASS_RECORD
    assert codec.decode_record(read("record/seeing-node-record.bin")) == swarm_samples.SEEING_RECORD
    laying_out = codec.decode_record(read("record/laying-out-node-record.bin"))
    assert laying_out == swarm_samples.LAYING_OUT_RECORD
    assert codec.decode_record(read("record/gpu-node-record.bin")) == swarm_samples.GPU_RECORD


def test_parts_of_pictures_without_a_grid_decode_as_nodes_of_before_write_them() -> None:
    assert msgspec.convert([[], 2], ipc.PicturePart) == ipc.PicturePart(n_rows=2)
    assert msgspec.convert([[7, 9], 0], ipc.PicturePart) == ipc.PicturePart((7, 9))


@pytest.mark.parametrize(("name", "message"), swarm_samples.REQUESTS)
def test_golden_requests_decode_to_their_messages(name: str, message: object) -> None:
    assert codec.decode_request(read(f"request/{name}.bin")) == message


@pytest.mark.parametrize(("name", "message"), swarm_samples.RESPONSES)
def test_golden_responses_decode_to_their_messages(name: str, message: object) -> None:
    assert codec.decode_response(read(f"response/{name}.bin")) == message


def test_the_golden_outline_decodes_to_its_message() -> None:
    outline = msgspec.msgpack.decode(read("outline/outline.bin"), type=swarm.Outline)
    assert outline == swarm_samples.OUTLINE


@pytest.mark.parametrize(("name", "statement"), swarm_samples.STATEMENTS)
def test_golden_statements_decode_to_what_was_signed(
    name: str, statement: Envelope | Heartbeat | Details
) -> None:
    def verify(node_id: str, content: bytes, signature: bytes) -> bool:
        return node_id == statement.node_id and signature == demo_signature(content)

    assert unseal(read(f"gossip/{name}.bin"), type(statement), verify) == statement


@pytest.mark.parametrize(("name", "kind", "content"), swarm_samples.CONTROL_FRAMES)
def test_golden_frames_of_the_data_plane_are_what_their_kind_says(
    name: str, kind: FrameKind, content: bytes | Hello
) -> None:
    frame = read_frame(f"data-plane/{name}.bin")
    assert FrameKind(frame.header[0]) == kind
    header = bytes(frame.header[1:])
    assert content == (header if isinstance(content, bytes) else msgspec.msgpack.decode(header, type=Hello))
    assert not frame.payload


@pytest.mark.parametrize(("name", "array"), write_vectors.TENSORS)
def test_golden_tensor_decodes_to_its_array(
    name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> None:
    decoded = decode_tensor(read(f"tensor/{name}.bin"))
    assert decoded.dtype == array.dtype
    assert decoded.shape == array.shape
    assert decoded.tobytes() == array.tobytes()


@pytest.mark.parametrize(("name", "row_format", "rows"), write_vectors.PACKED_ROWS)
def test_golden_packed_rows_are_read_as_their_rows(name: str, row_format: str, rows: Tensor) -> None:
    n_rows, width = rows.shape
    decoded = unpack_rows(read(f"packed-rows/{name}.bin"), n_rows=n_rows, width=width)
    assert decoded.tobytes() == rows.tobytes()


@pytest.mark.parametrize(("name", "message"), swarm_samples.NEIGHBOUR_MESSAGES)
def test_golden_neighbour_bodies_decode_to_their_messages(name: str, message: object) -> None:
    assert decode_neighbour(read(f"neighbour/{name}.bin"), type(message)) == message  # type: ignore[type-var]


def test_every_message_of_the_protocol_has_a_golden_file() -> None:
    tables = (*ipc_samples.IPC_MESSAGES, *swarm_samples.JOB_MESSAGES)
    bodies = (*swarm_samples.REQUESTS, *swarm_samples.RESPONSES)
    shown = {*(type(each[1]) for each in (*tables, *bodies)), type(swarm_samples.RECORD)}
    unions = (
        *(ipc.AnyDaemonMessage, ipc.AnyWorkerMessage),
        *(swarm.JobMessage, file_digests.AnyRequest, file_digests.AnyResponse),
    )
    assert shown == {
        *(message for union in unions for message in get_args(union)),
        swarm.NodeRecord,
    }


def test_every_field_takes_another_value_than_its_default_in_some_golden_file() -> None:
    messages: list[msgspec.Struct] = [
        each[1] for each in (*ipc_samples.IPC_MESSAGES, *swarm_samples.JOB_MESSAGES)
    ]
    messages += [each[1] for each in (*swarm_samples.REQUESTS, *swarm_samples.RESPONSES)]
    messages += [each[1] for each in swarm_samples.STATEMENTS]
    messages += [swarm_samples.RECORD_DETAILS, *swarm_samples.RECORD_DETAILS.fetched]
    messages += [each[2] for each in swarm_samples.CONTROL_FRAMES if isinstance(each[2], Hello)]
    record = swarm_samples.RECORD
    messages += [record, record.capability, *record.models, *record.files, *record.prefix_caches]
    sharing = swarm_samples.SHARING_RECORD
    messages += [sharing, *(sharing.shares or ()), *(swarm_samples.PUBLISHED_RECORD.shares or ())]
    messages += [*swarm_samples.PUBLISHED_RECORD.models, *swarm_samples.KV_TYPE_RECORD.models]
    messages += swarm_samples.KERNEL_CLASS_RECORD.models
    messages.append(swarm_samples.SEEING_RECORD)
    spreading = swarm_samples.SPREADING_RECORD
    messages += [spreading, *(spreading.shared_files or ()), *(spreading.fetched_files or ())]
    messages += [part for shared in spreading.shared_files or () for part in shared.parts]
    messages += [swarm_samples.PACKING_RECORD.capability, swarm_samples.ACCEPTING_RECORD.capability]
    messages += [COMMITTING_RECORD.capability, swarm_samples.LAYING_OUT_RECORD.capability]
    messages.append(swarm_samples.GPU_RECORD.capability)
    messages += [swarm_samples.OUTLINE, SAMPLING, EXACT, FINGERPRINTED, SHORT_MEMORY]
    messages += [run for message in messages if isinstance(message, FetchDigests) for run in message.known]
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
        (name, "id")
        for name in ("Ready", "Arrived", "Relay", "Turned", "LinkLost", "PrefixManifestUpdate", "AtWork")
    }
    assert {pair for pair in unseen if pair[1] not in ("v", "digest")} == unasked
