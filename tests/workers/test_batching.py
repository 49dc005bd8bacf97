"""Several requests in one worker share batches, and each gets what it would get alone.

How exact that is: cut or uncut, a batch computes the same to the last bit (test_exactness.py). A row that
shares its batch with others goes through other kernels of libllama than a lone one, so logits may differ by
rounding from those of an unbatched run; the trained model's text does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from kernel_timings import KERNEL_TIMINGS

from swarmllm_proto import ipc
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.engine.segment import Segment, Span
from swarmllm_workers.schedule import scheduler
from swarmllm_workers.server.handlers import STARVED_MS, Handlers

from .client import GREEDY
from .conftest import MakeModel
from .test_exactness import GUIDE

PROMPT = np.array([72, 101, 108, 108, 111, 44], np.int32)
ENDLESS = ipc.Sampling(temperature=0.0, max_tokens=4000, ignore_eos=True)


class Room:
    """A worker without its process: messages in, messages out, one round at a time."""

    def __init__(self, path: Path, folder: Path, *ranges: tuple[int, int], **settings: Any) -> None:
        self.sent: list[tuple[Any, bytes]] = []
        self.handlers = Handlers(self._on_message, lambda *_: None, lambda: None)
        self.n_calls = 0
        settings.setdefault("kernel_timings", str(KERNEL_TIMINGS))
        self.call(ipc.Open, path=str(path), cache_dir=str(folder / "segments"), **settings)
        for start, end in ranges:
            self.call(ipc.Load, start=start, end=end)

    def _on_message(self, message: Any, payload: Any = b"") -> None:
        self.sent.append((message, bytes(payload) if isinstance(payload, bytes) else b"".join(payload)))

    def call(self, kind: type[ipc.DaemonMessage], data: np.ndarray | None = None, **fields: Any) -> int:
        self.n_calls += 1
        payload = b"" if data is None else b"".join(encode_tensor(data))
        self.handlers.handle(kind(id=self.n_calls, **fields), memoryview(payload))
        return self.n_calls

    def generate(self, tokens: np.ndarray, name: str, sampling: ipc.Sampling = GREEDY) -> int:
        return self.call(ipc.Generate, tokens, request_id=name, sampling=sampling)

    def run(self, n_rounds: int = 10_000) -> None:
        for _ in range(n_rounds):
            if not self.handlers.state.has_work:
                return
            self.handlers.step()

    def tokens(self, name: str) -> list[int]:
        return [m.token for m, _ in self.sent if isinstance(m, ipc.Token) and m.request_id == name]

    def errors(self) -> dict[str, str]:
        return {m.request_id: m.kind for m, _ in self.sent if isinstance(m, ipc.Error)}


@pytest.fixture
def open_room(make_model: MakeModel, tmp_path: Path) -> Iterator[Callable[..., Room]]:
    rooms: list[Room] = []

    def open_(model: str | Path, *ranges: tuple[int, int], **settings: Any) -> Room:
        path = model if isinstance(model, Path) else make_model(model)
        rooms.append(Room(path, tmp_path, *ranges, **settings))
        return rooms[-1]

    yield open_
    for room in rooms:
        room.handlers.close()


OpenRoom = Callable[..., Room]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Rows of every span of every decode, as they happen."""
    seen: list[list[int]] = []
    run = Segment.run

    def recorded(self: Segment, spans: list[Span]) -> list[np.ndarray]:
        seen.append([len(span.data) for span in spans])
        return run(self, spans)

    monkeypatch.setattr(Segment, "run", recorded)
    return seen


def guide_prompts(room: Room) -> list[np.ndarray]:
    engine = room.handlers.state.engine()
    questions = ["What is a pipeline?", "How do I add a model?", "What does a worker do?", "What is a slot?"]
    texts = [engine.template().render([{"role": "user", "content": q}], None) for q in questions]
    return [engine.vocabulary.tokenize(text, is_rendered=True) for text in texts]


