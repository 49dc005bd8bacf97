"""Log-probabilities that a last stage tells: others than those of its logits are found."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
import trio
from deadlines import PATIENCE_S
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.pipeline import Prompt
from swarmllm.pipeline.check.told_logprobs import TOTALS_APART, are_apart, are_possible, total
from swarmllm.swarm.peers.trust import NEUTRAL, TrustEvent
from swarmllm_proto.fingerprints import decode_fingerprint, drawn_tokens, encode_fingerprint
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
        told = super()._fingerprinted(token, sampling, row)
        lower = tuple(TokenLogprob(each.token, each.logprob - 1, each.piece) for each in told.logprobs)
        return msgspec.structs.replace(told, logprobs=lower)


class Unlikely(FakePool):
    """Tells a lower one of its token only."""

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        told = super()._fingerprinted(token, sampling, row)
        own, *others = told.logprobs
        return msgspec.structs.replace(told, logprobs=(TokenLogprob(own.token, -1.0, own.piece), *others))


@pytest.mark.parametrize("liar", [Shifted, Unlikely])
async def test_a_stage_that_tells_other_log_probabilities_is_wrong(
    liar: type[FakePool], patient_clock: MockClock
) -> None:
    async with open_swarm(heads(liar("8:12")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        sampling = Sampling(max_tokens=6, logprobs=True, top_logprobs=1)
        with trio.fail_after(PATIENCE_S):
            async with swarm[A].pipelines.generate(Prompt(text="how likely?"), swarm.entry, sampling) as told:
                assert [piece async for piece in told]
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


def test_totals_are_those_of_the_same_rows() -> None:
    said, values, _ = told_of(1, 1)
    assert total(said, values) == pytest.approx(float(values[-2]) - said[1].logprob, abs=0.02)
    assert math.isnan(total((), values))
    assert math.isnan(total((TokenLogprob(1, LOGPROB_MIN, b""),), values))
    told = np.array([10.0, math.nan, 12.0])
    assert not are_apart(told, told + TOTALS_APART - 0.01)
    assert are_apart(told, told - TOTALS_APART - 0.01)
    assert not are_apart(told, np.array([math.nan, 1.0, math.nan]))
