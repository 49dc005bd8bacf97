"""Asks the stages of a silent request which of them still work on it.

Jobs are not acknowledged one by one, which would cost every token a message per hop. Instead a silence is
investigated: every stage is asked whether it knows the request and works on it. If a stage does not answer or
does not know the request, it is to blame; if no stage works on it, a job was lost on its way. Either way the
request fails within the time in which every forward should have been acknowledged (`rr_ack_timeout_s`), long
before anybody stops waiting for a token.

Each stage also says how many rows it has received and sent. So the request waits for a known node: the last
one that has received the row and has not sent it on. Where two neighbours contradict each other, one of them
lies, and which one cannot be known. A stage that is busy is not to blame, but a request that waits for it
much longer than was planned is better done elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import trio
from msgspec import UNSET, UnsetType

from swarmllm.errors import NodeUnreachable, RemoteError, SwarmLLMError
from swarmllm.swarm.router import Router
from swarmllm_proto.codec import decode_response, encode_request
from swarmllm_proto.errors import ProtocolError
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.swarm import ProbeStage, Stage, StageState

MOVED_BYTES = 16 * 1024
"""More than the signs of life between two nodes add up to between two probes: part of a large job."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The state of a request that a client waits for."""

    error: SwarmLLMError | None = None
    """Why it cannot be waited for; None: somebody is at work."""
    culprit: NodeId | None = None
    waits_for: frozenset[NodeId] = frozenset()
    """The node that has the next row, or two of which one must have it; empty: unknown."""


async def probe(
    router: Router,
    request_id: str,
    stages: Sequence[Stage],
    n_due: int | None,
    n_sent: int | UnsetType,
    is_busy_here: bool,
    timeout_s: float,
) -> ProbeResult:
    """Ask the other nodes of these stages. `n_due`: of so many rows the results of all but the last have
    come; None: nobody counts. `n_sent`: so many have left this node; unset: unknown."""
    here = router.node_id
    states: dict[NodeId, StageState | None] = {}
    async with trio.open_nursery() as nursery:

        async def ask(node_id: NodeId) -> None:
            states[node_id] = await _ask(router, node_id, request_id, timeout_s)

        for node_id in {stage.node_id for stage in stages} - {here}:
            nursery.start_soon(ask, node_id)
    return judge_states(stages, here, states, n_due, n_sent, is_busy_here, timeout_s)


def judge_states(
    stages: Sequence[Stage],
    here: NodeId,
    states: Mapping[NodeId, StageState | None],
    n_due: int | None,
    n_sent: int | UnsetType,
    is_busy_here: bool,
    timeout_s: float,
) -> ProbeResult:
    """What follows from the answers; None: there was none within `timeout_s`."""
    for node_id, state in sorted(states.items()):
        if state is None:
            error = NodeUnreachable(
                f"node {node_id} does not say how the request stands within {timeout_s:g} s"
            )
            return ProbeResult(error, node_id)
        if not state.known:
            return ProbeResult(RemoteError(f"node {node_id} does not know the request any more"), node_id)
    if is_busy_here:
        return ProbeResult()
    reported = {node_id: state for node_id, state in states.items() if state is not None}
    waits_for = _waits_for(stages, here, reported, n_due, n_sent)
    if any(reported[node_id].busy for node_id in waits_for or reported):
        return ProbeResult(waits_for=waits_for)
    lost = NodeUnreachable("a job was lost between two stages: nobody works on it")
    if len(waits_for) != 1:
        return ProbeResult(lost, waits_for=waits_for)
    (culprit,) = waits_for
    return ProbeResult(NodeUnreachable(f"node {culprit} does not do its part"), culprit, waits_for)


def _waits_for(
    stages: Sequence[Stage],
    here: NodeId,
    reported: Mapping[NodeId, StageState],
    n_due: int | None,
    n_sent: int | UnsetType,
) -> frozenset[NodeId]:
    others = [stage.node_id for stage in stages if stage.node_id != here]
    if len(set(others)) == 1:
        return frozenset(others)
    if n_due is None or len(set(others)) < len(others):
        return frozenset()
    has_it = [index for index, node in enumerate(others) if _is_at_least(reported[node].n_received, n_due)]
    if not has_it:
        # This node knows whether the first of the others was sent it; of a later one nobody does.
        was_sent = _is_at_least(n_sent, n_due) and reported[others[0]].n_received is not UNSET
        return frozenset(others[:1] if was_sent else ())
    last = has_it[-1]
    passed_on = reported[others[last]].n_sent
    # What the last one says to have sent has not come here; of two others one says what is not so.
    is_known = passed_on is not UNSET and passed_on < n_due
    return frozenset(others[last : last + (1 if is_known else 2)])


def _is_at_least(n_rows: int | UnsetType, least: int) -> bool:
    return n_rows is not UNSET and n_rows >= least


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
