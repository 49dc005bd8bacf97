"""How far a token is from the one that its seed gives: little at honest nodes, however flat the odds are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmllm.pipeline.check.likelihood import (
    FAR,
    between,
    comparable,
    end_chance,
    end_chance_by_fingerprint,
    is_far,
    is_plain,
)
from swarmllm.pipeline.check.sampling import DRAWN_TOKENS
from swarmllm.pipeline.check.tallies import Bias, Tallies
from swarmllm.pipeline.check.verdict import Sampled, TokenEvidence
from swarmllm_proto.fingerprints import N_DRAWN
from swarmllm_proto.ipc import Sampling

from .test_check_tallies import NO_ROWS
from .test_checks import A, B

N_VOCAB = 300
PLAIN = Sampling(temperature=1.0)
NUCLEUS = Sampling(temperature=0.8, top_p=0.95)
GREEDY = Sampling(temperature=0.0)
Draw = Callable[[np.ndarray, float], int]
"""(logits, uniform number) -> token."""


def probabilities(logits: np.ndarray, temperature: float) -> np.ndarray:
    weights = np.exp((logits - logits.max()) / temperature)
    return np.asarray(weights / weights.sum())


def by_id(logits: np.ndarray, uniform: float, temperature: float = 1.0) -> int:
    """As where nothing is truncated."""
    sums = np.cumsum(probabilities(logits, temperature))
    return min(int(np.searchsorted(sums, uniform)), len(logits) - 1)


def by_rank(logits: np.ndarray, uniform: float, temperature: float = 0.8) -> int:
    """As with top_p."""
    order = np.argsort(-logits, kind="stable")
    kept = order[: int(np.searchsorted(np.cumsum(probabilities(logits, 1.0)[order]), 0.95)) + 1]
    return int(kept[by_id(logits[kept], uniform, temperature)])


def sampled(logits: np.ndarray, token: int) -> Sampled:
    logprobs = np.log(probabilities(logits, 1.0))
    top = np.argsort(-logits)[:20].tolist()
    return Sampled(token, tuple((each, float(logprobs[each])) for each in top))


def n_far(
    sampling: Sampling, honest: Draw, reported: Draw, noise: float, spread: float, n_tokens: int = 3000
) -> int:
    generator = np.random.default_rng(3)
    found = 0
    for _ in range(n_tokens):
        logits, uniform = spread * generator.standard_normal(N_VOCAB), generator.random()
        again = sampled(logits, honest(logits, uniform))
        off = logits + noise * generator.standard_normal(N_VOCAB)
        found += is_far(reported(off, uniform), again, sampling, N_VOCAB)
    return found


@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0])
@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize(
    ("sampling", "draw"),
    [(PLAIN, by_id), (NUCLEUS, by_rank), (GREEDY, lambda logits, _: int(logits.argmax()))],
)
def test_other_kernels_give_no_token_that_is_far(
    sampling: Sampling, draw: Draw, noise: float, spread: float
) -> None:
    assert n_far(sampling, draw, draw, noise, spread) == 0


@pytest.mark.parametrize(
    "cheat",
    [
        lambda logits, _: int(logits.argmax()),
        lambda logits, uniform: by_id(logits, uniform, 0.5),
        lambda logits, uniform: by_id(logits, 1 - uniform),
        lambda logits, uniform: by_id(logits[::-1], uniform),
    ],
    ids=["the likeliest", "half the temperature", "another number", "other logits"],
)
def test_tokens_of_a_stage_that_does_not_draw_as_asked_are_far(cheat: Draw) -> None:
    """Of a hundred tokens a few, where the distribution is not flat."""
    assert n_far(PLAIN, by_id, cheat, 0.0, 3.0, 1000) > 50


def test_a_stage_with_another_seed_is_certain_soon_and_a_greedy_one_with_other_rows_too() -> None:
    generator = np.random.default_rng(5)
    for sampling in (PLAIN, GREEDY):
        tallies, certain = Tallies(), None
        for _ in range(8):
            reported, again = [], []
            for _ in range(DRAWN_TOKENS):
                logits = 3 * generator.standard_normal(N_VOCAB)
                honest = by_id(logits, generator.random()) if sampling is PLAIN else int(logits.argmax())
                reported.append(by_id(logits, generator.random()))
                again.append(sampled(logits, honest))
            evidence = TokenEvidence(NO_ROWS, 0, (), tuple(reported), True)
            far = partial(is_far, sampling=sampling, n_vocab=N_VOCAB)
            certain = certain or tallies.add(B, A, evidence, again, is_greedy=sampling is GREEDY, is_far=far)
        assert certain is Bias.FAR


@given(
    st.integers(0, 2**32 - 1),
    st.floats(0.2, 8.0),
    st.floats(0.1, 4.0),
    st.integers(0, N_VOCAB - 1),
    st.integers(0, N_VOCAB - 1),
)
def test_what_is_said_to_lie_between_two_tokens_is_at_most_the_truth(
    seed: int, spread: float, temperature: float, one: int, other: int
) -> None:
    logits = spread * np.random.default_rng(seed).standard_normal(N_VOCAB)
    likely = probabilities(logits, temperature)
    said = between(other, sampled(logits, one), Sampling(temperature=temperature), N_VOCAB)
    low, high = sorted((one, other))
    assert said <= likely[low + 1 : high].sum() + 1e-9
    cut = Sampling(temperature=temperature, top_k=40)
    ranks = np.argsort(-logits).tolist()
    low, high = sorted((ranks.index(one), ranks.index(other)))
    assert between(other, sampled(logits, one), cut, N_VOCAB) <= likely[ranks[low + 1 : high]].sum() + 1e-9


def test_where_the_order_of_the_tokens_is_not_known_the_smaller_distance_counts() -> None:
    logits = np.zeros(N_VOCAB)
    logits[[10, 20, 30]] = 9.0, 8.0, 7.0
    again = sampled(logits, 10)
    assert between(30, again, PLAIN, N_VOCAB) > FAR
    logits[[10, 20, 30]] = 9.0, 7.0, 8.0
    again = sampled(logits, 10)
    assert between(30, again, PLAIN, N_VOCAB) > FAR / 2
    assert between(30, again, Sampling(min_p=0.01), N_VOCAB) == 0


def test_tokens_that_nearly_equal_ones_stand_between_are_not_far() -> None:
    """Another node may have them in another order."""
    logits = np.full(N_VOCAB, -9.0)
    logits[[10, 20, 30]] = 0.1, 0.05, 0.0
    assert between(30, sampled(logits, 10), NUCLEUS, N_VOCAB) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"repeat_penalty": 1.1},
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"dry_multiplier": 0.8},
        {"mirostat": 2},
        {"grammar": 'root ::= "a"'},
        {"json_schema": "{}"},
        {"logit_bias": ((3, 1.0),)},
        {"typical_p": 0.9},
        {"xtc_probability": 0.1},
    ],
)
def test_what_is_not_drawn_from_the_models_own_probabilities_is_not_plain(changes: dict[str, object]) -> None:
    assert is_plain(PLAIN)
    assert is_plain(NUCLEUS)
    assert not is_plain(msgspec.structs.replace(PLAIN, **changes))


def test_after_another_token_a_grammar_makes_the_rest_incomparable() -> None:
    again = [Sampled(1), Sampled(2), Sampled(3), Sampled(4)]
    grammar = Sampling(grammar='root ::= "a"')
    assert comparable(again, (1, 9, 3, 4), grammar) == again[:2]
    assert comparable(again, (1, 2, 3, 4), grammar) == again
    assert comparable(again, (1, 9, 3, 4), PLAIN) == again


def test_an_end_has_at_most_the_chance_that_the_logits_give_it() -> None:
    logits = np.random.default_rng(2).standard_normal(N_VOCAB) * 3
    logits[7] = logits.min() - 4
    for temperature in (0.5, 1.0, 2.0):
        sampling = Sampling(temperature=temperature)
        logprobs = logits - np.log(np.exp(logits).sum())
        top = np.argsort(-logits)[:20].tolist()
        known = Sampled(top[0], tuple((token, float(logprobs[token])) for token in top))
        weights = np.exp(logits / temperature)
        true = 10 * weights[7] / weights.sum()
        reported = replace(known, reported_logprob=float(logprobs[7]))
        assert true < end_chance(7, reported, sampling, 10) < 20 * true
        assert end_chance(7, known, sampling, 10) > end_chance(7, reported, sampling, 10)
        values = np.array([0.0] * N_DRAWN + [logits.max(), logits[7]], np.float32)
        assert true < end_chance_by_fingerprint(values, sampling, 10)
    assert end_chance(7, reported, Sampling(temperature=0.0), 10) == 1
    assert end_chance_by_fingerprint(values, Sampling(temperature=0.0), 10) == 1
    assert end_chance(7, Sampled(1), sampling, 10) == 1
