"""Scores and normed states of exact requests: the bits of a fresh worker, beside others and over a cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_scores
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_proto.tensors import decode_tensor
from swarmllm_workers.kernels import small_batches

from .blueprint import write
from .conftest import MakeModel
from .families import FAMILIES
from .test_batching import Room, batches, open_room  # noqa: F401
from .test_exact_cuts import PROMPT
from .test_exact_requests import MODELS, NOT_EXACT, SETTINGS, prompts
from .test_exactness import GUIDE

# ruff: noqa: F811 (fixtures are imported)

OpenRoom = Callable[..., Room]
Rows = Literal["scores", "normed"]
N_TOP = 20
ENDLESS = ipc.Sampling(max_tokens=3000, ignore_eos=True)


def answer(room: Room) -> bytes:
    """The next one, while others go on."""
    n_before = len(room.sent)
    while not (found := [p for m, p in room.sent[n_before:] if isinstance(m, ipc.LayerResult)]):
        room.handlers.step()
        assert not room.errors()
    return found[0]


def ask(
    rooms: list[Room],
    ranges: list[tuple[int, int]],
    want: Rows,
    prompt: np.ndarray = PROMPT,
    *,
    chunk: int = 128,
    is_exact: bool = True,
    name: str = "this",
) -> bytes:
    """What a prompt's rows give behind stages of these ranges, one in each room: numbers, as bytes."""
    parts: list[bytes] = []
    rows, scored = prompt[:-1], tuple(prompt[1:].tolist())
    for at in range(0, len(rows), chunk):
        data = rows[at : at + chunk]
        n_rows = len(data)
        for room, (start, end) in zip(rooms, ranges, strict=True):
            is_last = room is rooms[-1]
            is_scored = is_last and want == "scores"
            room.call(
                ipc.Forward,
                data,
                request_id=name,
                start=start,
                end=end,
                position=at,
                want=want if is_last else "hidden",
                sampling=ipc.Sampling(top_logprobs=N_TOP, exact=is_exact) if is_scored else None,
                n_prompt_tokens=len(rows),
                scored=scored[at : at + chunk] if is_scored else (),
                exact_rows=len(prompt) if is_exact else 0,
            )
            payload = answer(room)
            if is_scored:
                scores = decode_scores(payload, n_rows, N_TOP)
                told = [[(each.token, each.logprob) for each in row] for row in scores]
                parts.append(np.array(told, np.float64).tobytes())
            else:
                data = decode_tensor(payload).copy()
        if want == "normed":
            parts.append(data.tobytes())
    for room in rooms:
        room.call(ipc.ReleaseRequestKv, request_id=name)
    return b"".join(parts)


def fresh(open_room: OpenRoom, path: Path, n_layers: int, want: Rows, prompt: np.ndarray = PROMPT) -> bytes:
    """The same of one whole model in a worker that has done nothing else."""
    room = open_room(path, (0, n_layers), **SETTINGS)
    found = ask([room], [(0, n_layers)], want, prompt)
    room.handlers.close()
    return found


@pytest.mark.parametrize("want", ["scores", "normed"])
@pytest.mark.parametrize("model", ["guide", *MODELS])
def test_beside_others_they_are_those_of_a_fresh_worker(
    open_room: OpenRoom, make_model: MakeModel, model: str, want: Rows
) -> None:
    path, n_layers = (GUIDE, 12) if model == "guide" else (make_model(MODELS[model]), 3)
    room = open_room(path, (0, n_layers), **SETTINGS)
    for i, prompt in enumerate(prompts()):
        room.generate(prompt, f"earlier-{i}", NOT_EXACT)
    room.run()
    for i, prompt in enumerate(prompts()[3:6]):
        room.generate(prompt, f"endless-{i}", ENDLESS)
    room.run(2)
    again = [ask([room], [(0, n_layers)], want) for _ in range(2)]
    assert all(room.tokens(f"endless-{i}") for i in range(3))
    assert again == [fresh(open_room, path, n_layers, want)] * 2


