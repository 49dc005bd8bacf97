"""A token drawn in one call is the one that libllama's samplers draw."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.sampling import random_logits
from swarmllm.guide import GUIDE_PATH
from swarmllm_proto.ipc import Sampling
from swarmllm_workers.decode import candidates
from swarmllm_workers.decode.native_draw import Changed, NativeDraw
from swarmllm_workers.decode.sampling import Sampler, step_seed
from swarmllm_workers.engine.libllama import Model
from swarmllm_workers.errors import CallError

pytestmark = pytest.mark.skipif(candidates.native.library is None, reason="draw.c was not built")

N_VOCAB = 32_000
MANY = 150_000
SETTINGS = (
    Sampling(temperature=0.0),
    Sampling(),
    Sampling(temperature=0.6),
    Sampling(temperature=0.01),
    Sampling(top_k=40, temperature=0.8),
    Sampling(top_k=40, top_p=0.95, min_p=0.05, temperature=0.8),
    Sampling(top_k=1),
    Sampling(top_k=200, top_p=0.5, temperature=1.5),
    Sampling(top_p=0.9),
    Sampling(top_p=0.95, temperature=0.7),
    Sampling(top_p=0.95, min_p=0.1, temperature=1.2),
    Sampling(top_p=0.0),
    Sampling(min_p=0.05),
    Sampling(min_p=0.5, temperature=2.0),
)


def slowly(sampling: Sampling) -> Sampler:
    """Draws as where draw.c was not built."""
    sampler = Sampler(sampling, n_vocab=MANY)
    sampler._native._library = None
    return sampler


@pytest.mark.parametrize("sampling", SETTINGS)
@pytest.mark.parametrize("n_vocab", [700, N_VOCAB])
def test_nearly_every_token_is_drawn_in_one_call(sampling: Sampling, n_vocab: int) -> None:
    draw, slow, drawn = NativeDraw(sampling), slowly(sampling), list[int]()
    for i in range(60):
        logits = random_logits(n_vocab, i)
        token = draw(logits, step_seed(slow.seed, i))
        if token is not None:
            drawn.append(token)
            assert token == slow.sample(logits, i, ())
            assert draw.largest == slow.largest
    assert len(drawn) >= 57


@settings(max_examples=300, deadline=None)
@given(
    sampling=st.sampled_from(SETTINGS),
    n=st.sampled_from([1, 2, 127, 128, 129, 500, 2048, 2049, 9000]),
    width=st.sampled_from([0.01, 1.0, 3.0, 40.0]),
    step=st.sampled_from([0.0, 0.25]),
    share_masked=st.sampled_from([0.0, 0.5, 0.999]),
    seed=st.integers(0, 2**32 - 1),
)
def test_where_it_is_sure_it_is_right(
    sampling: Sampling, n: int, width: float, step: float, share_masked: float, seed: int
) -> None:
    """Also with equal logits, and where most tokens cannot come."""
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(n) * width).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    logits[rng.random(n) < share_masked] = -np.inf
    logits[int(rng.integers(n))] = 1.0
    draw, slow = NativeDraw(sampling), slowly(sampling)
    for i in range(10):
        token = draw(logits, step_seed(slow.seed, i))
        assert token in (None, slow.sample(logits, i, ()))


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_a_flat_nucleus_is_drawn_from_without_sorting_it(temperature: float) -> None:
    sampling = Sampling(top_p=0.95, temperature=temperature)
    draw, slow, n_sure = NativeDraw(sampling), slowly(sampling), 0
    for i in range(12):
        logits = random_logits(MANY, i, is_flat=True)
        token = draw(logits, step_seed(slow.seed, i))
        assert token in (None, slow.sample(logits, i, ()))
        n_sure += token is not None
    assert n_sure >= 9


def test_tokens_outside_the_nucleus_of_a_flat_distribution_are_never_drawn() -> None:
    logits = np.full(20_000, -0.75, np.float32)
    logits[:10_000] = np.linspace(0.1, 0.0, 10_000, dtype=np.float32)
    weights = np.exp(logits.astype(np.float64))
    n_kept = int(np.searchsorted(np.cumsum(weights), 0.3 * weights.sum())) + 1
    draw = NativeDraw(Sampling(top_p=0.3))
    drawn = [token for seed in range(2000) if (token := draw(logits, seed)) is not None]
    assert len(drawn) > 1900
    assert n_kept * 0.99 < max(drawn) < n_kept


def test_more_equal_tokens_than_there_is_room_for_are_left_to_the_sampler() -> None:
    assert NativeDraw(Sampling(top_p=0.3))(np.zeros(20_000, np.float32), 1) is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("sampling", SETTINGS)
def test_what_is_not_finite_is_left_to_the_sampler(sampling: Sampling, value: float) -> None:
    for at in (0, 130, 299):
        logits = np.full(300, -np.inf, np.float32) if value == -np.inf else np.zeros(300, np.float32)
        logits[at] = value
        assert NativeDraw(sampling)(logits, 1) is None
        with pytest.raises(CallError, match="not finite"):
            Sampler(sampling).sample(logits, 0, ())


@pytest.mark.parametrize(
    "sampling", [Sampling(typical_p=0.5), Sampling(mirostat=2), Sampling(xtc_probability=0.5)]
)
def test_what_it_does_not_know_is_left_to_the_sampler(sampling: Sampling) -> None:
    assert NativeDraw(sampling)(np.zeros(300, np.float32), 1) is None


def test_other_arrays_are_left_to_the_sampler() -> None:
    draw = NativeDraw(Sampling())
    assert draw(np.zeros(300), 1) is None
    assert draw(np.zeros(600, np.float32)[::2], 1) is None


def test_a_sampler_takes_rows_of_other_lengths() -> None:
    sampler, slow = Sampler(Sampling(seed=1)), slowly(Sampling(seed=1))
    for i, n in enumerate((300, 20_000, 5)):
        assert sampler.sample(random_logits(max(n, 500), 1)[:n], i, ()) == slow.sample(
            random_logits(max(n, 500), 1)[:n], i, ()
        )


def test_a_random_number_near_a_border_is_left_to_the_sampler() -> None:
    """Of two tokens, in f32 as near as they come."""
    uniform, n_near = candidates.SeededUniform(), 0
    for seed in range(200):
        random = uniform(seed)
        logits = np.array([np.log(random), np.log(1 - random)], np.float32)
        weights = np.exp(logits.astype(np.float64))
        if abs(weights[0] / weights.sum() - random) > 3e-8:
            continue
        n_near += 1
        assert NativeDraw(Sampling())(logits, seed) is None
        assert NativeDraw(Sampling(top_p=max(random, 1 - random)))(logits, 0) is None
        if random > 0.5:  # the likelier one comes first
            assert NativeDraw(Sampling(top_k=2))(logits, seed) is None
    assert n_near > 20


def test_a_token_that_is_just_kept_or_just_not_is_left_to_the_sampler() -> None:
    for below in (-2e-5, 0.0, 2e-5):
        logits = np.array([0.0, np.log(0.25) - below, -9.0], np.float32)
        for sampling in (Sampling(min_p=0.25), Sampling(min_p=0.25, top_k=3)):
            assert NativeDraw(sampling)(logits, 1) is None
    logits = np.array([3.0, 2.0, 2.0, 1.0], np.float32)
    assert NativeDraw(Sampling(top_k=2))(logits, 1) is None
    assert NativeDraw(Sampling(top_k=1))(logits, 1) == 0


@pytest.mark.parametrize("temperature", [1e-60, 1e-38])
@pytest.mark.parametrize("truncation", [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_a_temperature_near_nothing_is_greedy(temperature: float, truncation: dict[str, float]) -> None:
    sampling = Sampling(temperature=temperature, **truncation)  # type: ignore[arg-type]
    logits = random_logits(1000, 2)
    expected = [int(logits.argmax())] * 5
    assert [Sampler(sampling).sample(logits, i, ()) for i in range(5)] == expected
    assert [slowly(sampling).sample(logits, i, ()) for i in range(5)] == expected


CHANGES = (
    Sampling(repeat_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=5),
    Sampling(temperature=0.0, repeat_penalty=1.5, seed=5),
    Sampling(logit_bias=((7, 30.0), (3, -100.0), (7, -1.0)), seed=5),
    Sampling(logit_bias=((7, 5.0),), repeat_penalty=1.2, repeat_last_n=4, top_k=40, seed=5),
    Sampling(dry_multiplier=0.8, dry_allowed_length=1, repeat_penalty=1.1, top_p=0.9, seed=5),
)


@pytest.mark.parametrize("sampling", CHANGES)
def test_changed_logits_are_drawn_from_and_left_as_they_were(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(GUIDE_PATH, vocab_only=True)
    n_vocab = model.n_vocab
    logits = random_logits(n_vocab, 4)
    before, likely = logits.copy(), np.argsort(-logits)[:5].tolist()
    quick = Sampler(sampling, model.vocabulary, n_vocab)
    slow = Sampler(sampling, model.vocabulary, n_vocab)
    slow._native._library = None
    monkeypatch.setattr(quick, "_draw", None)  # is not asked
    generated = [*likely, 3, 3, 130, n_vocab - 1, *likely]
    for i in range(30):
        token = quick.sample(logits, i, generated)
        assert token == slow.sample(logits, i, generated)
        assert np.array_equal(logits, before)
        assert quick.largest == slow.largest == before.max()
    model.close()


def test_the_first_draw_of_a_request_has_nothing_to_look_back_at() -> None:
    for sampling in CHANGES:
        if not sampling.dry_multiplier:
            expected = slowly(sampling).sample(random_logits(5000, 1), 0, ())
            assert Sampler(sampling, n_vocab=5000).sample(random_logits(5000, 1), 0, ()) == expected


def test_where_changes_leave_no_finite_logit_the_sampler_decides() -> None:
    logits = np.zeros(300, np.float32)
    everywhere = np.arange(300, dtype=np.int32)
    for value in (np.nan, np.inf, -np.inf):
        changed = Changed(everywhere, np.full(300, value, np.float32))
        assert NativeDraw(Sampling())(logits, 1, changed) is None
        assert not logits.any()


def test_a_token_that_a_change_makes_impossible_is_never_drawn() -> None:
    """Alone in its block, it was the largest."""
    logits = np.full(400, -5.0, np.float32)
    logits[200] = 9.0
    changed = Changed(np.array([200], np.int32), np.array([-np.inf], np.float32))
    draw = NativeDraw(Sampling())
    assert 200 not in {draw(logits, seed, changed) for seed in range(300)}
    greedy = NativeDraw(Sampling(temperature=0.0))
    assert (greedy(logits, 0, changed), greedy.largest) == (0, 9.0)
