"""How the last stage accepts the guesses of a window."""

from __future__ import annotations

import numpy as np
import pytest

from swarmllm_proto.ipc import Sampling
from swarmllm_proto.limits import GUESSES_MAX, WINDOW_ROWS_MAX
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.schedule.window_work import judge
from swarmllm_workers.speculation.drafting import NgramLookup

from .factory import N_VOCAB


@pytest.mark.slow
def test_distribution_over_windows_is_that_of_the_model(vocabulary: Vocabulary) -> None:
    """100,000 tokens of a text in which each depends on the one before it, guessed from the text so far and
    accepted as the last stage does it: chi-square of all pairs against what the model says."""
    n_tokens, letters = 100_000, np.arange(ord("a"), ord("a") + 6)
    table = np.full((N_VOCAB, N_VOCAB), -np.inf, np.float32)
    chances = np.random.default_rng(2).dirichlet(np.full(len(letters), 0.4), len(letters))
    table[np.ix_(letters, letters)] = np.log(chances)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, seed=8, max_tokens=n_tokens)
    decoding = Decoding(vocabulary, sampling)
    decoding.decode(table[letters[0]], 0)
    lookup, history = NgramLookup(4, GUESSES_MAX), np.empty(n_tokens, np.int32)
    history[0], n_guessed, n_right = decoding.tokens[0], 0, 0
    while (n := decoding.n_generated) < n_tokens:
        # Between none and as many as a window takes, and no more than tokens may still come.
        n_wanted = min(n % WINDOW_ROWS_MAX, n_tokens - n - 1)
        draft = lookup.draft(history[:n], lambda kind, once_s, n_wanted=n_wanted: n_wanted)  # type: ignore[misc]
        guesses = draft.tokens if draft is not None else ()
        decoded: list[Decoded] = []
        judge(decoding, n, table[[decoding.tokens[-1], *guesses]], guesses, decoded)
        history[n : n + len(decoded)] = [each.token for each in decoded]
        n_guessed, n_right = n_guessed + len(guesses), n_right + len(decoded) - 1
    assert n_tokens / 3 < n_right < n_guessed
    text = np.array(decoding.tokens) - letters[0]
    counts = np.zeros(chances.shape)
    np.add.at(counts, (text[:-1], text[1:]), 1)
    expected = counts.sum(axis=1, keepdims=True) * chances
    is_likely = expected >= 10
    statistic = float((((counts - expected) ** 2) / expected)[is_likely].sum())
    freedom = int(is_likely.sum()) - len(letters)
    assert freedom >= 20
    # Wilson and Hilferty's normal approximation; one honest run in 10,000 is beyond 3.7.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.7, z