@pytest.mark.parametrize("want", ["scores", "normed"])
@pytest.mark.parametrize("model", ["guide", *MODELS])
def test_over_a_cut_they_are_those_of_the_whole(
    open_room: OpenRoom, make_model: MakeModel, model: str, want: Rows
) -> None:
    path, n_layers = (GUIDE, 12) if model == "guide" else (make_model(MODELS[model]), 3)
    middle = n_layers // 2
    ranges = [(0, middle), (middle, n_layers)]
    rooms = [open_room(path, each, **SETTINGS) for each in ranges]
    other = [open_room(path, (0, n_layers), **SETTINGS)]
    ask(rooms, ranges, want, prompts()[5], is_exact=False, name="other")
    found = ask(rooms, ranges, want)
    assert found == fresh(open_room, path, n_layers, want)
    assert ask(other, [(0, n_layers)], want, chunk=4096) == found


@pytest.mark.parametrize("want", ["scores", "normed"])
@pytest.mark.parametrize("name", ["mamba-2", "gemma-2", "lfm2", "falcon-h1"])
def test_other_kinds_of_state_give_the_same_too(
    open_room: OpenRoom, tmp_path: Path, name: str, want: Rows
) -> None:
    family = FAMILIES[name]
    path = tmp_path / f"{name}.gguf"
    write(path, family)
    room = open_room(path, (0, family.n_layers), **SETTINGS)
    for i in range(3):
        room.generate(prompts()[i + 3] % 200, f"other-{i}", NOT_EXACT)
    room.run()
    prompt = (PROMPT % 200).astype(np.int32)
    found = ask([room], [(0, family.n_layers)], want, prompt)
    assert found == fresh(open_room, path, family.n_layers, want, prompt)


@pytest.mark.skipif(
    small_batches.find_library() is not None and not small_batches.has_k_tiles(),
    reason="this ggml has no tiles for K-quants: a row has the same bits in every batch",
)
def test_those_of_requests_that_are_not_exact_are_others(open_room: OpenRoom) -> None:
    """Or the tests above would show nothing. Where the cells lie decides it: they are elsewhere each time."""
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    found = set()
    for i in range(12):
        room.generate(prompts()[i % 8] + i, f"earlier-{i}", NOT_EXACT)
        room.run()
        found.add(ask([room], [(0, 12)], "scores", is_exact=False))
    assert len(found) > 1


def test_a_models_parts_in_one_worker_give_those_of_the_whole(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 5), (5, 12), **SETTINGS)
    assert len(room.handlers.state.engine().layers.segments) > 1
    assert ask([room], [(0, 12)], "scores") == fresh(open_room, GUIDE, 12, "scores")


@pytest.mark.parametrize("settings", [{"n_slots": 1}, {"n_slots": 2}, {"n_slots": 100}, {"n_ctx": 512}])
def test_settings_of_a_node_change_nothing(open_room: OpenRoom, settings: dict[str, Any]) -> None:
    room = open_room(GUIDE, (0, 12), **(SETTINGS | settings))
    assert ask([room], [(0, 12)], "scores") == fresh(open_room, GUIDE, 12, "scores")


def test_pieces_are_whole(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    ask([room], [(0, 12)], "scores")
    assert batches == [[EXACT_ROWS]] * 3 + [[199 - 3 * EXACT_ROWS]]


def test_room_for_logits_counts(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    engine = room.handlers.state.engine()
    taken = []
    for want in ("none", "normed"):
        room.call(
            ipc.Forward,
            PROMPT[:64],
            request_id=want,
            start=0,
            end=12,
            position=0,
            want=want,
            n_prompt_tokens=200,
            exact_rows=200,
        )
        before = engine.memory
        room.run()
        taken.append(engine.memory.work_bytes - before.work_bytes)
    assert not room.errors()
    assert taken[1] - taken[0] == 2 * EXACT_ROWS * engine.n_vocab * 4


def test_who_has_begun_without_rows_of_the_head_gets_none(open_room: OpenRoom) -> None:
    """libllama aborts where a batch has more of them than its context was made for."""
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    fields: dict[str, Any] = {"request_id": "this", "start": 0, "end": 12, "n_prompt_tokens": 200}
    room.call(ipc.Forward, PROMPT[:64], position=0, want="none", exact_rows=201, **fields)
    room.run()
    room.call(ipc.Forward, PROMPT[64:128], position=64, want="normed", exact_rows=201, **fields)
    room.run()
    (error,) = [message for message, _ in room.sent if isinstance(message, ipc.Error)]
    assert (error.kind, error.field) == ("bad_message", "want")
