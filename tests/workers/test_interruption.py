"""A batch that nobody waits for any more is left in the middle, and nobody else notices."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from bench.common.shapes import Shape, build
from swarmllm_proto import ipc
from swarmllm_proto.codec import decode_daemon_message, encode_ipc
from swarmllm_proto.errors import FrameTooLarge
from swarmllm_proto.frames import FrameDecoder
from swarmllm_proto.tensors import encode_tensor
from swarmllm_workers.engine import libllama
from swarmllm_workers.engine.engine import Engine
from swarmllm_workers.engine.engine_settings import EngineSettings
from swarmllm_workers.errors import Interrupted
from swarmllm_workers.schedule import read_ahead
from swarmllm_workers.schedule.read_ahead import ReadAhead
from swarmllm_workers.server.handlers import Handlers

from .blueprint import write
from .client import Worker
from .conftest import MakeModel
from .families import FAMILIES
from .test_engine import run

PROMPT = (np.arange(48) % 90 + 33).astype(np.int32)
SHORT = ipc.Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)

SLOW = Shape(n_layers=4, n_embd=768, n_heads=12, n_kv_heads=4, n_ff=3072, n_vocab=512)
"""Half a second for 500 rows, on a fast core."""


@dataclass
class Asked:
    """Who is asked whether to go on, and says no after so many questions."""

    n_allowed: int | None = None
    n_questions: int = 0

    def is_unwanted(self) -> bool:
        self.n_questions += 1
        return self.n_allowed is not None and self.n_questions > self.n_allowed


@dataclass
class Stream:
    """What a daemon sends, as it comes; nothing at all once it has `ended`."""

    arrived: list[bytes] = field(default_factory=list)
    has_ended: bool = False
    n_read: int = 0

    def receive(self) -> bytes:
        if not self.arrived and not self.has_ended:
            raise BlockingIOError
        self.n_read += 1
        return self.arrived.pop(0) if self.arrived else b""


@pytest.fixture(autouse=True)
def _eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch of many rows counts as long, and every question is a look."""
    monkeypatch.setattr(libllama, "WATCHED_FROM_S", 0.0)
    monkeypatch.setattr(read_ahead, "LOOK_EVERY_S", 0.0)


