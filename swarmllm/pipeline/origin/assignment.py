"""Asks every stage to take part before anything is computed; unless all accept, the request goes elsewhere.

The assignment carries the names of the prompt's blocks, and each answer says of how many of them the stage
has rows already (see `prefix.names`). What all have need not be computed again.

A stage that cannot be asked or does not answer in time is treated like one that refuses: it is better to
learn this now than to wait for a first token that never comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec
import trio
from msgspec import UNSET

from swarmllm.errors import (
    DeadlineExceeded,
    NodeBusy,
    NodeRefused,
    NodeUnreachable,
    RemoteError,
    SwarmLLMError,
)
from swarmllm.pipeline.origin.output import Blamed
from swarmllm.pipeline.prefix.names import PrefixNames, give_names
from swarmllm.pipeline.prefix.stage_fetching import FetchesForStages
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import KeptElsewhere, PipelineAck, PipelineAssignment, StageBlocks
from swarmllm_proto.tensors import Tensor


class Assigner(Protocol):
    """The chain whose stages are asked."""

    blamed: Blamed

    def prefixes_of(self, node_id: NodeId) -> tuple[StageBlocks, ...]: ...


async def assign_with_prefixes(
    compute: Compute,
    router: Router,
    assignment: PipelineAssignment,
    context: RequestContext,
    assigner: Assigner,
    *,
    timeout_s: float,
    fetches: FetchesForStages,
    sources: Sequence[KeptElsewhere] = (),
) -> tuple[int, dict[NodeId, PipelineAck]]:
    """Ask every stage to take part. `sources`: where stages may fetch KV of the prompt's beginning. Returns
    the number of the prompt's first blocks of which all of them have rows, and the acknowledgements of the
    other nodes. Raises as `assign` does."""
    view = context.view
    n_blocks: list[int] = []

    async def bring_here() -> None:
        prefixes = assigner.prefixes_of(view.node_id)
        await fetches.bring(context, prefixes, sources)
        n_blocks.append(await give_names(compute, context, prefixes))

    acks: dict[NodeId, PipelineAck] = {}
    refusal: SwarmLLMError | None = None
    async with trio.open_nursery() as nursery:
        if any(map(view.is_here, range(len(view.stages)))):
            # Beside the others: all stages look for their rows, and fetch them, at the same time.
            nursery.start_soon(bring_here)
        try:
            acks = await assign(
                router,
                assignment,
                timeout_s=timeout_s,
                blamed=assigner.blamed,
                prefixes_of=assigner.prefixes_of,
                sources=sources,
            )
        except SwarmLLMError as error:
            refusal = error
            nursery.cancel_scope.cancel()
    if refusal is not None:
        raise refusal
    return min([*n_blocks, *(ack.n_prefix_blocks for ack in acks.values())]), acks


async def assign_fetches(
    router: Router,
    assignment: PipelineAssignment,
    context: RequestContext,
    names: PrefixNames,
    tokens: Tensor,
    *,
    timeout_s: float,
    fetches: FetchesForStages,
    sources: Sequence[KeptElsewhere],
) -> int:
    """Have the stages fetch KV of a prompt that no request needs now. Returns the number of its first blocks
    of which all of them have rows then. Raises as `assign` does, SwarmLLMError of this node."""
    mine = names.of_node(router.node_id, tokens)
    await fetches.bring(context, mine, sources, is_awaited=False)
    n_here = [await fetches.n_blocks_here(context, mine)] if mine else []
    acks = await assign(
        router,
        msgspec.structs.replace(assignment, only_fetches=True),
        timeout_s=timeout_s,
        prefixes_of=lambda node_id: names.of_node(node_id, tokens),
        sources=sources,
    )
    return min([*n_here, *(ack.n_prefix_blocks for ack in acks.values())], default=0)


async def assign(
    router: Router,
    assignment: PipelineAssignment,
    *,
    timeout_s: float,
    blamed: Blamed | None = None,
    prefixes_of: Callable[[NodeId], tuple[StageBlocks, ...]] = lambda node_id: (),
    sources: Sequence[KeptElsewhere] = (),
) -> dict[NodeId, PipelineAck]:
    """By node id. Returns when every stage elsewhere has accepted what `prefixes_of` names to its node, too.
    Raises RemoteError (NodeBusy where it may be asked again later) for the first that did not, after
    `blamed` has been told its node id. One that does not reach the next stage is not to blame for that alone:
    nobody here knows which of the two has lost the other."""
    failures: list[SwarmLLMError] = []
    acks: dict[NodeId, PipelineAck] = {}
    async with trio.open_nursery() as nursery:

        async def ask(node_id: NodeId) -> None:
            try:
                theirs = tuple(each for each in sources if assignment.stages[each.stage].node_id == node_id)
                named = msgspec.structs.replace(
                    assignment, prefixes=prefixes_of(node_id), kept_elsewhere=theirs or UNSET
                )
                acks[node_id] = await _ask(router, node_id, named, timeout_s)
            except SwarmLLMError as error:
                if not failures:
                    _blame(Blamed() if blamed is None else blamed, node_id, error, assignment)
                failures.append(error)
                nursery.cancel_scope.cancel()

        for node_id in sorted({stage.node_id for stage in assignment.stages} - {router.node_id}):
            nursery.start_soon(ask, node_id)
    if failures:
        raise failures[0]
    return acks


def _blame(blamed: Blamed, node_id: NodeId, error: SwarmLLMError, assignment: PipelineAssignment) -> None:
    other = error.unreachable if isinstance(error, NodeRefused) else None
    if other is not None and other in {stage.node_id for stage in assignment.stages} - {
        node_id,
        assignment.origin,
    }:
        blamed.separate(node_id, other)
    else:
        blamed.blame(node_id)


async def _ask(
    router: Router, node_id: NodeId, assignment: PipelineAssignment, timeout_s: float
) -> PipelineAck:
    if assignment.stages[-1].node_id != node_id:
        # Only who samples needs to know how, and what came before: stop strings may be quotes from the
        # prompt. Of an exact request a stage needs to know how many rows there will be, and which of them run
        # one by one.
        sampling = assignment.sampling
        assignment = msgspec.structs.replace(
            assignment,
            sampling=Sampling(max_tokens=sampling.max_tokens, exact=True) if sampling.exact else Sampling(),
            n_generated=len(assignment.generated) if sampling.exact else UNSET,
            n_prompt_tokens=assignment.n_prompt_tokens + len(assignment.generated),
            generated=(),
            scored=UNSET,
            prompt=UNSET,
        )
    try:
        with trio.fail_after(timeout_s):
            body = await router.request(node_id, encode_request(assignment), timeout_s=timeout_s)
        ack = decode_response(body)
    except (trio.TooSlowError, DeadlineExceeded):
        raise NodeUnreachable(f"node {node_id} did not acknowledge within {timeout_s:g} s") from None
    except ProtocolError as error:
        raise RemoteError(f"node {node_id} answered nonsense: {error}") from error
    if not isinstance(ack, PipelineAck):
        raise RemoteError(f"node {node_id} answered something else than an acknowledgement")
    if ack.request_id != assignment.request_id or not ack.accepted:
        text = f"node {node_id} refused: {ack.reason or 'no reason given'}"
        if ack.busy:
            raise NodeBusy(text)
        raise NodeRefused(text, unreachable=None if ack.unreachable is UNSET else ack.unreachable)
    return ack
