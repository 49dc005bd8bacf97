"""Fingerprints of logits: who tells those of other logits is out of all routes, who tells none is checked as
before, and nobody else is charged."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec import UNSET
from trio.testing import MockClock

from bench.common.arithmetic import FakePool
from swarmllm.pipeline.check.evidence import of_fewer
from swarmllm.pipeline.check.fingerprints import OWN, distance, is_possible
from swarmllm.pipeline.check.likelihood import between, distance_max, with_apart
from swarmllm.pipeline.check.thresholds import (
    ANY,
    SPREAD_MIN,
    TOKENS_OTHER_KV,
    TOKENS_SAME_KV,
    TokenDistance,
    token_limits,
)
from swarmllm.pipeline.check.verdict import (
    Match,
    Sampled,
    TokenEvidence,
    Verdict,
    before_computing,
    fingerprint_distance,
    is_drawn_falsely,
    judge_tokens,
)
from swarmllm.pipeline.origin.output import InvalidReport
from swarmllm.pipeline.origin.reported_fingerprints import ReportedFingerprints
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.fingerprints import N_DRAWN, N_VALUES, drawn_tokens, encode_fingerprint
from swarmllm_proto.ipc import Sampling, Token
from swarmllm_proto.swarm import PipelineAssignment, StreamingToken
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, open_swarm
from .test_check_tallies import DrawingPool
from .test_checks import ALWAYS, LIAR, A, B, M, N, ask, asked_and_checked, count, drawn, heads, prefer
from .test_whole_checks import WHOLE, holders

__all__ = ["drawn"]  # The fixture has every request checked.

KEY, N_VOCAB = 9, 5000


class OtherLogits(FakePool):
    """Its tokens are right, its logits are those of other weights."""

    def _fingerprint(self, index: int, token: int, sampling: Sampling, row: Tensor) -> bytes | None:
        return super()._fingerprint(index, token, sampling, row + 75)


class Unlikely(FakePool):
    """Its tokens have larger logits than the largest."""

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        assert sampling.fingerprint_key is not None
        return msgspec.structs.replace(
            token, fingerprint=encode_fingerprint(np.full(N_DRAWN, -1, np.float32), -0.75, -0.5)
        )


class Forgetful(FakePool):
    """Tells no fingerprint with every third token."""

    def _fingerprinted(self, token: Token, sampling: Sampling, row: Tensor) -> Token:
        reported = super()._fingerprinted(token, sampling, row)
        return token if token.index % 3 == 1 else reported


async def requests_until_out(swarm: Swarm) -> int | None:
    for number in range(20):
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        if swarm[A].trust.score(LIAR) < WORK_MIN:
            return number + 1
    return None


def pools_of(where: str, liar: type[FakePool]) -> dict[str, FakePool]:
    if where == "whole, here too":
        return {A: FakePool(WHOLE), LIAR: liar(WHOLE)}
    if where == "whole":
        return holders(liar(WHOLE))
    pools = heads(liar("8:12"))
    return pools | {A: FakePool("0:4", "8:12")} if where == "here too" else pools


@pytest.mark.parametrize("where", ["elsewhere", "here too", "whole", "whole, here too"])
async def test_a_stage_with_other_logits_is_out_of_all_routes_at_once(
    where: str, patient_clock: MockClock
) -> None:
    async with open_swarm(pools_of(where, OtherLogits), settings=ALWAYS) as swarm:
        if "here too" in where:
            swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        if M in swarm.nodes:
            assert await requests_until_out(swarm) == 1
            for _ in range(20):
                assert await ask(swarm)
            assert count(swarm, LIAR, TrustEvent.SERVED) == 1
            assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (M, N))
            swarm.kill(LIAR)
            assert await ask(swarm)
        else:
            await prefer(swarm, LIAR)
            await asked_and_checked(swarm)
        assert swarm[A].pipelines.statistics().checks_wrong == 1
        await swarm.quiet()


async def test_what_cannot_be_is_wrong_without_computing_anything(patient_clock: MockClock) -> None:
    """Nothing has a say in a greedy token but the logits."""
    async with open_swarm(heads(Unlikely("8:12")), settings=ALWAYS) as swarm:
        assert await requests_until_out(swarm) is not None
        assert not any(call[0] == "forward" for node_id in (M, N) for call in swarm[node_id].pool.calls)
        await swarm.quiet()


@pytest.mark.parametrize("where", ["elsewhere", "here too", "whole"])
async def test_an_older_stage_that_tells_none_is_checked_by_its_tokens(
    where: str, patient_clock: MockClock
) -> None:
    pools = pools_of(where, FakePool)
    pools[LIAR].tells_fingerprints = False
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        if "here too" in where:
            swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        assert await requests_until_out(swarm) is None
        assert swarm[A].trust.explain(LIAR).counts == {"served": 20, "checked": 20}
        await swarm.quiet()


async def test_who_tells_some_of_them_broke_the_protocol(patient_clock: MockClock) -> None:
    async with open_swarm(heads(Forgetful("8:12")), settings=ALWAYS) as swarm:
        await prefer(swarm, LIAR, M, N)
        assert await ask(swarm)
        assert count(swarm, LIAR, TrustEvent.FAILED) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


@pytest.mark.parametrize("where", ["elsewhere", "whole"])
async def test_who_announces_that_it_tells_them_and_does_not_broke_the_protocol(
    where: str, patient_clock: MockClock
) -> None:
    pools = pools_of(where, FakePool)
    pools[LIAR].tells_fingerprints = False
    async with open_swarm(pools, settings=ALWAYS, committing=None) as swarm:
        await prefer(swarm, LIAR, M, N)
        assert await ask(swarm)
        assert count(swarm, LIAR, TrustEvent.FAILED) == 1
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in pools if node_id not in (A, LIAR))
        await swarm.quiet()


async def test_each_request_has_a_key_of_its_own_unless_nobody_checks_it(patient_clock: MockClock) -> None:
    keys: list[int | None] = []
    for settings in (ALWAYS, msgspec.UNSET):
        options: dict[str, Any] = {} if settings is msgspec.UNSET else {"settings": settings}
        async with open_swarm(heads(FakePool("8:12")), **options) as swarm:
            await prefer(swarm, LIAR, M, N)
            sampled = swarm[LIAR].pool.forward

            async def watched(model: Any, sampled: Any = sampled, **call: Any) -> Any:
                if call.get("sampling") is not None:
                    keys.append(call["sampling"].fingerprint_key)
                return await sampled(model, **call)

            vars(swarm[LIAR].pool)["forward"] = watched
            for _ in range(2):
                assert await ask(swarm)
            await swarm.quiet()
    assert None not in keys[:2]
    assert len(set(keys[:2])) == 2


def fingerprints(tokens: list[int], first: int = 3, *, is_greedy: bool = False) -> Tensor:
    generator, rows = np.random.default_rng(2), []
    for index, token in enumerate(tokens):
        logits = generator.standard_normal(N_VOCAB).astype(np.float16).astype(np.float32)
        logits[token] = 7.5 if is_greedy else 1.5
        ids = drawn_tokens(KEY, first + index, N_VOCAB)
        rows.append([*logits[ids], logits.max(), logits[token]])
    return np.array(rows, np.float32)


TOKENS = list(range(100, 110))


def possible(reported: Tensor, tokens: list[int] = TOKENS, *, is_likeliest: bool = False) -> bool:
    return is_possible(reported, tokens, 3, KEY, N_VOCAB, is_likeliest=is_likeliest)


def test_fingerprints_agree_with_each_other_and_with_the_tokens() -> None:
    reported = fingerprints(TOKENS)
    assert possible(reported)
    assert not possible(reported, is_likeliest=True)
    assert possible(fingerprints(TOKENS, is_greedy=True), is_likeliest=True)
    for column, value in (
        (2, reported[4, N_DRAWN] + 1),
        (N_DRAWN, reported[4].max() - 5),
        (N_DRAWN + 1, 99.0),
    ):
        changed = reported.copy()
        changed[4, column] = value
        assert not possible(changed), column
    # A token that is drawn too, and one that is drawn twice.
    tokens = [int(drawn_tokens(KEY, 3 + at, N_VOCAB)[5]) for at in range(len(TOKENS))]
    reported = fingerprints(tokens)
    assert possible(reported, tokens)
    reported[6, 5] -= 0.5
    assert not possible(reported, tokens)
    twice = fingerprints([1] * 3)
    assert is_possible(twice, [1] * 3, 3, KEY, 3, is_likeliest=False) is False


def test_distance_is_a_mean_in_which_no_token_outweighs_the_others() -> None:
    reported = fingerprints(TOKENS)
    assert distance(reported, reported) == 0
    near = reported.copy()
    near[:, :N_DRAWN] *= 1.01
    assert 0.009 < distance(reported, near) < 0.012
    far = reported.copy()
    far[0, :N_DRAWN] = 6e4
    assert distance(reported, far) == pytest.approx(2 / len(TOKENS))
    # What is added to all logits is a difference, too: no honest kernels do it.
    shifted = reported.copy()
    shifted[:, :N_DRAWN] += 1
    assert distance(reported, shifted) > 0.5
    alike = np.zeros_like(reported)
    assert distance(alike, alike) == 0
    assert distance(alike, reported) == 2


def test_limits_are_wider_for_few_tokens_and_for_other_types_of_kv() -> None:
    assert token_limits("f16", "f16", 64) == TOKENS_SAME_KV.of_tokens(64)
    for one, other in (("f16", "q8_0"), (None, None), ("f16", None)):
        assert token_limits(one, other, 64) == TOKENS_OTHER_KV.of_tokens(64)
    few, many = token_limits("f16", "f16", 4), token_limits("f16", "f16", 64)
    assert few.least == tuple(2 * each.least for each in TOKENS_SAME_KV)
    for of_many, limits in zip(many, TOKENS_SAME_KV, strict=True):
        assert of_many.least < 1.1 * limits.least
        assert of_many.limit(SPREAD_MIN / 2) == of_many.most
        assert of_many.limit(0.5 * of_many.least / of_many.of_spread) == of_many.least
        above = 1.2 * of_many.least / of_many.of_spread
        assert of_many.limit(above) == above * of_many.of_spread
        assert of_many.limit(9.0) == of_many.most


def test_a_shift_is_held_against_how_much_roundings_weigh_whatever_its_own_spread() -> None:
    limits = token_limits("f16", "f16", 64)
    size = 2 * limits.shift.least / limits.shift.of_spread
    assert limits.limit(TokenDistance(0.01, size, 0.0)).shift == size * limits.shift.of_spread
    assert limits.limit(TokenDistance(0.0, 0.0, 0.3)) == limits.most


def judged(
    reported: Tensor | None, again: Tensor | None, *, limit: float, agreed: bool | None = True
) -> object:
    evidence = TokenEvidence(
        np.zeros((20, 4), np.float32), 3, (9, 9, 9), tuple(TOKENS), agreed, fingerprints=reported
    )
    values: list[Any] = [None] * len(TOKENS) if again is None else list(again)
    sampled = [Sampled(token, (), False, value) for token, value in zip(TOKENS, values, strict=True)]
    return judge_tokens(evidence, sampled, greedy=True, limit=ANY._replace(logits=limit))


def test_other_logits_are_wrong_although_every_token_is_right() -> None:
    reported = fingerprints(TOKENS)
    near, far = reported.copy(), reported.copy()
    near[:, :N_DRAWN] *= 1.01
    far[:, :N_DRAWN] *= 1.1
    assert judged(reported, reported, limit=0.02) == (Verdict.RIGHT, Match.EQUAL)
    assert judged(reported, near, limit=0.02) == (Verdict.RIGHT, Match.CLOSE)
    assert judged(reported, far, limit=0.02) == (Verdict.WRONG, Match.WRONG)
    assert judged(reported, far, limit=0.02, agreed=None) == (Verdict.DISPUTED_BEFORE, Match.WRONG)
    for one, other in ((None, far), (reported, None)):
        assert judged(one, other, limit=0.02) == (Verdict.RIGHT, Match.EQUAL)


def test_impossible_fingerprints_are_wrong_whatever_came_in() -> None:
    for agreed in (True, False, None):
        evidence = TokenEvidence(np.zeros((20, 4), np.float32), 3, (), (1,), agreed, is_possible=False)
        assert before_computing(evidence) is Verdict.WRONG


def test_a_check_of_fewer_tokens_leaves_out_the_last_ones() -> None:
    reported = fingerprints(TOKENS)
    rows = np.arange(80, dtype=np.float32).reshape(20, 4)
    evidence = TokenEvidence(rows, 3, (9, 9, 9), tuple(TOKENS), True, True, reported)
    assert of_fewer(evidence, 10) is evidence
    fewer = of_fewer(evidence, 4)
    assert (fewer.reported, fewer.is_ended, fewer.before) == (tuple(TOKENS[:4]), False, (9, 9, 9))
    np.testing.assert_array_equal(fewer.came_in, rows[:14])
    assert fewer.fingerprints is not None
    np.testing.assert_array_equal(fewer.fingerprints, reported[:4])
    whole = of_fewer(of_whole_model(evidence), 4)
    np.testing.assert_array_equal(whole.came_in, np.arange(7))


def of_whole_model(evidence: TokenEvidence) -> TokenEvidence:
    """The same of a whole model, whose prompt is all that came in."""
    return TokenEvidence(np.arange(7, dtype=np.int32), 3, evidence.before, evidence.reported, True)


DATA = encode_fingerprint(np.arange(N_DRAWN, dtype=np.float32), 20.0, 5.0)


def test_what_is_told_is_kept_in_order_where_it_is_wanted() -> None:
    asked = Sampling(fingerprint_key=KEY)
    reported = ReportedFingerprints(asked, is_kept=True)
    for _ in range(5):
        reported.take(DATA)
    values = reported.read(2, 3)
    assert values is not None
    assert values.shape == (3, N_VALUES)
    assert reported.read(3, 3) is None
    assert reported.read(-1, 3) is None
    unwanted = ReportedFingerprints(asked, is_kept=False)
    unwanted.take(DATA)
    assert unwanted.read(0, 1) is None
    unasked = ReportedFingerprints(Sampling(), is_kept=True)
    for fingerprint in (DATA, UNSET, b"x"):
        unasked.take(fingerprint)
    assert unasked.read(0, 1) is None


@pytest.mark.parametrize(
    ("sequence", "words"),
    [
        ((DATA, UNSET), "some of the tokens"),
        ((UNSET, DATA), "some of the tokens"),
        ((DATA[:-1],), "35 bytes"),
        ((b"",), "0 bytes"),
        ((DATA[:-2] + b"\x00\x7e",), "no numbers"),
    ],
)
def test_other_fingerprints_are_no_honest_stages(sequence: tuple[Any, ...], words: str) -> None:
    reported = ReportedFingerprints(Sampling(fingerprint_key=KEY), is_kept=False)
    *before, last = sequence
    for fingerprint in before:
        reported.take(fingerprint)
    with pytest.raises(InvalidReport, match=words):
        reported.take(last)


def test_older_nodes_may_leave_the_new_fields_out() -> None:
    assert StreamingToken(request_id="r", index=0, token=1).fingerprint is UNSET
    fields = {field.name: field for field in msgspec.structs.fields(PipelineAssignment)}
    assert fields["sampling"].type is Sampling
    assert Sampling().fingerprint_key is None


async def test_drawn_answers_with_fingerprints_are_right(patient_clock: MockClock) -> None:
    pools = {A: DrawingPool("0:4", "8:12"), B: DrawingPool("4:8"), LIAR: DrawingPool("8:12")}
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        for _ in range(6):
            await prefer(swarm, LIAR)
            await asked_and_checked(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 0
        assert count(swarm, LIAR, TrustEvent.CHECKED) == 6
        await swarm.quiet()


def drawn_again(reported: Tensor, apart: list[float | None]) -> list[Sampled]:
    """Other tokens than those that were told, from these logits."""
    return [Sampled(1, (), False, row, -2.0, off) for row, off in zip(reported, apart, strict=True)]


def test_a_token_that_its_own_logits_do_not_give_was_not_drawn_from_them() -> None:
    reported = fingerprints(TOKENS)
    evidence = TokenEvidence(np.zeros((20, 4), np.float32), 3, (), tuple(TOKENS), True, fingerprints=reported)
    near = drawn_again(reported, [0.1] * 9 + [0.3])
    assert is_drawn_falsely(evidence, near, 0.2)
    assert not is_drawn_falsely(evidence, near, 0.35)
    assert judge_tokens(evidence, near, greedy=False, limit=ANY._replace(logits=1.0), distance_max=0.2) == (
        Verdict.WRONG,
        Match.WRONG,
    )
    assert judge_tokens(evidence, near, greedy=False, limit=ANY._replace(logits=1.0))[1] is Match.CLOSE
    assert not is_drawn_falsely(evidence, drawn_again(reported, [None] * 10), 0.2)
    same = [Sampled(token, (), False, row, -2.0, 0.9) for token, row in zip(TOKENS, reported, strict=True)]
    assert not is_drawn_falsely(evidence, same, 0.2)
    # From other logits other tokens may come: that is a matter of the distance.
    other = reported.copy()
    other[9] *= 1.5
    assert not is_drawn_falsely(evidence, drawn_again(other, [0.1] * 9 + [0.3]), 0.2)
    assert not is_drawn_falsely(TokenEvidence(reported, 3, (), tuple(TOKENS), True), near, 0.2)


def test_the_lower_the_temperature_the_more_may_lie_between() -> None:
    assert distance_max(Sampling(temperature=1.0), 0.2) == 0.2
    assert distance_max(Sampling(temperature=0.5), 0.2) == 0.2
    assert distance_max(Sampling(temperature=0.1), 0.2) == pytest.approx(1.0)
    assert distance_max(Sampling(temperature=0.0), 0.2) == float("inf")


def test_what_another_holder_does_not_say_is_taken_from_its_likeliest_tokens() -> None:
    likeliest = tuple((token, -0.5 - token) for token in range(5))
    sampled = [Sampled(0, likeliest), Sampled(0, likeliest), Sampled(0, likeliest, apart=0.7), Sampled(0)]
    plain = with_apart(sampled, (4, 0, 4, 4), Sampling(temperature=1.0), N_VOCAB)
    assert [each.apart for each in plain][1:] == [0.0, 0.7, None]
    assert plain[0].apart == between(4, sampled[0], Sampling(temperature=1.0), N_VOCAB) > 0
    for other in (Sampling(temperature=0.0), Sampling(temperature=1.0, repeat_penalty=1.2)):
        assert with_apart(sampled, (4, 0, 4, 4), other, N_VOCAB) is sampled


def test_another_holders_own_token_is_not_compared_with_one_that_differs() -> None:
    reported = fingerprints(TOKENS)
    again = reported.copy()
    again[:, OWN] += 5
    evidence = TokenEvidence(np.zeros((20, 4), np.float32), 3, (), tuple(TOKENS), True, fingerprints=reported)

    def apart(token: int, reported_logprob: float | None) -> float | None:
        sampled = [Sampled(token, (), False, row.copy(), reported_logprob) for row in again]
        return fingerprint_distance(evidence, sampled)

    assert apart(1, None) == 0
    assert (apart(1, -2.0) or 0) > 0.5
