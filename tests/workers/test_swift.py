"""A model that was loaded in pieces for its guesses' sake is in one again when they do not pay."""

# ruff: noqa: F811 (fixtures are imported)

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from swarmllm_proto import ipc
from swarmllm_workers.engine.segment_maker import SegmentMaker
from swarmllm_workers.errors import CallError

from .blueprint import write
from .families import FAMILIES
from .test_batching import OpenRoom, Room, open_room  # noqa: F401
from .test_exactness import GUIDE
from .test_speculation import EagerPay, answers, done, guide_prompt

# With fused attention rows do not depend on what others have in the cells.
SWIFT = {"swift_gamma": 3, "swift_skip_ratio": 0.45, "flash_attention": "auto"}
ENDLESS = ipc.Sampling(temperature=0.0, max_tokens=300, ignore_eos=True)


def ranges(room: Room) -> list[tuple[int, int]]:
    return [(segment.start, segment.end) for segment in room.handlers.state.engine().layers.segments]


@pytest.fixture
def gain_min(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Guesses are made whenever they may be, and pay; until a test says otherwise."""
    monkeypatch.setattr("swarmllm_workers.speculation.speculation.CostGate", EagerPay)
    monkeypatch.setattr("swarmllm_workers.speculation.swift.GAIN_MIN", 0.0)
    return monkeypatch


def demand(gain_min: pytest.MonkeyPatch, gain: float, n_tokens: int = 8) -> None:
    gain_min.setattr("swarmllm_workers.speculation.swift.GAIN_MIN", gain)
    gain_min.setattr("swarmllm_workers.speculation.swift.TRIED_TOKENS", n_tokens)


def test_a_model_that_cannot_gain_by_pieces_is_in_one_when_its_load_is_over(
    open_room: OpenRoom, gain_min: pytest.MonkeyPatch
) -> None:
    demand(gain_min, math.inf)
    room = open_room(GUIDE, (0, 12), n_ctx=512, **SWIFT)
    assert ranges(room) == [(0, 12)]
    assert not any(segment.n_rows for segment in room.handlers.state.engine().layers.segments)
    room.call(ipc.Unload, start=0, end=12)
    room.call(ipc.Load, start=0, end=12)
    assert ranges(room) == [(0, 12)]
    assert not room.errors()


def test_requests_show_that_it_does_not_pay_and_those_that_run_go_on_where_they_are(
    open_room: OpenRoom, gain_min: pytest.MonkeyPatch
) -> None:
    plain = open_room(GUIDE, (0, 12), n_ctx=1024, n_prefixes=0, flash_attention="auto")
    room = open_room(GUIDE, (0, 12), n_ctx=1024, **SWIFT)
    in_pieces = ranges(room)
    assert len(in_pieces) > 2
    prompts = [guide_prompt(plain, question) for question in ("What is a node?", "How do I leave?")]
    for name, prompt in zip(("first", "second"), prompts, strict=True):
        plain.generate(prompt, name, ENDLESS)
        plain.run()
    room.generate(prompts[0], "first", ENDLESS)
    room.run(20)
    assert ranges(room) == in_pieces
    demand(gain_min, math.inf)
    room.run(20)
    assert ranges(room) == [(0, 12)]
    engine = room.handlers.state.engine()
    assert [(segment.start, segment.end) for segment in engine.layers.retired] == in_pieces
    room.generate(prompts[1], "second", ENDLESS)
    room.run()
    assert done(room, "first").n_guessed > 0
    assert done(room, "second").n_guessed == 0
    for name in ("first", "second"):
        assert room.tokens(name) == plain.tokens(name)
    assert not engine.layers.retired


def test_where_there_is_no_room_for_pieces_or_to_go_back_it_serves_as_it_is(
    open_room: OpenRoom, gain_min: pytest.MonkeyPatch
) -> None:
    opened: list[tuple[int, int]] = []
    refused = {"inner"}
    open_ = SegmentMaker.open

    def refusing(self: SegmentMaker, start: int, end: int, progress: object = None) -> object:
        kind = "whole" if (start, end) == (0, 12) else "inner" if start else "first"
        if kind in refused:
            raise CallError("out_of_memory", "none left")
        opened.append((start, end))
        return open_(self, start, end)

    gain_min.setattr(SegmentMaker, "open", refusing)
    room = open_room(GUIDE, (0, 12), n_ctx=512, **SWIFT)
    prompts = [guide_prompt(room, "What is a node?")]
    text = answers(room, prompts, temperature=0.0, max_tokens=12)
    assert ranges(room) == [(0, 12)]
    assert opened[0] == opened[-1] == (0, 12)

    refused.clear()
    other = open_room(GUIDE, (0, 12), n_ctx=512, **SWIFT)
    in_pieces = ranges(other)
    assert len(in_pieces) > 2
    refused.add("whole")
    demand(gain_min, math.inf)
    assert answers(other, prompts, temperature=0.0, max_tokens=12) == text
    assert answers(other, prompts, temperature=0.0, max_tokens=12) == text
    assert ranges(other) in (in_pieces, [])
    refused.clear()
    assert answers(other, prompts, temperature=0.0, max_tokens=12) == text
    assert ranges(other) == [(0, 12)]


def test_pieces_stay_where_guesses_pay(open_room: OpenRoom, gain_min: pytest.MonkeyPatch) -> None:
    room = open_room(GUIDE, (0, 12), n_ctx=512, **SWIFT)
    in_pieces = ranges(room)
    gain_min.setattr("swarmllm_workers.speculation.swift.TRIED_TOKENS", 8)
    room.generate(np.arange(40, dtype=np.int32), "any", ENDLESS)
    room.run()
    assert ranges(room) == in_pieces
    assert done(room, "any").n_guessed > 0


@pytest.mark.usefixtures("gain_min")
def test_recurrent_models_stay_in_one_piece(open_room: OpenRoom, tmp_path: Path) -> None:
    room = open_room(write(tmp_path / "falcon-h1.gguf", FAMILIES["falcon-h1"]), **SWIFT)
    n_layers = room.handlers.state.engine().n_layers
    room.call(ipc.Load, start=0, end=n_layers)
    assert ranges(room) == [(0, n_layers)]
