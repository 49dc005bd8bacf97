"""Signed statements of a stage about the rows that it received and sent.

A commitment is made after the rows have left and before anybody knows which of them are looked at later. It
goes to the stage after it, which compares it with what came, and to the origin of the request. Two nodes that
contradict each other can be told apart where one of them has the other's signature.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Final, Protocol

import msgspec
from blake3 import blake3
from msgspec import Meta

from swarmllm_proto.identifiers import ModelId, NodeId, Sign, Verify
from swarmllm_proto.ipc.base import Position, RequestId, StageIndex
from swarmllm_proto.swarm.base import DIGEST_SIZE, WIRE_VERSION

STRETCH_ROWS: Final = 32
"""Rows of one digest. Stretches begin at multiples of it."""
STRETCHES_MAX: Final = 128
"""Of one commitment."""
_DOMAIN: Final = b"swarmllm rows 1:"
_Digests = Annotated[bytes, Meta(max_length=STRETCHES_MAX * DIGEST_SIZE)]


class RowsCommitment(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """Job message, stage -> the stage after it, and -> origin: BLAKE3 of the rows [position, position +
    n_rows), 32 rows at a time (the last ones may be fewer), as f32, little-endian."""

    v: int = WIRE_VERSION
    request_id: RequestId
    stage: StageIndex
    position: Position
    n_rows: Annotated[int, Meta(ge=1, le=STRETCHES_MAX * STRETCH_ROWS)]
    sent: _Digests = b""
    """32 bytes for each stretch, of the rows that left the stage; empty: it is the last one, and sends
    none."""
    received: _Digests = b""
    """Of the rows that came to it; empty: it got tokens, or does not have the rows any more."""
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    """Ed25519, by the stage's node, over `signed_content`."""

    def __post_init__(self) -> None:
        if self.position % STRETCH_ROWS:
            raise ValueError(f"field `position`: {self.position} is no multiple of {STRETCH_ROWS}")
        due = DIGEST_SIZE * -(-self.n_rows // STRETCH_ROWS)
        for name, digests in (("sent", self.sent), ("received", self.received)):
            if len(digests) not in (0, due):
                raise ValueError(f"field `{name}`: {len(digests)} bytes where {due} or none are due")
        if not self.sent and not self.received:
            raise ValueError("field `sent`: it is about no rows")


class StageLike(Protocol):
    @property
    def node_id(self) -> NodeId: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


def pipeline_digest(request_id: str, model_id: ModelId, origin: NodeId, stages: Iterable[StageLike]) -> bytes:
    """Of what all nodes of a request know of it: a signature about one request says nothing of another."""
    parts = [request_id.encode(), model_id.encode(), origin.encode()]
    for stage in stages:
        parts += [stage.node_id.encode(), str(stage.start).encode(), str(stage.end).encode()]
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(4, "little"))
        hasher.update(part)
    return hasher.digest()


def signed_content(commitment: RowsCommitment, pipeline: bytes) -> bytes:
    numbers = (commitment.stage, commitment.position, commitment.n_rows, len(commitment.sent))
    return b"".join(
        (
            _DOMAIN,
            pipeline,
            *(number.to_bytes(4, "little") for number in numbers),
            commitment.sent,
            commitment.received,
        )
    )


def signed(commitment: RowsCommitment, pipeline: bytes, sign: Sign) -> RowsCommitment:
    """The same with its signature; whatever stood there is ignored."""
    return msgspec.structs.replace(commitment, signature=sign(signed_content(commitment, pipeline)))


def is_signed_by(commitment: RowsCommitment, pipeline: bytes, node_id: NodeId, verify: Verify) -> bool:
    return verify(node_id, signed_content(commitment, pipeline), commitment.signature)


def stretch_digests(digests: bytes) -> Sequence[bytes]:
    return [digests[at : at + DIGEST_SIZE] for at in range(0, len(digests), DIGEST_SIZE)]
