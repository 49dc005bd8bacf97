"""Moves running requests of this node off stages whose node is about to give up their layers.

A node that stops in order, or is about to unload layers, says first that it does not have them any more, and
goes on running what it runs. This node sees that in its record, and has such a request broken off where
another pipeline is there for it: the node that takes the stage's place fetches what the other one has
computed (`prefix.stage_holders`), while that is still there. Nobody is to blame. Where there is no other
pipeline the request stays where it is.

Then it has the nodes that take over fetch KV of its latest prompts, which nobody asks for now.

Requests move one after the other, so that each route counts those that were moved before, and their KV does
not compete for the way.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Protocol

import trio

from swarmllm.errors import NodeBusy, NoPipeline, StageMoved
from swarmllm.models.layers import LayerRange, covers
from swarmllm.pipeline.origin.attempts import Attempts
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.lifecycle import ChainState, RequestState
from swarmllm.pipeline.origin.requests import Attempt, OriginRequest, OriginRequests
from swarmllm.pipeline.prefix.kept_prompts import KeptPrompt
from swarmllm.pipeline.repair.standbys import may_be_repeated
from swarmllm.pipeline.request import new_request_id
from swarmllm.pipeline.route.assembly import Assembly
from swarmllm.pipeline.tasks import PipelineTasks
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import ModelId, NodeId
from swarmllm_proto.ipc import Sampling
from swarmllm_proto.swarm import Stage

log = logging.getLogger(__name__)

LOOK_S: Final = 0.05
CAUGHT_UP_S: Final = 5.0
"""What the registry may take to know a record that has come."""
MOVING_S: Final = 5.0
"""What one request may take to go on elsewhere before the next one follows."""
AHEAD_S: Final = 5.0
"""What KV of requests that are over may take: nobody waits for it."""
AGAIN_S: Final = 0.25
"""Until a node is asked again that was busy fetching for others."""
_BEGINS: Final = frozenset({ChainState.ASSIGNING, ChainState.PREFILL, ChainState.REBUILDING})


class FindsRoutes(Protocol):
    async def choose(self, request: OriginRequest) -> Assembly:
        """The pipeline that a request would get now. Raises NoPipeline."""
        ...

    async def elsewhere(self, request: OriginRequest) -> Assembly:
        """The pipeline that a request would get now in place of the one that it has. Raises NoPipeline."""
        ...


@dataclass(slots=True)
class Moves:
    router: Router
    registry: Registry
    requests: OriginRequests
    routes: FindsRoutes
    attempts: Attempts
    tasks: PipelineTasks
    _changed: set[NodeId] = field(default_factory=set)
    _is_moving: bool = False
    _stuck: set[str] = field(default_factory=set)
    """Attempts that were looked at since the swarm last changed."""

    def look(self, changed: NodeId) -> None:
        """That node's record has changed."""
        self._stuck.clear()
        if self.tasks.nursery is None or not self._has_any():
            return
        self._changed.add(changed)
        if not self._is_moving:
            self._is_moving = True
            self.tasks.spawn(self._move_all)

    def _has_any(self) -> bool:
        return bool(len(self.attempts.kept_prompts)) or any(map(_may_move, self.requests.open_attempts()))

    async def _move_all(self) -> None:
        try:
            while self._changed:
                await self._caught_up(self._changed.pop())
                while left := self._to_be_moved():
                    ready = [each for each in left if each.chain is not None and has_begun(each.chain)]
                    if ready:
                        await self._move(ready[0])
                    else:
                        await trio.sleep(LOOK_S)
                with trio.move_on_after(AHEAD_S):
                    await self._fetch_ahead()
        finally:
            self._is_moving = False

    async def _caught_up(self, node_id: NodeId) -> None:
        with trio.move_on_after(CAUGHT_UP_S):
            while self.registry.content(node_id) is not self.router.records().get(node_id):  # noqa: ASYNC110
                await trio.sleep(LOOK_S)

    def _to_be_moved(self) -> list[Attempt]:
        """With a stage on a node that does not say any more that it has its layers; those that have given no
        token yet included."""
        return [
            attempt
            for attempt in self.requests.open_attempts()
            if _may_move(attempt)
            and attempt.id not in self._stuck
            and self._is_missing(attempt.request.entry.model_id, attempt.assembly.stages)
        ]

    async def _fetch_ahead(self) -> None:
        """Of requests that are over: one prompt after the other."""
        prompts = self.attempts.kept_prompts
        while kept := prompts.of(self._is_given_up, trio.current_time()):
            prompts.drop(kept[0])
            request = OriginRequest(new_request_id(), kept[0].entry, kept[0].tokens, Sampling(max_tokens=1))
            try:
                assembly = await self.routes.choose(request)
                if len(assembly.stages) > 1:
                    await self.attempts.fetch_ahead(request, assembly)
            except NodeBusy:
                prompts.completed(kept[0])
                await trio.sleep(AGAIN_S)
            except NoPipeline:
                pass

    def _is_given_up(self, kept: KeptPrompt) -> bool:
        return self._is_missing(kept.entry.model_id, kept.stages)

    def _is_missing(self, model_id: ModelId, stages: Iterable[Stage]) -> bool:
        """Whether a node of these says that it does not have its layers, or not all of them."""
        for stage in stages:
            if self.registry.node(stage.node_id) is None:
                continue
            said = self.registry.announced(model_id, stage.node_id)
            held = [] if said is None else [LayerRange(start, end) for start, end in said.ranges]
            if not covers(held, LayerRange(stage.start, stage.end)):
                return True
        return False

    async def _move(self, attempt: Attempt) -> None:
        request, chain = attempt.request, attempt.chain
        assert chain is not None, "it is open"
        self._stuck.add(attempt.id)
        try:
            await self.routes.elsewhere(request)
        except NoPipeline as error:
            log.debug("request %s stays where it is: %s", request.id, error.message)
            return
        if not _may_move(attempt):
            return  # It has ended, or broken, meanwhile.
        log.info("request %s goes on elsewhere: a node gives up layers that it uses", request.id)
        chain.fail(StageMoved("a node gives up layers that the request uses"))
        with trio.move_on_after(MOVING_S):
            while request.state is not RequestState.ENDED:
                if request.current not in (None, attempt) and request.state is RequestState.DECODE:
                    break
                await trio.sleep(LOOK_S)


def has_begun(chain: Chain) -> bool:
    return chain.state is ChainState.DECODE


def _may_move(attempt: Attempt) -> bool:
    """Whether another pipeline may go on with what this one's other stages keep. Exact requests use no KV of
    other nodes, so moving them saves nothing."""
    chain, request = attempt.chain, attempt.request
    if chain is None or attempt is not request.current or not may_be_repeated(request):
        return False
    is_cut = len(attempt.context.view.stages) > 1 and attempt.context.wants == "tokens"
    return is_cut and (has_begun(chain) or chain.state in _BEGINS)
