"""Samples of what stages say of their rows, and of the fields that go with it."""

from __future__ import annotations

from common_samples import MODEL_ID, NODE_A, NODE_B, REQUEST_ID, SAMPLING, demo_signature

from swarmllm_proto import swarm
from swarmllm_proto.row_commitments import pipeline_digest, signed

STAGES = (
    swarm.Stage(node_id=NODE_A, start=0, end=4, commits=True),
    swarm.Stage(node_id=NODE_B, start=4, end=12, commits=True),
)
COMMITMENT = signed(
    swarm.RowsCommitment(
        request_id=REQUEST_ID,
        stage=1,
        position=96,
        n_rows=34,
        sent=bytes(range(64)),
        received=bytes(range(64, 128)),
        signature=bytes(64),
    ),
    pipeline_digest(REQUEST_ID, MODEL_ID, NODE_A, STAGES),
    demo_signature,
)
COMMITTING_RECORD = swarm.NodeRecord(
    node_id=NODE_A, sequence=14, capability=swarm.NodeCapability(commits=True)
)
COMMITTING_ASSIGNMENT = swarm.PipelineAssignment(
    request_id=REQUEST_ID,
    model_id=MODEL_ID,
    origin=NODE_A,
    stages=STAGES,
    n_prompt_tokens=130,
    sampling=SAMPLING,
)
COMMITTED_PIECE = swarm.RowsPiece(
    request_id=REQUEST_ID, known=True, digest=bytes(range(32)), commitment=bytes(range(9))
)
