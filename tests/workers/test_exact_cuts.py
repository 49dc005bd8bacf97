"""Exact requests over a cut: a stage per worker, and the bits of the uncut model in a fresh one.

Each stage here is a worker in this process. Other requests begin before, and run between, on every stage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import UNSET, UnsetType

from swarmllm_proto import ipc
from swarmllm_proto.limits import EXACT_ROWS
from swarmllm_proto.tensors import decode_tensor

from .conftest import MakeModel
from .test_batching import Room, batches, open_room  # noqa: F401
from .test_exact_requests import EXACT, MODELS, NOT_EXACT, SETTINGS, STEPS, alone, prompts, told
from .test_exactness import GUIDE

# ruff: noqa: F811 (fixtures are imported)

OpenRoom = Callable[..., Room]
PROMPT = prompts()[-2]
"""200 tokens."""


class Stages:
    """A pipeline of rooms, one range each."""

    def __init__(self, open_room: OpenRoom, path: Path, *ranges: tuple[int, int]) -> None:
        self.ranges = ranges
        self.rooms = [open_room(path, each, **SETTINGS) for each in ranges]

    def forward(
        self,
        data: np.ndarray,
        position: int,
        n_prompt: int,
        *,
        name: str = "this",
        sampling: ipc.Sampling = EXACT,
        first: int = 0,
        generated: tuple[int, ...] = (),
        has_sampled: bool = False,
    ) -> np.ndarray:
        """Rows through the stages from `first` on; what comes to the stages after the last one that has no
        head."""
        last = len(self.rooms) - 1
        for i, (room, (start, end)) in list(enumerate(zip(self.rooms, self.ranges, strict=True)))[first:]:
            is_token = i == last and position + len(data) >= n_prompt
            room.call(
                ipc.Forward,
                data,
                request_id=name,
                start=start,
                end=end,
                position=position,
                want="token" if is_token else "none" if i == last else "hidden",
                sampling=sampling if is_token and not has_sampled else None,
                n_prompt_tokens=n_prompt,
                generated=generated if is_token and not has_sampled else (),
                exact_rows=n_prompt + sampling.max_tokens if sampling.exact else 0,
            )
            room.run()
            assert not room.errors()
            if i < last:
                data = decode_tensor(next(p for m, p in reversed(room.sent) if not isinstance(m, ipc.AtWork)))
        return data

    def answer(self, prompt: np.ndarray, name: str, sampling: ipc.Sampling, chunk: int = 128) -> list[Any]:
        for at in range(0, len(prompt), chunk):
            self.forward(prompt[at : at + chunk], at, len(prompt), name=name, sampling=sampling)
        for i in range(1, sampling.max_tokens):
            token = np.array([told(self.rooms[-1], name)[-1][0]], np.int32)
            at = len(prompt) + i - 1
            self.forward(token, at, len(prompt), name=name, sampling=sampling, has_sampled=True)
        return told(self.rooms[-1], name)

    def disturb(self) -> None:
        """Cells of two other requests, of which one goes on for ever."""
        for i, prompt in enumerate(prompts()[3:5]):
            self.answer(prompt, f"other-{i}", NOT_EXACT)


@pytest.mark.parametrize("model", ["guide", *MODELS])
def test_two_stages_beside_others_give_the_bits_of_the_whole_alone(
    open_room: OpenRoom, make_model: MakeModel, model: str
) -> None:
    path, n_layers = (GUIDE, 12) if model == "guide" else (make_model(MODELS[model]), 3)
    stages = Stages(open_room, path, (0, n_layers // 2), (n_layers // 2, n_layers))
    stages.disturb()
    whole = alone(open_room, path, n_layers, PROMPT)
    assert stages.answer(PROMPT, "this", EXACT) == whole
    assert len(whole) == STEPS


@pytest.mark.parametrize("chunk", [EXACT_ROWS, 3 * EXACT_ROWS, 4096])
def test_three_stages_and_chunks_of_any_number_of_pieces(open_room: OpenRoom, chunk: int) -> None:
    stages = Stages(open_room, GUIDE, (0, 3), (3, 8), (8, 12))
    stages.disturb()
    assert stages.answer(PROMPT, "this", EXACT, chunk) == alone(open_room, GUIDE, 12, PROMPT)


def test_requests_that_are_not_exact_are_told_otherwise(open_room: OpenRoom) -> None:
    """Or the tests above would show nothing."""
    stages = Stages(open_room, GUIDE, (0, 6), (6, 12))
    stages.disturb()
    assert stages.answer(PROMPT, "this", NOT_EXACT) != alone(open_room, GUIDE, 12, PROMPT)


def test_pieces_are_counted_from_the_first_row(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room(GUIDE, (0, 6), **SETTINGS)
    for position, n_rows in ((0, 100), (100, 80), (180, 23)):
        data = PROMPT[:n_rows] if position == 0 else np.resize(PROMPT, n_rows)
        room.call(
            ipc.Forward,
            data.astype(np.int32),
            request_id="this",
            start=0,
            end=6,
            position=position,
            want="hidden",
            n_prompt_tokens=200,
            exact_rows=300,
        )
        room.run()
    # 200 rows of the prompt, and three of what was generated before.
    assert batches == [[64], [36], [28], [52], [12], [8], [1], [1], [1]]


def test_a_stage_that_is_built_again_gives_the_same_bits(open_room: OpenRoom) -> None:
    """Its rows come at once from what the stage before has kept: the prompt, and then generated rows."""
    whole = alone(open_room, GUIDE, 12, PROMPT)
    stages = Stages(open_room, GUIDE, (0, 6), (6, 12))
    stages.disturb()
    for at in range(0, len(PROMPT), 128):
        stages.forward(PROMPT[at : at + 128], at, len(PROMPT))
    for i in range(2):
        token = np.array([whole[i][0]], np.int32)
        stages.forward(token, len(PROMPT) + i, len(PROMPT), has_sampled=True)
    n_kept = len(PROMPT) + 2
    stages.rooms[0].call(ipc.ReadJournal, request_id="this", end=6, position=0, n_rows=n_kept)
    kept = decode_tensor(stages.rooms[0].sent[-1][1])
    assert len(kept) == n_kept
    stages.rooms[1] = other = open_room(GUIDE, (6, 12), **SETTINGS)
    tokens = tuple(token for token, _ in whole[:3])
    for at in range(0, n_kept, 128):
        other.call(
            ipc.Forward,
            kept[at : at + 128],
            request_id="this",
            start=6,
            end=12,
            position=at,
            want="none",
            n_prompt_tokens=len(PROMPT),
            exact_rows=len(PROMPT) + STEPS,
        )
        other.run()
    for i in range(3, STEPS):
        token = np.array([whole[i - 1][0]], np.int32)
        at = len(PROMPT) + i - 1
        stages.forward(token, at, len(PROMPT), generated=tokens, has_sampled=i > 3)
    assert told(other, "this") == whole[3:]


def test_what_is_held_for_another_pipeline_stays_apart(open_room: OpenRoom) -> None:
    stages = Stages(open_room, GUIDE, (0, 6), (6, 12))
    whole = alone(open_room, GUIDE, 12, PROMPT)
    stages.forward(PROMPT[:128], 0, len(PROMPT))
    stages.forward(PROMPT[128:], 128, len(PROMPT))
    for room, each in zip(stages.rooms, stages.ranges, strict=True):
        room.call(ipc.HoldRequest, request_id="this", hold_s=60.0)
        room.call(ipc.ResumeRequest, request_id="next", resumes="this", n_rows=200, ranges=(each,))
        assert room.sent[-1][0].kept[0].n_rows == 200
    token = np.array([whole[0][0]], np.int32)
    stages.forward(token, len(PROMPT), len(PROMPT), name="next", generated=(whole[0][0],))
    assert told(stages.rooms[-1], "next") == whole[1:2]
    for room in stages.rooms:
        engine = room.handlers.state.engine()
        room.call(ipc.ReleaseRequestKv, request_id="next")
        assert not any(segment.apart_segments for segment in engine.layers.segments)


def test_a_request_does_not_become_exact_on_its_way(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 6), **SETTINGS)
    fields: dict[str, Any] = {"request_id": "this", "start": 0, "end": 6, "want": "hidden"}
    room.call(ipc.Forward, PROMPT[:64], position=0, **fields)
    room.run()
    room.call(ipc.Forward, PROMPT[64:128], position=64, exact_rows=300, **fields)
    room.run()
    assert room.errors() == {"this": "bad_message"}


@pytest.mark.parametrize(("own", "other"), [("f16", "q8_0"), ("q8_0", "f16")])
def test_keys_and_values_are_kept_as_the_request_says(
    open_room: OpenRoom, own: ipc.KvType, other: ipc.KvType
) -> None:
    """As a worker whose requests all have that type computes it."""

    def rows(kv_type: ipc.KvType, asked: ipc.KvType | UnsetType) -> np.ndarray:
        room = open_room(GUIDE, (0, 6), **SETTINGS, kv_type=kv_type, flash_attention="auto")
        fields: dict[str, Any] = {"request_id": "this", "start": 0, "end": 6, "want": "hidden"}
        room.call(ipc.Forward, PROMPT[:64], position=0, exact_rows=80, kv_type=asked, **fields)
        room.run()
        assert not room.errors()
        before = room.handlers.state.engine().memory
        room.call(ipc.Forward, PROMPT[64:80], position=64, exact_rows=80, **fields)
        room.run()
        assert room.handlers.state.engine().memory == before
        return decode_tensor(next(p for m, p in reversed(room.sent) if isinstance(m, ipc.LayerResult)))

    assert np.array_equal(rows(own, other), rows(other, UNSET))
    assert not np.array_equal(rows(own, other), rows(own, UNSET))


def test_values_are_not_quantised_without_fused_attention(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 6), **SETTINGS, flash_attention="off")
    fields: dict[str, Any] = {"start": 0, "end": 6, "want": "hidden", "position": 0}
    room.call(ipc.Forward, PROMPT[:64], request_id="this", exact_rows=80, kv_type="q8_0", **fields)
    (error,) = [message for message, _ in room.sent if isinstance(message, ipc.Error)]
    assert (error.kind, error.field) == ("bad_message", "kv_type")


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"want": "token", "sampling": EXACT}, "exact_rows"),
        ({"want": "token", "sampling": NOT_EXACT, "exact_rows": 80}, "exact_rows"),
    ],
)
def test_forwards_that_contradict_themselves_are_refused(
    open_room: OpenRoom, fields: dict[str, Any], field: str
) -> None:
    room = open_room(GUIDE, (0, 12), **SETTINGS)
    room.call(ipc.Forward, PROMPT[:64], request_id="this", start=0, end=12, position=0, **fields)
    (error,) = [message for message, _ in room.sent if isinstance(message, ipc.Error)]
    assert (error.kind, error.field) == ("bad_message", field)
