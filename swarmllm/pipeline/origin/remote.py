"""A pipeline of one stage on another node: the whole decode loop runs in the worker there.

No job walks. The origin sends the prompt's token ids once, and the worker generates as if the request were
its own node's (it shares batches, and the KV of prompts that begin alike); tokens stream back as they come,
and nothing waits for the way between the two nodes: what a round trip costs is paid once, not per token. The
stage sees the prompt, which it could compute from embedded rows as well, since it holds the embedding.
"""

from __future__ import annotations

from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.generation import Shape
from swarmllm.pipeline.origin.lifecycle import ChainEvent
from swarmllm.pipeline.stage.session import Session
from swarmllm_proto.codec import encode_job
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import RemoteGenerateRequest, StageBlocks
from swarmllm_proto.tensors import encode_tensor


class RemoteChain(Chain):
    """The origin's side; the other is `remote_stage`."""

    shape: Shape = "remote-generate"

    def prefixes_of(self, node_id: NodeId) -> tuple[StageBlocks, ...]:
        """The worker there sees the tokens and knows by itself what it has."""
        return ()

    def start(self, session: Session, n_known_blocks: int = 0) -> None:
        self._pass(ChainEvent.START)
        self._begin(session)
        request = RemoteGenerateRequest(request_id=self.context.request_id, n_tokens=len(self.prompt))
        stage = self.context.view.stages[0]
        session.relay(stage.node_id, *encode_job(request, encode_tensor(self.prompt)))