def test_generations_share_every_decode(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room("llama", (0, 4), n_ctx=256)
    for i in range(4):
        room.generate(PROMPT + i, str(i))
    room.run()
    assert batches == [[len(PROMPT)] * 4] + [[1] * 4] * (GREEDY.max_tokens - 1)


def test_batching_can_be_turned_off(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room("llama", (0, 4), n_ctx=256, continuous_batching=False)
    for i in range(2):
        room.generate(PROMPT + i, str(i))
    room.run()
    assert {len(spans) for spans in batches} == {1}
    assert len(room.tokens("0")) == len(room.tokens("1")) == GREEDY.max_tokens


def test_forwards_of_several_requests_share_a_decode_bit_for_bit_as_a_batch_of_the_engine(
    open_room: OpenRoom, batches: list[list[int]]
) -> None:
    room = open_room("qwen2", (1, 3), n_ctx=256)
    rows = np.random.default_rng(3).standard_normal((3, 5, 64)).astype(np.float32)
    for i in range(3):
        room.call(ipc.Forward, rows[i], request_id=str(i), start=1, end=3, position=0, want="hidden")
    room.run()
    assert batches == [[5, 5, 5]]
    shared = [payload for message, payload in room.sent if isinstance(message, ipc.LayerResult)]
    engine = room.handlers.state.engine()
    engine.release("0"), engine.release("1"), engine.release("2")
    route = engine.route("again", 1, 3)
    expected = engine.run(route, [Span(slot, 0, rows[slot], "hidden") for slot in range(3)])
    for payload, result in zip(shared, expected, strict=True):
        assert payload == b"".join(encode_tensor(result))


@pytest.mark.slow
def test_shared_batches_give_the_same_text_as_lone_ones(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), n_ctx=1024)
    prompts = guide_prompts(room)
    for i, prompt in enumerate(prompts):
        room.generate(prompt, f"alone {i}")
        room.run()
    for i, prompt in enumerate(prompts):
        room.generate(prompt, f"together {i}")
        room.run(3)  # they begin at different times: prompts and decodes mix
    room.run()
    for i in range(len(prompts)):
        assert room.tokens(f"together {i}") == room.tokens(f"alone {i}")


def test_batched_logits_equal_lone_ones_to_rounding(open_room: OpenRoom) -> None:
    room = open_room(GUIDE, (0, 12), n_ctx=1024)
    engine = room.handlers.state.engine()
    prompts = guide_prompts(room)
    route = engine.route("r", 0, 12)
    alone = [
        engine.run(route, [Span(slot, 0, prompt, "logits")])[0].copy() for slot, prompt in enumerate(prompts)
    ]
    together = engine.run(route, [Span(slot, 0, prompt, "logits") for slot, prompt in enumerate(prompts)])
    difference = max(float(np.abs(a - b).max()) for a, b in zip(alone, together, strict=True))
    assert difference < 0.02 * float(np.std(alone))


def test_decode_goes_on_while_a_long_prompt_is_admitted(
    open_room: OpenRoom, batches: list[list[int]]
) -> None:
    room = open_room("llama", (0, 4), n_ctx=2048)
    room.generate(PROMPT, "short", ENDLESS)
    room.run(2)
    room.generate(np.resize(PROMPT, 1000), "long")
    n_before, n_batches = len(room.tokens("short")), len(batches)
    while not room.tokens("long"):
        room.run(1)
    admission = batches[n_batches:]
    assert len(room.tokens("short")) - n_before == len(admission)
    assert [rows[1] for rows in admission if len(rows) == 2] == [63] * 15 + [1000 - 15 * 63]
    own_time = {len(rows) for before, rows in pairwise(admission) if len(before) == 2}
    assert own_time == {1}, "after each piece its reader has a batch alone"


def test_generation_waits_for_a_slot_where_another_will_free_one(open_room: OpenRoom) -> None:
    room = open_room("llama", (0, 4), n_ctx=256, n_slots=2)
    for i in range(4):
        room.generate(PROMPT, str(i))
    room.run()
    assert not room.errors()
    assert all(len(room.tokens(str(i))) == GREEDY.max_tokens for i in range(4))


def test_generation_is_refused_where_forwards_hold_every_slot(open_room: OpenRoom) -> None:
    room = open_room("llama", (0, 4), n_ctx=256, n_slots=1)
    room.call(ipc.Forward, PROMPT, request_id="f", start=0, end=4, position=0, want="none")
    room.run()
    room.generate(PROMPT, "g")
    room.run()
    assert room.errors() == {"g": "no_slot"}


@pytest.mark.slow
def test_generation_that_has_to_give_way_comes_back_with_the_same_text(
    open_room: OpenRoom, batches: list[list[int]]
) -> None:
    """Room for two prompts, not for two answers."""
    prompts = guide_prompts(open_room(GUIDE))[:2]
    room = open_room(GUIDE, (0, 12), n_ctx=sum(map(len, prompts)) + 24)
    sampling = ipc.Sampling(temperature=0.0, max_tokens=40)
    for i, prompt in enumerate(prompts):
        room.generate(prompt, f"alone {i}", sampling)
        room.run()
    batches.clear()
    for i, prompt in enumerate(prompts):
        room.generate(prompt, f"together {i}", sampling)
    room.run()
    assert not room.errors()
    assert any(n > len(prompts[1]) for spans in batches for n in spans), "nobody had to start over"
    for i in range(len(prompts)):
        assert room.tokens(f"together {i}") == room.tokens(f"alone {i}")


def test_forward_takes_the_cells_of_a_generation(open_room: OpenRoom) -> None:
    room = open_room("llama", (0, 4), n_ctx=64)
    room.generate(np.resize(PROMPT, 40), "g")
    room.run(2)
    n_before = len(room.tokens("g"))
    room.call(ipc.Forward, np.resize(PROMPT, 20), request_id="f", start=0, end=4, position=0, want="none")
    room.run(3)
    assert any(isinstance(message, ipc.LayerResult) for message, _ in room.sent)
    assert not room.errors()
    room.call(ipc.ReleaseRequestKv, request_id="f")
    room.run()
    assert len(room.tokens("g")) == GREEDY.max_tokens > n_before


def test_failure_of_a_batch_costs_the_guilty_only(
    open_room: OpenRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libllama refuses any batch in which slot 1 takes part."""
    room = open_room("llama", (0, 4), n_ctx=256)
    run = Segment.run

    def refusing(self: Segment, spans: list[Span]) -> list[np.ndarray]:
        if any(span.slot == 1 for span in spans):
            raise RuntimeError("the decode failed")
        return run(self, spans)

    monkeypatch.setattr(Segment, "run", refusing)
    for name in "abc":
        room.generate(PROMPT, name)
    room.run()
    assert room.errors() == {"b": "engine"}
    assert len(room.tokens("a")) == len(room.tokens("c")) == GREEDY.max_tokens


def two_forwards(room: Room) -> list[str]:
    """Of two requests for which there is no room together; whose results have come after three rounds."""
    for name, n in (("a", 30), ("b", 50)):
        data = np.resize(PROMPT, n)
        room.call(ipc.Forward, data, request_id=name, start=0, end=2, position=0, want="hidden")
    room.run(3)
    return [m.request_id for m, _ in room.sent if isinstance(m, ipc.LayerResult)]


def test_forwards_wait_until_others_have_ended_while_the_rest_of_the_batch_runs(open_room: OpenRoom) -> None:
    room = open_room("llama", (0, 2), n_ctx=64)
    assert two_forwards(room) == ["a"]
    assert room.handlers.pause_ms() == STARVED_MS
    room.call(ipc.CancelRequest, request_id="a")
    room.run()
    assert [m.request_id for m, _ in room.sent if isinstance(m, ipc.LayerResult)] == ["a", "b"]
    assert not room.errors()


def test_forwards_that_have_waited_long_enough_are_refused(
    open_room: OpenRoom, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler, "ROOM_TIMEOUT_S", 0.0)
    room = open_room("llama", (0, 2), n_ctx=64)
    assert two_forwards(room) == ["a"]
    room.run()
    assert room.errors() == {"b": "no_room"}
    assert not room.handlers.state.has_work


def test_forwards_wait_ten_seconds_for_room(open_room: OpenRoom, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    clock = SimpleNamespace(monotonic=lambda: now_s, perf_counter=time.perf_counter)
    monkeypatch.setattr(scheduler, "time", clock)
    room = open_room("llama", (0, 2), n_ctx=64)
    assert two_forwards(room) == ["a"]
    now_s += 9.9
    room.run(3)
    assert not room.errors()
    now_s += 0.2
    room.run(3)
    assert room.errors() == {"b": "no_room"}


def test_a_generation_ends_with_the_last_cell_of_its_context(open_room: OpenRoom) -> None:
    room = open_room("llama", (0, 4), n_ctx=64)
    room.generate(PROMPT, "only", ENDLESS)
    room.run()
    assert not room.errors()
    # Every cell holds a row, and the last row gives one token more.
    assert len(room.tokens("only")) == 64 - len(PROMPT) + 1
    (done,) = [m for m, _ in room.sent if isinstance(m, ipc.GenerateDone)]
    assert done.finish_reason == "length"


def test_pieces_of_a_prompt_are_as_large_as_configured(open_room: OpenRoom, batches: list[list[int]]) -> None:
    room = open_room("llama", (0, 4), n_ctx=1024, prefill_chunk_tokens=200)
    room.generate(np.resize(PROMPT, 500), "only")
    while not room.tokens("only"):
        room.run(1)
    assert batches == [[200], [200], [100]]
