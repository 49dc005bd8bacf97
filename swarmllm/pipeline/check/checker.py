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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

import numpy as np
import trio
from msgspec import UNSET

from swarmllm.errors import SwarmLLMError
from swarmllm.models.layers import covers
from swarmllm.pipeline.check.charges import Charges
from swarmllm.pipeline.check.commitments import Commitments
from swarmllm.pipeline.check.equal_bits import are_equal, draw_piece, judge_bits
from swarmllm.pipeline.check.evidence import Collector, EvidenceAbsent, OtherRows, token_evidence
from swarmllm.pipeline.check.likelihood import comparable, is_far, is_plain
from swarmllm.pipeline.check.recompute import RecomputeTask, Replies, TokenTask, compute_here, sample_here
from swarmllm.pipeline.check.repaired import Comparable, comparable_rows
from swarmllm.pipeline.check.sampling import (
    CHECKED_TOKENS,
    DRAWN_TOKENS,
    SINGLE_ROW,
    Budget,
    Chance,
    draw_stage,
    draw_stretch,
    draw_tokens,
    rate,
)
from swarmllm.pipeline.check.tallies import Tallies
from swarmllm.pipeline.check.thresholds import Limits, limits
from swarmllm.pipeline.check.verdict import (
    Evidence,
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    before_computing,
    compare,
    distance,
    judge,
    judge_tokens,
)
from swarmllm.pipeline.check.whole import sample_whole_at, sample_whole_here
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.membership.signer import RowSigner
from swarmllm.swarm.peers.trust import NEUTRAL, Deed, NodeTrust
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
SPARE_SLOTS = 2
"""A check here leaves at least one for a request that comes meanwhile."""
TOLD_S = 5.0
"""By then what a node announces has arrived, where it has just loaded the model with another type of KV."""
HOLDERS_ASKED = 3
"""Nodes that are asked to compute rows again, until two agree."""


@dataclass(frozen=True, slots=True)
class _Pending:
    context: RequestContext
    stage: int
    evidence: Evidence | TokenEvidence
    kv_type: str | None
    """That the stage announced before it could know that it was drawn."""

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

    @property
    def is_greedy(self) -> bool:
        return self.context.sampling.temperature == 0

    @property
    def is_plainly_greedy(self) -> bool:
        """Each token is the likeliest one: no penalty, bias or grammar has a say in it."""
        return self.is_greedy and is_plain(self.context.sampling)


@dataclass(frozen=True, slots=True)
class _Found:
    """What came of computing it again."""

    verdict: Verdict
    match: Match
    results: Tensor | list[Sampled]
    by: NodeId
    is_by_bits: bool = False
    """Kernels of the stage's own class computed an exact request again."""


class NodeLoad(Protocol):
    """What this node has to do."""

    def is_busy(self) -> bool:
        """Whether requests run here."""
        ...

    def room(self) -> Room: ...


