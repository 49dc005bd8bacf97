"""Twenty requests beside a liar that does not stop: the same for every row of the table of faults."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import trio
from deadlines import DEADLINE_S
from node_ids import A

from bench.common.arithmetic import uncut
from swarmllm.pipeline import Prompt
from swarmllm.swarm.peers.trust import NEUTRAL
from swarmllm_proto.codec import decode_request
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import PipelineAssignment

from .fakes import Swarm

PROMPT = "and what did the others say?"
N_TOKENS = 6
N_REQUESTS = 20
SETTLED = 10
"""So many requests it may take until nobody asks the liar."""


async def answered(swarm: Swarm) -> bool:
    """A request of A: whether its text is that of the uncut model."""
    with trio.fail_after(DEADLINE_S):
        async with swarm[A].pipelines.generate(
            Prompt(text=PROMPT), swarm.entry, Sampling(max_tokens=N_TOKENS)
        ) as generation:
            text = "".join([piece.text async for piece in generation])
    return text == await uncut(PROMPT, N_TOKENS)


async def twenty_requests(swarm: Swarm, liar: NodeId, honest: Collection[NodeId]) -> None:
    """All are answered; from the eleventh on the liar is not even asked; nobody else ends with less trust
    than a stranger; and A is answered as soon as the liar has left."""
    router, request = swarm[A].router, swarm[A].router.request
    asked = 0

    async def counted(node_id: NodeId, body: bytes, **options: Any) -> bytes:
        nonlocal asked
        asked += node_id == liar and isinstance(decode_request(body), PipelineAssignment)
        return await request(node_id, body, **options)

    router.request = counted  # type: ignore[method-assign]
    for index in range(N_REQUESTS):
        before = asked
        assert await answered(swarm)
        assert index < SETTLED or asked == before
    assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in honest)
    swarm.kill(liar)
    assert await answered(swarm)
