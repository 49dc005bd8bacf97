"""Describes work that waits to be checked, its cost, and the result. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from swarmllm.pipeline.check.equal_bits import are_equal
from swarmllm.pipeline.check.likelihood import is_plain
from swarmllm.pipeline.check.thresholds import token_limits
from swarmllm.pipeline.check.verdict import (
    Evidence,
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    compare,
    fingerprints_of,
    judge_tokens,
)
from swarmllm.pipeline.request import RequestContext
from swarmllm_proto.identifiers import NodeId
from swarmllm_proto.tensors import Tensor


@dataclass(frozen=True, slots=True)
class PendingCheck:
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
class RecomputeResult:
    """The result of computing it again."""

    verdict: Verdict
    match: Match
    results: Tensor | list[Sampled]
    by: NodeId
    is_by_bits: bool = False
    """Kernels of the stage's own class computed an exact request again."""


def work_of_rows(evidence: Evidence) -> float:
    """What it takes to compute one layer of it again, in rows of a prompt."""
    return float(len(evidence.came_in))


def work_of_tokens(evidence: TokenEvidence, each: float) -> float:
    """The same, where a row that gives a token costs so much."""
    n_told, n_rows = len(evidence.reported), len(evidence.came_in)
    if evidence.came_in.ndim > 1:
        return n_rows - n_told + each * n_told
    return n_rows + len(evidence.before) + each * n_told


def agree(pending: PendingCheck, one: RecomputeResult, other: RecomputeResult) -> bool:
    """Whether two holders computed the same."""
    evidence = pending.evidence
    if one.is_by_bits and other.is_by_bits:
        return are_equal(one.results, other.results)
    if isinstance(evidence, TokenEvidence):
        assert isinstance(one.results, list)
        assert isinstance(other.results, list)
        tokens, values = tuple(sampled.token for sampled in one.results), fingerprints_of(one.results)
        said = replace(evidence, reported=tokens, is_ended=False, fingerprints=values, logprobs=())
        limit = token_limits(None, None, len(tokens)).most
        match = judge_tokens(said, other.results, greedy=pending.is_plainly_greedy, limit=limit)[1]
        return match is not Match.WRONG
    assert not isinstance(one.results, list)
    assert not isinstance(other.results, list)
    own = evidence.came_in[-evidence.n_rows :]
    return compare(one.results, other.results, own) is not Match.WRONG
