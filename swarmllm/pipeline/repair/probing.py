"""Who still works on a request of which nothing has been heard?

Jobs are not acknowledged one by one, which would cost every token a message per hop. Instead a silence is
looked into: every stage is asked whether it knows the request and whether anything of it happens there. If
a stage does not answer or knows nothing, it is to blame; if nothing happens anywhere, a job has been
dropped on its way. Either way the request fails within the time in which every forward should have been
acknowledged (`rr_ack_timeout_s`), long before anybody stops waiting for a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import trio

from swarmllm.errors import NodeUnreachable, RemoteError, SwarmLLMError
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import ProbeStage, StageState

MOVED_BYTES = 16 * 1024
"""More than the signs of life between two nodes add up to between two probes: part of a large job."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Why a request cannot be waited for."""

    error: SwarmLLMError
    culprit: NodeId | None = None


async def find_fault(
    router: Router, request_id: str, node_ids: frozenset[NodeId], is_busy_here: bool, timeout_s: float
) -> ProbeResult | None:
    """Ask `node_ids` (other nodes). None: somebody is at work."""
    states: dict[NodeId, StageState | None] = {}
    async with trio.open_nursery() as nursery:

        async def ask(node_id: NodeId) -> None:
            states[node_id] = await _ask(router, node_id, request_id, timeout_s)

        for node_id in node_ids:
            nursery.start_soon(ask, node_id)
    for node_id, state in sorted(states.items()):
        if state is None:
            error = NodeUnreachable(
                f"node {node_id} does not say how the request stands within {timeout_s:g} s"
            )
            return ProbeResult(error, node_id)
        if not state.known:
            return ProbeResult(RemoteError(f"node {node_id} does not know the request any more"), node_id)
    if is_busy_here or any(state is not None and state.busy for state in states.values()):
        return None
    return ProbeResult(NodeUnreachable("a job was lost between two stages: nobody works on it"))


async def _ask(router: Router, node_id: NodeId, request_id: str, timeout_s: float) -> StageState | None:
    try:
        with trio.fail_after(timeout_s):
            body = await router.request(
                node_id, encode_request(ProbeStage(request_id=request_id)), timeout_s=timeout_s
            )
        answer = decode_response(body)
    except (trio.TooSlowError, SwarmLLMError, ProtocolError):
        return None
    return answer if isinstance(answer, StageState) and answer.request_id == request_id else None
