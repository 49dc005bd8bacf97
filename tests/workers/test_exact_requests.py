"""Exact requests: the bits of their rows depend on nobody else's, whatever the model and the moment.

Compared are the log-probabilities of the 20 likeliest tokens of every step, as numbers, not as text.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from swarmllm_proto import ipc
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_workers.engine import memory
from swarmllm_workers.errors import CallError
from swarmllm_workers.kernels import small_batches
from swarmllm_workers.kernels.kernel_choice import Way
from swarmllm_workers.kernels.small_batches import alike, force, last_way

from .blueprint import write
from .conftest import MakeModel
from .factory import Spec
from .families import FAMILIES
from .test_batching import PROMPT, Room, batches, open_room  # noqa: F401
from .test_exactness import GUIDE

# ruff: noqa: F811 (fixtures are imported)

OpenRoom = Callable[..., Room]
LENGTHS = (1, 7, 63, 64, 65, 130, 200, 300)
STEPS = 6
EXACT = ipc.Sampling(
    temperature=0.8, seed=3, max_tokens=STEPS, ignore_eos=True, logprobs=True, top_logprobs=20, exact=True
)
NOT_EXACT = ipc.Sampling(
    temperature=0.8, seed=3, max_tokens=STEPS, ignore_eos=True, logprobs=True, top_logprobs=20
)
SETTINGS: dict[str, Any] = {"n_ctx": 4096, "n_slots": 16}


def typed(kind: Type) -> Spec:
    return Spec("llama", n_layers=3, n_embd=256, n_ff=512, n_heads=2, head_size=128, types=(kind,), tied=True)


MODELS = {kind.name: typed(kind) for kind in (Type.Q8_0, Type.Q4_K, Type.Q6_K, Type.Q4_0, Type.F16)}


def prompts(n_vocab: int = 250) -> list[np.ndarray]:
    """Half of them begin alike."""
    rng = np.random.default_rng(4)
    whole = rng.integers(0, n_vocab, max(LENGTHS)).astype(np.int32)
    others = [rng.integers(0, n_vocab, n).astype(np.int32) for n in LENGTHS]
    return [whole[:n] if i % 2 else others[i] for i, n in enumerate(LENGTHS)]


def told(room: Room, name: str) -> list[Any]:
    """Of every token of a request: its id, and the log-probabilities."""
    assert not room.errors()
    return [
        (m.token, [(each.token, each.logprob) for each in m.logprobs])
        for m, _ in room.sent
        if isinstance(m, ipc.Token) and m.request_id == name
    ]


def alone(open_room: OpenRoom, path: Path, n_layers: int, prompt: np.ndarray, **settings: Any) -> list[Any]:
    room = open_room(path, (0, n_layers), **(SETTINGS | settings))
    room.generate(prompt, "alone", EXACT)
    room.run()
    room.handlers.close()
    return told(room, "alone")


def beside_others(open_room: OpenRoom, path: Path, n_layers: int, sampling: ipc.Sampling) -> list[list[Any]]:
    """What eight requests are told that come between others, where earlier ones have left their cells."""
    room = open_room(path, (0, n_layers), **SETTINGS)
    for i, prompt in enumerate(prompts()):
        room.generate(prompt, f"earlier-{i}", NOT_EXACT)
    room.run()
    for i, prompt in enumerate(prompts()):
        room.generate(prompt, f"this-{i}", sampling)
        room.generate(prompt[::-1].copy(), f"other-{i}", NOT_EXACT)
        room.run(1)
    room.run()
    return [told(room, f"this-{i}") for i in range(len(LENGTHS))]


@pytest.mark.parametrize("model", ["guide", *MODELS])
def test_eight_at_once_are_told_what_each_is_told_alone_in_a_fresh_worker(
    open_room: OpenRoom, make_model: MakeModel, model: str
) -> None:
    path, n_layers = (GUIDE, 12) if model == "guide" else (make_model(MODELS[model]), 3)
    got = beside_others(open_room, path, n_layers, EXACT)
    for prompt, one in zip(prompts(), got, strict=True):
        assert one == alone(open_room, path, n_layers, prompt)
        assert len(one) == STEPS


def test_requests_that_are_not_exact_are_told_otherwise(open_room: OpenRoom) -> None:
    """Or the test above would show nothing."""
    assert beside_others(open_room, GUIDE, 12, NOT_EXACT) != beside_others(open_room, GUIDE, 12, EXACT)


@pytest.mark.parametrize("name", ["mamba-2", "gemma-2", "lfm2", "falcon-h1"])
def test_other_kinds_of_state_are_exact_too(open_room: OpenRoom, tmp_path: Path, name: str) -> None:
    family = FAMILIES[name]
    path = tmp_path / f"{name}.gguf"
    write(path, family)
    rooms = [open_room(path, (0, family.n_layers), **SETTINGS) for _ in range(2)]
    rooms[0].generate(prompts()[5] % 200, "this", EXACT)
    rooms[0].run()
    for i in range(3):
        rooms[1].generate(prompts()[i + 3] % 200, f"other-{i}", NOT_EXACT)
    rooms[1].run(4)
    rooms[1].generate(prompts()[5] % 200, "this", EXACT)
    rooms[1].run()
    assert told(rooms[0], "this") == told(rooms[1], "this")


@pytest.mark.parametrize(
    "settings", [{"n_ctx": 1024}, {"prefill_chunk_tokens": 16}, {"n_slots": 2}, {"n_slots": 100}]
)
def test_other_settings_give_the_same_bits(open_room: OpenRoom, settings: dict[str, Any]) -> None:
    prompt = prompts()[-1]
    assert alone(open_room, GUIDE, 12, prompt, **settings) == alone(open_room, GUIDE, 12, prompt)


def test_pieces_of_the_prompt_are_always_as_long(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room("llama", (0, 4), **SETTINGS)
    room.generate(PROMPT, "reader", NOT_EXACT)
    room.run(2)
    batches.clear()
    room.generate(prompts()[-1], "this", EXACT)
    room.generate(prompts()[4], "other", NOT_EXACT)
    room.run()
    assert batches.count([EXACT_ROWS]) >= 300 // EXACT_ROWS
    assert [300 % EXACT_ROWS] in batches


def test_an_answer_goes_on_elsewhere_with_the_same_bits(open_room: OpenRoom) -> None:
    prompt = prompts()[-2]
    whole = alone(open_room, GUIDE, 12, prompt)
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    tokens = np.append(prompt, [token for token, _ in whole[:3]]).astype(np.int32)
    room.call(ipc.Generate, tokens, request_id="this", sampling=EXACT, n_generated=3)
    room.run()
    assert told(room, "this") == whole[3:]


def test_a_model_in_parts_gives_the_bits_of_the_whole(open_room: OpenRoom) -> None:
    prompt = prompts()[-1]
    room = open_room(GUIDE, (0, 5), (5, 12), **SETTINGS)
    assert len(room.handlers.state.engine().layers.segments) > 1
    room.generate(prompt, "this", EXACT)
    room.run()
    assert told(room, "this") == alone(open_room, GUIDE, 12, prompt)


def test_a_cut_while_it_runs_takes_nothing_from_it(open_room: OpenRoom) -> None:
    prompt = prompts()[-1]
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    engine = room.handlers.state.engine()
    room.generate(prompt, "this", EXACT)
    room.run(2)
    rows = np.zeros((3, engine.n_embd), np.float32)
    room.call(ipc.Forward, rows, request_id="part", start=4, end=9, position=0, want="hidden")
    room.run()
    assert len(engine.layers.segments) == 3
    assert told(room, "this") == alone(open_room, GUIDE, 12, prompt)
    room.call(ipc.ReleaseRequestKv, request_id="part")
    assert not engine.layers.retired


def test_unloading_ends_it_with_a_reason(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    room.generate(prompts()[-1], "this", EXACT)
    room.run(2)
    room.call(ipc.Unload, start=0, end=12)
    room.run()
    assert room.errors() == {"this": "not_loaded"}


def test_its_memory_counts_and_comes_back(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    engine = room.handlers.state.engine()
    before = engine.memory
    room.generate(prompts()[-1], "this", EXACT)
    room.run(2)
    during = engine.memory
    assert during.weights_bytes == before.weights_bytes
    # 306 rows are 512 cells, of the 4,096 that all others share.
    assert during.kv_bytes - before.kv_bytes == before.kv_bytes * 512 // 4096
    assert during.work_bytes > before.work_bytes
    room.run()
    assert engine.memory == before
    assert all(segment.is_idle or segment.n_rows for segment in engine.layers.segments)
    assert not any(segment.apart_segments for segment in engine.layers.segments)


def test_where_memory_is_short_it_is_refused_and_others_are_not(
    open_room: OpenRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    monkeypatch.setattr(memory, "available_bytes", lambda: 2**20)
    room.generate(prompts()[-1], "this", EXACT)
    room.generate(prompts()[-1], "other", NOT_EXACT)
    room.run()
    assert room.errors() == {"this": "out_of_memory"}
    assert len(room.tokens("other")) == STEPS


def test_products_do_not_depend_on_what_was_measured() -> None:
    if small_batches._library is None or last_way() <= Way.TILES:
        pytest.skip("no kernels of ours here")
    forced = ctypes.c_int64.in_dll(small_batches._library, "swarmllm_forced")
    with alike():
        assert forced.value == last_way()
    assert forced.value == -1
    force(Way.DOTS)
    try:
        with pytest.raises(CallError), alike():
            raise CallError("engine", "")
        assert forced.value == Way.DOTS
    finally:
        force(None)
