"""Tokens that are possible one by one: what the checks of a node say together."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import msgspec
import numpy as np
import pytest
from trio.testing import MockClock

from bench.common.arithmetic import PRIME, FakePool
from swarmllm.pipeline.check.sampling import DRAWN_TOKENS
from swarmllm.pipeline.check.tallies import TALLIES_MAX, Bias, Tallies
from swarmllm.pipeline.check.verdict import Sampled, TokenEvidence
from swarmllm.swarm.in_memory.network import node_id_named
from swarmllm.swarm.peers.trust import NEUTRAL, WORK_MIN, TrustEvent
from swarmllm_proto.fingerprints import N_DRAWN, decode_fingerprint, encode_fingerprint
from swarmllm_proto.ipc import FinishReason, Sampling, Token, TokenLogprob
from swarmllm_proto.tensors import Tensor

from .fakes import Swarm, open_swarm
from .test_checks import ALWAYS, LIAR, A, B, M, N, ask, asked_and_checked, count, drawn, prefer

__all__ = ["drawn"]  # The fixture has every request checked.

C = node_id_named("c")
N_VOCAB = 300
END = PRIME + 1
NO_ROWS = np.zeros((1, 4), np.float32)
Cheat = Callable[[np.ndarray, float], int]
"""(logits, uniform number) -> token."""


def inverse(logits: np.ndarray, uniform: float, temperature: float = 1.0) -> int:
    """As a sampler draws: the same number and nearly the same logits mostly give the same token."""
    weights = np.exp((logits - logits.max()) / temperature)
    return min(int(np.searchsorted(np.cumsum(weights) / weights.sum(), uniform)), len(logits) - 1)


def checks(
    spread: float, noise: float, cheat: Cheat, seed: int = 1
) -> Iterator[tuple[TokenEvidence, list[Sampled]]]:
    """Of a stage whose logits are off by so much, and which picks its tokens this way."""
    generator = np.random.default_rng(seed)
    while True:
        reported, again = [], []
        for _ in range(DRAWN_TOKENS):
            logits, uniform = spread * generator.standard_normal(N_VOCAB), generator.random()
            reported.append(cheat(logits + noise * generator.standard_normal(N_VOCAB), uniform))
            top = np.argsort(-logits)[:20].tolist()
            likeliest = tuple((token, float(logits[token])) for token in top)
            again.append(Sampled(inverse(logits, uniform), likeliest))
        yield TokenEvidence(NO_ROWS, 0, (), tuple(reported), True), again


@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("noise", [0.02, 0.2, 0.5])
def test_other_kernels_lean_to_neither_side(spread: float, noise: float) -> None:
    """However flat the distribution is, and however far the logits are off."""
    tallies = Tallies()
    found = [tallies.add(B, A, *check) for check in itertools.islice(checks(spread, noise, inverse), 500)]
    assert not any(found)


@pytest.mark.parametrize("spread", [1.0, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_the_likeliest_instead_of_a_drawn_token_is_certain_soon(spread: float, noise: float) -> None:
    tallies = Tallies()
    greedy = checks(spread, noise, lambda logits, _: int(logits.argmax()))
    found = [tallies.add(B, A, *check) for check in itertools.islice(greedy, 5)]
    assert [bias for bias in found if bias][:1] == [Bias.LIKELIER]


def test_a_flatter_distribution_is_certain_soon() -> None:
    tallies = Tallies()
    flat = checks(3.0, 0.0, lambda logits, uniform: inverse(logits, uniform, 4.0))
    found = [tallies.add(B, A, *check) for check in itertools.islice(flat, 10)]
    assert Bias.UNLIKELIER in found


def test_earlier_merit_does_not_outweigh_what_is_seen_now() -> None:
    tallies = Tallies()
    for check in itertools.islice(checks(3.0, 0.2, inverse), 300):
        assert tallies.add(B, A, *check) is None
    greedy = checks(3.0, 0.2, lambda logits, _: int(logits.argmax()))
    assert any(tallies.add(B, A, *check) for check in itertools.islice(greedy, 5))


def ended(reported: int, again: Sampled) -> tuple[TokenEvidence, list[Sampled]]:
    return TokenEvidence(NO_ROWS, 0, (), (reported,), True, True), [again]


def test_ends_that_no_seed_gives_are_certain_after_four() -> None:
    tallies, unlike = Tallies(), Sampled(3, ((3, -0.1), (4, -3.0)))
    assert [tallies.add(B, A, *ended(9, unlike)) for _ in range(4)] == [None] * 3 + [Bias.ENDS_EARLY]
    for _ in range(100):
        assert tallies.add(C, A, *ended(4, unlike)) is None  # It was likely.
        assert tallies.add(C, A, *ended(9, Sampled(9, ((3, -0.1),), is_end=True))) is None


@pytest.mark.parametrize("chance", [1e-9, 1e-6, 1e-3])
def test_the_less_likely_an_end_is_the_sooner_it_is_certain(chance: float) -> None:
    tallies, unlike = Tallies(), Sampled(3, ((3, -0.1), (4, -3.0)))

    def n_ends(add: Callable[[], object]) -> int:
        return next(n for n in range(1, 20) if add())

    by_computing = n_ends(lambda: tallies.add(B, A, *ended(9, unlike), end_chance=lambda *_: chance))
    assert by_computing == {1e-9: 1, 1e-6: 2, 1e-3: 3}[chance]
    assert n_ends(lambda: tallies.add_end(C, chance)) == {1e-9: 1, 1e-6: 2, 1e-3: 4}[chance]


def test_ends_as_likely_as_chance_has_it_accuse_nobody() -> None:
    """Of honest nodes: each end is as unlikely as one of so many is."""
    chances, tallies = np.random.default_rng(4).random(100_000), Tallies()
    assert not any(tallies.add_end(C, chance) for chance in chances.tolist())
    unlike = Sampled(3, ((3, -0.1), (4, -3.0)))
    for chance in (0.02 * chances[:2000]).tolist():
        assert tallies.add(B, A, *ended(9, unlike), end_chance=lambda *_, chance=chance: chance) is None
        for _ in range(49):
            tallies.add(B, A, *ended(3, Sampled(3, ((3, -0.1),), is_end=True)))


def test_what_different_nodes_computed_is_not_mixed_and_the_first_alone_confirms_nothing() -> None:
    tallies, unlike = Tallies(), Sampled(3, ((3, -0.1), (4, -3.0)))
    for by in (A, M, N):
        assert [tallies.add(B, by, *ended(9, unlike)) for _ in range(3)] == [None] * 3
    assert not tallies.is_confirmed(B, M)
    assert not tallies.is_confirmed(B, M)
    assert tallies.accuser(B) == M
    assert tallies.is_confirmed(B, N)


def test_so_many_pairs_are_remembered() -> None:
    tallies, unlike = Tallies(), Sampled(3, ((3, -0.1), (4, -3.0)))
    for _ in range(3):
        tallies.add(B, A, *ended(9, unlike))
    for number in range(TALLIES_MAX):
        tallies.add(node_id_named(f"other{number}"), A, *ended(9, unlike))
    assert len(tallies._sums) == TALLIES_MAX
    assert tallies.add(B, A, *ended(9, unlike)) is None


END: Final = 7
"""Ends a text."""


class DrawingPool(FakePool):
    """Its heads draw one of twenty tokens, with the request's seed."""

    draws = True

    def __init__(self, *ranges: str) -> None:
        super().__init__(*ranges)
        self.ends = frozenset({END})

    def _sample(self, slot: Any, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        token, _ = super()._sample(slot, request_id, row)
        seed = [slot.sampling.seed, token.index]
        uniform = float(np.random.default_rng(seed).random()) if self.draws else 0.0
        rank = inverse(np.arange(20, 0, -1) / 4, uniform)
        tokens = [(token.token + offset) % PRIME for offset in range(20)]
        likeliest = [TokenLogprob(each, -i / 4 - 1.6, b"") for i, each in enumerate(tokens)]
        if not slot.sampling.logprobs:
            likeliest = []
        drawn = tokens[rank]
        finish: FinishReason | None = "length" if token.index + 1 >= slot.sampling.max_tokens else None
        finish = "stop" if drawn in self.ends else finish
        logprobs = (TokenLogprob(drawn, -rank / 4 - 1.6, b""), *likeliest)[: 1 + len(likeliest)]
        token = msgspec.structs.replace(token, token=drawn, finish_reason=finish, logprobs=logprobs)
        return token, f"{drawn} ".encode()


class GreedyPool(DrawingPool):
    draws = False


class EndingPool(DrawingPool):
    def _sample(self, slot: Any, request_id: str, row: Tensor) -> tuple[Token, bytes]:
        token, piece = super()._sample(slot, request_id, row)
        if token.index < 3:
            return token, piece
        return msgspec.structs.replace(token, token=END, finish_reason="stop"), b""


def drawing(liar: FakePool, *, origin_holds_the_head: bool) -> dict[str, FakePool]:
    pools = {A: DrawingPool("0:4", "8:12") if origin_holds_the_head else DrawingPool("0:4")}
    pools |= {B: DrawingPool("4:8"), LIAR: liar, M: DrawingPool("8:12"), N: DrawingPool("8:12")}
    return pools


async def out_after(swarm: Swarm, n_requests: int) -> int | None:
    """Requests until the liar gets no more work."""
    for number in range(n_requests):
        await prefer(swarm, LIAR, M, N)
        await asked_and_checked(swarm)
        if swarm[A].trust.score(LIAR) < WORK_MIN:
            return number + 1
    return None


@pytest.mark.parametrize("liar", [GreedyPool, EndingPool])
@pytest.mark.parametrize("origin_holds_the_head", [True, False])
async def test_a_last_stage_that_does_not_draw_or_ends_early_is_out_of_all_routes(
    liar: type[FakePool], origin_holds_the_head: bool, patient_clock: MockClock
) -> None:
    pools = drawing(liar("8:12"), origin_holds_the_head=origin_holds_the_head)
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        swarm[A].pipelines._observations.observe(swarm.entry.model_id, "decode", 100.0, 1, 1)
        assert await out_after(swarm, 60) is not None
        trust = swarm[A].trust
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == 1
        assert all(trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


class TruthfulEndingPool(EndingPool):
    """Tells what the logit of the end is, which is not nearly the largest one."""

    def _fingerprint(self, index: int, token: int, sampling: Sampling, row: Tensor) -> bytes | None:
        data = super()._fingerprint(index, token, sampling, row)
        if data is None or token != END:
            return data
        values = decode_fingerprint(data)
        return encode_fingerprint(values[:N_DRAWN], 0.0, -16.0)


@pytest.mark.parametrize(("liar", "is_found"), [(TruthfulEndingPool, True), (EndingPool, False)])
async def test_who_tells_that_a_text_could_not_end_there_is_out_without_a_check(
    liar: type[FakePool], is_found: bool, drawn: list[str], patient_clock: MockClock
) -> None:
    drawn.clear()
    pools = drawing(liar("8:12"), origin_holds_the_head=True)
    async with open_swarm(pools, settings=replace(ALWAYS, check_rate=1e-9)) as swarm:
        for _ in range(3):
            await prefer(swarm, LIAR, M, N)
            await ask(swarm)
        assert count(swarm, LIAR, TrustEvent.WRONG_RESULT) == is_found
        assert all(swarm[A].trust.score(node_id) >= NEUTRAL for node_id in (B, M, N))
        await swarm.quiet()


async def test_last_stages_that_draw_are_right(patient_clock: MockClock) -> None:
    pools = drawing(DrawingPool("8:12"), origin_holds_the_head=False)
    async with open_swarm(pools, settings=ALWAYS) as swarm:
        assert await out_after(swarm, 30) is None
        assert swarm[A].trust.explain(LIAR).counts == {"served": 30, "checked": 30}