@dataclass(slots=True)
class Checker:
    router: Router
    registry: Registry
    compute: Compute
    settings: PipelineSettings
    counts: PipelineStatistics
    suspects: Suspects
    trust: NodeTrust
    here: NodeLoad
    chance: Chance = field(default_factory=lambda: random.SystemRandom().random)
    replies: Replies = field(default_factory=Replies)
    signer: RowSigner | None = None
    commitments: Commitments = field(init=False)
    _charges: Charges = field(init=False)
    _budget: Budget = field(init=False)
    _tallies: Tallies = field(default_factory=Tallies)
    _pending: deque[_Pending] = field(default_factory=deque)
    _has_work: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self._budget = Budget(self.settings.check_rate)
        self._charges = Charges(self.router.node_id, self.trust, self.suspects, self.counts)
        self.commitments = Commitments(self.router, self.registry, self._charges, self.trust, self.signer)

    def draws(self, context: RequestContext, *, is_whole: bool) -> int | None:
        """The stage that is to be checked when this request is over. `is_whole`: another node runs the whole
        model, and has been told the prompt's tokens."""
        base, view = self.settings.check_rate, context.view
        if base <= 0 or context.wants != "tokens" or len(self._pending) >= PENDING_MAX:
            return None
        if len(view.stages) == 1 and not is_whole:
            return None  # Its tokens are nobody else's business.
        return draw_stage(
            view.stages,
            view.node_id,
            lambda node_id: self._budget.scaled(rate(self.trust.score(node_id), base)),
            self.chance,
        )

    def completed(self, chain: Chain) -> None:
        """A request of this node, in which others took part, is over: checks may cost a part of it."""
        n_rows, n_tokens = len(chain.prompt) - chain.n_cached_tokens, len(chain.generated)
        self._budget.served((n_rows + SINGLE_ROW * n_tokens) * chain.context.view.stages[-1].end)

    async def collect(self, chain: Chain, stage: int) -> None:
        """Take what a check needs from stages that hold a request that is over."""
        kv_type = self._kv_type(chain.context, chain.context.view.stages[stage].node_id)
        try:
            evidence = await self._evidence(chain, stage)
        except OtherRows as liar:
            self._charges.wrong(liar.node_id, "it shows other rows than it signed for")
            return
        except (EvidenceAbsent, SwarmLLMError) as error:
            log.info("request %s is not checked: %s", chain.context.request_id, error or "rows are not there")
            evidence = None
        if evidence is None:
            self.counts.checks_dropped += 1
            return
        self._pending.append(_Pending(chain.context, stage, evidence, kv_type))
        self._has_work.set()

    async def _evidence(self, chain: Chain, stage: int) -> Evidence | TokenEvidence | None:
        """Raises EvidenceAbsent, OtherRows, SwarmLLMError."""
        context, tokens, generated = chain.context, chain.computed_tokens, chain.generated
        row_bytes, n_prompt = 4 * context.n_embd, context.n_prompt_tokens
        ledger = await self.commitments.said_by(chain, stage)
        is_asked = ledger is not None and context.view.stages[stage].commits is True
        if is_asked and ledger is not None and not ledger.has_of(stage):
            self._charges.silent(context.view.stages[stage].node_id)
        chunk_tokens = self.settings.prefill_chunk_tokens
        collector = Collector(self.router, self.compute, context, tokens, chunk_tokens, ledger)
        rows: Comparable | None = Comparable(chain.n_cached_tokens, len(tokens))
        if chain.recomputed is not None:
            rows = comparable_rows(
                stage,
                len(context.view.stages),
                chain.recomputed,
                n_due=len(chain.prompt) - 1,
                n_prompt=n_prompt,
                n_rows=len(tokens),
            )
        if rows is None:
            return None
        if stage == context.view.last:
            first = len(context.generated)
            is_drawn = context.sampling.temperature > 0
            drawn = draw_tokens(
                first,
                len(generated),
                n_prompt,
                row_bytes,
                self.chance,
                n_wanted=DRAWN_TOKENS if is_drawn else CHECKED_TOKENS,
                is_ended=chain.is_ended_by_model,
            )
            if drawn is None or context.sampling.mirostat:
                return None  # Mirostat's running limit is known to the stage only.
            if len(context.view.stages) == 1:
                prompt = np.asarray(chain.prompt[:n_prompt], np.int32)
                return token_evidence(
                    prompt, drawn, generated, is_agreed=True, is_ended=chain.is_ended_by_model
                )
            return await collector.collect_tokens(drawn, generated, is_ended=chain.is_ended_by_model)
        n_rows = rows.end
        if stage == 0 and not context.view.is_here(context.view.last):
            # What the last stage told the first one is known to neither this node nor anybody else.
            n_rows = min(n_rows, context.n_given_tokens)
        if context.sampling.exact:
            stretch = draw_piece(n_rows, context.n_prompt_rows, row_bytes, self.chance, rows.first)
        else:
            stretch = draw_stretch(n_rows, row_bytes, self.chance, rows.first)
        return None if stretch is None else await collector.collect(stage, stretch)

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
            if not self.here.is_busy():
                return
            await trio.sleep(LOOK_S)

    async def _check(self, pending: _Pending) -> None:
        evidence = pending.evidence
        verdict = before_computing(evidence)
        if verdict is not None:
            self._charge(pending, verdict, Match.WRONG)
        elif (found := await self._computed(pending)) is not None:
            self._charge(pending, found.verdict, found.match)
            if found.verdict is Verdict.RIGHT:
                self._add_up(pending, found)

    def _add_up(self, pending: _Pending, found: _Found) -> None:
        """Tokens that are possible one by one may be impossible together."""
        evidence = pending.evidence
        if not isinstance(evidence, TokenEvidence) or not evidence.is_agreed:
            return
        assert isinstance(found.results, list)
        sampling, n_vocab = pending.context.sampling, pending.context.n_vocab
        certain = self._tallies.add(
            pending.node_id,
            found.by,
            evidence,
            found.results,
            is_greedy=pending.is_greedy,
            is_far=partial(is_far, sampling=sampling, n_vocab=n_vocab) if is_plain(sampling) else None,
        )
        if certain is None:
            return
        if found.by == self.router.node_id or self._tallies.is_confirmed(pending.node_id, found.by):
            self._charges.wrong(pending.node_id, certain.value)
        elif len(self._others(pending)) < 2:
            self._charges.dispute(pending.node_id, found.by)

    async def _computed(self, pending: _Pending) -> _Found | None:
        """None: it is this stage or the one that computed it again, and both have been charged; or nobody
        could."""
        loaded = self.compute.loaded(pending.context.model.model_id)
        if covers(loaded, pending.context.view.layers(pending.stage)):
            if self.here.room().free_slots < SPARE_SLOTS:
                self.counts.checks_dropped += 1
                return None
            return await self._computed_by(pending, None)
        found: list[tuple[NodeId, _Found]] = []
        for node_id in self._others(pending):
            try:
                newest = await self._computed_by(pending, node_id)
            except SwarmLLMError as error:
                log.info("%s does not compute what a check asks for: %s", node_id, error.message)
                continue
            if newest.match is not Match.WRONG:
                if not newest.is_by_bits and any(earlier.is_by_bits for _, earlier in found):
                    continue  # What is close to a row says nothing of its bits.
                for other, earlier in found:
                    # Two honest ones of unlike classes may stand on both sides of the limits.
                    if not _agree(pending, newest, earlier):
                        self._charges.wrong(other, "two others computed otherwise")
                return newest
            if any(_agree(pending, newest, earlier) for _, earlier in found):
                return newest
            found.append((node_id, newest))
        if found:
            self._charges.dispute(pending.node_id, found[0][0])
        else:
            self.counts.checks_dropped += 1
        return None

    async def _computed_by(self, pending: _Pending, node_id: NodeId | None) -> _Found:
        """None: by this node. Raises SwarmLLMError."""
        exactly = await self._computed_exactly(pending, node_id)
        if exactly is not None:
            return exactly
        context, evidence, chunk_tokens = (
            pending.context,
            pending.evidence,
            self.settings.prefill_chunk_tokens,
        )
        self._budget.spend(_work(evidence) * len(context.view.layers(pending.stage)))
        if isinstance(evidence, TokenEvidence):
            sampled = await self._sampled_by(TokenTask(context, evidence, chunk_tokens), node_id)
            sampled = comparable(sampled, evidence.told, context.sampling)
            return _Found(
                *judge_tokens(evidence, sampled, greedy=pending.is_plainly_greedy),
                sampled,
                node_id or self.router.node_id,
            )
        by = node_id or self.router.node_id
        rows = await self._recomputed_by(pending, evidence, node_id)
        verdict, match = judge(evidence, rows, self._limits(pending, by).least)
        if match is Match.WRONG and judge(evidence, rows)[1] is not Match.WRONG:
            self._budget.spend(_work(evidence) * len(context.view.layers(pending.stage)))
            verdict, match = await self._judged_by_spread(pending, evidence, rows, node_id)
        return _Found(verdict, match, rows, by)

    async def _computed_exactly(self, pending: _Pending, node_id: NodeId | None) -> _Found | None:
        """Bit for bit; None: its bits need not be equal, or are not even equal when it computes twice. Raises
        SwarmLLMError."""
        context, evidence, by = pending.context, pending.evidence, node_id or self.router.node_id
        if not context.kernel_class or self._kernel_class(context, by) != context.kernel_class:
            return None

        async def results() -> Tensor | list[Sampled]:
            n_single = max(0, len(evidence.came_in) - context.n_prompt_rows)
            work = len(evidence.came_in) + (SINGLE_ROW - 1) * n_single
            self._budget.spend(work * len(context.view.layers(pending.stage)))
            if isinstance(evidence, TokenEvidence):
                task = TokenTask(context, evidence, self.settings.prefill_chunk_tokens)
                return await self._sampled_by(task, node_id)
            return await self._recomputed_by(pending, evidence, node_id)

        found = await results()
        verdict, match = judge_bits(evidence, found)
        if match is not Match.EQUAL and not are_equal(await results(), found):
            log.warning("node %s computes an exact request twice with other bits each time", by)
            return None
        return _Found(verdict, match, found, by, is_by_bits=True)

    async def _judged_by_spread(
        self, pending: _Pending, evidence: Evidence, rows: Tensor, node_id: NodeId | None
    ) -> tuple[Verdict, Match]:
        """Where the distance says something only together with what roundings do to these very rows. Raises
        SwarmLLMError."""
        again = await self._recomputed_by(pending, evidence, node_id, is_regrouped=True)
        spread = distance(rows, again, evidence.came_in[-evidence.n_rows :])
        await trio.sleep(TOLD_S)
        return judge(evidence, rows, self._limits(pending, node_id or self.router.node_id).limit(spread))

    async def _recomputed_by(
        self, pending: _Pending, evidence: Evidence, node_id: NodeId | None, *, is_regrouped: bool = False
    ) -> Tensor:
        """None: by this node. Raises SwarmLLMError."""
        task = RecomputeTask(
            pending.context,
            pending.context.view.layers(pending.stage),
            evidence.came_in,
            evidence.n_rows,
            self.settings.prefill_chunk_tokens,
            is_regrouped,
        )
        if node_id is None:
            return await compute_here(self.compute, task)
        return await self.replies.compute_at(node_id, self.router, task)

    def _limits(self, pending: _Pending, by: NodeId) -> Limits:
        """A node that has changed what it announces is not taken at its word."""
        is_settled = self._kv_type(pending.context, pending.node_id) == pending.kv_type
        return limits(pending.kv_type if is_settled else None, self._kv_type(pending.context, by))

    def _kv_type(self, context: RequestContext, node_id: NodeId) -> str | None:
        """As the node announces it for the request's model."""
        record = self.registry.node(node_id)
        said = [] if record is None else [m for m in record.models if m.model_id == context.model.model_id]
        return said[0].kv_type or None if said and said[0].kv_type is not UNSET else None

    def _kernel_class(self, context: RequestContext, node_id: NodeId) -> str:
        """The same of its kernels."""
        if node_id == self.router.node_id:
            return self.compute.kernel_class(context.model.model_id)
        said = self.registry.announced(context.model.model_id, node_id)
        return (said.kernel_class or "") if said is not None else ""

    async def _sampled_by(self, task: TokenTask, node_id: NodeId | None) -> list[Sampled]:
        """None: by this node. Raises SwarmLLMError."""
        if len(task.context.view.stages) == 1:
            if node_id is None:
                return await sample_whole_here(self.compute, task)
            return await sample_whole_at(node_id, self.replies, self.router, task)
        if node_id is None:
            return await sample_here(self.compute, task)
        return await self.replies.sample_at(node_id, self.router, task)

    def _others(self, pending: _Pending) -> list[NodeId]:
        """Holders that have no part in it, the most trusted first."""
        view = pending.context.view
        layers = view.layers(pending.stage)
        # Of a whole model they see the prompt, not its rows.
        least = NEUTRAL if len(view.stages) == 1 else 0.0
        held = self.registry.held(pending.context.model.model_id)
        able = [
            node_id
            for node_id in sorted(self.registry.reachable() - view.node_ids)
            if covers(held.get(node_id, ()), layers) and self.trust.score(node_id) >= least
        ]
        # Who has spoken against it is to be confirmed by another one.
        accuser = self._tallies.accuser(pending.node_id)

        def order(node_id: NodeId) -> tuple[bool, bool, float]:
            is_unlike = self._kv_type(pending.context, node_id) != pending.kv_type
            if kernel_class := pending.context.kernel_class:
                is_unlike = self._kernel_class(pending.context, node_id) != kernel_class
            return node_id == accuser, is_unlike, -self.trust.score(node_id)

        return sorted(able, key=order)[:HOLDERS_ASKED]

    def _charge(self, pending: _Pending, verdict: Verdict, match: Match) -> None:
        if verdict is Verdict.UNKNOWN:
            self.counts.checks_dropped += 1
            return
        if verdict is Verdict.RIGHT:
            self.counts.checked += 1
            self.trust.note(pending.node_id, Deed.CHECKED, match)
        elif verdict is Verdict.WRONG:
            self._charges.wrong(pending.node_id, f"layers {pending.context.view.layers(pending.stage)}")
        else:
            is_before = verdict is Verdict.DISPUTED_BEFORE
            self._charges.contradict(pending.node_id, pending.before if is_before else pending.after)


def _work(evidence: Evidence | TokenEvidence) -> float:
    """What it takes to compute one layer of it again, in rows of a prompt."""
    if not isinstance(evidence, TokenEvidence):
        return float(len(evidence.came_in))
    n_told, n_rows = len(evidence.told), len(evidence.came_in)
    if evidence.came_in.ndim > 1:
        return n_rows - n_told + SINGLE_ROW * n_told
    return n_rows + len(evidence.before) + SINGLE_ROW * n_told


def _agree(pending: _Pending, one: _Found, other: _Found) -> bool:
    """Whether two holders computed the same."""
    evidence = pending.evidence
    if one.is_by_bits and other.is_by_bits:
        return are_equal(one.results, other.results)
    if isinstance(evidence, TokenEvidence):
        assert isinstance(one.results, list)
        assert isinstance(other.results, list)
        said = replace(evidence, told=tuple(sampled.token for sampled in one.results), is_ended=False)
        return judge_tokens(said, other.results, greedy=pending.is_plainly_greedy)[1] is not Match.WRONG
    assert not isinstance(one.results, list)
    assert not isinstance(other.results, list)
    own = evidence.came_in[-evidence.n_rows :]
    return compare(one.results, other.results, own) is not Match.WRONG
