"""A prompt that is answered again: what followed it is guessed, and changes nothing but the time."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers.cache.prefixes import PrefixSettings
from swarmllm_workers.speculation.drafting import (
    AGAIN,
    ENTRIES_PER_PREFIX,
    N_TOKENS_MAX,
    Continuations,
    Remembered,
)

from .test_batching import OpenRoom, Room, batches, open_room  # noqa: F401
from .test_speculation import done, eager, guide_prompt, needs_small_batches  # noqa: F401

SETTINGS = PrefixSettings(n_cells_entries=1, n_entries=1, ttl_s=10.0)
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 5},
    "penalised": {"temperature": 0.0, "repeat_penalty": 1.3},
    "with logprobs": {"temperature": 0.0, "logprobs": True, "top_logprobs": 3},
    "with a stop string": {"temperature": 0.0},
    "in a grammar": {"temperature": 0.0, "grammar": 'root ::= ("one" | "two" | " ")+'},
    "mirostat": {"temperature": 0.8, "mirostat": 2, "seed": 3},
}


def ids(*tokens: int) -> np.ndarray:
    return np.array(tokens, np.int32)


def test_the_answer_to_the_very_same_prompt_is_remembered() -> None:
    kept = Continuations(SETTINGS)
    kept.remember(ids(1, 2, 3), ids(7, 8), 0.0)
    assert kept.recall(ids(1, 2, 3), 1.0).tolist() == [7, 8]
    for other in (ids(1, 2), ids(1, 2, 3, 7), ids(1, 2, 4)):
        assert not len(kept.recall(other, 1.0))


def test_the_latest_answer_counts_unless_it_only_breaks_off_earlier() -> None:
    kept = Continuations(SETTINGS)
    kept.remember(ids(1), ids(7, 8, 9), 0.0)
    kept.remember(ids(1), ids(7, 8), 0.0)
    assert kept.recall(ids(1), 0.0).tolist() == [7, 8, 9]
    kept.remember(ids(1), ids(7, 5), 0.0)
    assert kept.recall(ids(1), 0.0).tolist() == [7, 5]


def test_what_nobody_asks_for_is_forgotten() -> None:
    kept = Continuations(SETTINGS)
    kept.remember(ids(1), ids(7), 0.0)
    kept.remember(ids(2), ids(8), 9.0)
    assert len(kept.recall(ids(1), 9.0))
    assert len(kept.recall(ids(1), 18.0))  # asked for in time
    assert not len(kept.recall(ids(2), 19.5))
    assert not len(kept.recall(ids(1), 28.5))
    assert len(kept) == 0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 2 * N_TOKENS_MAX)), max_size=40))
@settings(max_examples=40)
def test_memory_is_bounded(answers: list[tuple[int, int]]) -> None:
    kept, off = Continuations(SETTINGS), Continuations(PrefixSettings())
    for at, (prompt, n) in enumerate(answers):
        for each in (kept, off):
            each.remember(ids(prompt), np.full(n, at, np.int32), 0.0)
        assert len(kept) <= ENTRIES_PER_PREFIX
        assert len(off) == 0
        assert len(kept.recall(ids(prompt), 0.0)) <= N_TOKENS_MAX


def test_guesses_go_on_as_long_as_they_come_true() -> None:
    drafter = Remembered(2, ids(7, 8, 9, 10))
    asked: list[str] = []

    def worth(kind: str, _start_s: float) -> int:
        asked.append(kind)
        return 2

    drafts = [drafter.draft(ids(*tokens), worth) for tokens in ([1, 2], [1, 2, 7], [1, 2, 7, 8, 9])]
    assert [draft and draft.tokens for draft in drafts] == [(7, 8), (8, 9), (10,)]
    assert drafter.draft(ids(1, 2, 7, 8, 9, 10), worth) is None  # nothing is known of what follows
    assert set(asked) == {AGAIN}
    wrong = Remembered(2, ids(7, 8, 9, 10))
    assert wrong.draft(ids(1, 2, 5), worth) is None
    assert wrong.draft(ids(1, 2, 5, 8), worth) is None


def ask(room: Room, prompt: np.ndarray, **sampling: Any) -> tuple[list[tuple[Any, ...]], ipc.GenerateDone]:
    """All that a reader sees, and how it went."""
    name = f"request-{next(NUMBERS)}"
    room.generate(prompt, name, ipc.Sampling(**({"max_tokens": 12, "ignore_eos": True} | sampling)))
    room.run()
    assert not room.errors()
    tokens = [(m, text) for m, text in room.sent if isinstance(m, ipc.Token) and m.request_id == name]
    return [(m.index, m.token, m.finish_reason, m.logprobs, text) for m, text in tokens], done(room, name)


NUMBERS = count()


@needs_small_batches
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "question", ["What is a pipeline?", "Tell me in short how I load a model on two nodes, and why."]
)
def test_the_same_again_is_the_same(open_room: OpenRoom, way: str, question: str) -> None:
    plain = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=4)
    guessing = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=4, ngram_max_size=4)
    ask(guessing, guide_prompt(guessing, "Hello"), temperature=0.0)  # tried: guesses count from now on
    prompt, sampling = guide_prompt(plain, question), dict(WAYS[way])
    if way == "with a stop string":
        text = b"".join(each[-1] for each in ask(plain, prompt, **sampling)[0]).decode()
        sampling["stop"] = (text[len(text) // 2 :][:6],)
    for i in range(3):
        seen, _ = ask(plain, prompt, **sampling)
        again, account = ask(guessing, prompt, **sampling)
        assert again == seen
        if i:
            assert account.n_guessed_right > 0


@needs_small_batches
@pytest.mark.usefixtures("eager")
def test_all_that_is_remembered_comes_out_of_one_batch(open_room: OpenRoom, batches: list[list[int]]) -> None:
    """With the last row of the prompt, the only one that no cache has."""
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=4, ngram_max_size=4)
    prompt = np.random.default_rng(2).integers(300, 2000, 129).astype(np.int32)
    cold, _ = ask(room, prompt, temperature=0.0, max_tokens=5)
    del batches[:]
    warm, account = ask(room, prompt, temperature=0.0, max_tokens=5)
    assert warm == cold
    assert batches == [[5]]
    assert (account.n_cached_tokens, account.guesses) == (128, (ipc.GuessCount("again", 4, 4),))
    assert account.prefill_s > 0
    assert account.decode_s > 0


@needs_small_batches
@pytest.mark.usefixtures("eager")
def test_another_prompt_with_the_same_beginning_gets_no_guess(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=4, ngram_max_size=4)
    prompt = np.arange(300, 300 + 129, dtype=np.int32)  # no run of tokens comes twice
    ask(room, prompt, temperature=0.0, max_tokens=3)
    other = np.append(prompt, np.int32(999))
    _, account = ask(room, other, temperature=0.0, max_tokens=2)
    assert account.n_cached_tokens == 129
    assert account.n_guessed == 0


@pytest.mark.usefixtures("eager")
def test_nothing_is_remembered_where_prompts_are_not_cached(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=0, ngram_max_size=4)
    prompt = np.arange(300, 300 + 129, dtype=np.int32)
    for _ in range(2):
        _, account = ask(room, prompt, temperature=0.0, max_tokens=2)
    assert account.n_guessed == 0
    speculation = room.handlers.state.speculation
    assert speculation is not None
    assert len(speculation.continuations) == 0
