"""Which tokens can be drawn: sampling from few candidates has the results of sampling from all."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sampling import random_logits, whole_list
from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode import candidates
from swarmllm_workers.decode.sampling import Sampler, step_seed
from swarmllm_workers.kernels.kernel_tuning import processor

from .test_sampling import softmax

CHI_SQUARE_MAX = 5.0
"""Standard deviations of the statistic from its mean: one seed in a million."""


@pytest.fixture(params=["C", "numpy"])
def both(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "numpy":
        monkeypatch.setattr(candidates.native, "library", None)
    elif candidates.native.library is None:
        pytest.skip("weights.c was not built")


def test_the_widest_registers_of_this_processor_are_computed_with() -> None:
    """A processor with AVX2 of any maker: its numbers are otherwise computed one by one."""
    if candidates.native.library is None:
        pytest.skip("weights.c was not built")
    features = set(processor()[1].split())
    expected = 512 if "avx512f" in features else 256 if {"avx2", "fma"} <= features else 128
    assert candidates.native.library.swarmllm_weights_width() == expected


@pytest.mark.parametrize("is_native", [True, False])
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 1000),
    k=st.integers(1, 1100),
    n_values=st.integers(1, 40),
    seed=st.integers(0, 2**32 - 1),
)
def test_the_largest_are_those_of_a_full_sort(
    n: int, k: int, n_values: int, seed: int, is_native: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.integers(-n_values, n_values + 1, n) / 4).astype(np.float32)
    logits[rng.random(n) < 0.1] = -np.inf
    native, candidates.native = candidates.native, candidates._Native()
    try:
        if not is_native:
            candidates.native.library = None
        smallest = np.sort(logits)[::-1][min(k, n) - 1]
        maxima = candidates.block_maxima(logits)
        assert candidates.largest(logits, k, maxima).tolist() == np.flatnonzero(logits >= smallest).tolist()
        assert candidates.above(logits, 0.5, maxima).tolist() == np.flatnonzero(logits >= 0.5).tolist()
        assert candidates.best(logits, maxima) == int(logits.argmax())
        logits[int(rng.integers(n))] = np.nan
        assert candidates.best(logits, candidates.block_maxima(logits)) == int(logits.argmax())
    finally:
        candidates.native = native


@pytest.mark.parametrize("n_vocab", [1, 50, 128, 129, 32_000])
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_draws_are_those_of_the_definition(both: None, n_vocab: int, temperature: float) -> None:
    """The first token at which the sum reaches the random number."""
    logits = random_logits(max(n_vocab, 500), 3)[:n_vocab]
    ends = np.cumsum(softmax((logits / np.float32(temperature)).astype(np.float32)))
    rng = np.random.default_rng(5)
    for random in [0.0, 1 - 2.0**-53, *rng.random(100)]:
        token = candidates.draw(logits, float(logits.max()), temperature, random)
        if token is None:
            assert np.abs(ends - random).min() < 1e-6 or random == 0.0
        elif np.abs(ends - random).min() > 1e-6:
            assert token == np.searchsorted(ends, random)


def test_impossible_tokens_are_never_drawn(both: None) -> None:
    logits = np.full(1000, -np.inf, np.float32)
    logits[[3, 700]] = -200.0, -200.5
    sampler = Sampler(Sampling(seed=4))
    assert {sampler.sample(logits, i, ()) for i in range(100)} == {3, 700}


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(seed=3),
        Sampling(temperature=0.6, seed=3),
        Sampling(temperature=1.4, repeat_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3, seed=3),
        Sampling(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8, repeat_penalty=1.1, seed=3),
        Sampling(top_k=300, seed=3),
        Sampling(top_p=0.9, seed=3),
        Sampling(top_p=0.9, min_p=0.02, seed=3),
        Sampling(min_p=0.05, temperature=0.8, seed=3),
    ],
)
@pytest.mark.parametrize("n_vocab", [700, 20_000])
def test_each_seed_draws_what_libllama_draws_from_all_tokens(
    both: None, sampling: Sampling, n_vocab: int
) -> None:
    logits = random_logits(n_vocab, 8)
    generated = np.argsort(-logits)[:7].tolist() * 2
    sampler = Sampler(sampling)
    drawn = [sampler.sample(logits, i, generated) for i in range(100)]
    assert drawn == [whole_list(sampling, logits, i, generated) for i in range(100)]
    assert len(set(drawn)) > 1


@pytest.mark.parametrize("is_native", [True, False])
def test_a_flat_distribution_is_drawn_as_often_as_it_says(
    monkeypatch: pytest.MonkeyPatch, is_native: bool
) -> None:
    """Chi-square of 200 groups of tokens, none of which is likely by itself."""
    if not is_native:
        monkeypatch.setattr(candidates.native, "library", None)
    logits = random_logits(20_000, 1, is_flat=True)
    sampler, n_draws = Sampler(Sampling(seed=11)), 4000
    drawn = np.bincount([sampler.sample(logits, i, ()) % 200 for i in range(n_draws)], minlength=200)
    expected = np.bincount(np.arange(20_000) % 200, softmax(logits)) * n_draws
    statistic = float(((drawn - expected) ** 2 / expected).sum())
    assert abs(statistic - 199) < CHI_SQUARE_MAX * np.sqrt(2 * 199)


@pytest.mark.parametrize("top_p", [0.5, 0.9, 0.99])
@pytest.mark.parametrize("is_flat", [True, False])
def test_the_nucleus_is_the_fewest_that_reach_p(both: None, top_p: float, is_flat: bool) -> None:
    logits = random_logits(20_000, 2, is_flat=is_flat)
    order = np.argsort(-logits, kind="stable")
    sums = np.cumsum(softmax(logits)[order])
    kept = candidates.nucleus(logits, top_p, candidates.block_maxima(logits))
    assert kept.tolist() == order[: len(kept)].tolist()
    assert sums[len(kept) - 1] > top_p - 1e-6
    assert len(kept) == 1 or sums[len(kept) - 2] < top_p + 1e-6


def test_random_numbers_are_those_of_libllamas_sampler() -> None:
    """Equally likely tokens tell its first bits."""
    uniform = candidates.SeededUniform()
    logits = np.zeros(1024, np.float32)
    for index in range(50):
        sampling = Sampling(seed=index)
        token = whole_list(sampling, logits, 0, ())
        assert token == int(uniform(step_seed(index, 0)) * 1024)


def test_a_nan_among_the_last_numbers_is_found(both: None) -> None:
    """Behind the last whole register of the last block."""
    logits = np.zeros(130, np.float32)
    logits[129] = np.nan
    assert candidates.best(logits, candidates.block_maxima(logits)) == 129
