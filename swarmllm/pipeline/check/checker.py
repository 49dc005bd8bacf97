"""Checks what stages of this node's finished requests computed, one after the other and behind everything
else, and notes the outcome.

The stages of a drawn request hold its KV until the rows of one stretch are collected. The rows are then
computed again: by this node if it has the layers, else by another holder, and by a third one before a node is
accused on another's word. No client waits for a check.
"""

from __future__ import annotations

import logging
import random
from collections import deque
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol, get_args

import numpy as np
import trio
from msgspec import UNSET

from swarmllm.errors import SwarmLLMError
from swarmllm.models.layers import covers
from swarmllm.pipeline.check.commitments import Commitments
from swarmllm.pipeline.check.equal_bits import are_equal, draw_piece, judge_bits
from swarmllm.pipeline.check.evidence import (
    Collector,
    EvidenceAbsent,
    OtherRows,
    of_fewer,
    token_evidence,
    with_fingerprints,
)
from swarmllm.pipeline.check.likelihood import (
    IMPOSSIBLE,
    comparable,
    distance_max,
    end_chance,
    end_chance_by_fingerprint,
    is_far,
    is_plain,
    with_apart,
)
from swarmllm.pipeline.check.pending import PendingCheck, RecomputeResult, agree, work_of_rows, work_of_tokens
from swarmllm.pipeline.check.recompute import RecomputeTask, Replies, TokenTask, compute_here, sample_here
from swarmllm.pipeline.check.repaired_rows import Comparable, comparable_rows
from swarmllm.pipeline.check.resample_whole import sample_whole_at
from swarmllm.pipeline.check.sampling import (
    BATCHED_TOKENS,
    CHECKED_TOKENS,
    DRAWN_TOKENS,
    HEAD_ROW,
    SINGLE_ROW,
    Budget,
    Chance,
    draw_stage,
    draw_stretch,
    draw_tokens,
    rate,
)
from swarmllm.pipeline.check.tallies import Bias, Tallies
from swarmllm.pipeline.check.thresholds import (
    SAME_KV,
    Limits,
    TokenLimits,
    limits,
    spread_with_kv,
    token_limits,
)
from swarmllm.pipeline.check.verdict import (
    Evidence,
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    before_computing,
    distance,
    judge,
    judge_tokens,
    token_distance,
    with_recomputed,
)
from swarmllm.pipeline.check.verdict_recorder import VerdictRecorder
from swarmllm.pipeline.origin.chain import Chain
from swarmllm.pipeline.origin.requests import Attempt
from swarmllm.pipeline.request import RequestContext
from swarmllm.pipeline.route.suspects import Suspects
from swarmllm.pipeline.settings import PipelineSettings
from swarmllm.pipeline.stage.capacity import Room
from swarmllm.pipeline.stage.compute import Compute
from swarmllm.pipeline.statistics import PipelineStatistics
from swarmllm.swarm.peers.trust import NEUTRAL, NodeTrust, TrustEvent
from swarmllm.swarm.records.registry import Registry
from swarmllm.swarm.router import Router
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.ipc import KvType
from swarmllm_proto.tensors import Tensor

log = logging.getLogger(__name__)

PENDING_MAX = 4
"""Checks that wait for their turn; more are dropped. Each keeps 8 MiB of rows at most."""
IDLE_WAIT_S = 30.0
"""So long a check waits for this node to have nothing else to do."""
LOOK_S = 0.25
SPARE_SLOTS = 2
"""A check here leaves at least one for a request that comes meanwhile."""
ANNOUNCEMENT_S = 5.0
"""By then what a node announces has arrived, where it has just loaded the model with another type of KV."""
HOLDERS_ASKED = 3
"""Nodes that are asked to compute rows again, until two agree."""


