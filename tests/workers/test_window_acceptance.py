"""How the last stage accepts the guesses of a window."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from long_runs import part_or_whole

from swarmllm_proto.ipc import Sampling
from swarmllm_proto.limits import GUESSES_MAX, WINDOW_ROWS_MAX
from swarmllm_workers.decode.decoding import Decoded, Decoding
from swarmllm_workers.decode.vocabulary import Vocabulary
from swarmllm_workers.schedule.window_work import WindowRows, WindowWork, judge
from swarmllm_workers.speculation.drafting import NgramLookup

from .factory import N_VOCAB


@pytest.mark.slow
def test_distribution_over_windows_is_that_of_the_model(vocabulary: Vocabulary) -> None:
    """30,000 tokens (in a long run 100,000) of a text in which each depends on the one before it, guessed
    from the text so far and accepted as the last stage does it: chi-square of all pairs against what the
    model says."""
    n_tokens = part_or_whole(30_000, 100_000)
    letters = np.arange(ord("a"), ord("a") + 6)
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


def test_single_rows_of_a_trial_stand_where_they_stood_together() -> None:
    spans: list[tuple[int, int]] = []

    def run(_route: object, given: list[Any]) -> list[np.ndarray]:
        (span,) = given
        spans.append((span.position, len(span.data)))
        return [np.ones((len(span.data), 4), np.float32)]

    engine: Any = SimpleNamespace(n_layers=12, run=run)
    route: Any = SimpleNamespace(start=0, end=4)
    assert WindowRows(engine)._is_exact(route, 0, 7, np.ones((3, 4), np.float32), 2)
    assert spans == [(7, 2), (7, 1), (8, 1), (9, 1)]


def test_all_batches_of_a_window_are_its_computing_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WindowWork, "_sample_rows", lambda self, logits: None)
    work: Any = WindowWork.__new__(WindowWork)
    work._message = SimpleNamespace(want="token")
    work._compute_s, work._n_done, work._n_running = 0.0, 0, 2
    for seconds in (0.5, 0.25):
        work.accept(np.ones((2, 4), np.float32), seconds)
    assert (work._compute_s, work._n_done) == (0.75, 4)
