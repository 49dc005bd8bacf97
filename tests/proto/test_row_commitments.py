"""What a stage signs of its rows says who, which request, which rows; a change of any of these shows."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from blake3 import blake3

from swarmllm_proto.codec import decode_job, encode_job
from swarmllm_proto.errors import BadMessage
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.limits import COMMITMENT_MAX, SWARM_HEADER_MAX
from swarmllm_proto.row_commitments import (
    STRETCH_ROWS,
    STRETCHES_MAX,
    RowsCommitment,
    is_signed_by,
    pipeline_digest,
    signed,
    stretch_digests,
)
from swarmllm_proto.swarm import Stage

NODE = NodeId("12D3KooW9pNAk8aiBuGVQtWRdbkLmo5qVL3e2h5UxbN2Nz9ttwiw")
OTHER = NodeId("12D3KooWT3gYEvLJyx1FyyHqrmvdy1tMjpgxmu9aSeKMEuafQtyC")
STAGES = (Stage(node_id=NODE, start=0, end=4), Stage(node_id=OTHER, start=4, end=12))
PIPELINE = pipeline_digest("r", "0" * 64, OTHER, STAGES)  # type: ignore[arg-type]


def sign(content: bytes) -> bytes:
    return blake3(NODE.encode() + content).digest(64)


def verify(node_id: NodeId, content: bytes, signature: bytes) -> bool:
    return signature == blake3(node_id.encode() + content).digest(64)


def commitment(**changes: Any) -> RowsCommitment:
    fields: dict[str, Any] = {"request_id": "r", "stage": 1, "position": 64, "n_rows": 40, "sent": bytes(64)}
    return RowsCommitment(**(fields | {"received": b"r" * 64, "signature": bytes(64)} | changes))


def test_its_signature_is_its_nodes() -> None:
    told = signed(commitment(), PIPELINE, sign)
    assert is_signed_by(told, PIPELINE, NODE, verify)
    assert not is_signed_by(told, PIPELINE, OTHER, verify)
    assert not is_signed_by(commitment(), PIPELINE, NODE, verify)


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 2},
        {"position": 96},
        {"n_rows": 41},
        {"sent": b"s" * 64},
        {"received": bytes(64)},
        {"sent": b"", "received": b"r" * 64},
        {"sent": b"r" * 64, "received": b""},
    ],
)
def test_it_says_nothing_else(change: dict[str, Any]) -> None:
    told = signed(commitment(), PIPELINE, sign)
    assert not is_signed_by(msgspec.structs.replace(told, **change), PIPELINE, NODE, verify)


@pytest.mark.parametrize(
    "other",
    [
        pipeline_digest("q", "0" * 64, OTHER, STAGES),  # type: ignore[arg-type]
        pipeline_digest("r", "1" * 64, OTHER, STAGES),  # type: ignore[arg-type]
        pipeline_digest("r", "0" * 64, NODE, STAGES),  # type: ignore[arg-type]
        pipeline_digest("r", "0" * 64, OTHER, STAGES[:1]),  # type: ignore[arg-type]
        pipeline_digest("r", "0" * 64, OTHER, (Stage(node_id=NODE, start=0, end=41), STAGES[1])),  # type: ignore[arg-type]
    ],
)
def test_it_says_nothing_of_another_request(other: bytes) -> None:
    assert not is_signed_by(signed(commitment(), PIPELINE, sign), other, NODE, verify)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"position": 33}, "position"),
        ({"n_rows": 32}, "sent"),
        ({"sent": bytes(63)}, "sent"),
        ({"received": bytes(96)}, "received"),
        ({"sent": b"", "received": b""}, "sent"),
        ({"n_rows": 0}, "n_rows"),
        ({"n_rows": 4097}, "n_rows"),
        ({"signature": bytes(63)}, "signature"),
    ],
)
def test_what_cannot_be_is_refused_with_its_field(change: dict[str, Any], field: str) -> None:
    header = msgspec.msgpack.encode({"type": "RowsCommitment"} | {**fields_of(commitment()), **change})
    with pytest.raises(BadMessage) as caught:
        decode_job(header)
    assert caught.value.field == field


def fields_of(told: RowsCommitment) -> dict[str, Any]:
    return {name: getattr(told, name) for name in told.__struct_fields__}


def test_the_largest_one_fits() -> None:
    digests = bytes(32 * STRETCHES_MAX)
    told = commitment(
        request_id="x" * 64,
        stage=255,
        position=2**31 - 32,
        n_rows=STRETCHES_MAX * STRETCH_ROWS,
        sent=digests,
        received=digests,
    )
    header, _ = encode_job(told)
    assert len(header) <= COMMITMENT_MAX <= SWARM_HEADER_MAX
    assert decode_job(header) == told
    assert len(stretch_digests(digests)) == STRETCHES_MAX
