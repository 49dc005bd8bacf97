"""Checks what stages of this node's finished requests computed, one after the other and behind everything
else, and notes the outcome.

What is drawn is held by its stages for as long as it takes to collect the rows of one stretch. Then they are
computed again: by this node if it has the layers, else by another holder, and by a third one before anybody
is accused on another's word. No client waits for any of it.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import trio

from swarmllm.errors import SwarmLLMError
from swarmllm.pipeline.check.evidence import Collector, NotThere
from swarmllm.pipeline.check.recompute import Replies, Task, compute_here
from swarmllm.pipeline.check.sampling import Chance, draw_stage, draw_stretch, rate
from swarmllm.pipeline.check.verdict import Evidence, Match, Verdict, before_computing, compare, judge
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.stage.walker import RequestContext
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.scheduling.route import composes
from swarmllm.swarm.peers.trust import Deed, Note
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

PENDING_MAX = 4
"""Checks that wait for their turn; more are dropped. Each keeps 8 MiB of rows at most."""
IDLE_WAIT_S = 30.0
"""So long a check waits for this node to have nothing else to do."""
LOOK_S = 0.25
HOLDERS_ASKED = 3
"""Nodes that are asked to compute rows again, until two agree."""


@dataclass(frozen=True, slots=True)
class _Pending:
    context: RequestContext
    stage: int
    evidence: Evidence

    @property
    def node_id(self) -> NodeId:
        return self.context.view.stages[self.stage].node_id

    @property
    def before(self) -> NodeId:
        """Of the first stage the last one, which gives it tokens."""
        return self.context.view.stages[self.stage - 1].node_id

    @property
    def after(self) -> NodeId:
        return self.context.view.stages[self.stage + 1].node_id


@dataclass(slots=True)
class Checker:
    router: Router
    registry: Registry
    compute: Compute
    settings: PipelineSettings
    counts: PipelineStatistics
    suspects: Suspects
    note: Note
    trust_of: Callable[[NodeId], float]
    is_busy: Callable[[], bool]
    """Whether requests run on this node."""
    chance: Chance = field(default_factory=lambda: random.SystemRandom().random)
    replies: Replies = field(default_factory=Replies)
    _pending: deque[_Pending] = field(default_factory=deque)
    _has_work: trio.Event = field(default_factory=trio.Event)

    def draws(self, context: RequestContext) -> int | None:
        """The stage that is to be checked when this request is over."""
        base = self.settings.check_rate
        if base <= 0 or context.wants != "tokens" or len(self._pending) >= PENDING_MAX:
            return None
        view = context.view
        return draw_stage(
            view.stages, view.node_id, lambda node_id: rate(self.trust_of(node_id), base), self.chance
        )

    async def collect(self, chain: Chain, stage: int) -> None:
        """Take what a check needs from stages that hold a request that is over."""
        context, tokens = chain.context, chain.computed_tokens
        n_rows = len(tokens)
        if stage == 0 and not context.view.is_here(context.view.last):
            # What the last stage told the first one is known to neither this node nor anybody else.
            n_rows = context.n_given_tokens
        stretch = draw_stretch(n_rows, 4 * context.n_embd, self.chance, chain.n_cached_tokens)
        if stretch is None:
            self.counts.checks_dropped += 1
            return
        try:
            evidence = await Collector(
                self.router, self.compute, context, tokens, self.settings.prefill_chunk_tokens
            ).collect(stage, stretch)
        except (NotThere, SwarmLLMError) as error:
            log.info("request %s is not checked: %s", context.request_id, error or "rows are not there")
            self.counts.checks_dropped += 1
            return
        self._pending.append(_Pending(context, stage, evidence))
        self._has_work.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._has_work.wait()
            await self._quiet()
            pending = self._pending.popleft()
            if not self._pending:
                self._has_work = trio.Event()
            try:
                await self._check(pending)
            except SwarmLLMError as error:
                log.info("a check of %s came to nothing: %s", pending.node_id, error.message)
                self.counts.checks_dropped += 1

    async def _quiet(self) -> None:
        for _ in range(int(IDLE_WAIT_S / LOOK_S)):
            if not self.is_busy():
                return
            await trio.sleep(LOOK_S)

    async def _check(self, pending: _Pending) -> None:
        evidence = pending.evidence
        verdict = before_computing(evidence)
        found = (verdict, Match.WRONG) if verdict is not None else await self._computed(pending)
        if found is not None:
            self._charge(pending, *found)

    async def _computed(self, pending: _Pending) -> tuple[Verdict, Match] | None:
        """None: it is this stage or the one that computed the rows again, and both have been charged."""
        context, evidence = pending.context, pending.evidence
        view = context.view
        task = Task(
            context,
            view.layers(pending.stage),
            evidence.came_in,
            evidence.n_rows,
            self.settings.prefill_chunk_tokens,
        )
        if composes(self.compute.loaded(context.model.model_id), task.layers):
            return judge(evidence, await compute_here(self.compute, task))
        found: list[tuple[NodeId, Tensor]] = []
        for node_id in self._others(pending):
            try:
                rows = await self.replies.compute_at(node_id, self.router, task)
            except SwarmLLMError as error:
                log.info("%s does not compute the rows of a check: %s", node_id, error.message)
                continue
            verdict, match = judge(evidence, rows)
            if not found and match is not Match.WRONG:
                return verdict, match
            found.append((node_id, rows))
            agreed = self._agreed(pending, found)
            if agreed is not None:
                return agreed
        if not found:
            return Verdict.UNKNOWN, Match.WRONG
        # It or the one that computed the rows again.
        self._dispute(pending.node_id, found[0][0])
        return None

    def _agreed(self, pending: _Pending, found: list[tuple[NodeId, Tensor]]) -> tuple[Verdict, Match] | None:
        """What the newest of several holders decides: two that agree outvote a third."""
        *earlier, (_, rows) = found
        own = pending.evidence.came_in[-pending.evidence.n_rows :]
        verdict, match = judge(pending.evidence, rows)
        if match is not Match.WRONG:
            for node_id, _ in earlier:
                self._wrong(node_id, "two others computed other rows")
            return verdict, match
        if any(compare(rows, other, own) is not Match.WRONG for _, other in earlier):
            return verdict, match
        return None

    def _others(self, pending: _Pending) -> list[NodeId]:
        """Holders that have no part in it, the most trusted first."""
        view = pending.context.view
        layers = view.layers(pending.stage)
        held = self.registry.held(pending.context.model.model_id)
        able = [
            node_id
            for node_id in sorted(self.registry.connected() - view.node_ids)
            if composes(held.get(node_id, ()), layers)
        ]
        return sorted(able, key=self.trust_of, reverse=True)[:HOLDERS_ASKED]

    def _charge(self, pending: _Pending, verdict: Verdict, match: Match) -> None:
        if verdict is Verdict.UNKNOWN:
            self.counts.checks_dropped += 1
            return
        if verdict is Verdict.RIGHT:
            self.counts.checked += 1
            self.note(pending.node_id, Deed.CHECKED, match)
        elif verdict is Verdict.WRONG:
            self._wrong(pending.node_id, f"layers {pending.context.view.layers(pending.stage)}")
        else:
            is_before = verdict is Verdict.DISPUTED_BEFORE
            self._dispute(pending.node_id, pending.before if is_before else pending.after)

    def _wrong(self, node_id: NodeId, detail: str) -> None:
        self.counts.checked += 1
        self.counts.checks_wrong += 1
        self.note(node_id, Deed.WRONG_RESULT, detail)
        self.suspects.doubt([node_id], trio.current_time())

    def _dispute(self, node_id: NodeId, other: NodeId) -> None:
        """One of them lies: both lose a little, and routes do without both as far as they can."""
        self.counts.checked += 1
        self.counts.checks_disputed += 1
        pair = {node_id, other} - {self.router.node_id}
        for each in sorted(pair):
            self.note(each, Deed.DISPUTED, f"with {max(pair - {each}, default=other)}")
        self.suspects.doubt(sorted(pair), trio.current_time())
