"""Samplers: what the parameters do, and that a step can be repeated."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest

from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode.sampling import Sampler
from swarmllm_workers.errors import CallError

N_VOCAB = 50
LOGITS = np.random.default_rng(5).standard_normal(N_VOCAB).astype(np.float32) * 2
N_DRAWS = 4000


def draw(sampling: Sampling, logits: np.ndarray = LOGITS, n: int = N_DRAWS) -> np.ndarray:
    """How often each token is drawn over the steps of one request."""
    sampler = Sampler(sampling)
    return np.bincount([sampler.sample(logits, index, ()) for index in range(n)], minlength=N_VOCAB)


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return np.asarray(weights / weights.sum())


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.5])
def test_tokens_are_drawn_as_often_as_their_probability_says(temperature: float) -> None:
    counts = draw(Sampling(temperature=temperature, seed=1))
    expected = softmax(LOGITS / temperature) * N_DRAWS
    deviation = (counts - expected) / np.sqrt(expected + 1)
    assert np.abs(deviation).max() < 5  # five standard deviations in 50 tokens: one seed in 30,000


def test_greedy_is_the_first_of_the_largest() -> None:
    logits = LOGITS.copy()
    logits[[31, 17]] = logits.max() + 1
    assert Sampler(Sampling(temperature=0.0)).sample(logits, 0, ()) == 17


@pytest.mark.parametrize(
    ("sampling", "n_possible"),
    [
        (Sampling(top_k=1, seed=3), 1),
        (Sampling(top_k=5, seed=3), 5),
        (Sampling(min_p=1.0, seed=3), 1),
        (Sampling(top_p=0.0, seed=3), 1),
    ],
)
def test_truncation_keeps_the_most_likely_tokens(sampling: Sampling, n_possible: int) -> None:
    drawn = np.nonzero(draw(sampling, n=500))[0]
    assert set(drawn) <= set(np.argsort(-LOGITS)[:n_possible])
    assert len(drawn) == n_possible


def test_top_p_keeps_the_smallest_set_that_reaches_p() -> None:
    order = np.argsort(-LOGITS)
    n_kept = int(np.searchsorted(np.cumsum(softmax(LOGITS)[order]), 0.5)) + 1
    drawn = set(np.nonzero(draw(Sampling(top_p=0.5, seed=9), n=1000))[0])
    assert drawn == set(order[:n_kept])


def test_a_step_drawn_again_gives_the_same_token_and_another_seed_others() -> None:
    first = [Sampler(Sampling(seed=7)).sample(LOGITS, index, ()) for index in range(40)]
    again = Sampler(Sampling(seed=7))
    assert [again.sample(LOGITS, index, ()) for index in reversed(range(40))] == first[::-1]
    assert [Sampler(Sampling(seed=8)).sample(LOGITS, index, ()) for index in range(40)] != first
    assert Sampler(Sampling()).seed != Sampler(Sampling()).seed


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0, repeat_penalty=10.0),
        Sampling(temperature=0.0, presence_penalty=2.0),
        Sampling(temperature=0.0, frequency_penalty=2.0),
    ],
)
def test_penalties_count_what_was_generated(sampling: Sampling) -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[4], logits[9] = 3.0, 2.0
    sampler = Sampler(sampling)
    assert sampler.sample(logits, 0, ()) == 4
    assert sampler.sample(logits, 1, (4,)) == 9
    assert sampler.sample(logits, 1, (9,)) == 4


def test_penalties_look_back_over_so_many_tokens() -> None:
    logits = np.zeros(N_VOCAB, np.float32)
    logits[4], logits[9] = 3.0, 2.0
    for n, chosen in ((0, 4), (1, 4), (2, 9), (1024, 9)):
        sampler = Sampler(Sampling(temperature=0.0, repeat_penalty=10.0, repeat_last_n=n))
        assert sampler.sample(logits, 2, (4, 7)) == chosen, n


def test_typical_leaves_out_what_is_too_likely_to_be_typical() -> None:
    """A third of the probability on one token, the rest evenly on many: the many are typical."""
    logits = np.zeros(N_VOCAB, np.float32)
    logits[4] = np.log((N_VOCAB - 1) / 2)
    drawn = set(np.nonzero(draw(Sampling(typical_p=0.4, seed=2), logits, n=500))[0])
    assert 4 not in drawn
    assert len(drawn) > 10


def test_xtc_leaves_out_all_but_the_last_of_the_likely_tokens() -> None:
    logits = np.full(N_VOCAB, -9.0, np.float32)
    logits[[3, 8, 20]] = 3.0, 2.0, 1.0
    always = draw(Sampling(xtc_probability=1.0, xtc_threshold=0.05, seed=2), logits, n=300)
    assert always[3] == always[8] == 0
    assert always[20] > 250
    sometimes = draw(Sampling(xtc_probability=0.5, xtc_threshold=0.05, seed=2), logits, n=300)
    assert sometimes[3] > 50


@pytest.mark.parametrize("other", [{}, {"top_k": 40}, {"typical_p": 0.9}, {"top_p": 0.999}])
def test_xtc_never_leaves_a_token_that_cannot_come(other: dict[str, float]) -> None:
    """As where a grammar allows few: with this threshold all but the least likely one are left out."""
    logits = LOGITS.copy()
    logits[5:] = -np.inf
    sampling = Sampling(xtc_probability=1.0, xtc_threshold=0.0, seed=5, **other)  # type: ignore[arg-type]
    assert set(np.nonzero(draw(sampling, logits, n=200))[0]) <= set(range(5))


def test_biases_are_added_to_their_tokens() -> None:
    best = int(LOGITS.argmax())
    greedy = Sampling(temperature=0.0, logit_bias=((best, -100.0), (7, 90.0)))
    assert Sampler(greedy, n_vocab=N_VOCAB).sample(LOGITS, 0, ()) == 7
    drawn = Sampler(Sampling(logit_bias=((7, 100.0),)), n_vocab=N_VOCAB)
    assert {drawn.sample(LOGITS, index, ()) for index in range(50)} == {7}
    with pytest.raises(CallError) as caught:
        Sampler(Sampling(logit_bias=((N_VOCAB, 1.0),)), n_vocab=N_VOCAB)
    assert caught.value.field == "sampling.logit_bias"


@pytest.mark.slow
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [2.0, 3.5])
def test_mirostat_steers_to_the_surprise_that_was_asked_for(version: Literal[1, 2], tau: float) -> None:
    logits = -1.1 * np.log(np.arange(1, 2001)).astype(np.float32)
    sampler = Sampler(Sampling(mirostat=version, mirostat_tau=tau, seed=5))
    drawn = [sampler.sample(logits, index, ()) for index in range(1500)]
    probabilities = softmax(logits)
    # Mirostat measures among the tokens it has left; over all of them surprise is a little higher.
    surprise = -np.log2(probabilities[drawn[500:]]).mean()
    assert tau - 0.2 < surprise < tau + 2.0
    entropy = -(probabilities * np.log2(probabilities)).sum()
    assert surprise < entropy - 1, "no steering at all"


def test_mirostat_step_can_be_repeated() -> None:
    sampler = Sampler(Sampling(mirostat=2, seed=5))
    first = [sampler.sample(LOGITS, index, ()) for index in range(30)]
    assert [sampler.sample(LOGITS, index, ()) for index in range(10, 30)] == first[10:]


@pytest.mark.parametrize("is_greatest", [True, False])
def test_a_surprise_that_no_number_can_say_allows_all_tokens(is_greatest: bool) -> None:
    """The limit rises with each token, by up to 100 bits."""
    eta = 1.0 if is_greatest else 0.0
    sampler = Sampler(Sampling(mirostat=1, mirostat_tau=100.0, mirostat_eta=eta, seed=2))
    drawn = {sampler.sample(LOGITS * np.float32(0.01), index, ()) for index in range(300)}
    assert len(drawn) > N_VOCAB * 0.9


@pytest.mark.parametrize("penalty", [0.0, 1e-300, 1e-45, 0.009])
def test_penalty_of_nearly_zero_is_refused(penalty: float) -> None:
    with pytest.raises(CallError, match="must be at least") as caught:
        Sampler(Sampling(repeat_penalty=penalty))
    assert caught.value.field == "sampling.repeat_penalty"


def test_logits_that_are_not_finite_are_an_error() -> None:
    damaged = LOGITS.copy()
    damaged[3] = np.nan
    with pytest.raises(CallError, match="finite"):
        Sampler(Sampling(temperature=0.0)).sample(damaged, 0, ())
