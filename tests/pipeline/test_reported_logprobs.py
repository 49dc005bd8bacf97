"""Log-probabilities that a last stage tells: others than those of its logits are found."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import trio
from deadlines import DEADLINE_S
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.equal_bits import judge_bits
from swarmllm.pipeline.check.reported_logprobs import are_possible, logprob_distance, total
from swarmllm.pipeline.check.thresholds import ANY, TokenDistance, token_limits
from swarmllm.pipeline.check.verdict import Match, Sampled, TokenEvidence, judge_tokens
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm_proto.fingerprints import N_VALUES, decode_fingerprint, drawn_tokens, encode_fingerprint
from swarmllm_proto.ipc import Sampling, Token, TokenLogprob
from swarmllm_proto.ipc.base import LOGPROB_MIN
from swarmllm_proto.tensors import Tensor
from swarmllm_workers.decode.sampling import logprobs

from .fakes import open_swarm
from .test_checks import ALWAYS, LIAR, A, B, M, N, checked, count, drawn, heads, prefer

__all__ = ["drawn"]  # The fixture has every request checked.

KEY, N_VOCAB, FIRST = 9, 5000, 3


class Shifted(FakePool):
    """Tells all log-probabilities lower by one, which its logits do not contradict."""

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        reported = super()._fingerprinted(token, sampling, row)
        lower = tuple(TokenLogprob(each.token, each.logprob - 1, each.piece) for each in reported.logprobs)
        return msgspec.structs.replace(reported, logprobs=lower)


class Unlikely(FakePool):
    """Tells a lower one of its token only."""

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        reported = super()._fingerprinted(token, sampling, row)
        own, *others = reported.logprobs
        return msgspec.structs.replace(reported, logprobs=(TokenLogprob(own.token, -1.0, own.piece), *others))


@pytest.mark.parametrize("liar", [Shifted, Unlikely])
async def test_a_stage_that_tells_other_log_probabilities_is_wrong(
    liar: type[FakePool], patient_clock: MockClock
) -> None:
    async with open_swarm(heads(liar("8:12")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        sampling = Sampling(max_tokens=6, logprobs=True, top_logprobs=1)
        with trio.fail_after(DEADLINE_S):
            async with swarm[A].pipelines.generate(
                Prompt(text="how likely?"), swarm.entry, sampling
            ) as reported:
                assert [piece async for piece in reported]
        await checked(swarm, 1)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


def told_of(seed: int, n_top: int, temperature: float = 3.0) -> tuple[tuple[TokenLogprob, ...], Tensor, int]:
    """What an honest stage tells of a token: log-probabilities, and the fingerprint."""
    rng = np.random.default_rng(seed)
    logits = (temperature * rng.standard_normal(N_VOCAB)).astype(np.float32)
    token = int(rng.integers(N_VOCAB))
    values = encode_fingerprint(logits[drawn_tokens(KEY, FIRST, N_VOCAB)], logits.max(), logits[token])
    return logprobs(logits, token, n_top, lambda _: b""), decode_fingerprint(values), token


@pytest.mark.parametrize("n_top", [0, 1, 20])
@pytest.mark.parametrize("temperature", [0.01, 3.0, 100.0])
def test_what_honest_stages_tell_is_possible(n_top: int, temperature: float) -> None:
    for seed in range(50):
        said, values, token = told_of(seed, n_top, temperature)
        assert are_possible([said], values[None], [token], FIRST, KEY, N_VOCAB)


def test_what_contradicts_the_logits_is_not() -> None:
    said, values, token = told_of(1, 20)
    own, first, *others = said

    def is_possible(*changed: TokenLogprob) -> bool:
        return are_possible([changed], values[None], [token], FIRST, KEY, N_VOCAB)

    def moved(each: TokenLogprob, by: float) -> TokenLogprob:
        return TokenLogprob(each.token, each.logprob + by, each.piece)

    assert is_possible(*said)
    assert not is_possible(moved(own, 0.1), first, *others)
    assert not is_possible(own, moved(first, 0.1), *others)
    assert not is_possible(moved(first, 0.0), first, *others)  # of another token
    assert not is_possible(own, *others, first)
    assert not is_possible(*(moved(each, 3.0) for each in said))  # more than one in all
    assert is_possible()  # nobody asked
    assert is_possible(TokenLogprob(token, LOGPROB_MIN, b""), first, *others)


def test_the_total_is_told_by_logit_and_log_probability() -> None:
    said, values, _ = told_of(1, 1)
    assert total(said, values) == pytest.approx(float(values[-2]) - said[1].logprob, abs=0.02)
    assert math.isnan(total((), values))
    assert math.isnan(total((TokenLogprob(1, LOGPROB_MIN, b""),), values))


def logprob(token: int, value: float) -> TokenLogprob:
    return TokenLogprob(token, value, b"")


def test_sizes_add_up_and_shifts_cancel() -> None:
    reported = [(logprob(1, -1.0), logprob(2, -2.0)), (logprob(3, -0.5),)]
    again = [{1: -1.2, 2: -1.8}, {3: -0.4}]
    assert logprob_distance(reported, again) == pytest.approx((0.15, 0.05))
    assert logprob_distance(
        reported, [{token: value - 0.3 for token, value in each.items()} for each in again]
    ) == (pytest.approx((0.25, 0.25)))
    # What one of the two does not tell, or calls impossible, says nothing; one alone counts for 1 at most.
    assert logprob_distance(reported, [{7: -1.0}, {3: LOGPROB_MIN}]) == (0, 0)
    assert logprob_distance([(), (logprob(3, LOGPROB_MIN),)], again) == (0, 0)
    assert logprob_distance([(logprob(3, -20.0),)], [{3: -1.0}]) == (1, 1)


def told_beside(shift: float, *, limit: TokenDistance = ANY) -> Match:
    """Of 16 tokens, of which each is told with another one beside it."""
    tokens = tuple(range(16))
    logprobs = tuple((logprob(token, -1.0 - shift), logprob(90, -2.0 - shift)) for token in tokens)
    again = [Sampled(token, ((90, -2.0),), reported_logprob=-1.0) for token in tokens]
    evidence = TokenEvidence(np.zeros((20, 4), np.float32), 0, (), tokens, True, logprobs=logprobs)
    return judge_tokens(evidence, again, greedy=True, limit=limit)[1]


def test_a_tenth_of_a_nat_is_seen() -> None:
    limits = token_limits("f16", "f16", 16)
    beside = limits.limit(TokenDistance(0.01, limits.size.least / limits.size.of_spread, 0.0))
    for shift in (0.1, -0.1):
        assert told_beside(shift, limit=beside) is Match.WRONG
        assert told_beside(shift, limit=limits.most) is not Match.WRONG
    assert told_beside(0.02, limit=beside) is not Match.WRONG


def test_log_probabilities_of_exact_requests_are_equal() -> None:
    values = np.zeros((1, N_VALUES), np.float32)
    said = [Sampled(1, ((1, -1.0),), fingerprint=values[0], reported_logprob=-1.0)]
    for shift, match in ((0.0, Match.EQUAL), (0.002, Match.WRONG)):
        evidence = TokenEvidence(
            values, 0, (), (1,), True, fingerprints=values, logprobs=((logprob(1, -1.0 - shift),),)
        )
        assert judge_bits(evidence, said)[1] is match
