"""Golden bytes: one file per message, written once and then only ever decoded.

    python proto/vectors/write_vectors.py

writes the files that are missing and exits with 1, touching nothing, where an existing file would change:
those bytes are what other versions and other implementations read, so they move only together with
WIRE_VERSION (delete the file then).

`ipc/`, `job/` and `data-plane/` hold whole frames, `record/`, `request/`, `response/`, `neighbour/` and
`outline/` bodies, `gossip/` signed statements (with a signature that is none), `tensor/` tensors, `blocks/`
the chained hashes of a prompt, one after the other. The samples are in the modules beside this one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
from commitment_samples import COMMITTING_RECORD
from common_samples import HIDDEN, MODEL_ID, TOKEN_IDS, demo_signature
from ipc_samples import IPC_MESSAGES
from swarm_samples import (
    ACCEPTING_RECORD,
    CONTROL_FRAMES,
    GIVING_PROJECTOR_RECORD,
    GPU_RECORD,
    HEARING_RECORD,
    JOB_MESSAGES,
    KERNEL_CLASS_RECORD,
    KV_TYPE_RECORD,
    LAYING_OUT_RECORD,
    NEIGHBOUR_MESSAGES,
    OUTLINE,
    PACKING_RECORD,
    PUBLISHED_RECORD,
    RECORD,
    REQUESTS,
    RESPONSES,
    SEEING_RECORD,
    SHARING_RECORD,
    SPREADING_RECORD,
    STATEMENTS,
)

from swarmllm_proto import swarm
from swarmllm_proto.blocks import extend_block_hashes, root_hash
from swarmllm_proto.codec import encode_ipc, encode_job, encode_record, encode_request, encode_response
from swarmllm_proto.envelope import seal
from swarmllm_proto.frames import FrameKind, encode_frame
from swarmllm_proto.ipc.base import RowFormat
from swarmllm_proto.limits import SWARM_HEADER_MAX, SWARM_PAYLOAD_MAX
from swarmllm_proto.router_messages import encode_neighbour
from swarmllm_proto.tensors import Tensor, pack_rows, rounded, tensor_bytes

FOLDER = Path(__file__).resolve().parent

TENSORS: list[tuple[str, Tensor]] = [
    ("f32", HIDDEN),
    ("f16", HIDDEN.astype(np.float16)),
    ("i32", TOKEN_IDS),
    ("empty", np.empty((0, 896), np.float32)),
]
_WIDE = np.arange(-96, 96, dtype=np.float32).reshape(3, 64) / 7
PACKED_ROWS: list[tuple[str, RowFormat, Tensor]] = [
    ("q8_0", "q8_0", rounded(_WIDE)),
    ("lossless", "lossless", _WIDE),
]
BLOCK_PROMPT = tuple((7 * i * i) % 32_000 for i in range(150))
"""Two complete blocks and a rest."""


def encode_job_frame(message: swarm.JobMessage, payload: bytes) -> bytes:
    header, body = encode_job(message, payload)
    return b"".join(encode_frame(header, body, header_max=SWARM_HEADER_MAX, payload_max=SWARM_PAYLOAD_MAX))


def control_frame(kind: FrameKind, content: bytes | msgspec.Struct) -> bytes:
    header = content if isinstance(content, bytes) else msgspec.msgpack.encode(content)
    return b"".join(encode_frame(bytes((kind,)) + header))


def vectors() -> Iterator[tuple[str, bytes]]:
    """(path below this folder, bytes) of every golden file."""
    for name, message, payload in IPC_MESSAGES:
        yield f"ipc/{name}.bin", b"".join(encode_ipc(message, payload))
    for name, job, payload in JOB_MESSAGES:
        yield f"job/{name}.bin", encode_job_frame(job, payload)
    for name, kind, content in CONTROL_FRAMES:
        yield f"data-plane/{name}.bin", control_frame(kind, content)
    yield "record/node-record.bin", encode_record(RECORD)
    yield "record/packing-node-record.bin", encode_record(PACKING_RECORD)
    yield "record/gpu-node-record.bin", encode_record(GPU_RECORD)
    yield "record/laying-out-node-record.bin", encode_record(LAYING_OUT_RECORD)
    yield "record/sharing-node-record.bin", encode_record(SHARING_RECORD)
    yield "record/accepting-node-record.bin", encode_record(ACCEPTING_RECORD)
    yield "record/committing-node-record.bin", encode_record(COMMITTING_RECORD)
    yield "record/published-node-record.bin", encode_record(PUBLISHED_RECORD)
    yield "record/spreading-node-record.bin", encode_record(SPREADING_RECORD)
    yield "record/kv-type-node-record.bin", encode_record(KV_TYPE_RECORD)
    yield "record/kernel-class-node-record.bin", encode_record(KERNEL_CLASS_RECORD)
    yield "record/seeing-node-record.bin", encode_record(SEEING_RECORD)
    yield "record/giving-projector-node-record.bin", encode_record(GIVING_PROJECTOR_RECORD)
    yield "record/hearing-node-record.bin", encode_record(HEARING_RECORD)
    for name, request in REQUESTS:
        yield f"request/{name}.bin", encode_request(request)
    for name, response in RESPONSES:
        yield f"response/{name}.bin", encode_response(response)
    for name, statement in STATEMENTS:
        yield f"gossip/{name}.bin", seal(statement, demo_signature)
    yield "outline/outline.bin", msgspec.msgpack.encode(OUTLINE)
    for name, neighbour in NEIGHBOUR_MESSAGES:
        yield f"neighbour/{name}.bin", encode_neighbour(neighbour)
    for name, array in TENSORS:
        yield f"tensor/{name}.bin", tensor_bytes(array)
    for name, row_format, rows in PACKED_ROWS:
        path = f"packed-rows/{name}.bin"
        # Another version of zstd may write other bytes; what is read must be the same.
        is_kept = row_format == "lossless" and (FOLDER / path).exists()
        yield path, (FOLDER / path).read_bytes() if is_kept else pack_rows(rows, row_format)
    yield (
        "blocks/two-of-150-tokens.bin",
        b"".join(extend_block_hashes(root_hash(MODEL_ID, 4, 12), BLOCK_PROMPT)),
    )


def main() -> int:
    changed = [
        path for path, data in vectors() if (FOLDER / path).exists() and (FOLDER / path).read_bytes() != data
    ]
    if changed:
        print("these golden bytes would change:", *changed, sep="\n  ", file=sys.stderr)
        return 1
    for path, data in vectors():
        target = FOLDER / path
        if not target.exists():
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(data)
            print(f"{path}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