def cancel(*request_ids: str) -> bytes:
    messages = [ipc.CancelRequest(id=i, request_id=each) for i, each in enumerate(request_ids, 1)]
    return b"".join(b"".join(encode_ipc(message)) for message in messages)


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3moe"])
@pytest.mark.parametrize("n_before", [0, 16])
def test_its_rows_are_gone_and_all_others_stay(
    name: str, n_before: int, make_model: MakeModel, tmp_path: Path
) -> None:
    asked = Asked()
    n_threads = 2 if name == "llama" else 1
    settings = EngineSettings(n_ctx=256, n_slots=3, n_threads=n_threads, is_unwanted=asked.is_unwanted)
    engine = Engine(make_model(name), tmp_path / "segments", settings)
    try:
        last = engine.n_layers
        engine.layers.load(0, last)
        run(engine, "other", 0, last, 0, PROMPT[:20])
        expected = run(engine, "whole", 0, last, 0, PROMPT)
        assert asked.n_questions > 20
        n_in_all = asked.n_questions // 2
        segment = engine.layers.segments[0]
        if n_before:
            run(engine, "r", 0, last, 0, PROMPT[:n_before])
        for n_allowed in (0, 1, n_in_all // 2, n_in_all - 5):
            asked.n_allowed, asked.n_questions = n_allowed, 0
            with pytest.raises(Interrupted):
                run(engine, "r", 0, last, n_before, PROMPT[n_before:])
            assert segment.lengths[engine.take_slot("r")] == n_before
        asked.n_allowed = None
        again = run(engine, "r", 0, last, n_before, PROMPT[n_before:])
        if not n_before:
            np.testing.assert_array_equal(again, expected)
        assert again.argmax() == expected.argmax()
        undisturbed = run(engine, "whole", 0, last, len(PROMPT), PROMPT[:1])
        np.testing.assert_allclose(run(engine, "r", 0, last, len(PROMPT), PROMPT[:1]), undisturbed, atol=1e-3)
        assert segment.lengths[engine.take_slot("other")] == 20
    finally:
        engine.close()


def test_decode_steps_are_never_asked_about(make_model: MakeModel, tmp_path: Path) -> None:
    asked = Asked(n_allowed=0)
    settings = EngineSettings(n_ctx=64, n_slots=1, n_threads=1, is_unwanted=asked.is_unwanted)
    engine = Engine(make_model("llama"), tmp_path / "segments", settings)
    try:
        engine.layers.load(0, 4)
        run(engine, "r", 0, 4, 0, PROMPT[:15])
        run(engine, "r", 0, 4, 15, PROMPT[15:16])
        assert asked.n_questions == 0
    finally:
        engine.close()


class Room:
    """A worker without its process, with a daemon that may speak while it computes."""

    def __init__(self, path: Path, folder: Path) -> None:
        self.stream = Stream()
        self.read_ahead = ReadAhead(self.stream.receive, FrameDecoder())
        self.sent: list[object] = []
        self.handlers = Handlers(self._on_message, lambda *_: None, lambda: None, self.read_ahead)
        self.handlers.handle(
            ipc.Open(id=1, path=str(path), cache_dir=str(folder), n_ctx=512, n_slots=2), memoryview(b"")
        )
        loaded = self.sent[-1]
        assert isinstance(loaded, ipc.Opened)
        self.handlers.handle(ipc.Load(id=2, start=0, end=loaded.n_layers), memoryview(b""))

    def _on_message(self, message: object, payload: object = b"") -> None:
        self.sent.append(message)

    def generate(self, request_id: str, prompt: np.ndarray = PROMPT) -> None:
        payload = memoryview(b"".join(encode_tensor(prompt)))
        self.handlers.handle(ipc.Generate(id=9, request_id=request_id, sampling=SHORT), payload)

    def step(self) -> None:
        self.handlers.step()
        for frame in self.read_ahead.take():
            self.handlers.handle(decode_daemon_message(frame), frame.payload)

    def tokens(self, request_id: str) -> list[int]:
        while self.handlers.state.has_work:
            self.step()
        return [m.token for m in self.sent if isinstance(m, ipc.Token) and m.request_id == request_id]


@pytest.fixture(params=["llama", "mamba"])
def room(request: pytest.FixtureRequest, make_model: MakeModel, tmp_path: Path) -> Iterator[Room]:
    path = make_model("llama") if request.param == "llama" else write(tmp_path / "m.gguf", FAMILIES["mamba"])
    room = Room(path, tmp_path / "segments")
    yield room
    room.handlers.close()


def test_a_prompt_that_is_cancelled_while_it_is_computed_gives_no_token(room: Room) -> None:
    room.generate("undisturbed")
    expected = room.tokens("undisturbed")
    # Of a prompt that is known to the token there would be nothing left to compute.
    room.generate("left", PROMPT[::-1].copy())
    room.stream.arrived = [cancel("somebody else", "left")]
    room.step()
    assert not room.handlers.state.has_work
    assert not room.tokens("left")
    (done,) = [m for m in room.sent if isinstance(m, ipc.GenerateDone) and m.request_id == "left"]
    assert (done.finish_reason, done.prefill_s) == ("cancelled", 0.0)
    room.generate("later")
    assert room.tokens("later") == expected


def test_a_batch_goes_on_as_long_as_anybody_waits_for_it(room: Room) -> None:
    room.generate("alone")
    expected = room.tokens("alone")
    room.generate("left", PROMPT[::-1].copy())
    room.generate("stays")
    room.stream.arrived = [cancel("left")]
    assert room.tokens("stays") == expected
    assert len(room.tokens("left")) <= 1


def test_what_is_read_ahead_comes_out_whole_and_in_order() -> None:
    stream = Stream([])
    ahead = ReadAhead(stream.receive, FrameDecoder())
    sent = cancel("a") + b"".join(encode_ipc(ipc.Embed(id=7), b"CancelRequest" * 9)) + cancel("b", "c")
    stream.arrived = [sent[:50], sent[50:200], sent[200:]]
    assert not ahead.is_unwanted()
    assert stream.n_read == 0, "nothing runs: whoever reads next is the loop"
    ahead.begin(["a", "c"])
    assert ahead.is_unwanted()
    ahead.end()
    assert not ahead.is_unwanted()
    messages = [decode_daemon_message(frame) for frame in ahead.take()]
    assert [getattr(m, "request_id", "-") for m in messages] == ["a", "-", "b", "c"]
    ahead.begin(["a"])
    assert not ahead.is_unwanted(), "what has been handled is over"


def test_nobody_waits_for_a_batch_when_the_daemon_has_gone() -> None:
    ahead = ReadAhead(Stream(has_ended=True).receive, FrameDecoder())
    ahead.begin(["r"])
    assert ahead.is_unwanted()


def test_a_broken_stream_is_left_to_the_loop() -> None:
    decoder = FrameDecoder(header_max=8)
    ahead = ReadAhead(Stream([b"\xff" * 16]).receive, decoder)
    ahead.begin(["r"])
    assert not ahead.is_unwanted()
    with pytest.raises(FrameTooLarge):
        decoder.feed(b"")


def test_no_more_is_read_ahead_than_the_loop_would_read() -> None:
    stream = Stream([cancel(str(i)) for i in range(100)])
    ahead = ReadAhead(stream.receive, FrameDecoder())
    ahead.begin(["r"])
    for _ in range(3):
        assert not ahead.is_unwanted()
    assert stream.n_read == read_ahead.READS_MAX
    assert len(list(ahead.take())) == read_ahead.READS_MAX
    assert not ahead.is_unwanted()
    assert stream.n_read == 100


def busy_s(worker: Worker) -> float:
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


@pytest.mark.slow
def test_a_worker_hears_of_it_while_it_computes(worker: Worker, tmp_path: Path) -> None:
    """More than one try, because the batch may be over by the time that this process has its turn."""
    worker.open(build(SLOW, tmp_path / "slow.gguf"), (0, 4), prefill_chunk_tokens=500, n_prefixes=0)
    prompt = encode_tensor(np.resize(PROMPT, 500))
    was_interrupted = False
    for name in map(str, range(20)):
        before_s = busy_s(worker)
        worker.send(ipc.Generate, prompt, request_id=name, sampling=SHORT)
        for _ in range(5000):
            if busy_s(worker) > before_s + 0.03:
                break
            time.sleep(0.001)
        worker.send(ipc.CancelRequest, request_id=name)
        n_tokens = 0
        while not isinstance(message := worker.receive_any().message, ipc.GenerateDone):
            n_tokens += isinstance(message, ipc.Token)
        assert isinstance(worker.receive_any().message, ipc.Done)
        if not n_tokens and not message.prefill_s:
            assert message.finish_reason == "cancelled"
            was_interrupted = True
            break
    assert was_interrupted
    assert len(worker.generate(PROMPT, "later", SHORT).tokens) == 4