class NodeLoad(Protocol):
    """How much work this node has."""

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
    commitments: Commitments
    chance: Chance = field(default_factory=lambda: random.SystemRandom().random)
    replies: Replies = field(default_factory=Replies)
    _charges: VerdictRecorder = field(init=False)
    _budget: Budget = field(init=False)
    _tallies: Tallies = field(default_factory=Tallies)
    _pending: deque[PendingCheck] = field(default_factory=deque)
    _has_work: trio.Event = field(default_factory=trio.Event)

    def __post_init__(self) -> None:
        self._budget = Budget(self.settings.check_rate)
        self._charges = self.commitments.verdict_recorder

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
            lambda node_id: self._budget.scaled(self._rate(node_id, base)),
            self.chance,
        )

    def _rate(self, node_id: NodeId, base: float) -> float:
        """A node that tells nothing of its rows before it can know what is checked may say anything later."""
        tells = self.commitments.signer is None or self.commitments.can_commit(node_id)
        return rate(self.trust.score(node_id), base, tells=tells)

    def completed(self, chain: Chain) -> None:
        """A request of this node, in which others took part, is over: checks may cost a part of it."""
        n_rows, n_tokens = len(chain.prompt) - chain.n_cached_tokens, len(chain.generated)
        self._budget.served((n_rows + SINGLE_ROW * n_tokens) * chain.context.view.stages[-1].end)
        self._note_end(chain)

    def _note_end(self, chain: Chain) -> None:
        """By what the last stage itself tells, its text may have ended where next to none end."""
        sampling, view, values = chain.context.sampling, chain.context.view, chain.fingerprints.newest
        if values is None or not chain.is_ended_by_model or not is_plain(sampling) or view.is_here(view.last):
            return
        last, n_tokens = view.stages[view.last].node_id, max(1, len(chain.generated))
        if self._tallies.add_end(last, end_chance_by_fingerprint(values, sampling, n_tokens)):
            self._charges.wrong(last, Bias.ENDS_EARLY.value)

    async def collect(self, attempt: Attempt, chain: Chain, stage: int) -> None:
        """Take what a check needs from stages that hold a request that is over."""
        kv_type = self._kv_type(chain.context, chain.context.view.stages[stage].node_id)
        try:
            evidence = await self._evidence(attempt, chain, stage)
        except OtherRows as liar:
            self._charges.wrong(liar.node_id, "it shows other rows than it signed for")
            return
        except (EvidenceAbsent, SwarmLLMError) as error:
            log.info("request %s is not checked: %s", chain.context.request_id, error or "rows are not there")
            evidence = None
        if evidence is None:
            self.counts.checks_dropped += 1
            return
        self._pending.append(PendingCheck(chain.context, stage, evidence, kv_type))
        self._has_work.set()

    async def _evidence(self, attempt: Attempt, chain: Chain, stage: int) -> Evidence | TokenEvidence | None:
        """Raises EvidenceAbsent, OtherRows, SwarmLLMError."""
        context, tokens, generated = chain.context, chain.computed_tokens, chain.generated
        row_bytes, n_prompt = 4 * context.n_embd, context.n_prompt_tokens
        ledger = await self.commitments.said_by(attempt, chain, stage)
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
            n_wanted = DRAWN_TOKENS if is_drawn else CHECKED_TOKENS
            is_single = bool(context.exact_rows) or not self._has_layers(context, stage)
            drawn = draw_tokens(
                first,
                len(generated),
                n_prompt,
                row_bytes,
                self.chance,
                n_wanted=n_wanted if is_single else BATCHED_TOKENS,
                is_ended=chain.is_ended_by_model,
            )
            if drawn is None or context.sampling.mirostat:
                return None  # Mirostat's running limit is known to the stage only.
            if len(context.view.stages) == 1:
                prompt = np.asarray(chain.prompt[:n_prompt], np.int32)
                evidence = token_evidence(
                    prompt, drawn, generated, is_agreed=True, is_ended=chain.is_ended_by_model
                )
            else:
                is_ended = chain.is_ended_by_model
                evidence = await collector.collect_tokens(drawn, generated, is_ended=is_ended)
            return with_fingerprints(evidence, chain.fingerprints, context)
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

    async def _check(self, pending: PendingCheck) -> None:
        evidence = pending.evidence
        verdict = before_computing(evidence)
        if verdict is not None:
            self._charge(pending, verdict, Match.WRONG)
        elif (found := await self._computed(pending)) is not None:
            self._charge(pending, found.verdict, found.match)
            if found.verdict is Verdict.RIGHT:
                self._add_up(pending, found)

    def _add_up(self, pending: PendingCheck, found: RecomputeResult) -> None:
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
            end_chance=partial(
                end_chance, sampling=sampling, n_tokens=evidence.first + len(evidence.reported)
            )
            if is_plain(sampling)
            else None,
        )
        if certain is None:
            return
        if found.by == self.router.node_id or self._tallies.is_confirmed(pending.node_id, found.by):
            self._charges.wrong(pending.node_id, certain.value)
        elif len(self._others(pending)) < 2:
            self._charges.dispute(pending.node_id, found.by)

    async def _computed(self, pending: PendingCheck) -> RecomputeResult | None:
        """None: it is this stage or the one that computed it again, and both have been charged; or nobody
        could."""
        if self._has_layers(pending.context, pending.stage):
            if self.here.room().free_slots < SPARE_SLOTS:
                self.counts.checks_dropped += 1
                return None
            return await self._computed_by(pending, None)
        if isinstance(pending.evidence, TokenEvidence):
            pending = replace(pending, evidence=of_fewer(pending.evidence, DRAWN_TOKENS))
        found: list[tuple[NodeId, RecomputeResult]] = []
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
                    if not agree(pending, newest, earlier):
                        self._charges.wrong(other, "two others computed otherwise")
                return newest
            if any(agree(pending, newest, earlier) for _, earlier in found):
                return newest
            found.append((node_id, newest))
        if found:
            self._charges.dispute(pending.node_id, found[0][0])
        else:
            self.counts.checks_dropped += 1
        return None

    async def _computed_by(self, pending: PendingCheck, node_id: NodeId | None) -> RecomputeResult:
        """None: by this node. Raises SwarmLLMError."""
        exactly = await self._computed_exactly(pending, node_id)
        if exactly is not None:
            return exactly
        context, evidence = pending.context, pending.evidence
        by = node_id or self.router.node_id
        if isinstance(evidence, TokenEvidence):
            return await self._tokens_computed_by(pending, evidence, node_id)
        self._budget.spend(work_of_rows(evidence) * len(context.view.layers(pending.stage)))
        rows = await self._recomputed_by(pending, evidence, node_id)
        if node_id is None and (found := await self._judged_here(pending, evidence, rows)) is not None:
            return RecomputeResult(*found, rows, by)
        verdict, match = judge(evidence, rows, self._limits(pending, by).least)
        if match is Match.WRONG and judge(evidence, rows)[1] is not Match.WRONG:
            self._budget.spend(work_of_rows(evidence) * len(context.view.layers(pending.stage)))
            verdict, match = await self._judged_by_spread(pending, evidence, rows, node_id)
        return RecomputeResult(verdict, match, rows, by)

    async def _tokens_computed_by(
        self, pending: PendingCheck, evidence: TokenEvidence, node_id: NodeId | None
    ) -> RecomputeResult:
        """None: by this node. Raises SwarmLLMError."""
        by, is_greedy = node_id or self.router.node_id, pending.is_plainly_greedy
        sampled = await self._sampled_by(pending, evidence, node_id)
        allowed = self._limits_of_tokens(pending, by, len(sampled))
        judged = partial(
            judge_tokens,
            evidence,
            sampled,
            greedy=is_greedy,
            distance_max=distance_max(pending.context.sampling, IMPOSSIBLE),
        )
        verdict, match = judged(limit=allowed.least)
        if match is Match.WRONG and judged(limit=allowed.most)[1] is not Match.WRONG:
            again = await self._sampled_by(pending, evidence, node_id, is_regrouped=True)
            spread = token_distance(with_recomputed(evidence, again), sampled)
            await trio.sleep(ANNOUNCEMENT_S)
            verdict, match = judged(limit=self._limits_of_tokens(pending, by, len(sampled)).limit(spread))
        return RecomputeResult(verdict, match, sampled, by)

    async def _computed_exactly(
        self, pending: PendingCheck, node_id: NodeId | None
    ) -> RecomputeResult | None:
        """Bit for bit; None: its bits need not be equal, or are not even equal when it computes twice. Raises
        SwarmLLMError."""
        context, evidence, by = pending.context, pending.evidence, node_id or self.router.node_id
        if not context.kernel_class or self._kernel_class(context, by) != context.kernel_class:
            return None

        async def results() -> Tensor | list[Sampled]:
            if isinstance(evidence, TokenEvidence):
                return await self._sampled_by(pending, evidence, node_id)
            n_single = max(0, len(evidence.came_in) - context.n_prompt_rows)
            work = len(evidence.came_in) + (SINGLE_ROW - 1) * n_single
            self._budget.spend(work * len(context.view.layers(pending.stage)))
            return await self._recomputed_by(pending, evidence, node_id)

        found = await results()
        verdict, match = judge_bits(evidence, found)
        if match is not Match.EQUAL and not are_equal(await results(), found):
            log.warning("node %s computes an exact request twice with other bits each time", by)
            return None
        return RecomputeResult(verdict, match, found, by, is_by_bits=True)

    async def _judged_by_spread(
        self, pending: PendingCheck, evidence: Evidence, rows: Tensor, node_id: NodeId | None
    ) -> tuple[Verdict, Match]:
        """Where the distance says something only together with what roundings do to these very rows. Raises
        SwarmLLMError."""
        again = await self._recomputed_by(pending, evidence, node_id, is_regrouped=True)
        spread = distance(rows, again, evidence.came_in[-evidence.n_rows :])
        await trio.sleep(ANNOUNCEMENT_S)
        return judge(evidence, rows, self._limits(pending, node_id or self.router.node_id).limit(spread))

    async def _judged_here(
        self, pending: PendingCheck, evidence: Evidence, rows: Tensor
    ) -> tuple[Verdict, Match] | None:
        """By rows that this node computes with each type of KV, so that a stage gains nothing by announcing
        another one. None: its worker has no attention or no room for the other type. Raises SwarmLLMError."""
        near = judge(evidence, rows, SAME_KV.least)
        if near[1] is not Match.WRONG or judge(evidence, rows)[1] is Match.WRONG:
            return near  # Farther than any type of KV accounts for.
        own_type = self._kv_type(pending.context, self.router.node_id)
        others = [kv_type for kv_type in get_args(KvType) if kv_type != own_type]
        if len(others) != 1:
            return None
        work = work_of_rows(evidence) * len(pending.context.view.layers(pending.stage))
        try:
            self._budget.spend(work)
            other = await self._recomputed_by(pending, evidence, None, kv_type=others[0])
        except SwarmLLMError as error:
            log.info("rows with keys and values in %s cannot be computed: %s", others[0], error.message)
            return None
        if (found := judge(evidence, other, SAME_KV.least))[1] is not Match.WRONG:
            return found
        self._budget.spend(work)
        again = await self._recomputed_by(pending, evidence, None, is_regrouped=True)
        own = evidence.came_in[-evidence.n_rows :]
        spread = spread_with_kv(distance(rows, again, own), distance(rows, other, own))
        judged = [judge(evidence, each, SAME_KV.limit(spread)) for each in (rows, other)]
        return next((each for each in judged if each[1] is not Match.WRONG), near)

    async def _recomputed_by(
        self,
        pending: PendingCheck,
        evidence: Evidence,
        node_id: NodeId | None,
        *,
        is_regrouped: bool = False,
        kv_type: KvType | None = None,
    ) -> Tensor:
        """None: by this node. Raises SwarmLLMError."""
        task = RecomputeTask(
            pending.context,
            pending.context.view.layers(pending.stage),
            evidence.came_in,
            evidence.n_rows,
            self.settings.prefill_chunk_tokens,
            is_regrouped,
            kv_type,
        )
        if node_id is None:
            return await compute_here(self.compute, task)
        return await self.replies.compute_at(node_id, self.router, task)

    def _limits(self, pending: PendingCheck, by: NodeId) -> Limits:
        """A node that has changed what it announces is not taken at its word."""
        is_settled = self._kv_type(pending.context, pending.node_id) == pending.kv_type
        return limits(pending.kv_type if is_settled else None, self._kv_type(pending.context, by))

    def _limits_of_tokens(self, pending: PendingCheck, by: NodeId, n_tokens: int) -> TokenLimits:
        """The same for what is told with so many tokens."""
        is_settled = self._kv_type(pending.context, pending.node_id) == pending.kv_type
        kv_type = pending.kv_type if is_settled else None
        return token_limits(kv_type, self._kv_type(pending.context, by), n_tokens)

    def _has_layers(self, context: RequestContext, stage: int) -> bool:
        """Whether this node can compute what the stage did."""
        return covers(self.compute.loaded(context.model.model_id), context.view.layers(stage))

    def _kv_type(self, context: RequestContext, node_id: NodeId) -> str | None:
        """As the node announces it for the request's model."""
        record = self.registry.node(node_id)
        models = [] if record is None else [m for m in record.models if m.model_id == context.model.model_id]
        return models[0].kv_type or None if models and models[0].kv_type is not UNSET else None

    def _kernel_class(self, context: RequestContext, node_id: NodeId) -> str:
        """The same of its kernels."""
        if node_id == self.router.node_id:
            return self.compute.kernel_class(context.model.model_id)
        announced = self.registry.announced(context.model.model_id, node_id)
        return (announced.kernel_class or "") if announced is not None else ""

    async def _sampled_by(
        self,
        pending: PendingCheck,
        evidence: TokenEvidence,
        node_id: NodeId | None,
        *,
        is_regrouped: bool = False,
    ) -> list[Sampled]:
        """None: by this node. Raises SwarmLLMError."""
        context = pending.context
        task = TokenTask(context, evidence, self.settings.prefill_chunk_tokens, is_regrouped)
        is_batched = node_id is None and not context.exact_rows
        work = work_of_tokens(evidence, HEAD_ROW if is_batched else SINGLE_ROW)
        self._budget.spend(work * len(task.layers))
        if node_id is None:
            sampled = await sample_here(self.compute, task)
        elif task.is_whole:
            sampled = await sample_whole_at(node_id, self.replies, self.router, task)
        else:
            sampled = await self.replies.sample_at(node_id, self.router, task)
        sampled = comparable(sampled, evidence.reported, context.sampling)
        return with_apart(sampled, evidence.reported, context.sampling, context.n_vocab)

    def _others(self, pending: PendingCheck) -> list[NodeId]:
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

    def _charge(self, pending: PendingCheck, verdict: Verdict, match: Match) -> None:
        if verdict is Verdict.UNKNOWN:
            self.counts.checks_dropped += 1
            return
        if verdict is Verdict.RIGHT:
            self.counts.checked += 1
            self.trust.note(pending.node_id, TrustEvent.CHECKED, match)
        elif verdict is Verdict.WRONG:
            self._charges.wrong(pending.node_id, f"layers {pending.context.view.layers(pending.stage)}")
        else:
            is_before = verdict is Verdict.DISPUTED_BEFORE
            self._charges.contradict(pending.node_id, pending.before if is_before else pending.after)
