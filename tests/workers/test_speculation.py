"""Guesses never change what is said: no token at temperature 0 or with a seed, and no distribution."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swarmllm.guide import GUIDE_PATH
from swarmllm_proto import ipc
from swarmllm_workers.kernels import small_batches
from swarmllm_workers.speculation.cost_gate import CostGate
from swarmllm_workers.speculation.speculation import Speculation

from .blueprint import write
from .conftest import MakeModel
from .families import FAMILIES
from .test_batching import OpenRoom, Room, open_room  # noqa: F401

DRAFT_PATH = GUIDE_PATH.with_name("guide-draft.gguf")
GUESSING: dict[str, dict[str, Any]] = {
    "ngram": {"ngram_max_size": 4},
    "draft": {"draft_path": str(DRAFT_PATH)},
    "swift": {"swift_gamma": 4, "swift_skip_ratio": 0.45},
}
QUESTIONS = (
    "What is a pipeline?",
    "Say it five times: the quick brown fox, the quick brown fox, the quick",
    "How do I load a model on two nodes?",
    "Which ports does a node listen on? Answer with a list.",
    "one two three one two three one two",
    "Ü ü € ✓ 例 例 例",
)
needs_small_batches = pytest.mark.skipif(
    small_batches.find_library() is None, reason="small_batches.c was not built (pip install -e . does)"
)


class EagerPay(CostGate):
    """Guesses whenever it may: tests do not depend on how fast the machine is."""

    def n_worth(self, kind: str, n_max: int, n_left: int = 1, start_s: float = 0.0) -> int:
        return n_max


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmllm_workers.speculation.speculation.CostGate", EagerPay)
    monkeypatch.setattr("swarmllm_workers.speculation.swift.GAIN_MIN", 0.0)


def guide_prompt(room: Room, question: str) -> np.ndarray:
    engine = room.handlers.state.engine()
    text = engine.template().render([{"role": "user", "content": question}], None)
    return engine.vocabulary.tokenize(text, is_rendered=True)


def done(room: Room, name: str) -> ipc.GenerateDone:
    return next(m for m, _ in room.sent if isinstance(m, ipc.GenerateDone) and m.request_id == name)


def answers(room: Room, prompts: list[np.ndarray], **sampling: Any) -> list[list[int]]:
    found = []
    for i, prompt in enumerate(prompts):
        name = f"request-{room.n_calls}"
        room.generate(prompt, name, ipc.Sampling(ignore_eos=True, seed=i, **sampling))
        room.run()
        assert not room.errors()
        found.append(room.tokens(name))
    return found


@needs_small_batches
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("way", GUESSING)
def test_bundled_model_says_the_same_with_guesses(open_room: OpenRoom, way: str) -> None:
    plain = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=0)
    guessing = open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=0, **GUESSING[way])
    prompts = [guide_prompt(plain, question) for question in QUESTIONS]
    for sampling in (
        {"temperature": 0.0, "max_tokens": 60},
        {"temperature": 1.0, "max_tokens": 40},
        {"temperature": 0.8, "top_p": 0.9, "repeat_penalty": 1.2, "max_tokens": 25},
    ):
        assert answers(guessing, prompts, **sampling) == answers(plain, prompts, **sampling)
    counts = [each for m, _ in guessing.sent if isinstance(m, ipc.GenerateDone) for each in m.guesses]
    assert 0 < sum(each.n_right for each in counts) < sum(each.n_checked for each in counts)
    assert {each.by for each in counts} == ({"lookup"} if way == "ngram" else {way})


@needs_small_batches
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2", "llama-moe", "llama-kquants"])
def test_random_models_say_the_same_with_guesses(open_room: OpenRoom, model: str) -> None:
    """Near ties abound in their logits: the slightest rounding would show."""
    settings: dict[str, Any] = {"n_ctx": 512, "n_prefixes": 0}
    plain = open_room(model, **settings)
    guessing = open_room(model, ngram_max_size=2, **settings)
    for room in (plain, guessing):
        room.call(ipc.Load, start=0, end=room.handlers.state.engine().n_layers)
    rng = np.random.default_rng(3)
    prompts = [np.tile(rng.integers(0, 256, 9).astype(np.int32), 5) for _ in range(4)]
    for temperature in (0.0, 1.0):
        sampling = {"temperature": temperature, "max_tokens": 50}
        assert answers(guessing, prompts, **sampling) == answers(plain, prompts, **sampling)
    assert sum(m.n_guessed for m, _ in guessing.sent if isinstance(m, ipc.GenerateDone)) > 0


@needs_small_batches
@pytest.mark.slow
@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(("way", "least_right"), [("draft", 1 / 4), ("ngram", 1 / 50)])
def test_distribution_at_temperature_1_is_that_of_the_model(
    open_room: OpenRoom, way: str, least_right: float
) -> None:
    """Chi-square of the fifth token of an answer, with guesses against without, and with other seeds on
    either side. The prompt is always the same, so lookup guesses how it went on before."""
    room = {
        guesses: open_room(GUIDE_PATH, (0, 12), n_ctx=512, n_prefixes=4, **(GUESSING[way] if guesses else {}))
        for guesses in (True, False)
    }
    prompt = guide_prompt(room[False], "Hello!")
    answers(room[True], [prompt], temperature=0.0, max_tokens=20)
    counts: dict[bool, Counter[int]] = {}
    n = 250
    for guesses, each in room.items():
        for i in range(n):
            seed = i + (n if guesses else 0)
            sampling = ipc.Sampling(temperature=1.5, max_tokens=5, seed=seed, ignore_eos=True)
            each.generate(prompt, f"r{i}", sampling)
            each.run()
        counts[guesses] = Counter(each.tokens(f"r{i}")[4] for i in range(n))
    assert done(room[True], "r0").n_guessed > 0
    n_right = sum(m.n_guessed_right for m, _ in room[True].sent if isinstance(m, ipc.GenerateDone))
    assert n_right > n * least_right
    table = np.zeros((2, 24))
    for side in (True, False):
        for token, count in counts[side].items():
            table[int(side), token % 24] += count
    table = table[:, table.sum(axis=0) >= 10]
    expected = table.sum(axis=0) / 2
    statistic = float((((table - expected) ** 2) / expected).sum())
    freedom = table.shape[1] - 1
    assert freedom >= 5
    # Wilson and Hilferty's normal approximation; one honest run in 10,000 is beyond 3.7.
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert z < 3.7


@pytest.mark.usefixtures("eager")
def test_nothing_is_guessed_where_rows_of_a_batch_differ(
    open_room: OpenRoom,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Speculation, "_is_exact", lambda *_: False)
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=512, ngram_max_size=4)
    answers(room, [guide_prompt(room, QUESTIONS[1])], temperature=0.0, max_tokens=30)
    assert done(room, "request-2").n_guessed == 0


@pytest.mark.usefixtures("eager")
def test_recurrent_models_never_guess(open_room: OpenRoom, tmp_path: Path) -> None:
    path = write(tmp_path / "mamba2.gguf", FAMILIES["mamba-2"])
    room = open_room(path, ngram_max_size=4)
    engine = room.handlers.state.engine()
    room.call(ipc.Load, start=0, end=engine.n_layers)
    answers(room, [np.tile(np.arange(5, dtype=np.int32), 8)], temperature=0.0, max_tokens=20)
    assert done(room, f"request-{room.n_calls - 1}").n_guessed == 0


@needs_small_batches
@pytest.mark.usefixtures("eager")
def test_requests_that_share_the_worker_do_not_guess(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=1024, ngram_max_size=4)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    for name in ("a", "b"):
        room.generate(guide_prompt(room, QUESTIONS[4]), name, sampling)
    room.run()
    assert not room.errors()
    assert done(room, "a").n_guessed == done(room, "b").n_guessed == 0
    assert len(room.tokens("a")) == len(room.tokens("b")) == 40


@pytest.mark.usefixtures("eager")
def test_guessing_stops_at_the_end_of_the_context(open_room: OpenRoom) -> None:
    room = open_room(GUIDE_PATH, (0, 12), n_ctx=96, n_slots=1, n_prefixes=0, ngram_max_size=4)
    prompt = np.tile(np.array([5, 6, 7], np.int32), 20)
    (tokens,) = answers(room, [prompt], temperature=0.0, max_tokens=200)
    assert len(tokens) == 96 - 60 + 1
    plain = open_room(GUIDE_PATH, (0, 12), n_ctx=96, n_slots=1, n_prefixes=0)
    assert answers(plain, [prompt], temperature=0.0, max_tokens=200) == [tokens]


def test_draft_model_of_another_vocabulary_is_refused(open_room: OpenRoom, make_model: MakeModel) -> None:
    room = open_room(GUIDE_PATH, draft_path=str(make_model("llama")))
    room.call(ipc.Load, start=0, end=12)
    error = next(m for m, _ in room.sent if isinstance(m, ipc.Error))
    assert (error.kind, error.field) == ("bad_model", "draft_path")
    assert "other tokens" in error.message
    room.call(ipc.Tokenize, text="it serves on")
    assert isinstance(room.sent[-1][0], ipc.Tokens)
